"""What the optimizer's update joins: which gradients the new value of a parameter depends on besides its own.

Read off the update, traced on whole leaves, with every stacked leaf cut in two as stages might cut it.
"""

from collections.abc import Mapping

import jax

from costmodel.errors import InputError
from costmodel.graph import UpdateJoins
from planner.frontend.cut_leaves import Cut, part_name
from planner.frontend.flat import Program, Value
from planner.frontend.optimizer import Optimizer, cut_update, traced_optimizer, treats_layers_alone
from planner.frontend.task import TrainingTask

SUMS = ("add", "add_any")
Piece = tuple[str, int]  # leaf, and which half of it (0 for whole ones)


def update_joins(
    task: TrainingTask, leaves: Mapping[str, jax.ShapeDtypeStruct], stacked: Mapping[str, int]
) -> UpdateJoins:
    """The joins of a task's optimizer.

    Args:
        leaves: the trained leaves by name.
        stacked: those that are stacks of layers -> number of layers.
    """
    optimizer = traced_optimizer(task, leaves)
    cuts = {n: Cut(0, {0: (0, 1), 1: (1, layers)}) for n, layers in stacked.items() if n in leaves and layers > 1}
    reasons: dict[str, str] = {}
    try:
        program, _ = cut_update(optimizer, cuts)
    except InputError:
        reasons = {n: reason for n, cut in cuts.items() if (reason := _obstacle(optimizer, n, cut))}
        if reasons and treats_layers_alone(task):
            reasons = dict.fromkeys(reasons, "")
        program, _ = cut_update(optimizer, {n: cut for n, cut in cuts.items() if n not in reasons})
    reads, rounds = _joined(program, optimizer, {n: cut for n, cut in cuts.items() if n not in reasons})
    return UpdateJoins(reads=reads, rounds=rounds, uncut={n: reason for n, reason in reasons.items() if reason})


def _obstacle(optimizer: Optimizer, name: str, cut: Cut) -> str:
    """Why a leaf cannot be cut, or ''."""
    try:
        cut_update(optimizer, {name: cut})
    except InputError as error:
        return error.message
    return ""


def _joined(program: Program, optimizer: Optimizer, cuts: Mapping[str, Cut]) -> tuple[dict[str, frozenset[str]], int]:
    """For each leaf the others whose gradients its update reads (itself, where one half reads the other's), and how
    many times, one after the other, values of several pieces come together.

    As `lowering/staged.py` does: a value of one piece's arrays is that piece's, also where single numbers of others go
    into it; sums of numbers of several pieces are joined at once, in whatever order the user's program adds them.
    """
    pieces: list[Piece] = [(n, half) for n in optimizer.leaves for half in range(2 if n in cuts else 1)]
    names = [part_name(*piece) if piece[0] in cuts else piece[0] for piece in pieces]
    home = {f"{kind}/{name}": i for i, name in enumerate(names) for kind in ("param", "grad")}
    needs = {f"grad/{name}": 1 << i for i, name in enumerate(names)}  # bit i: the gradient of piece i
    level: dict[str, int] = {}  # joins on the way to a value
    joined: set[str] = set()  # values made of several pieces, which belong to none
    for e in program.equations:
        inputs = [o for o in e.inputs if isinstance(o, Value)]
        need, at = 0, 0
        for o in inputs:
            need |= needs.get(o.name, 0)
            at = max(at, level.get(o.name, 0))
        owned = [o for o in inputs if o.name in home]
        every, arrays = {home[o.name] for o in owned}, {home[o.name] for o in owned if o.shape}
        meets = any(o.name in joined for o in inputs)
        sums = e.primitive.name in SUMS and meets and not arrays
        own = None if sums else _only(every) if len(every) == 1 else _only(arrays)
        if own is None and every:
            at = max(at, 1 + max(level.get(o.name, 0) for o in owned))
        for v in e.outputs:
            needs[v.name], level[v.name] = need, at
            if own is not None:
                home[v.name] = own
            elif every or meets:
                joined.add(v.name)
    reads: dict[str, frozenset[str]] = {}
    rounds = 0
    known: dict[int, frozenset[str]] = {}
    for i, (piece, o) in enumerate(zip(pieces, program.outputs, strict=False)):
        others = needs.get(o.name, 0) & ~(1 << i) if isinstance(o, Value) else 0
        if others not in known:
            known[others] = frozenset(pieces[k][0] for k in range(len(pieces)) if others >> k & 1)
        if others:
            reads[piece[0]] = reads.get(piece[0], frozenset()) | known[others]
        rounds = max(rounds, level.get(o.name, 0) if isinstance(o, Value) else 0)
    return reads, rounds


def _only(pieces: set[int]) -> int | None:
    return next(iter(pieces)) if len(pieces) == 1 else None
