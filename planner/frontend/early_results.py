"""What only new state and aux outputs need is computed where its inputs are made, not at the end."""

from planner.frontend.flat import Equation, Program, Value, prune


def early_results(program: Program, losses: int) -> Program:
    """Moves what only new state and aux outputs need to where its inputs are made.

    Functions compute such results last. Left there, they would keep early values alive through all blocks, and a state
    leaf that an early stage reads would come from the last one: microbatches could not follow each other.
    """
    loss = prune(Program(program.inputs, program.equations, program.outputs[:losses], program.constants))
    fixed = {e.name for e in loss.equations}
    inputs = set(program.inputs)
    anywhere = {v for v in inputs if v.name.startswith(("batch:", "state:")) or v.name == "rng"}
    place: dict[Value, int] = {}
    for i, e in enumerate(program.equations):
        for o in e.inputs:  # parameters are held by the stage that reads them for the loss
            if isinstance(o, Value) and o in inputs and e.name in fixed:
                place.setdefault(o, i)
        place.update(dict.fromkeys(e.outputs, i))
    key: dict[str, tuple[int, int]] = {e.name: (i, i) for i, e in enumerate(program.equations)}
    free = [
        (i, e)
        for i, e in enumerate(program.equations)
        if e.name not in fixed and not e.scopes and not e.params.get("effects")
    ]
    floating: list[tuple[int, Equation]] = []  # made of state and batch alone: go where they are read
    for i, e in free:
        found = [place[o] for o in e.inputs if isinstance(o, Value) and o in place and o not in anywhere]
        if not found:
            floating.append((i, e))
            anywhere.update(e.outputs)
            continue
        key[e.name] = (max(found), i)
        place.update(dict.fromkeys(e.outputs, max(found)))
    readers: dict[Value, list[str]] = {}
    for _, r in free:
        for o in r.inputs:
            if isinstance(o, Value):
                readers.setdefault(o, []).append(r.name)
    for i, e in reversed(floating):
        key[e.name] = (min((key[r][0] for v in e.outputs for r in readers.get(v, ())), default=i), i)
    equations = tuple(sorted(program.equations, key=lambda e: key[e.name]))
    return Program(program.inputs, equations, program.outputs, program.constants)
