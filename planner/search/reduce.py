"""Exact reductions of an intra-op problem before any solver: `apply` makes it smaller, `Reduced.invert` maps back.

Every reduction keeps at least one optimal assignment:

* R1 rows: a memory row that no assignment can exceed is dropped, and with the last row the transients.
* R2 support: a strategy without a possible cast to any live strategy of some neighbour is dropped.
* R3 memory: a strategy that exceeds a row although all other nodes take their smallest memory is dropped.
* R4 dominance (Goldstein dead-end elimination): strategy s of a node is dropped when a strategy t costs no more for
  **every** choice of the neighbours, in time and in each memory row, and its transient is no larger. Identical
  strategies are the special case with equality; the lowest index stays.
* R5 folding: a node whose only tensor joins it to one other node is folded into that node when, for each spec of the
  neighbour, one strategy is best in time and in every row at once (always so where no row binds).
* R6 a tensor whose live casts are all free is dropped.

The bound of R4 on a tensor, with ``d[b] = cast[a_t, b] − cast[a_s, b]`` for a producer that would leave a_t instead of
a_s: a set of needed specs costs Σ_{b in set} d[b], which is at most max_b d[b] where all d ≤ 0, and else at most the
smaller of Σ_consumers max_b d⁺[b] and Σ_b d⁺[b]. For a consumer that would need b_t instead of b_s, under source a: it
pays cast[a, b_t] at most (nothing where another consumer needs b_t in any case) and saves cast[a, b_s] for certain only
where no other consumer can need b_s.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.search.problem import NOT_NEEDED, Floats, IntraOpProblem, Ints, Node, SearchStatus, TensorEdge

Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fold:
    """A node folded into its only neighbour.

    Attributes:
        node, neighbour: indices in the original problem.
        best: [S of the neighbour] strategy of `node` that goes with each strategy of the neighbour.
    """

    node: int
    neighbour: int
    best: Ints


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reduced:
    """A smaller problem and the way back.

    Attributes:
        nodes: original index of each node of `problem`.
        kept: original strategy of each strategy of `problem`, a node each.
        folds: in the order in which they were made.
    """

    problem: IntraOpProblem
    nodes: tuple[int, ...]
    kept: tuple[Ints, ...]
    folds: tuple[Fold, ...]

    def invert(self, choice: tuple[int, ...]) -> tuple[int, ...]:
        """The assignment of the original problem that `choice` of the reduced problem stands for."""
        full = np.full(len(self.nodes) + len(self.folds), -1, dtype=np.int64)
        for node, kept, strategy in zip(self.nodes, self.kept, choice, strict=True):
            full[node] = kept[strategy]
        for fold in reversed(self.folds):
            full[fold.node] = fold.best[full[fold.neighbour]]
        return tuple(int(x) for x in full)

    def project(self, choice: tuple[int, ...]) -> tuple[int, ...] | None:
        """The reduced assignment that an original one stands for, or None where it uses a dropped strategy."""
        reduced = []
        for node, kept in zip(self.nodes, self.kept, strict=True):
            place = np.flatnonzero(kept == choice[node])
            if not len(place):
                return None
            reduced.append(int(place[0]))
        return tuple(reduced)


def apply(
    problem: IntraOpProblem,
    *,
    with_memory: bool = True,
    keep_rows: bool = False,
    allowed: tuple[Mask, ...] | None = None,
) -> Reduced | SearchStatus:
    """Reduce a problem.

    Args:
        with_memory: False drops every memory row: the relaxation whose optimum may not fit.
        keep_rows: leave out R1 and R3, for a question to which the budgets are no limit (`least_memory`).
        allowed: masks of the strategies that may be used, a node each; all where omitted.

    Returns:
        The reduced problem, or the reason why nothing is left of it.
    """
    work = _Work(problem, with_memory, keep_rows, allowed)
    status = work.run()
    return status if status is not None else work.compact()


class _Work:
    """The problem while it shrinks: masks of live strategies over the original indices."""

    def __init__(self, problem: IntraOpProblem, with_memory: bool, keep_rows: bool, allowed: tuple[Mask, ...] | None):
        self.original = problem
        self.limits_bind = not keep_rows
        rows = np.arange(len(problem.budget_bytes)) if keep_rows else _binding_rows(problem)
        if not with_memory:
            rows = rows[:0]
        self.budget = problem.budget_bytes[rows]
        self.time = [node.time_s for node in problem.nodes]
        self.memory = [node.memory_bytes[rows] for node in problem.nodes]
        self.transient = [node.transient_bytes if len(rows) else np.zeros(len(node.time_s)) for node in problem.nodes]
        self.live: list[Mask] = [np.isfinite(time) for time in self.time]
        if allowed is not None:
            self.live = [mask & more for mask, more in zip(self.live, allowed, strict=True)]
        self.tensors: list[TensorEdge | None] = []
        self.costs: list[Floats] = []  # [1 + R, A, B + 1]: time, then rows; the last column is NOT_NEEDED
        self.possible: list[Mask] = []  # [A, B + 1]
        for tensor in problem.tensors:
            finite = np.isfinite(tensor.cast_time_s)
            stack = np.concatenate([tensor.cast_time_s[None], tensor.cast_memory_bytes[rows]])
            stack = np.where(finite, stack, 0.0)
            self.tensors.append(tensor if tensor.consumers else None)
            self.costs.append(np.pad(stack, ((0, 0), (0, 0), (0, 1))))
            self.possible.append(np.pad(finite, ((0, 0), (0, 1)), constant_values=True))
        self.touching: list[list[int]] = [[] for _ in problem.nodes]
        for index, tensor in enumerate(problem.tensors):
            for node in dict.fromkeys((tensor.producer, *(node for node, _ in tensor.consumers))):
                self.touching[node].append(index)
        self.folds: list[Fold] = []
        self.gone: set[int] = set()

    def run(self) -> SearchStatus | None:
        """Apply R2 to R6 until nothing changes. Returns why nothing is left, or None."""
        dirty = set(range(len(self.time)))
        if self._empty():
            return SearchStatus.infeasible_casts
        while dirty:
            changed = self._support()
            if self._empty():
                return SearchStatus.infeasible_casts
            changed |= self._over_budget()
            if self._empty():
                return SearchStatus.infeasible_memory
            dirty |= self._near(changed)
            now, dirty = sorted(dirty - self.gone), set[int]()
            for node in now:
                if self._drop_dominated(node):
                    dirty |= self._near({node})
            for node in now:
                if node not in self.gone:
                    dirty |= self._fold(node)
        return None

    def _empty(self) -> bool:
        return any(not mask.any() for node, mask in enumerate(self.live) if node not in self.gone)

    def _near(self, nodes: set[int]) -> set[int]:
        near = set(nodes)
        for node in nodes:
            for index in self.touching[node]:
                tensor = self.tensors[index]
                if tensor is not None:
                    near |= {tensor.producer, *(consumer for consumer, _ in tensor.consumers)}
        return near - self.gone

    def _support(self) -> set[int]:
        """R2, to a fixed point. Returns the nodes that lost strategies."""
        changed: set[int] = set()
        again = True
        while again:
            again = False
            for index, tensor in enumerate(self.tensors):
                if tensor is None:
                    continue
                possible = self.possible[index]
                for consumer, target in tensor.consumers:
                    pairs = possible[np.ix_(tensor.source, target)]  # target -1 reads the last column
                    pairs = pairs & self.live[tensor.producer][:, None] & self.live[consumer][None, :]
                    for node, keeps in ((tensor.producer, pairs.any(axis=1)), (consumer, pairs.any(axis=0))):
                        if (self.live[node] & ~keeps).any():
                            self.live[node] = self.live[node] & keeps
                            changed.add(node)
                            again = True
        return changed

    def _over_budget(self) -> set[int]:
        """R3. Returns the nodes that lost strategies."""
        if not len(self.budget) or not self.limits_bind:
            return set()
        present = [node for node in range(len(self.live)) if node not in self.gone]
        least = {node: np.where(self.live[node], self.memory[node], np.inf).min(axis=1) for node in present}
        floor = max(float(self.transient[node][self.live[node]].min()) for node in present)
        total = np.sum([least[node] for node in present], axis=0)
        limit = self.budget + 1e-12 * np.abs(self.budget)
        changed: set[int] = set()
        for node in present:
            used = (total - least[node])[:, None] + self.memory[node] + np.maximum(floor, self.transient[node])[None]
            keeps = (used <= limit[:, None]).all(axis=0)
            if (self.live[node] & ~keeps).any():
                self.live[node] = self.live[node] & keeps
                changed.add(node)
        return changed

    def _drop_dominated(self, node: int) -> bool:
        """R4 on one node. Returns whether a strategy was dropped."""
        strategies = np.flatnonzero(self.live[node])
        if len(strategies) == 1:
            return False
        own = np.concatenate([self.time[node][None], self.memory[node]])[:, strategies]
        gap = own[:, :, None] - own[:, None, :]  # [1 + R, t, s]: most by which t can cost more than s
        with np.errstate(invalid="ignore"):
            for index in self.touching[node]:
                tensor = self.tensors[index]
                if tensor is not None:
                    gap = gap + self._tensor_gap(index, tensor, node, strategies)
            transient = self.transient[node][strategies]
            better = (gap <= 0).all(axis=0) & (transient[:, None] <= transient[None, :])
        keeps = np.ones(len(strategies), dtype=bool)
        np.fill_diagonal(better, False)
        for place in range(len(strategies) - 1, -1, -1):
            if (better[:, place] & keeps).any():
                keeps[place] = False
        self.live[node] = self.live[node].copy()
        self.live[node][strategies[~keeps]] = False
        return not keeps.all()

    def _tensor_gap(self, index: int, tensor: TensorEdge, node: int, strategies: Ints) -> Floats:
        """[1 + R, t, s]: most by which strategy t can cost more than s on this tensor; the bound of R4."""
        roles = [tensor.source] if tensor.producer == node else []
        roles += [target for consumer, target in tensor.consumers if consumer == node]
        specs = [role[strategies] for role in roles]
        if len(roles) > 1:
            same = np.logical_and.reduce([spec[:, None] == spec[None, :] for spec in specs])
            return np.where(same, 0.0, np.inf)[None]
        used, place = np.unique(specs[0], return_inverse=True)
        if tensor.producer == node:
            gap = self._producer_gap(index, tensor, used)
        else:
            gap = self._consumer_gap(index, tensor, node, used)
        gap[:, np.arange(len(used)), np.arange(len(used))] = 0.0
        return gap[:, place[:, None], place[None, :]]

    def _needs(self, tensor: TensorEdge, skip: int = -1) -> list[Mask]:
        """[B + 1] columns that each consumer but `skip` can still need; the last is NOT_NEEDED."""
        columns = tensor.cast_time_s.shape[1] + 1
        needs = []
        for consumer, target in tensor.consumers:
            if consumer != skip:
                mask = np.zeros(columns, dtype=bool)
                mask[target[self.live[consumer]]] = True
                needs.append(mask)
        return needs

    def _producer_gap(self, index: int, tensor: TensorEdge, used: Ints) -> Floats:
        needs = self._needs(tensor)
        union = np.logical_or.reduce(needs)
        columns = np.flatnonzero(union)
        cost = self.costs[index][:, used][:, :, columns]
        possible = self.possible[index][used][:, columns]
        step = cost[:, :, None, :] - cost[:, None, :, :]
        step = np.where(possible[None, :, None, :], step, np.inf)
        step = np.where(possible[None, None, :, :], step, -np.inf)
        most = step.max(axis=3)
        if len(needs) == 1:
            return most
        some_needed = any(not mask[-1] for mask in needs)
        columns_real = columns < len(union) - 1
        real = step[..., columns_real]
        above = np.maximum(real, 0.0)
        by_consumer = np.zeros(most.shape)
        for mask in needs:
            chosen = mask[columns][columns_real]
            if chosen.any():
                by_consumer = by_consumer + above[..., chosen].max(axis=3)
        above_all = np.minimum(by_consumer, above.sum(axis=3))
        most_real = real.max(axis=3, initial=-np.inf)
        return np.where(most_real <= 0, most_real if some_needed else 0.0, above_all)

    def _consumer_gap(self, index: int, tensor: TensorEdge, node: int, used: Ints) -> Floats:
        sources = np.unique(tensor.source[self.live[tensor.producer]])
        cost = self.costs[index][:, sources][:, :, used]
        possible = self.possible[index][sources][:, used]
        others = self._needs(tensor, skip=node)
        may = np.logical_or.reduce(others)[used] if others else np.zeros(len(used), dtype=bool)
        sure = np.zeros(len(used), dtype=bool)
        for mask in others:
            if mask.sum() == 1:
                sure |= mask[used]
        saved = np.where(may, 0.0, cost)
        paid = np.where(sure, 0.0, cost)
        step = paid[:, :, :, None] - saved[:, :, None, :]
        step = np.where(possible[None, :, :, None], step, np.inf)
        step = np.where(possible[None, :, None, :], step, -np.inf)
        return step.max(axis=1)

    def _fold(self, leaf: int) -> set[int]:
        """R5 and R6 on one node. Returns the nodes to look at again."""
        indices = [index for index in self.touching[leaf] if self.tensors[index] is not None]
        for index in indices:
            tensor = self.tensors[index]
            assert tensor is not None
            sources = np.unique(tensor.source[self.live[tensor.producer]])
            columns = np.flatnonzero(np.logical_or.reduce(self._needs(tensor)))
            part = np.ix_(sources, columns)
            if self.possible[index][part].all() and not self.costs[index][:, part[0], part[1]].any():
                self.tensors[index] = None
        indices = [index for index in indices if self.tensors[index] is not None]
        if len(indices) != 1:
            return set()
        tensor = self.tensors[indices[0]]
        assert tensor is not None
        if len(tensor.consumers) != 1 or tensor.consumers[0][0] == tensor.producer:
            return set()
        consumer, target = tensor.consumers[0]
        neighbour = consumer if leaf == tensor.producer else tensor.producer
        pairs = np.ix_(tensor.source, target)
        cost, possible = self.costs[indices[0]][:, pairs[0], pairs[1]], self.possible[indices[0]][pairs]
        if leaf != tensor.producer:
            cost, possible = cost.swapaxes(1, 2), possible.T
        own = np.concatenate([self.time[leaf][None], self.memory[leaf]])
        total = np.where((possible & self.live[leaf][:, None])[None], own[:, :, None] + cost, np.inf)
        transient = np.where(np.isfinite(total[0]), self.transient[leaf][:, None], np.inf)
        total = np.concatenate([total, transient[None]])
        best_everywhere = (total <= total.min(axis=1, keepdims=True)).all(axis=0) & np.isfinite(total[0])
        live = self.live[neighbour]
        supported = np.isfinite(total[0]).any(axis=0)
        if not (best_everywhere.any(axis=0) | ~supported)[live].all():
            return set()
        best = best_everywhere.argmax(axis=0)
        added = total[:, best, np.arange(len(best))]
        self.time[neighbour] = self.time[neighbour] + added[0]
        self.memory[neighbour] = self.memory[neighbour] + np.where(supported, added[1:-1], 0.0)
        self.transient[neighbour] = np.maximum(self.transient[neighbour], np.where(supported, added[-1], 0.0))
        self.live[neighbour] = live & supported
        self.tensors[indices[0]] = None
        self.gone.add(leaf)
        self.folds.append(Fold(node=leaf, neighbour=neighbour, best=best.astype(np.int64)))
        return self._near({neighbour})

    def compact(self) -> Reduced:
        """The live part as a problem of its own."""
        nodes = [node for node in range(len(self.live)) if node not in self.gone]
        new_index = {node: place for place, node in enumerate(nodes)}
        kept = tuple(np.flatnonzero(self.live[node]) for node in nodes)
        small_nodes = tuple(
            Node(
                name=self.original.nodes[node].name,
                time_s=self.time[node][keep],
                memory_bytes=self.memory[node][:, keep],
                transient_bytes=self.transient[node][keep],
            )
            for node, keep in zip(nodes, kept, strict=True)
        )
        tensors = []
        for index, tensor in enumerate(self.tensors):
            if tensor is None:
                continue
            sources, source = np.unique(tensor.source[kept[new_index[tensor.producer]]], return_inverse=True)
            columns = np.flatnonzero(np.logical_or.reduce(self._needs(tensor))[:-1])
            column_of = np.full(tensor.cast_time_s.shape[1] + 1, NOT_NEEDED)
            column_of[columns] = np.arange(len(columns))
            costs = self.costs[index][:, sources][:, :, columns]
            possible = self.possible[index][sources][:, columns]
            tensors.append(
                TensorEdge(
                    name=tensor.name,
                    producer=new_index[tensor.producer],
                    source=source.astype(np.int64),
                    consumers=tuple(
                        (new_index[node], column_of[target[kept[new_index[node]]]]) for node, target in tensor.consumers
                    ),
                    cast_time_s=np.where(possible, costs[0], np.inf),
                    cast_memory_bytes=costs[1:],
                )
            )
        problem = IntraOpProblem(nodes=small_nodes, tensors=tuple(tensors), budget_bytes=self.budget)
        return Reduced(problem=problem, nodes=tuple(nodes), kept=kept, folds=tuple(self.folds))


def _binding_rows(problem: IntraOpProblem) -> Ints:
    """R1: rows that some assignment may exceed."""
    most = np.zeros(len(problem.budget_bytes))
    transient = 0.0
    for node in problem.nodes:
        most += node.memory_bytes.max(axis=1)
        transient = max(transient, float(node.transient_bytes.max()))
    for tensor in problem.tensors:
        finite = np.where(np.isfinite(tensor.cast_time_s), tensor.cast_memory_bytes, 0.0)
        if finite.size:
            most += min(len(tensor.consumers), finite.shape[2]) * finite.max(axis=(1, 2))
    return np.flatnonzero(most + transient > problem.budget_bytes)
