"""What the blocks of an assignment keep for the backward pass, and what is live while they run."""

from dataclasses import dataclass, replace
from functools import cached_property

from costmodel.graph import Op
from costmodel.sharding import REPLICATED, Spec, result_spec, split_factor
from planner.space.assignment import Assignment
from planner.space.backward import Handed, cotangent_name, handed_by
from planner.space.group_costs import group_kept, group_live
from planner.space.kernels import kernels_of
from planner.space.live_spans import BlockSpans
from planner.space.liveness import BlockLiveness, Waiting
from planner.space.nodes import GroupNode


@dataclass(frozen=True, kw_only=True)
class AssignmentMemory(Assignment):
    """An assignment with its bytes by block class."""

    @cached_property
    def lying(self) -> dict[str, dict[tuple[str, Spec], float]]:
        """As `kept`, in a program that holds both passes: outside of scans what fuses is computed again from what lies
        in memory anyway."""
        found = {}
        for key, cls in self.space.graph.classes.items():
            if (
                self.space.fuses
                and self.setting.remat == "none"
                and key not in self.space.graph.layered
                and all(op.scope < 0 for op in cls.ops)
            ):
                lying = self._liveness(key, alone=True).lying()
                found[key] = lying if sum(lying.values()) < sum(self.kept[key].values()) else self.kept[key]
            else:
                found[key] = self.kept[key]
        return found

    def fused_saves(self, key: str) -> dict[tuple[str, Spec], float]:
        """What a block of a class keeps where fused functions save what they read and each tensor lies as it was made,
        whatever is in scans: of a framework that gathers an operand again. Beside regions of a user's remat it is what
        these keep."""
        if any(op.scope >= 0 for op in self.space.graph.classes[key].ops):
            return self.kept_without_remat[key]
        cls, spans = self.space.graph.classes[key], replace(self._spans(key), triton=False)  # XLA's kernels keep more
        block = BlockLiveness.of(spans, cls, self.space.mesh)
        makers = {name: op for op in self.space.graph.classes[key].ops for name in op.outputs}
        found: dict[tuple[str, Spec], float] = {}
        for (name, spec), size in block.lying().items():
            made = self.input_specs[key].get(name, spec)
            if (op := makers.get(name)) is not None:
                made = result_spec(op, op.outputs.index(name), self.op_strategies[key][op.name])
            parts = split_factor(made, self.space.mesh) / split_factor(spec, self.space.mesh)
            found[name, spec] = size / max(1.0, parts)
        return found

    def live_bytes(self, key: str, *, rerun: bool, alone: bool = False) -> float:
        """The most that is live on a device while a block of a class runs backward, beside parameters, gradients and
        what was kept.

        Args:
            rerun: its forward ops run just before, so that nothing was kept but its inputs.
            alone: both passes are one program.
        """
        if not self.space.fuses:
            return self._unfused_bytes(key)
        at = (key, rerun, alone)
        if at not in self._live:
            kept = {name for name, _ in self.kept[key]}
            layered = key in self.space.graph.layered
            self._live[at] = self._liveness(key, alone=alone).peak_bytes(rerun=rerun, kept=kept, sliced=layered)
        return self._live[at]

    def forward_bytes(self, key: str) -> float:
        """The most that is live on a device while a layer of a class runs forward, what it keeps included."""
        return self._liveness(key).forward_bytes(name for name, _ in self.kept[key])

    def waiting(self, key: str) -> Waiting:
        """What lies on a device for the weight gradients of a block of a class."""
        return self._liveness(key).waiting

    def _unfused_bytes(self, key: str) -> float:
        """`live_bytes` where every group leaves its results in memory, whatever ran before."""
        whole, live = self._whole_leaves(key), 0.0
        for i in range(len(self.space.groups[key])):
            node = self.space.nodes[self.space.index["group", key, str(i)]]
            assert isinstance(node, GroupNode)
            live = max(live, group_live(self.space, node, self.group_option(key, i), whole))
        return live + (sum(self._kept_inside(key).values()) if self.setting.remat == "full" else 0.0)

    def _whole_leaves(self, key: str) -> dict[str, Spec]:
        """Parameters that a class reads as whole leaves, with their spec through the step."""
        if key in self.space.graph.layered:
            return {}
        names = (n for n in self.space.graph.classes[key].inputs if ("place", key, n) in self.space.index)
        return {name: self.input_specs[key][name] for name in names}

    def _liveness(self, key: str, *, alone: bool = False) -> BlockLiveness:
        """Of a block of a class.

        Args:
            alone: both passes are one program.
        """
        spans = self._spans(key)
        if alone and self.space.pricing.kind.platform == "gpu" and key not in self.space.graph.layered:
            spans = spans.as_whole
        at = (key, spans.whole)
        if at not in self._blocks:
            self._blocks[at] = BlockLiveness.of(spans, self.space.graph.classes[key], self.space.mesh)
        return self._blocks[at]

    def _spans(self, key: str) -> BlockSpans:
        """The kernels of a block of a class, and when what they have in memory is live."""
        if key not in self._known_spans:
            space, cls = self.space, self.space.graph.classes[key]
            specs = {name: self.input_specs[key].get(name, space.whole) for name in cls.inputs}
            kernels = kernels_of(cls, space.mesh, self.op_strategies[key], specs)
            derived, triton, fast = space.derived[key], space.triton, space.fast
            self._known_spans[key] = BlockSpans(cls, kernels, specs, derived, triton=triton, fast=fast)
        return self._known_spans[key]

    @cached_property
    def _known_spans(self) -> dict[str, BlockSpans]:
        return {}

    @cached_property
    def _blocks(self) -> dict[tuple[str, bool], BlockLiveness]:
        return {}

    @cached_property
    def _live(self) -> dict[tuple[str, bool, bool], float]:
        return {}

    @cached_property
    def kept(self) -> dict[str, dict[tuple[str, Spec], float]]:
        """Block class -> tensor and spec -> bytes that a block keeps on one device for its backward pass."""
        if self.setting.remat == "none":
            return self.kept_without_remat
        found: dict[str, dict[tuple[str, Spec], float]] = {}
        for key, cls in self.space.graph.classes.items():
            again = {name for _, name in self.space.again[key, "full"].reads}
            found[key] = {
                (name, spec): cls.tensors[name].bytes / split_factor(spec, self.space.mesh)
                for name, spec in self.input_specs[key].items()
                if cls.tensors[name].role != "param" and name in again
            }
        return found

    @cached_property
    def kept_without_remat(self) -> dict[str, dict[tuple[str, Spec], float]]:
        """The same if nothing was recomputed."""
        return {key: self._kept_inside(key) for key in self.space.graph.classes}

    @cached_property
    def kept_for_weights(self) -> dict[str, dict[tuple[str, Spec], float]]:
        """The same between B and W, where a schedule splits backwards: what W reads of what B had or recomputed, and
        the cotangents that weight gradients are made of. Recomputed, it is no less than what is kept without remat: W
        reads results of the second run that the first would not have kept, in a user's remat region as under full
        remat."""
        found: dict[str, dict[tuple[str, Spec], float]] = {}
        for key, cls in self.space.graph.classes.items():
            handed = handed_by(cls.ops, cls.tensors, self.space.derived[key], cls.outputs)
            own: dict[tuple[str, Spec], float] = {}
            for i, group in enumerate(self.space.groups[key]):
                specs = self.group_specs[key][i]
                for op in group.ops:
                    kept = handed.get(op.name, Handed())
                    again = self._made_again(key, op) if op.scope >= 0 else frozenset[str]()
                    for name in kept.names | again:
                        own[name, specs[name]] = cls.tensors[name].bytes / split_factor(specs[name], self.space.mesh)
                    for name, alike in kept.cotangents:
                        split = tuple(max(code, REPLICATED) for code in specs[name])  # a pending sum's is whole
                        own[cotangent_name(alike), split] = cls.tensors[name].bytes / split_factor(
                            split, self.space.mesh
                        )
            whole = self.kept_without_remat[key]
            rerun = self.setting.remat == "full" and sum(own.values()) < sum(whole.values())
            found[key] = whole if rerun else own
        return found

    def _made_again(self, key: str, op: Op) -> frozenset[str]:
        """Of an op in a user's remat region, what its backward pass reads and the region's second run makes."""
        tensors, derived = self.space.graph.classes[key].tensors, self.space.derived[key]
        return frozenset(n for n in op.saves if tensors[n].role != "param" and n not in derived)

    def _kept_inside(self, key: str) -> dict[tuple[str, Spec], float]:
        found: dict[tuple[str, Spec], float] = {}
        for i, specs in enumerate(self.group_specs[key]):
            index = self.space.index["group", key, str(i)]
            node = self.space.nodes[index]
            assert isinstance(node, GroupNode)
            found |= group_kept(self.space, node, node.options[self.choice[index]], specs)
        return found


__all__ = ["AssignmentMemory"]
