"""A captured model in sequence chunks: how each value is cut, and the capture that each chunk sees.

The dim that is cut is found by trying: an embedding has a few dims to begin with, and the first that goes through the
whole model to a sum over tokens, and under a mask on its way, is the sequence. What of it does not go through is said
with its line.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import jax

from costmodel.errors import InputError
from costmodel.graph import Source, Tensor
from planner.frontend.blocks import BlockClass
from planner.frontend.capture import BlockInstance, Capture
from planner.frontend.chunks.bounds import Box, Interval, Region, of_array
from planner.frontend.chunks.causal import Blocked, ClassCuts, Origin, Seed, follow
from planner.frontend.chunks.cut import WHOLE, Cut, cut_shape
from planner.frontend.chunks.rewrite import ChunkClass, chunk_class, slice_name
from planner.frontend.flat import Value
from planner.frontend.residuals import Cache as ResidualCache

_HINT = (
    "sequence-chunks runs models in which each token depends on earlier tokens only, through softmax attention under a "
    "causal mask made in the program (jnp.where, or an added -1e9 or less); use another schedule for this one"
)


@dataclass(frozen=True, eq=False)
class ChunkedModel:
    """A model whose sequence is cut into chunks.

    Attributes:
        cuts: of every value between blocks by name; those left out are whole.
        blocks: how each block runs, by its name.
        tokens: length of the sequence.
    """

    capture: Capture
    chunks: int
    tokens: int
    cuts: dict[str, Cut]
    blocks: dict[str, ClassCuts]
    _classes: dict[tuple[int, int], ChunkClass] = field(default_factory=dict)
    _residuals: list[ResidualCache] = field(default_factory=list)

    def chunk_class(self, block: BlockInstance, at: int) -> ChunkClass:
        """How a block runs on chunk `at`."""
        found = self.blocks[block.name]
        if (id(found), at) not in self._classes:
            while len(self._residuals) < self.chunks:
                self._residuals.append({})
            known = list({id(c): None for c in self.blocks.values()})
            key = f"{block.cls.key}~{known.index(id(found))}@{at}"
            try:
                self._classes[id(found), at] = chunk_class(found, at, key, self._residuals[at])
            except Blocked as blocked:
                raise _refusal(blocked, self.chunks) from blocked
        return self._classes[id(found), at]

    def of_blocks(self, blocks: Sequence[BlockInstance], at: int) -> "ChunkCapture":
        """What chunk `at` sees of consecutive blocks, those of a stage."""
        capture = self.capture
        values = {n: self._cut_tensor(t, at) for n, t in capture.values.items()}
        runs, made, own, earlier = list(capture.runs), [], [], []
        classes: dict[str, BlockClass] = {}
        lengths = {run: sum(b.run == run for b in blocks) for run in {b.run for b in blocks}}
        firsts: dict[int, str] = {}
        for block in blocks:
            found = self.chunk_class(block, at)
            classes[found.cls.key] = found.cls
            layered = block.run >= 0
            first = firsts.setdefault(block.run, block.name) if layered else block.name
            layers, item = lengths[block.run] if layered else 0, self._item(block)
            inputs, outputs = list(block.inputs), list(block.outputs)
            crossing = [(inputs, earlier, n, chunk, found.cls.tensors[v]) for v, (n, chunk) in found.earlier.items()]
            crossing += [(outputs, own, n, at, found.cls.tensors[n]) for n in found.own]
            for ends, names, gathered, chunk, tensor in crossing:
                name = f"{first}.{slice_name(gathered, chunk)}"
                values[name] = self._slice_tensor(name, tensor, layers)
                ends.append(Source(name, item))
                names.append(name)
            if layered:
                kinds = capture.runs[block.run].kinds + ("stacked",) * len(found.earlier)
                runs[block.run] = replace(capture.runs[block.run], kinds=kinds)
            made.append(replace(block, cls=found.cls, inputs=tuple(inputs), outputs=tuple(outputs)))
        seen = replace(capture, values=values, runs=tuple(runs), classes=classes)
        return ChunkCapture(seen, tuple(made), tuple(dict.fromkeys(own)), tuple(dict.fromkeys(earlier)))

    def _item(self, block: BlockInstance) -> int | None:
        """Which item of its run's stacks a layer takes; None for a block that is in no run."""
        kinds = self.capture.runs[block.run].kinds if block.run >= 0 else ()
        return next((s.index for s, kind in zip(block.inputs, kinds, strict=False) if kind == "stacked"), None)

    def _cut_tensor(self, tensor: Tensor, at: int) -> Tensor:
        cut = self.cuts.get(tensor.name, WHOLE)
        return tensor if cut == WHOLE else replace(tensor, shape=cut_shape(tensor.shape, cut, self.chunks, at))

    def _slice_tensor(self, name: str, tensor: Tensor, layers: int) -> Tensor:
        """The slice of one layer, or those of a stage's layers stacked."""
        shape = (layers, *tensor.shape) if layers else tensor.shape
        return replace(tensor, name=name, shape=shape, role="activation")


@dataclass(frozen=True)
class ChunkCapture:
    """What one chunk sees of some blocks.

    Attributes:
        own: values that it hands to later chunks of the same blocks; earlier: those that earlier chunks handed over.
    """

    capture: Capture
    blocks: tuple[BlockInstance, ...]
    own: tuple[str, ...]
    earlier: tuple[str, ...]


def chunked_model(capture: Capture, chunks: int) -> ChunkedModel:
    """Cuts the sequence of a captured model into chunks.

    Raises:
        InputError: MP166, a token depends on later ones, or an op cannot be cut along the tokens; the message names it.
            MP167, the task carries state, or the sequence does not divide.
    """
    task = capture.task
    if task.state is not None:
        raise InputError(
            "MP167",
            "sequence-chunks cannot run a task that carries state: it has one new state a chunk",
            "remove state=",
        )
    dims = {d for d in task.batch_dim_list if d is not None}
    examples = frozenset((d, capture.microbatch) for d in dims)
    if chunks == 1:
        return _Walk(capture, 1, Seed(1, sys.maxsize, examples)).run()
    first: Blocked | None = None
    skip, count = 0, 1
    best: ChunkedModel | None = None
    while skip < count:
        seed = Seed(chunks, skip, examples)
        try:
            found = _Walk(capture, chunks, seed).run()
            if any(c.gathers for c in found.blocks.values()):
                return found
            best = best or (found if seed.dim >= 0 else None)
        except Blocked as blocked:
            first = first or blocked
        skip, count = skip + 1, seed.found
    if best is not None:
        return best
    if first is None:
        raise InputError(
            "MP167",
            f"no dim of the batch but that of examples divides into {chunks} chunks where the model begins to use it",
            _lengths_hint(capture, chunks),
        )
    raise _refusal(first, chunks)


def _lengths_hint(capture: Capture, chunks: int) -> str:
    leaves = jax.tree_util.tree_leaves_with_path(capture.task.with_batch_size(capture.microbatch))
    shapes = ", ".join(f"{jax.tree_util.keystr(path)} {tuple(x.shape)}" for path, x in leaves)
    return f"the batch has {shapes}; choose a number of chunks that divides the sequence"


def _refusal(blocked: Blocked, chunks: int) -> InputError:
    e = blocked.equation
    where = f"{e.name} at {blocked.line or 'an unknown line'}" if e is not None else "the model"
    message = f"the sequence cannot run in {chunks} chunks: {where} reads more than its own and earlier tokens"
    return InputError("MP166", f"{message}, as far as can be proven: {blocked.reason}", _HINT)


@dataclass
class _Walk:
    """Follows one choice of the sequence through all blocks."""

    capture: Capture
    chunks: int
    seed: Seed
    cuts: dict[str, Cut] = field(default_factory=dict)
    origins: dict[str, Origin] = field(default_factory=dict)
    regions: dict[str, Region] = field(default_factory=dict)
    known: dict[tuple[object, ...], ClassCuts] = field(default_factory=dict)

    def run(self) -> ChunkedModel:
        capture = self.capture
        for name, info in capture.inputs.items():
            self.origins[name] = frozenset({info.role} & {"param", "batch"})
        for value, array in capture.program.constants.items():
            self.regions[value.name] = lambda box, array=array: of_array(array, box)
        found: dict[str, ClassCuts] = {}
        blocks = capture.blocks
        at = 0
        while at < len(blocks):
            block, end = blocks[at], at + 1
            while block.run >= 0 and end < len(blocks) and blocks[end].run == block.run:
                end += 1
            result = self._block(block)
            for other in blocks[at:end]:
                found[other.name] = result
            self._outputs(blocks[at:end], result)
            at = end
        self._losses(found)
        return ChunkedModel(capture, self.chunks, self.seed.size, self.cuts, found)

    def _block(self, block: BlockInstance) -> ClassCuts:
        cuts = [self._cut(s) for s in block.inputs]
        origins = [self.origins.get(s.value, frozenset()) for s in block.inputs]
        regions = {}
        for value, source in zip(block.cls.program.inputs, block.inputs, strict=True):
            if source.index is None and source.value in self.regions and not self._carried(block, value):
                regions[value.name] = self.regions[source.value]
        key = (block.cls.key, tuple(cuts), tuple(origins), tuple((n, id(r)) for n, r in regions.items()), self.seed.dim)
        if key not in self.known:
            self.known[key] = follow(block.cls, cuts, origins, regions, self.chunks, self.seed)
        result = self.known[key]
        if block.run >= 0:
            self._require_steady(block, cuts, result)
        return result

    def _carried(self, block: BlockInstance, value: Value) -> bool:
        if block.run < 0:
            return False
        position = block.cls.program.inputs.index(value)
        return self.capture.runs[block.run].kinds[position] == "carry"

    def _cut(self, source: Source) -> Cut:
        cut = self.cuts.get(source.value, WHOLE)
        if source.index is None or cut == WHOLE:
            return cut
        return cut.shifted(-1)

    def _require_steady(self, block: BlockInstance, cuts: Sequence[Cut], result: ClassCuts) -> None:
        """Layers hand their carry on as they take it."""
        carry = [i for i, kind in enumerate(self.capture.runs[block.run].kinds) if kind == "carry"]
        for position, i in enumerate(carry):
            if result.output(position) != cuts[i]:
                operand = block.cls.program.outputs[position]
                maker = next((e for e in block.cls.program.equations if operand in e.outputs), None)
                raise Blocked(maker, "a layer hands on in chunks what it takes whole, or the other way round")

    def _outputs(self, blocks: Sequence[BlockInstance], result: ClassCuts) -> None:
        for block in blocks:
            for i, source in enumerate(block.outputs):
                cut = result.output(i)
                operand = block.cls.program.outputs[i]
                self.origins[source.value] = (
                    result.origins.get(operand.name, frozenset()) if isinstance(operand, Value) else frozenset()
                )
                if cut != WHOLE:
                    self.cuts[source.value] = cut if source.index is None else cut.shifted(1)
                if block.run < 0 and source.index is None:
                    self.regions[source.value] = self._region(result, i)

    def _region(self, result: ClassCuts, position: int) -> Region:
        def region(box: Box) -> Interval:
            return result.bounds.of(result.cls.program.outputs[position], box)

        return region

    def _losses(self, found: dict[str, ClassCuts]) -> None:
        """Loss parts are sums over chunks; of one that every chunk knows whole, the first hands out all."""
        for operand in self.capture.loss:
            if not isinstance(operand, Value) or self.cuts.get(operand.name) == Cut(partial=True):
                continue
            block = next(b for b in self.capture.blocks if any(s.value == operand.name for s in b.outputs))
            position = next(i for i, s in enumerate(block.outputs) if s.value == operand.name)
            found[block.name] = replace(found[block.name], once=found[block.name].once | {position})
            self.cuts[operand.name] = Cut(partial=True)


__all__ = ["ChunkCapture", "ChunkedModel", "chunked_model"]
