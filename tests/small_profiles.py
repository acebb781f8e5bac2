"""A small profile written by hand, for tests that need no devices."""

from typing import Any

from profiles.schema import (
    BlockTime,
    CollectiveLine,
    CollectiveSample,
    CopyLine,
    Fit,
    Gap,
    MatmulSample,
    OpTime,
    Profile,
    Rates,
)

DOT = "dot_general f32[8,16] f32[16,4] -> f32[8,4]"


def small_profile(**changes: Any) -> Profile:
    """A profile of two CPU devices with one of everything; `changes` replace fields."""
    fields: dict[str, Any] = {
        "device_kind": "cpu",
        "jax_device_kind": "cpu",
        "platform": "cpu",
        "devices": 2,
        "measured_at": "2026-01-02T03:04:05+00:00",
        "software": {"jax": "0.10.2", "jaxlib": "0.10.2"},
        "usable_memory_bytes": 3 << 30,
        "rates": Rates(
            matmul_flops_per_s={"float32": Fit(value=20e9), "bfloat16": Fit(value=10e9)},
            memory_bandwidth_bytes_per_s=Fit(value=2e9, error=0.1, samples=4),
            launch_s=Fit(value=1e-6),
        ),
        "matmuls": (MatmulSample(dtype="float32", shape=(8, 16, 4), time_s=1e-4, spread_s=1e-6, drift=-0.01),),
        "ops": {"add f32[4] f32[4] -> f32[4]": OpTime(forward_s=2e-5), DOT: OpTime(forward_s=1e-4, backward_s=2e-4)},
        "collectives": (CollectiveSample(kind="all_reduce", size=2, stride=1, full_bytes=4096, time_s=1e-4),),
        "collective_lines": (CollectiveLine(kind="all_reduce", size=2, stride=1, fixed_s=1e-4, s_per_byte=1e-9),),
        "copy_lines": (CopyLine(route="device_to_device", lanes=1, fixed_s=5e-5, s_per_byte=1e-10),),
        "blocks": (
            BlockTime(
                block_class="layers",
                mesh=(2,),
                microbatch=4,
                forward_s=1e-3,
                backward_s=1e-3,
                weight_s=1e-3,
                update_s=1e-4,
                saved_bytes=1 << 20,
                peak_bytes=1 << 22,
            ),
        ),
        "gaps": (Gap(what="gather", cause="the time budget was spent"),),
    }
    return Profile(**{**fields, **changes})
