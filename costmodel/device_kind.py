"""A device kind: the facts about one accelerator model that costs are computed from, each with its provenance."""

from typing import Literal

import msgspec

from costmodel.documents import require_number, suggestion
from costmodel.errors import InputError
from costmodel.provenance import Provenance
from costmodel.units import GIB, format_bytes

Platform = Literal["gpu", "tpu", "cpu"]

PEAK_DTYPES = ("float64", "float32", "tfloat32", "bfloat16", "float16", "float8", "int8")
"""Legal keys of `peak_flops_per_s`. `float32` is required: a dtype without a peak of its own is priced at it."""

_VENDOR_FACTS = frozenset(
    {
        "peak_flops_per_s",
        "memory_bytes",
        "memory_bandwidth_bytes_per_s",
        "link_bandwidth_bytes_per_s",
        "host_bandwidth_bytes_per_s",
    }
)


class DeviceKind(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one device (one entry of `jax.devices()`) of this kind can do.

    Attributes:
        name: canonical name, such as ``A100-SXM4-80GB``.
        vendor: who makes it.
        platform: JAX platform.
        peak_flops_per_s: dtype (`PEAK_DTYPES`) to dense peak FLOP/s. `float32` is the vector rate, the others are rates
            of the matrix units where there are any; `tfloat32` is the matrix units' rate for float32 inputs.
        memory_bytes: device memory that the driver reports in all.
        memory_bandwidth_bytes_per_s: peak rate between device memory and the chip.
        reserve_bytes: part of `memory_bytes` that programs cannot use: context, collective buffers, fragmentation.
        matmul_efficiency: achieved share of the peak in large matrix products.
        matmul_half_depth, matmul_half_area: depth k, and number of elements of its results, at which a product achieves
            half of that (`costmodel.kernels`, R2); 0 where its shape does not matter.
        misaligned_efficiency: the share of that again in 16-bit products whose k or n is no multiple of 8.
        attention_efficiency: achieved share of the peak inside fused attention, whatever its products' shape. Between
            FlashAttention-2's 0.35 on H100s and 0.6 on A100s (Dao 2023; Shah et al., "FlashAttention-3", 2024).
        bandwidth_efficiency: achieved share of the memory bandwidth in large memory-bound ops.
        launch_s: shortest time of any op (launch, scheduling).
        link_bandwidth_bytes_per_s: device-to-device fabric (NVLink, ICI, Infinity Fabric), per device and direction.
        link_span: devices joined by that fabric, where it joins fewer than a node (NVLink bridges: 2).
        host_bandwidth_bytes_per_s: to host memory, per direction (PCIe, C2C).
        jax_names: values of `jax.Device.device_kind` that mean this kind.
        provenance: overrides of where a field comes from, by field name (or ``peak_flops_per_s.float64``).
        source: where the facts were read.
        notes: anything that the reader should know.
    """

    name: str
    platform: Platform
    peak_flops_per_s: dict[str, float]
    memory_bytes: int
    memory_bandwidth_bytes_per_s: float
    vendor: str = "unknown"
    reserve_bytes: int = 0
    matmul_efficiency: float = 0.7
    matmul_half_depth: float = 0.0
    matmul_half_area: float = 0.0
    misaligned_efficiency: float = 1.0
    attention_efficiency: float = 0.45
    bandwidth_efficiency: float = 0.8
    launch_s: float = 4e-6
    link_bandwidth_bytes_per_s: float | None = None
    link_span: int | None = None
    host_bandwidth_bytes_per_s: float | None = None
    jax_names: tuple[str, ...] = ()
    provenance: dict[str, Provenance] = {}
    source: str = ""
    notes: str = ""

    def __hash__(self) -> int:
        return hash((self.name, self.memory_bytes))

    @property
    def usable_bytes(self) -> int:
        """Memory that a plan may fill: `memory_bytes - reserve_bytes`."""
        return self.memory_bytes - self.reserve_bytes

    def provenance_of(self, field: str) -> Provenance:
        """Where `field` comes from; unless said, vendors' facts are `datasheet` and runtime constants `assumed`."""
        head = field.split(".")[0]
        default: Provenance = "datasheet" if head in _VENDOR_FACTS else "assumed"
        return self.provenance.get(field, self.provenance.get(head, default))


def assumed_reserve_bytes(platform: Platform, memory_bytes: int) -> int:
    """Reserve of a kind that does not state one: 1.5 GiB or a tenth of the memory, whichever is less; nothing on CPUs.

    1.3 to 2 GB of CUDA context were seen in the published BLOOM-176B logs (bigscience, nvidia-smi).
    """
    return 0 if platform == "cpu" else min(3 * GIB // 2, memory_bytes // 10)


def check_device_kind(kind: DeviceKind, path: str, code: str = "MP133") -> None:
    """Raises InputError for a device kind with impossible facts; `path` is where it stands in its document."""
    if not kind.name.strip():
        raise InputError(code, f"{path}.name is empty", "name the device kind, such as 'A100-SXM4-80GB'")
    for dtype, rate in kind.peak_flops_per_s.items():
        if dtype not in PEAK_DTYPES:
            hint = suggestion(dtype, PEAK_DTYPES, "dtypes are")
            raise InputError(code, f"unknown dtype {dtype!r} in {path}.peak_flops_per_s", hint)
        require_number(rate, f"{path}.peak_flops_per_s.{dtype}", code)
    if "float32" not in kind.peak_flops_per_s:
        hint = "give the vector FLOP/s in float32: other dtypes without a peak are priced at it"
        raise InputError(code, f"{path}.peak_flops_per_s has no 'float32'", hint)
    require_number(kind.memory_bytes, f"{path}.memory_bytes", code)
    require_number(kind.memory_bandwidth_bytes_per_s, f"{path}.memory_bandwidth_bytes_per_s", code)
    require_number(kind.reserve_bytes, f"{path}.reserve_bytes", code, least=0)
    if kind.reserve_bytes >= kind.memory_bytes:
        got = f"{format_bytes(kind.reserve_bytes)} of {format_bytes(kind.memory_bytes)}"
        raise InputError(code, f"{path}.reserve_bytes leaves no usable memory: {got}", "lower the reserve")
    require_number(kind.matmul_efficiency, f"{path}.matmul_efficiency", code, most=1)
    require_number(kind.bandwidth_efficiency, f"{path}.bandwidth_efficiency", code, most=1)
    require_number(kind.matmul_half_depth, f"{path}.matmul_half_depth", code, least=0)
    require_number(kind.matmul_half_area, f"{path}.matmul_half_area", code, least=0)
    require_number(kind.misaligned_efficiency, f"{path}.misaligned_efficiency", code, most=1)
    require_number(kind.attention_efficiency, f"{path}.attention_efficiency", code, most=1)
    require_number(kind.launch_s, f"{path}.launch_s", code, least=0)
    for field in ("link_bandwidth_bytes_per_s", "link_span", "host_bandwidth_bytes_per_s"):
        if (value := getattr(kind, field)) is not None:
            require_number(value, f"{path}.{field}", code)
