"""A configuration as people write it: degrees, schedule, remat, ZeRO stage and what a framework adds to them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

from costmodel.documents import suggestion
from costmodel.errors import InputError

RematPolicy = Literal["none", "selective", "full"]
Attention = Literal["graph", "fused", "flash"]
GradientDtype = Literal["float32", "bfloat16", "float16"]
ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of one element of each gradient dtype."""

MatmulDtype = Literal["float8", "int8"]

_WORDS = {"on": True, "off": False, "true": True, "false": False, "yes": True, "no": False}
SHORT_NAMES = {"mbs": "microbatch", "vpp": "interleave", "vp": "interleave", "recompute": "remat"}


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """What `planner.estimate` is asked about. Every field restricts the planner's own space.

    Attributes:
        dp, tp, pp, cp: degrees of data, tensor, pipeline and context parallelism; they multiply to the devices used.
        ep: of expert parallelism: so many of the data-parallel devices, next to each other, share out the experts.
        microbatch: examples of one microbatch on one data-parallel replica.
        schedule: of the pipeline; with ``interleave`` above 1 each stage has so many parts of the model.
        remat: ``selective`` recomputes attention's scores and what follows from them, ``full`` whole layers.
        zero: what of gradients (2), optimizer state (1) and parameters (3) devices of dp and cp split.
        sp: whether tensor-parallel devices split positions of what lies between their products.
        partition: layers of each part that the stages run; None for equal parts.
        rank_order: axes of the device order, innermost first, such as ``tp-cp-dp-pp``.
        gradient_dtype: in which gradients are reduced; None for what the model keeps.
        overlap_gradients, overlap_parameters, overlap_tensor: whether gradient reductions, gathers of parameters, and
            collectives of tensor, context and expert parallelism run beside compute.
        bucket_bytes: gradients are reduced in parts of this size.
        attention: ``graph`` as captured, each op by itself; ``fused`` the softmax in one kernel; ``flash`` without
            scores in memory.
        matmul_dtype: in which products with parameters run; None for what the model computes in.
        scatter_gather: whether each tensor-parallel device sends its own part of an activation to the next stage.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    microbatch: int = 1
    schedule: str = "1f1b"
    interleave: int = 1
    remat: RematPolicy = "none"
    zero: int = 0
    sp: bool = False
    partition: tuple[int, ...] | None = None
    rank_order: str = "tp-cp-dp-pp"
    gradient_dtype: GradientDtype | None = None
    overlap_gradients: bool = False
    overlap_parameters: bool = False
    overlap_tensor: bool = False
    bucket_bytes: int | None = None
    attention: Attention = "graph"
    matmul_dtype: MatmulDtype | None = None
    scatter_gather: bool = False

    @property
    def devices(self) -> int:
        return self.dp * self.tp * self.pp * self.cp

    def replaced(self, **changes: Any) -> "Strategy":
        return check_strategy(replace(self, **changes))


AnyStrategy = str | Mapping[str, Any] | Strategy
"""What `parse_strategy` reads."""

_COUNTS = ("dp", "tp", "pp", "cp", "ep", "microbatch", "interleave")
_CHOICES: dict[str, tuple[Any, ...]] = {
    "remat": get_args(RematPolicy),
    "attention": get_args(Attention),
    "gradient_dtype": (None, *get_args(GradientDtype)),
    "matmul_dtype": (None, *get_args(MatmulDtype)),
    "zero": (0, 1, 2, 3),
}
_FLAGS = ("sp", "overlap_gradients", "overlap_parameters", "overlap_tensor", "scatter_gather")


def parse_strategy(given: AnyStrategy) -> Strategy:
    """A strategy from text such as ``dp=8,tp=8,pp=12,microbatch=1,zero=1,sp=on``, a mapping of the same, or itself.

    ``partition`` is written ``partition=10+10+12``.

    Raises:
        InputError: MP180 for what is not a strategy or names nothing of one, a field that there is not, or a value that
            it cannot have.
    """
    if isinstance(given, Strategy):
        return check_strategy(given)
    if isinstance(given, str):
        items = {}
        for part in filter(None, (p.strip() for p in given.split(","))):
            key, sign, value = part.partition("=")
            if not sign:
                raise InputError("MP180", f"{part!r} in the strategy has no '='", "write dp=8,tp=4,pp=2,microbatch=1")
            if "=" in value:
                message = f"{part!r} in the strategy has more than one '='"
                raise InputError("MP180", message, "separate fields by commas: dp=8,tp=4,pp=2")
            if key.strip() in items:
                raise InputError("MP180", f"the strategy gives {key.strip()!r} twice", "give it once")
            items[key.strip()] = value.strip()
    elif isinstance(given, Mapping):
        items = dict(given)
    else:
        message = f"a strategy is text, a mapping or a Strategy, not {type(given).__name__}"
        raise InputError("MP180", message, "write 'dp=8,tp=4,pp=2,microbatch=1'")
    if not items:
        hint = "write dp=8,tp=4,pp=2,microbatch=1; dp=1,microbatch=1 is one device, an example at a time"
        raise InputError("MP180", "the strategy names none of its fields", hint)
    known = {f.name for f in fields(Strategy)}
    values = {}
    for key, value in items.items():
        name = SHORT_NAMES.get(str(key), str(key))
        if name not in known:
            hint = suggestion(str(key), tuple(sorted(known)), "a strategy has")
            hint += " (`meshplan estimate` also takes constants of a stack there, such as step_s=0.1)"
            raise InputError("MP180", f"unknown field {key!r} in the strategy", hint)
        if name in values:
            raise InputError("MP180", f"the strategy gives {name!r} twice", "give it once")
        values[name] = _value(name, value)
    return check_strategy(Strategy(**values))


def _value(name: str, value: Any) -> Any:
    if not isinstance(value, str):
        if name == "partition" and isinstance(value, Sequence):
            return tuple(_whole(part) for part in value)
        return _whole(value)
    word = value.lower()
    if name in _FLAGS:
        return on_or_off(name, value)
    if name == "partition":
        try:
            return tuple(int(part) for part in value.split("+"))
        except ValueError:
            raise InputError("MP180", f"partition={value}", "write layers of each stage, partition=10+10+12") from None
    if name in (*_COUNTS, "zero", "bucket_bytes"):
        try:
            return int(value)
        except ValueError:
            raise InputError("MP180", f"{name}={value} is no whole number", f"write {name}=8, say") from None
    return None if word == "none" and name in ("gradient_dtype", "matmul_dtype") else value


def _whole(value: Any) -> Any:
    """A whole number of an array library as Python's; anything else as it is."""
    whole = hasattr(value, "__index__") and not isinstance(value, bool)
    return value.__index__() if whole else value


def on_or_off(name: str, value: str) -> bool:
    """What `on`, `off` or another word of the same meaning says.

    Raises:
        InputError: MP180 for any other word.
    """
    if value.lower() not in _WORDS:
        raise InputError("MP180", f"{name}={value}: it is on or off", "")
    return _WORDS[value.lower()]


def check_strategy(strategy: Strategy) -> Strategy:
    """The same, if its values make sense together.

    Raises:
        InputError: MP180.
    """
    for name in (*_COUNTS, "zero", "bucket_bytes"):
        value, least = getattr(strategy, name), 0 if name == "zero" else 1
        if value is None and name == "bucket_bytes":
            continue
        if not _is_whole(value, least):
            raise InputError("MP180", f"{name}={value!r}: it is a whole number from {least} on", "")
    for name, legal in _CHOICES.items():
        if getattr(strategy, name) not in legal:
            words = ", ".join(str(one) for one in legal if one is not None)
            raise InputError("MP180", f"{name}={getattr(strategy, name)!r}", f"legal are {words}")
    for name in _FLAGS:
        if not isinstance(getattr(strategy, name), bool):
            raise InputError("MP180", f"{name}={getattr(strategy, name)!r}: it is on or off", "")
    for name in ("schedule", "rank_order"):
        if not isinstance(getattr(strategy, name), str):
            raise InputError("MP180", f"{name}={getattr(strategy, name)!r}: it is a name", "")
    if strategy.interleave > 1 and strategy.pp == 1:
        message = f"interleave={strategy.interleave} with pp=1: parts of a stage take turns only in a pipeline"
        raise InputError("MP180", message, "raise pp, or leave interleave at 1")
    if strategy.interleave > 1 and strategy.schedule == "gpipe":
        message = f"interleave={strategy.interleave}: GPipe runs one part a stage"
        raise InputError("MP180", message, "schedule=breadth-first runs several there and back")
    if strategy.schedule == "interleaved" and strategy.interleave == 1:
        message = "schedule=interleaved with interleave=1: one part a stage is 1F1B"
        raise InputError("MP180", message, "interleave=2 for two parts a stage, with pp above 1; or schedule=1f1b")
    if strategy.partition is not None and strategy.pp == 1:
        raise InputError("MP180", "partition with pp=1: there is one stage", "leave it out, or raise pp")
    if strategy.dp % strategy.ep:
        message = f"ep={strategy.ep} does not divide dp={strategy.dp}, whose devices share out the experts"
        raise InputError("MP180", message, "choose an ep that divides dp")
    if sorted(strategy.rank_order.split("-")) != ["cp", "dp", "pp", "tp"]:
        message = f"rank_order={strategy.rank_order!r}"
        raise InputError("MP180", message, "name each of tp, cp, dp and pp once, innermost first: tp-cp-dp-pp")
    if strategy.partition is not None:
        _check_partition(strategy)
    return strategy


def _check_partition(strategy: Strategy) -> None:
    partition = strategy.partition
    if not isinstance(partition, tuple) or not all(_is_whole(n, 0) for n in partition):
        message = f"partition={partition!r}: whole numbers of layers from 0 on, one for each part"
        raise InputError("MP180", message, "write layers of each stage, partition=10+10+12")
    if len(partition) % strategy.pp:
        message = f"partition names {len(partition)} parts, pp={strategy.pp} has one or several for each stage"
        raise InputError("MP180", message, "")


def _is_whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def microbatches_of(strategy: Strategy, global_batch: int) -> int:
    """Microbatches of a step on each replica.

    Raises:
        InputError: MP185 if the batch does not divide.
    """
    dp, each = strategy.dp, strategy.dp * strategy.microbatch
    count, left = divmod(global_batch, each)
    if count and not left:
        return count
    message = f"global batch {global_batch} is not divided by dp={dp} x microbatch={strategy.microbatch}"
    batches = " and ".join(str(n * each) for n in sorted({max(1, count), count + 1}))
    hint = f"the global batch must be a multiple of {each}, such as {batches}"
    mine, rest = divmod(global_batch, dp)
    if mine and not rest:
        small = [size for size in range(1, math.isqrt(mine) + 1) if mine % size == 0]
        sizes = sorted({*small, *(mine // size for size in small)})
        near = sorted(sorted(sizes, key=lambda size: abs(size - strategy.microbatch))[:3])
        hint = f"with this batch, microbatch={' or '.join(map(str, near))}; else {hint}"
    raise InputError("MP185", message, hint)
