"""What a stage pays for casts between its blocks, walked as the lowering walks them (`lowering/stage.py`).

A value that an earlier stage made arrives replicated or split (`borders.arriving`) and is cast once to what its first
reader takes. The layers of a scan take their carry as the first one does; a value that all of them read, and a stack of
items, is cast once for all.
"""

from dataclasses import replace

from costmodel.graph import Block, ModelGraph, Source, Tensor
from costmodel.sharding import REPLICATED, VARYING, Spec, shifted
from planner.space.block_cost import BlockCost
from planner.space.borders import arriving, crossing
from planner.space.decision import Decision


def link_cost(graph: ModelGraph, decision: Decision, start: int, stop: int) -> BlockCost:
    """Cast seconds and collectives between the blocks ``start..stop-1`` and at the borders of the stage."""
    walk = _Walk(graph, decision, start, stop)
    walk.run()
    return walk.cost


class _Walk:
    def __init__(self, graph: ModelGraph, decision: Decision, start: int, stop: int):
        self.graph, self.decision, self.stop = graph, decision, stop
        self.blocks = graph.blocks[start:stop]
        self.cost = BlockCost()
        self.have: dict[str, Spec] = {}  # value -> the spec in which the stage holds it

    def run(self) -> None:
        at = 0
        while at < len(self.blocks):
            block, end = self.blocks[at], at + 1
            if block.class_key in self.graph.layered:
                while end < len(self.blocks) and self.blocks[end].class_key == block.class_key:
                    end += 1
                self._layers(self.blocks[at:end])
            else:
                self._single(block)
            at = end
        self._leave()

    def _port(self, block: Block, position: int) -> Spec | None:
        """Spec in which a block takes an input; None for parameters."""
        name = self.graph.classes[block.class_key].inputs[position]
        if block.inputs[position].value in self.graph.params:
            return None
        return self.decision.input_specs[block.class_key][name]

    def _natural(self, block: Block, position: int) -> Spec | None:
        name = self.graph.classes[block.class_key].outputs[position]
        return self.decision.output_specs[block.class_key].get(name)

    def _charge(self, tensor: Tensor, have: Spec, want: Spec, times: float = 1.0) -> None:
        self.decision.charge(tensor, have, want, self.cost, share=times)

    def _take(self, source: Source, tensor: Tensor, port: Spec) -> None:
        """Charges the cast of a block input (a value, or an item of a stack)."""
        whole = _shifted(port, source, 1)
        value = self.graph.values.get(source.value, tensor)
        if source.value not in self.have:
            comes = arriving(whole, value, value.shape, self.decision.space.mesh)
            self._charge(value, comes, whole)
            self.have[source.value] = whole
        self._charge(tensor, _shifted(self.have[source.value], source, -1), port)

    def _single(self, block: Block) -> None:
        tensors = self.graph.classes[block.class_key].tensors
        for i, (name, source) in enumerate(zip(self.graph.classes[block.class_key].inputs, block.inputs, strict=True)):
            port = self._port(block, i)
            if port is not None:
                self._take(source, tensors[name], port)
        for j, source in enumerate(block.outputs):
            natural = self._natural(block, j)
            if natural is not None:
                self.have[source.value] = natural

    def _layers(self, layers: tuple[Block, ...]) -> None:
        first, last = layers[0], layers[-1]
        key, cls = first.class_key, self.graph.classes[first.class_key]
        carried = self.decision.space.carries[key]
        for i, (name, source) in enumerate(zip(cls.inputs, first.inputs, strict=True)):
            port = self._port(first, i)
            if port is None:
                continue
            if source.index is None:
                self._take(source, cls.tensors[name], port)
            else:  # the stack is cast as one
                value = self.graph.values[source.value]
                whole = _shifted(port, source, 1)
                have = self.have.get(source.value, arriving(whole, value, value.shape, self.decision.space.mesh))
                self._charge(value, have, whole)
                self.have.setdefault(source.value, whole)
        outs = {j: self._port(first, i) for i, j in carried.items()}
        for j, source in enumerate(last.outputs):
            natural, port = self._natural(first, j), outs.get(j)
            if port is not None:
                if natural is not None:
                    self._charge(cls.tensors[cls.outputs[j]], natural, port, times=len(layers))
                self.have[source.value] = port
            elif natural is not None:
                self.have[source.value] = _shifted(natural, source, 1)

    def _leave(self) -> None:
        """Values that later stages read are sent; results are made whole, and loss parts numbers or sums."""
        made = {s.value for b in self.blocks for s in b.outputs}
        mesh = self.decision.space.mesh
        later = {s.value for b in self.graph.blocks[self.stop :] for s in b.inputs} & made
        results = set(self.graph.results) & made
        for name in sorted(later | results):
            value, spec = self.graph.values[name], self.have.get(name)
            if spec is None:
                continue
            if name in results:
                still = value if name in later else _without_gradient(value)
                self._charge(still, spec, self.decision.space.whole)
            else:
                self._charge(value, spec, crossing(spec, value.shape, mesh))
        for name in dict.fromkeys(n for n in self.graph.loss if n in made):
            spec = self.have.get(name)
            if spec is not None:
                self._charge(self.graph.values[name], spec, tuple(REPLICATED if c == VARYING else c for c in spec))


def _shifted(spec: Spec, source: Source, by: int) -> Spec:
    """A spec in the dims of the stack that the source is an item of (or back)."""
    return spec if source.index is None else shifted(spec, by)


def _without_gradient(tensor: Tensor) -> Tensor:
    return replace(tensor, needs_grad=False)
