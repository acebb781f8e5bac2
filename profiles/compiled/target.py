"""Devices that a program can be compiled for without being attached: what XLA must be told of them.

CUDA kinds are described to XLA by their facts, those of the catalogue and those of `catalog/compiler/nvidia.toml`; TPU
kinds by the name of a topology with as many chips or more. Other kinds have no compiler here.
"""

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

from costmodel.device_kind import DeviceKind
from profiles.compiled.records import Platform

_TIMED_CAPABILITIES = ("9.0", "10.0")
"""Those for which XLA has a speed-of-light model; asked of others, compilation fails."""

_TIMED_NOT = ("GB200",)
"""The same for kinds: XLA's model of collectives in its racks refuses groups that are no rack."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What to compile for.

    Attributes:
        kind: name of the device kind; devices: how many the program runs on; nodes: over how many machines.
        description: of a GPU the text of XLA's GpuTargetConfigProto; of a TPU the name of a topology.
        every: the program's devices are each `every`-th of the topology's (of kinds that XLA lists by core, a chip's
            first).
        clock_hz: of a TPU, to turn its compiler's cycles into seconds.
        timed: whether the compiler is asked for op times.
    """

    kind: str
    platform: Platform
    devices: int
    nodes: int = 1
    description: str = ""
    every: int = 1
    clock_hz: float | None = None
    timed: bool = False


def target_of(kind: DeviceKind, devices: int, nodes: int = 1) -> Target | None:
    """The target of some devices of a kind; None where XLA cannot be told enough of it.

    Args:
        devices: of all nodes; nodes: over how many machines they lie, equally many on each (else taken as one).
    """
    if devices % nodes:
        nodes = 1
    if kind.platform == "cpu":
        return cpu_target(devices, kind.name)
    if kind.platform == "tpu":
        return _tpu_target(kind, devices)
    facts = _table("nvidia")["kind"].get(kind.name)
    if facts is None:
        return None
    return Target(
        kind=kind.name,
        platform="cuda",
        devices=devices,
        nodes=nodes,
        description=_cuda_description(kind, facts),
        timed=facts["capability"] in _TIMED_CAPABILITIES and kind.name not in _TIMED_NOT,
    )


def cpu_target(devices: int, kind: str = "cpu") -> Target:
    """The CPU compiler, which every JAX has."""
    return Target(kind=kind, platform="cpu", devices=devices)


@cache
def _table(name: str) -> Mapping[str, Any]:
    return tomllib.loads(files("profiles").joinpath("catalog", "compiler", f"{name}.toml").read_text(encoding="utf-8"))


def _cuda_description(kind: DeviceKind, facts: Mapping[str, Any]) -> str:
    """XLA's GpuTargetConfigProto as text. Limits of threads, blocks and registers are those of every CUDA device."""
    capability = _table("nvidia")["capability"][facts["capability"]]
    major, minor = facts["capability"].split(".")
    name = kind.jax_names[0] if kind.jax_names else kind.name  # XLA finds some of its cost tables by it
    return f"""gpu_device_info {{
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  core_count: {facts["cores"]}
  fpus_per_core: {capability["fpus_per_core"]}
  clock_rate_ghz: {facts["clock_ghz"]}
  l2_cache_size: {facts["l2_cache_bytes"]}
  memory_bandwidth: {int(kind.memory_bandwidth_bytes_per_s)}
  device_memory_size: {kind.memory_bytes}
  shared_memory_per_block: 49152
  shared_memory_per_core: {capability["shared_memory_per_core_bytes"]}
  shared_memory_per_block_optin: {capability["shared_memory_per_block_bytes"]}
  threads_per_core_limit: {capability["threads_per_core"]}
  threads_per_block_limit: 1024 threads_per_warp: 32
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  device_vendor: "NVIDIA Corporation" name: "{name}"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{name}"
"""


def _tpu_target(kind: DeviceKind, devices: int) -> Target | None:
    facts = _table("google")["kind"].get(kind.name)
    if facts is None:
        return None
    listed = facts["listed_per_chip"]
    every = listed if facts["devices_per_chip"] == 1 else 1
    chips = math.ceil(devices * every / listed)
    target = Target(kind=kind.name, platform="tpu", devices=devices, every=every, clock_hz=facts.get("clock_hz"))
    shape = "x".join(str(n) for n in topology_shape(chips, facts["dims"]))
    return replace(target, description=f"{facts['topology']}:{shape}", timed=target.clock_hz is not None)


def topology_shape(chips: int, dims: int) -> tuple[int, ...]:
    """The smallest torus of whole hosts (2 x 2 chips, each dim a power of two) with at least `chips` chips; one chip
    alone is a host of its own."""
    if chips == 1:
        return (1,) * dims
    shape = [2, 2] + [1] * (dims - 2)
    while math.prod(shape) < chips:
        smallest = min(range(dims), key=lambda d: (shape[d], -d))
        shape[smallest] *= 2
    return tuple(sorted(shape)) if dims == 2 else tuple(shape)
