"""What a plan says of single ops: those without a rule, and those whose cost or memory rests on a guess."""

from collections.abc import Iterator, Mapping

from planner.planfile.schema import Finding
from planner.search.score import Score

Place = tuple[str, str]  # what it is, the user's line


def op_findings(score: Score) -> tuple[Finding, ...]:
    """MP171, MP174 and MP175 of a plan's ops."""
    unknown, loops = _shares(score)
    return (*_unknown(unknown), *_guessed_trips(loops), *_guessed_saves(score))


def _shares(score: Score) -> tuple[dict[Place, float], dict[str, float]]:
    """Share of the predicted compute time of ops without a rule, and of loops whose trip count is data, by line."""
    unknown: dict[Place, float] = {}
    loops: dict[str, float] = {}
    total = 0.0
    for stage in score.layout.stages:
        decision = stage.groups[0].decision
        space = decision.space
        for block in score.layout.graph.blocks[stage.start : stage.stop]:
            key = block.class_key
            total += decision.costs[key].forward_s + decision.costs[key].backward_s
            for op in space.graph.classes[key].ops:
                if op.known and not op.guessed_trips:
                    continue
                cost = space.op_cost(key, op, decision.op_strategies[key][op.name])
                spent = cost.forward_s + cost.backward_s
                if not op.known:
                    place = (op.primitive, op.source)
                    unknown[place] = unknown.get(place, 0.0) + spent
                for line in op.guessed_trips:
                    loops[line] = loops.get(line, 0.0) + spent
    whole = total or 1.0
    return {p: s / whole for p, s in unknown.items()}, {p: s / whole for p, s in loops.items()}


def _unknown(shares: Mapping[Place, float]) -> Iterator[Finding]:
    """Ops without a rule: whole on every device, with their share of the predicted time."""
    for (primitive, source), share in sorted(shares.items()):
        yield Finding(
            code="MP171",
            severity="warning",
            where=source,
            message=f"{primitive} ({source or 'no source line'}) has no rule: it runs whole on every device; "
            f"{share:.2%} of the predicted compute time, by an assumed cost",
            hint="register a rule for it (planner.frontend.rules.base.register) to have it split",
        )


def _guessed_trips(shares: Mapping[str, float]) -> Iterator[Finding]:
    """Loops that run until data says so: nothing states how often."""
    for source, share in sorted(shares.items()):
        yield Finding(
            code="MP174",
            severity="warning",
            where=source,
            message=f"the loop at {source or 'no source line'} runs until data ends it: it is priced as one trip, "
            f"{share:.2%} of the predicted compute time; each further trip takes as long again",
            hint="a loop of a known length (jax.lax.scan, fori_loop with fixed bounds) is priced with all its trips",
        )


def _guessed_saves(score: Score) -> Iterator[Finding]:
    """Ops that JAX does not differentiate on their own."""
    classes = score.layout.graph.classes.values()
    found = {(op.primitive, op.source): op.guessed_saves for cls in classes for op in cls.ops if op.guessed_saves}
    for (primitive, source), reason in sorted(found.items()):
        yield Finding(
            code="MP175",
            severity="note",
            where=source,
            message=f"what {primitive} ({source or 'no source line'}) keeps for the backward pass is a guess: JAX does "
            f"not differentiate it on its own ({reason})",
            hint="memory is predicted from the operands and results that the op's rule says are kept",
        )
