"""Follows the sequence through the program of a block, and proves that later tokens matter nowhere.

Every op is a set of factors, so where one operand is cut into chunks the factor of that dim says what happens to the
others and to the results. Where the sequence is both a dim of the queries and a dim of the keys, the queries keep their
chunk and the keys become all tokens so far. Reading those only is right where a mask hides the rest: a maximum over
them must not be below the hidden ones, and a sum over them must leave out zeros only (`bounds.py`).

A maximum's guard: the maximum over the tokens so far is that over all tokens if it exceeds the hidden ones. That is
known at run time only. The value becomes NaN where it does not (a row in which everything is masked), so that no number
is silently wrong.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from costmodel.graph import Op
from costmodel.sharding import major_factor
from planner.frontend.blocks import BlockClass
from planner.frontend.chunks.bounds import Bounds, Region
from planner.frontend.chunks.cut import WHOLE, Cut, text_of
from planner.frontend.flat import Equation, Operand, Program, Value
from planner.frontend.rules.factors import is_inexact

Origin = frozenset[str]  # of what a value is made: "param", "batch"
REDUCING = ("reduce_sum", "dot_general", "reduce_max")  # what may join the tokens so far
_TRIES = 32  # ways to tell queries from keys
_FAR = -2000.0  # a masked score at most this leaves zero behind the exponential, whatever passes the guard
_LOWEST = -1e30  # a guard from here down lets every finite maximum of a score pass


class Blocked(Exception):
    """An equation reads tokens of later chunks, or cannot be cut.

    Attributes:
        line: the user's line that made it, or where JAX does not say, one that reads or makes the same values.
    """

    def __init__(self, equation: Equation | None, reason: str):
        super().__init__(reason)
        self.equation, self.reason = equation, reason
        self.line = equation.source if equation is not None else ""

    def look_near(self, program: Program) -> None:
        """Finds a line where JAX does not know that of the equation."""
        if self.equation is None or self.line:
            return
        own = {v.name for v in self.equation.outputs}
        read = {o.name for o in self.equation.inputs if isinstance(o, Value)}
        readers = (e for e in program.equations if any(isinstance(o, Value) and o.name in own for o in e.inputs))
        makers = (e for e in program.equations if any(v.name in read for v in e.outputs))
        self.line = next((f"{e.source}, beside it" for e in (*readers, *makers) if e.source), "")


@dataclass(frozen=True)
class Step:
    """How one equation runs on a chunk.

    Attributes:
        chunk, prefix: factors of which it has its own slice, and those up to its own; -1 for none.
        operands, results: their cuts.
        guard: the number that its result must reach.
    """

    chunk: int
    prefix: int
    operands: tuple[Cut, ...]
    results: tuple[Cut, ...]
    guard: float | None = None


@dataclass(frozen=True, eq=False)
class ClassCuts:
    """How a block's program runs on chunks.

    Attributes:
        cuts: of every value by name; those left out are whole.
        steps: of the equations that do not run as they are, by name.
        gathers: values of which chunks read the slices up to their own, with the dim.
        origins: what each value is made of. bounds: of its values.
        once: outputs of which the chunks' sum is wanted and that each chunk knows whole, by position.
    """

    cls: BlockClass
    chunks: int
    inputs: tuple[Cut, ...]
    cuts: Mapping[str, Cut]
    steps: Mapping[str, Step]
    gathers: tuple[tuple[str, int], ...]
    origins: Mapping[str, Origin]
    bounds: Bounds
    once: frozenset[int] = frozenset()

    def output(self, position: int) -> Cut:
        operand = self.cls.program.outputs[position]
        return self.cuts.get(operand.name, WHOLE) if isinstance(operand, Value) else WHOLE


@dataclass
class Seed:
    """Where the cut begins: the first op that joins what is read of the batch with parameters, an embedding.

    Attributes:
        skip: which of the dims that it may begin with; batch_dims: (dim, size) of examples, which is none.
        dim, size: the one it began with, once that is known. Later ops of the kind begin with the same.
        found: number of dims that there were to begin with.
    """

    chunks: int
    skip: int
    batch_dims: frozenset[tuple[int, int]]
    dim: int = -1
    size: int = 0
    found: int = 0

    def factor(self, equation: Equation, op: Op, origins: Sequence[Origin]) -> int:
        """The factor that is cut from here on, -1 for none."""
        if not any("param" in o for o in origins):
            return -1
        places: dict[int, int] = {}  # factor -> dim
        for position, origin in enumerate(origins):
            if "batch" in origin and "param" not in origin:
                for dim, n in enumerate(equation.inputs[position].shape):
                    factor = major_factor(op, op.in_dims[position], dim)
                    if factor >= 0 and (dim, n) not in self.batch_dims and self._fits(op, factor):
                        places.setdefault(factor, dim)
        if not places:
            return -1
        if self.dim >= 0:
            same = (f for f, dim in places.items() if dim == self.dim and op.factors[f].size == self.size)
            return next(same, -1)
        self.found = len(places)
        if self.skip >= len(places):
            return -1
        factor, self.dim = list(places.items())[self.skip]
        self.size = op.factors[factor].size
        return factor

    def _fits(self, op: Op, factor: int) -> bool:
        kept = all(_place(op, dims, factor) not in (None, -1) for dims in op.out_dims)
        return kept and op.factors[factor].splits and op.factors[factor].size % self.chunks == 0


def _place(op: Op, dims: Sequence[tuple[int, ...]], factor: int) -> int | None:
    """The dim that a cut of `factor` cuts; -1 for none, None where the factor is not the major one of its dim."""
    for dim, parts in enumerate(dims):
        if factor in parts:
            return dim if major_factor(op, tuple(dims), dim) == factor else None
    return -1


def follow(
    cls: BlockClass,
    inputs: Sequence[Cut],
    origins: Sequence[Origin],
    regions: Mapping[str, Region],
    chunks: int,
    seed: Seed,
) -> ClassCuts:
    """Cuts of a block's values, given those of its inputs.

    Args:
        origins: of the inputs.
        regions: bounds of inputs, where they are known.

    Raises:
        Blocked: an equation reads tokens of later chunks, or cannot be cut.
    """
    choices: list[bool] = []
    first: Blocked | None = None
    for _ in range(_TRIES):
        work = _Follower(cls, chunks, seed, Bounds(cls.program, cls.ops, regions), choices)
        try:
            return work.run(inputs, origins)
        except Blocked as blocked:
            blocked.look_near(cls.program)
            first = first or blocked
            choices = work.choices[: work.asked]
            while choices and choices[-1]:
                choices.pop()
            if not choices:
                raise first from None
            choices[-1] = True
    raise first


@dataclass
class _Follower:
    cls: BlockClass
    chunks: int
    seed: Seed
    bounds: Bounds
    choices: list[bool]
    asked: int = 0
    cuts: dict[str, Cut] = field(default_factory=dict)
    origins: dict[str, Origin] = field(default_factory=dict)
    steps: dict[str, Step] = field(default_factory=dict)
    gathers: dict[str, int] = field(default_factory=dict)

    def run(self, inputs: Sequence[Cut], origins: Sequence[Origin]) -> ClassCuts:
        program = self.cls.program
        for value, cut, origin in zip(program.inputs, inputs, origins, strict=True):
            self._set(value.name, cut)
            self.origins[value.name] = origin
        for equation in program.equations:
            step = self._step(equation, self.cls.ops[equation.name])
            made = frozenset().union(*(self.origins.get(o.name, frozenset()) for o in _values(equation.inputs)))
            for i, value in enumerate(equation.outputs):
                self.origins[value.name] = made
                if step is not None:
                    self._set(value.name, step.results[i])
            if step is not None:
                self.steps[equation.name] = step
        for operand in _values(program.outputs):
            if self._cut(operand).prefix >= 0:
                maker = next((e for e in program.equations if operand in e.outputs), None)
                raise Blocked(maker, "what it makes has a dim of tokens so far, which would differ from chunk to chunk")
        return ClassCuts(
            self.cls, self.chunks, tuple(inputs), self.cuts, self.steps, tuple(self.gathers.items()), self.origins,
            self.bounds,
        )  # fmt: skip

    def _set(self, name: str, cut: Cut) -> None:
        if cut != WHOLE:
            self.cuts[name] = cut

    def _cut(self, operand: Operand) -> Cut:
        return self.cuts.get(operand.name, WHOLE) if isinstance(operand, Value) else WHOLE

    def _step(self, equation: Equation, op: Op) -> Step | None:
        have = [self._cut(o) for o in equation.inputs]
        if any(c.partial for c in have):
            return self._sums(equation, op, have)
        chunked = self._factors(equation, op, [c.chunk for c in have])
        prefixed = self._factors(equation, op, [c.prefix for c in have])
        if not chunked and not prefixed:
            origins = [
                self.origins.get(o.name, frozenset()) if isinstance(o, Value) else frozenset() for o in equation.inputs
            ]
            factor = self.seed.factor(equation, op, origins)
            if factor < 0:
                return None
            chunked = [factor]
        if len(prefixed) > 1:
            raise Blocked(equation, "it joins two dims of tokens so far")
        own = [f for f in chunked if f not in prefixed]
        if not prefixed and len(own) == 2:
            own, prefixed = ([own[1]], [own[0]]) if self._other_way() else ([own[0]], [own[1]])
        if len(own) > 1:
            raise Blocked(equation, "it joins several dims of tokens, each cut into chunks")
        return self._placed(equation, op, have, own[0] if own else -1, prefixed[0] if prefixed else -1)

    def _other_way(self) -> bool:
        """Whether the second of two dims of tokens are the queries here."""
        if self.asked == len(self.choices):
            self.choices.append(False)
        self.asked += 1
        return self.choices[self.asked - 1]

    def _factors(self, equation: Equation, op: Op, dims: Sequence[int]) -> list[int]:
        """The factors of the operands' cut dims, each once."""
        found: dict[int, None] = {}
        for position, dim in enumerate(dims):
            if dim >= 0:
                factor = major_factor(op, op.in_dims[position], dim)
                if factor < 0:
                    raise Blocked(equation, "no rule says how it treats the dim of tokens")
                found[factor] = None
        return list(found)

    def _placed(self, equation: Equation, op: Op, have: Sequence[Cut], chunk: int, prefix: int) -> Step:
        for factor in (chunk, prefix):
            if factor >= 0:
                self._require_cut(equation, op, factor, must_split=factor == chunk)
        operands = []
        for position, cut in enumerate(have):
            dims = op.in_dims[position]
            want = Cut(self._dim(op, dims, chunk), self._dim(op, dims, prefix))
            self._require_given(equation, equation.inputs[position], cut, want)
            operands.append(want)
        results, guard = [], None
        for position, value in enumerate(equation.outputs):
            dims = op.out_dims[position]
            own, before = self._dim(op, dims, chunk), self._dim(op, dims, prefix)
            partial = False
            if chunk >= 0 and own < 0:
                partial = self._summed(equation, op, chunk)
            if prefix >= 0 and before < 0:
                if partial:
                    raise Blocked(equation, "it sums over the queries and over the keys at once")
                guard = self._hidden(equation, op, operands, prefix, value)
            results.append(Cut(own, before, partial))
        return Step(chunk, prefix, tuple(operands), tuple(results), guard)

    def _dim(self, op: Op, dims: Sequence[tuple[int, ...]], factor: int) -> int:
        found = _place(op, dims, factor) if factor >= 0 else -1
        return -1 if found is None else found

    def _require_cut(self, equation: Equation, op: Op, factor: int, *, must_split: bool) -> None:
        fact = op.factors[factor]
        tensors = (*op.in_dims, *op.out_dims)
        in_results = any(_place(op, dims, factor) != -1 for dims in op.out_dims)
        if not op.known:
            raise Blocked(equation, f"no rule says what {op.primitive} does with tokens")
        if not fact.splits and (must_split or in_results):
            raise Blocked(equation, f"it needs all tokens at once ({fact.reason})")
        if any(_place(op, dims, factor) is None for dims in tensors):
            raise Blocked(equation, "it merges the dim of tokens with another that comes before it")
        if fact.size % self.chunks:
            raise Blocked(equation, f"{fact.size} tokens do not divide into {self.chunks} chunks")

    def _require_given(self, equation: Equation, operand: Operand, have: Cut, want: Cut) -> None:
        """Whether an operand can be had as it is needed: slices of whole dims, and what earlier chunks had."""
        if have == want:
            return
        if have.chunk >= 0 and have.prefix < 0 and want == Cut(prefix=have.chunk):
            assert isinstance(operand, Value)
            self.gathers[operand.name] = have.chunk
            return
        for mine, wanted in ((have.chunk, want.chunk), (have.prefix, want.prefix)):
            if mine >= 0 and mine != wanted:
                raise Blocked(equation, f"it reads {operand!r} as {text_of(want)}, which is known as {text_of(have)}")

    def _summed(self, equation: Equation, op: Op, factor: int) -> bool:
        """Whether a result without the dim of tokens is a sum over chunks (else it is the same for all)."""
        combine = op.factors[factor].combine
        if combine == "same":
            return False
        if combine == "sum":
            return True
        raise Blocked(equation, "it joins all tokens, the later ones too, other than in a sum")

    def _hidden(self, equation: Equation, op: Op, operands: Sequence[Cut], prefix: int, value: Value) -> float | None:
        """Proves that a reduction over the tokens so far is that over all; a maximum's guard.

        Raises:
            Blocked: later tokens matter.
        """
        read = [i for i, cut in enumerate(operands) if cut.prefix >= 0]
        kind = equation.primitive.name
        if kind in REDUCING[:2]:
            if self.chunks == 1 or any(self._is_zero(equation, i, operands[i]) for i in read):
                return None
            raise Blocked(equation, "it sums over later tokens too, and no mask is found that makes them zero")
        if kind == REDUCING[2]:
            if self.chunks == 1:
                return None
            highest = max(high for _, high in self._behind(equation, 0, operands[0]))
            if highest <= _FAR:
                guard = max(highest * 0.5, _LOWEST)
                self.bounds.floors[value.name] = guard
                self.bounds.forget()
                return guard
            raise Blocked(equation, "its maximum is over later tokens too, and no mask is found that hides them")
        raise Blocked(equation, "it joins earlier and later tokens other than in a sum or a maximum")

    def _is_zero(self, equation: Equation, position: int, cut: Cut) -> bool:
        return all(interval == (0.0, 0.0) for interval in self._behind(equation, position, cut))

    def _behind(self, equation: Equation, position: int, cut: Cut) -> Iterator[tuple[float, float]]:
        """Bounds of what each chunk leaves out of an operand: the tokens behind its own."""
        operand = equation.inputs[position]
        for at in range(self.chunks - 1):
            box: list[tuple[int, int]] = []
            for dim, n in enumerate(operand.shape):
                part = n // self.chunks
                if dim == cut.chunk:
                    box.append((at * part, (at + 1) * part))
                else:
                    box.append(((at + 1) * part, n) if dim == cut.prefix else (0, n))
            yield self.bounds.of(operand, tuple(box))

    def _sums(self, equation: Equation, op: Op, have: Sequence[Cut]) -> Step:
        """An equation that reads a sum over all tokens, of which each chunk has its part."""
        pending = {i for i, cut in enumerate(have) if cut.partial}
        sets = [set(s) for s in op.linear if pending <= set(s)]
        if equation.primitive.name == "convert_element_type" and is_inexact(equation.outputs[0]):
            sets.append({0})
        rest = [cut for i, cut in enumerate(have) if i not in pending]
        if not sets or any(cut != WHOLE for cut in rest):
            raise Blocked(equation, "it reads a sum over all tokens, of which later chunks have their part")
        chosen = min(sets, key=len)
        operands = tuple(Cut(partial=i in chosen) for i in range(len(have)))
        return Step(-1, -1, operands, tuple(Cut(partial=True) for _ in equation.outputs))


def _values(operands: Sequence[Operand]) -> Iterator[Value]:
    return (o for o in operands if isinstance(o, Value))


__all__ = ["Blocked", "ClassCuts", "Origin", "Seed", "Step", "follow"]
