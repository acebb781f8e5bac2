"""Layer times from a profile's block table, at any tp and microbatch.

B1  between two sizes   log time is linear in log size, for microbatch and for tp
B2  microbatch outside  time = fixed + slope * microbatch through the two nearest sizes, fixed >= 0 and slope >= 0;
                        with one size alone, in proportion to it
B3  tp outside          the power law of the two nearest sizes, with an exponent in [-1, 0]; with one alone, in
                        inverse proportion: what is left out is the fixed part and the collectives
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from costmodel.documents import suggestion
from costmodel.errors import ProfileError
from costmodel.provenance import Provenance, weakest
from profiles.schema import BlockTime, Profile

Point = tuple[float, float]  # size, seconds


class LayerTimes(NamedTuple):
    """Seconds of one layer for a microbatch, and of its update once a step, on each device.

    Attributes:
        forward_s, backward_s: the latter of all gradients.
        update_s: None where the table says nothing of updates.
        provenance: the table's own at its sizes, `interpolated` between them, `fitted` outside.
    """

    forward_s: float
    backward_s: float
    update_s: float | None
    provenance: Provenance


def layer_class(model: str, layer: str | int) -> str:
    """What the block table calls a layer of an imported table."""
    return f"{model}/{layer}"


def layer_names(profile: Profile, model: str | None = None) -> tuple[str, ...]:
    """Layers of a model in the block table, in the order of the table.

    Args:
        model: as it was imported; may be left out where the profile has one.

    Raises:
        ProfileError: MP311 the profile has none of that model, or several models and none is named.
    """
    model = layer_model(profile, model)
    start = f"{model}/"
    found = (one.block_class.removeprefix(start) for one in profile.blocks if one.block_class.startswith(start))
    return tuple(dict.fromkeys(found))


def layer_degrees(profile: Profile, layer: str | int, *, model: str | None = None) -> tuple[int, ...]:
    """Tensor parallel degrees that a layer was measured at, ascending; none for a layer that the table does not have.

    Args:
        model: as it was imported; may be left out where the profile has one.
    """
    return tuple(sorted({one.mesh[0] for one in _entries(profile, layer_class(layer_model(profile, model), layer))}))


def layer_microbatches(profile: Profile, layer: str | int, *, model: str | None = None) -> tuple[int, ...]:
    """Microbatches that a layer was measured at, ascending."""
    return tuple(sorted({one.microbatch for one in _entries(profile, layer_class(layer_model(profile, model), layer))}))


def layer_times(
    profile: Profile, layer: str | int, tp: int, microbatch: float, *, model: str | None = None
) -> LayerTimes:
    """Seconds of a layer at a tensor parallel degree and a microbatch, interpolated where they were not measured.

    Args:
        profile: with a block table whose entries have a mesh of one axis (tp), as `meshplan profile import` makes it.
        layer: as the table calls it: ``0`` is its first layer.
        tp: devices that share the layer. microbatch: examples.
        model: as it was imported; may be left out where the profile has one.

    Returns:
        Times by B1 to B3.

    Raises:
        ProfileError: MP311 the table does not have the layer or the model.
    """
    if tp < 1 or microbatch <= 0:
        raise ValueError(f"layer_times() needs tp >= 1 and microbatch > 0, got {tp} and {microbatch}")
    name = layer_class(layer_model(profile, model), layer)
    entries = _entries(profile, name)
    if not entries:
        known = sorted({one.block_class for one in profile.blocks})
        raise ProfileError("MP311", f"the block table has no {name!r}", suggestion(name, known, "it has"))
    by_tp: dict[int, list[BlockTime]] = {}
    for one in entries:
        by_tp.setdefault(one.mesh[0], []).append(one)
    own: Provenance = weakest(*[one.provenance for one in entries])
    ahead, how = _at(by_tp, "forward_s", tp, microbatch)
    back, _ = _at(by_tp, "gradients_s", tp, microbatch)
    updates = all(one.update_s is not None for one in entries)
    update = _at(by_tp, "update_s", tp, microbatch)[0] if updates else None
    return LayerTimes(ahead, back, update, own if how is None else weakest(own, how))


def _entries(profile: Profile, name: str) -> list[BlockTime]:
    return [one for one in profile.blocks if one.block_class == name and len(one.mesh) == 1]


def _at(
    by_tp: Mapping[int, Sequence[BlockTime]], field: str, tp: int, microbatch: float
) -> tuple[float, Provenance | None]:
    """One time of a layer, and how it was found if not as measured."""
    words: list[Provenance] = []

    def of_degree(degree: int) -> float:
        points = sorted((float(one.microbatch), float(getattr(one, field))) for one in by_tp[degree])
        value, how = over_microbatches(points, microbatch)
        if how is not None:
            words.append(how)
        return value

    if tp in by_tp:
        value = of_degree(tp)
    else:
        value, how = over_degrees([(float(degree), of_degree(degree)) for degree in _nearest(sorted(by_tp), tp)], tp)
        words.append(how)
    return value, weakest(*words) if words else None


def _nearest(degrees: Sequence[int], tp: int) -> list[int]:
    """The degrees around tp, or the two nearest where it is outside."""
    above = next((i for i, degree in enumerate(degrees) if degree > tp), len(degrees))
    start = min(max(above - 1, 0), max(len(degrees) - 2, 0))
    return list(degrees[start : start + 2])


def over_microbatches(points: Sequence[Point], microbatch: float) -> tuple[float, Provenance | None]:
    """Seconds at a microbatch from those at ascending sizes (B1, B2)."""
    for size, time_s in points:
        if size == microbatch:
            return time_s, None
    if len(points) == 1:
        return points[0][1] * microbatch / points[0][0], "fitted"
    if points[0][0] < microbatch < points[-1][0]:
        above = next(i for i, (size, _) in enumerate(points) if size > microbatch)
        return _log_line(points[above - 1], points[above], microbatch), "interpolated"
    (m0, t0), (m1, t1) = points[:2] if microbatch < points[0][0] else points[-2:]
    slope = max(0.0, (t1 - t0) / (m1 - m0))
    fixed = t1 - slope * m1
    if fixed < 0:
        near = (m0, t0) if microbatch < m0 else (m1, t1)
        return near[1] * microbatch / near[0], "fitted"
    return fixed + slope * microbatch, "fitted"


def over_degrees(points: Sequence[Point], tp: int) -> tuple[float, Provenance]:
    """Seconds at a degree from those at the one or two nearest ones (B1, B3)."""
    if len(points) == 1:
        return points[0][1] * points[0][0] / tp, "fitted"
    (d0, t0), (d1, t1) = points
    if d0 < tp < d1:
        return _log_line(points[0], points[1], tp), "interpolated"
    power = -1.0 if min(t0, t1) <= 0 else min(0.0, max(-1.0, math.log(t1 / t0) / math.log(d1 / d0)))
    near = points[0] if tp < d0 else points[1]
    return near[1] * (tp / near[0]) ** power, "fitted"


def _log_line(low: Point, high: Point, at: float) -> float:
    """Linear in both logarithms; in the times themselves where one is 0."""
    share = math.log(at / low[0]) / math.log(high[0] / low[0])
    if min(low[1], high[1]) <= 0:
        return low[1] + share * (high[1] - low[1])
    return low[1] * (high[1] / low[1]) ** share


def layer_models(profile: Profile) -> tuple[str, ...]:
    """Models whose layers the block table has."""
    names = {one.block_class.rpartition("/")[0] for one in profile.blocks if "/" in one.block_class}
    return tuple(sorted(names))


def layer_model(profile: Profile, model: str | None = None) -> str:
    """The model that is meant; may be left out where the profile has one.

    Raises:
        ProfileError: MP311 the profile has none of that name, or several models and none is named.
    """
    names = layer_models(profile)
    if model is None:
        if len(names) == 1:
            return names[0]
        have = f"layers of {', '.join(names)}" if names else "no imported layers"
        raise ProfileError("MP311", f"the block table has {have}", "say which model is meant" if names else "")
    if model not in names:
        raise ProfileError("MP311", f"the block table has no layers of {model!r}", suggestion(model, names, "it has"))
    return model
