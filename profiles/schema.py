"""The profile document: what was measured on devices of one kind, and the constants fitted to it.

Seconds are of one op, or one collective, with `devices` devices of the kind at work at the same time: what a plan's
devices do. A sample holds a median; its spread is the median absolute deviation, its drift how much later runs took
longer than earlier ones. Anything that could not be measured is a gap with its cause.
"""

from typing import Literal

import msgspec

from costmodel.collectives import CollectiveKind
from costmodel.device_kind import PEAK_DTYPES, Platform
from costmodel.documents import require_number, suggestion
from costmodel.errors import InputError
from costmodel.provenance import Provenance

SCHEMA_VERSION = 1

Route = Literal["device_to_device", "host_to_device", "device_to_host"]
BandwidthOp = Literal[
    "add", "normalise", "gather", "rms_normalise", "softmax", "reduce", "transpose", "scatter_add", "update"
]
KernelOp = Literal["attention", "fused_attention", "convolution"]


class Sample(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long something took.

    Attributes:
        time_s: median.
        spread_s: median absolute deviation from it.
        drift: median of the second half of the runs over that of the first half, less one.
        samples: runs.
    """

    time_s: float
    spread_s: float = 0.0
    drift: float = 0.0
    samples: int = 1

    @property
    def figures(self) -> dict[str, float]:
        """The four fields above by name, to make a sample of something particular."""
        return {name: getattr(self, name) for name in Sample.__struct_fields__}


class MatmulSample(Sample, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A matrix product ``[m, k] @ [k, n]`` on each device, or `batch` of them at once; `shape` is (m, k, n)."""

    dtype: str
    shape: tuple[int, int, int]
    batch: int = 1

    @property
    def flops(self) -> float:
        m, k, n = self.shape
        return 2.0 * self.batch * m * k * n


class BandwidthSample(Sample, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An op bound by memory: `memory_bytes` are those that each device must read and write."""

    op: BandwidthOp
    dtype: str
    shape: tuple[int, ...]
    memory_bytes: int


class KernelSample(Sample, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An op that is neither one product nor bound by memory.

    Attributes:
        shape: of attention (batch, sequence, heads, head size), causal; of a convolution with a 3 x 3 window (batch,
            height, width, channels), as many channels out as in.
        backward: value and gradients of all operands together; False: the value alone.
        flops: of what was timed.
    """

    op: KernelOp
    dtype: str
    shape: tuple[int, int, int, int]
    backward: bool
    flops: float


class Pulse(Sample, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The same product timed again and again while a profile is made: a device that slows down shows.

    Attributes:
        after_s: seconds after the first measurement.
        sm_clock_hz: the device's clock meanwhile, as its driver says; held_back: why the driver held it back, in words.
    """

    after_s: float
    sm_clock_hz: float | None = None
    held_back: tuple[str, ...] = ()


class CollectiveSample(Sample, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A collective in all groups of `size` devices at once.

    Attributes:
        stride: distance of neighbours of a group, in consecutive devices.
        full_bytes: as in `costmodel.collectives.collective_time_s`.
    """

    kind: CollectiveKind
    size: int
    stride: int
    full_bytes: int


class CopySample(Sample, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`lanes` devices each send `lane_bytes` to a partner, or to or from the host, at the same time."""

    route: Route
    lanes: int
    lane_bytes: int


class Fit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A fitted constant; `error` is the root mean square of the relative errors of the samples against it."""

    value: float
    error: float = 0.0
    samples: int = 1
    provenance: Provenance = "fitted"


class Rates(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Achieved rates of one device.

    Attributes:
        matmul_flops_per_s: by dtype, in large matrix products.
        memory_bandwidth_bytes_per_s: in large memory-bound ops.
        launch_s: shortest time of an op inside a program.
    """

    matmul_flops_per_s: dict[str, Fit] = {}
    memory_bandwidth_bytes_per_s: Fit | None = None
    launch_s: Fit | None = None


class LineFit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``fixed_s + s_per_byte * bytes``, with the error as in `Fit`."""

    fixed_s: float
    s_per_byte: float
    error: float = 0.0
    samples: int = 2
    provenance: Provenance = "fitted"


class CollectiveLine(LineFit, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The line of one collective in groups of one size and stride."""

    kind: CollectiveKind
    size: int
    stride: int


class CopyLine(LineFit, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The line of copies in `lanes` lanes, in bytes of one lane."""

    route: Route
    lanes: int


class OpTime(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model's op, whole on each device.

    Attributes:
        forward_s: the op alone.
        backward_s: all cotangents that the model needs of it; 0 where it needs none.
        spread_s: of both together.
        drift: as in `Sample`; the larger of the two.
    """

    forward_s: float
    backward_s: float = 0.0
    spread_s: float = 0.0
    drift: float = 0.0
    provenance: Provenance = "measured"


class BlockTime(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One block on one mesh: seconds of F, B and W for a microbatch and of the update, and its memory per device.

    Attributes:
        block_class: canonical hash of the class (`costmodel.graph.BlockClass.key`), or a name that the user gives.
            A layer of an imported table is ``MODEL/LAYER``.
        mesh: axis sizes; one axis of 1 for one device.
        microbatch: examples.
        layers: blocks that were timed in one loop, as a model runs them; all else but `peak_bytes` is of one of them.
        backward_s: of the activation gradients; of all gradients where `weight_s` is None.
        weight_s: of the weight gradients alone; None where that was not told apart.
        update_s: of the optimizer, once a step; None where that was not measured.
        saved_bytes: kept from F to B for one microbatch; peak_bytes: the most in use while they run. None where nobody
            has said.
        spread_s, drift: of F, B, W and update together, as in `OpTime`.
    """

    block_class: str
    mesh: tuple[int, ...]
    microbatch: int
    forward_s: float
    backward_s: float
    layers: int = 1
    weight_s: float | None = None
    update_s: float | None = None
    saved_bytes: int | None = None
    peak_bytes: int | None = None
    spread_s: float = 0.0
    drift: float = 0.0
    provenance: Provenance = "measured"

    @property
    def gradients_s(self) -> float:
        """Seconds of the whole backward pass."""
        return self.backward_s + (self.weight_s or 0.0)


class Gap(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Something that is not in the profile, and why."""

    what: str
    cause: str


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one kind of device does.

    Attributes:
        device_kind: canonical name, as in `costmodel.device_kind.DeviceKind`.
        jax_device_kind: `jax.Device.device_kind` of the devices that were measured.
        devices: how many ran together.
        measured_at: UTC date and time, ISO 8601.
        software: versions by name: ``jax``, ``jaxlib``, ``runtime``.
        usable_memory_bytes: what a program may use of one device's memory, where that is known.
        rates: fitted to `matmuls`, `bandwidths` and chains of tiny ops.
        ops: `costmodel.graph.Op.key` to seconds.
        microbatches: sizes at which the model of `ops` was captured, ascending; none where that is not known.
        collective_lines, copy_lines: fitted to `collectives` and `copies`.
        blocks: block table; preferred to op times where it has a block.
        pulses: the reference product while the profile was made, in order.
        sources: where figures come from that were not measured here.
        gaps: what could not be measured.
    """

    schema_version: int = SCHEMA_VERSION
    device_kind: str
    jax_device_kind: str
    platform: Platform
    devices: int
    measured_at: str = ""
    software: dict[str, str] = {}
    usable_memory_bytes: int | None = None
    rates: Rates = Rates()
    matmuls: tuple[MatmulSample, ...] = ()
    bandwidths: tuple[BandwidthSample, ...] = ()
    kernels: tuple[KernelSample, ...] = ()
    ops: dict[str, OpTime] = {}
    microbatches: tuple[int, ...] = ()
    collectives: tuple[CollectiveSample, ...] = ()
    collective_lines: tuple[CollectiveLine, ...] = ()
    copies: tuple[CopySample, ...] = ()
    copy_lines: tuple[CopyLine, ...] = ()
    blocks: tuple[BlockTime, ...] = ()
    pulses: tuple[Pulse, ...] = ()
    sources: tuple[str, ...] = ()
    gaps: tuple[Gap, ...] = ()


_POSITIVE = frozenset(
    {"time_s", "value", "forward_s", "samples", "lanes", "batch", "microbatch", "microbatches", "layers", "devices"}
)
_COUNTED_FROM_TWO = frozenset({"size"})


def check_profile(profile: Profile, code: str = "MP305") -> None:
    """Raises InputError for a profile with impossible numbers; the message has the path in the document."""
    for dtype in profile.rates.matmul_flops_per_s:
        if dtype not in PEAK_DTYPES:
            hint = suggestion(dtype, PEAK_DTYPES, "dtypes are")
            raise InputError(code, f"unknown dtype {dtype!r} in rates.matmul_flops_per_s", hint)
    _check(profile, "", code)


def _check(value: object, path: str, code: str) -> None:
    """Every number is finite; times and counts are positive, all others but `drift` at least 0."""
    if isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            _check(getattr(value, name), f"{path}.{name}" if path else name, code)
    elif isinstance(value, dict):
        for key, one in value.items():
            _check(one, f"{path}[{key!r}]", code)
    elif isinstance(value, tuple):
        for at, one in enumerate(value):
            _check(one, f"{path}[{at}]", code)
    elif isinstance(value, int | float):
        field = path.rsplit(".", 1)[-1].split("[")[0]
        if field == "drift":
            require_number(value, path, code, above=-1.0)
        elif field in _POSITIVE or field in ("shape", "mesh"):
            require_number(value, path, code)
        else:
            require_number(value, path, code, least=2 if field in _COUNTED_FROM_TWO else 0)
