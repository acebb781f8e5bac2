"""Random keys first: how each layer's key comes from the user's key is worked out in front of all layers.

Libraries fold a layer's path or count into a key where the layer begins, so layers that are equal but for that number
would look different, and a stage would need the chain of keys before it. Keys are a few words each: they are derived at
the start and handed to the layers, as they are where layers are scanned. Random bits are made where they are used.
"""

from collections.abc import Iterable
from dataclasses import replace

from planner.frontend.flat import Equation, Program, Value

DERIVE = frozenset({
    "random_wrap", "random_unwrap", "random_split", "random_fold_in", "random_clone", "random_seed", "slice", "squeeze",
    "reshape", "dynamic_slice", "gather", "concatenate", "broadcast_in_dim", "transpose", "split", "unstack", "copy",
})  # fmt: skip


def keys_first(program: Program, keys: Iterable[Value]) -> Program:
    """The program with everything that only derives keys from `keys` in front, out of any remat region."""
    derived, early, rest = set(keys), [], []
    for e in program.equations:
        values = [o for o in e.inputs if isinstance(o, Value)]
        if values and _derives(e) and all(v in derived for v in values):
            derived.update(e.outputs)
            early.append(replace(e, scopes=()))
        else:
            rest.append(e)
    return replace(program, equations=(*early, *rest))


def _derives(equation: Equation) -> bool:
    return equation.primitive.name in DERIVE
