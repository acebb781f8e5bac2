"""Exact variable elimination (min-plus) for the problem without memory rows, and min-marginals from the same tables.

The objective is a sum of factors, each a table over few variables. Variables are the nodes and, where several
strategies share a spec, the specs of a tensor's producer and consumers; a 0/inf link ties a spec to its node. A tensor
with one consumer is a table (source, target); with several it is a table over all of them in which each distinct target
counts once, or, where that table is large, one yes/no variable a target.

Eliminating a variable adds the tables that hold it and takes the minimum over it. The order is chosen greedily by the
size of the next table and depends only on the structure, so that one `Elimination` serves many cost vectors (the
Lagrangian relaxation changes costs, not structure). Passing messages back gives the min-marginal of every strategy: the
least total cost of any assignment that uses it.
"""

import math
from dataclasses import dataclass

import numpy as np

from planner.search.problem import NOT_NEEDED, Floats, IntraOpProblem, Ints


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _SpecRole:
    """A spec as seen by one node: `variable` has one value for each entry of `specs`."""

    variable: int
    specs: Ints


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _CastTable:
    """A factor whose numbers are the casts of one tensor.

    Attributes:
        factor: its id.
        scope: its variables, the source's first.
        column: the one target column that a yes/no variable stands for, or -1 for a table over all `targets`.
    """

    factor: int
    tensor: int
    scope: tuple[int, ...]
    source: Ints
    targets: tuple[Ints, ...]
    column: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Bucket:
    """One elimination step: add `inputs` (factor ids, each with its shape in the clique), minimise over `axis`."""

    variable: int
    clique: tuple[int, ...]
    axis: int
    inputs: tuple[tuple[int, tuple[int, ...]], ...]
    output: int
    parent: int
    """Bucket that takes the message, or -1."""


class Elimination:
    """An elimination order for the structure of one problem (`build` returns None where its tables are too large)."""

    def __init__(self, problem: IntraOpProblem, table_entries: int):
        self._problem = problem
        self._sizes = list(problem.sizes)
        self._scopes: list[tuple[int, ...]] = [(node,) for node in range(len(self._sizes))]
        self._fixed: dict[int, Floats] = {}
        self._casts: list[_CastTable] = []
        for index in range(len(problem.tensors)):
            self._add_tensor(index, table_entries)
        self._buckets: list[_Bucket] = []
        self.entries = 0
        self.fits = self._order(table_entries)

    @classmethod
    def build(cls, problem: IntraOpProblem, table_entries: int) -> "Elimination | None":
        """The elimination of a problem, or None where a table would exceed `table_entries`."""
        built = cls(problem, table_entries)
        return built if built.fits else None

    def minimise(self, node_cost: list[Floats], cast_cost: list[Floats]) -> tuple[float, tuple[int, ...]]:
        """The least cost of any assignment and the assignment (empty where the cost is infinite).

        Args:
            node_cost: [S] a node.
            cast_cost: [A, B] a tensor, inf where impossible.
        """
        tables = self._tables(node_cost, cast_cost)
        total = 0.0
        for bucket in self._buckets:
            message = self._clique(bucket, tables).min(axis=bucket.axis)
            tables[bucket.output] = message
            if bucket.parent < 0:
                total += float(message)
        if not math.isfinite(total):
            return math.inf, ()
        values = [0] * len(self._sizes)
        for bucket in reversed(self._buckets):
            line = np.zeros(self._sizes[bucket.variable])
            for factor, _ in bucket.inputs:
                at = tuple(slice(None) if v == bucket.variable else values[v] for v in self._scopes[factor])
                line = line + tables[factor][at]
            values[bucket.variable] = int(line.argmin())
        return total, tuple(values[: len(self._problem.nodes)])

    def min_marginals(self, node_cost: list[Floats], cast_cost: list[Floats]) -> list[Floats]:
        """[S] a node: least cost of any assignment that uses the strategy."""
        tables = self._tables(node_cost, cast_cost)
        total = 0.0
        for bucket in self._buckets:
            tables[bucket.output] = self._clique(bucket, tables).min(axis=bucket.axis)
            if bucket.parent < 0:
                total += float(tables[bucket.output])
        children: dict[int, list[int]] = {}
        for index, bucket in enumerate(self._buckets):
            children.setdefault(bucket.parent, []).append(index)
        downward: dict[int, Floats] = {}  # bucket -> rest of the total, over the bucket's clique without its variable
        marginals: list[Floats] = [np.zeros(0)] * len(self._problem.nodes)
        for root in children.get(-1, []):
            downward[root] = np.asarray(total - float(tables[self._buckets[root].output]))
        for index in range(len(self._buckets) - 1, -1, -1):
            bucket = self._buckets[index]
            full = self._clique(bucket, tables) + np.expand_dims(downward.pop(index), bucket.axis)
            if bucket.variable < len(marginals):
                others = tuple(axis for axis in range(full.ndim) if axis != bucket.axis)
                marginals[bucket.variable] = full.min(axis=others)
            for child in children.get(index, []):
                scope = self._scopes[self._buckets[child].output]
                drop = tuple(axis for axis, variable in enumerate(bucket.clique) if variable not in scope)
                message = tables[self._buckets[child].output]
                finite = np.isfinite(message)
                rest = full.min(axis=drop)
                downward[child] = np.where(finite, rest - np.where(finite, message, 0.0), np.inf)
        return marginals

    # Structure

    def _variable(self, size: int) -> int:
        self._sizes.append(size)
        return len(self._sizes) - 1

    def _factor(self, scope: tuple[int, ...], table: Floats | None = None) -> int:
        """Register a factor; `scope` may be in any order, the table is kept with its variables ascending."""
        order = sorted(range(len(scope)), key=lambda axis: scope[axis])
        self._scopes.append(tuple(scope[axis] for axis in order))
        factor = len(self._scopes) - 1
        if table is not None:
            self._fixed[factor] = table.transpose(order)
        return factor

    def _role(self, node: int, spec_of: Ints) -> _SpecRole:
        """The node itself where each strategy has a spec of its own, else a new variable linked to it."""
        specs, place = np.unique(spec_of, return_inverse=True)
        if len(specs) == len(spec_of):
            return _SpecRole(variable=node, specs=spec_of)
        variable = self._variable(len(specs))
        self._factor((node, variable), np.where(place[:, None] == np.arange(len(specs))[None], 0.0, np.inf))
        return _SpecRole(variable=variable, specs=specs)

    def _add_tensor(self, index: int, table_entries: int) -> None:
        tensor = self._problem.tensors[index]
        source = self._role(tensor.producer, tensor.source)
        parties = [tensor.producer, *(node for node, _ in tensor.consumers)]
        if len(set(parties)) < len(parties):
            # A node in two roles: give every role a variable of its own, so that no table has a variable twice.
            source = self._own_role(tensor.producer, tensor.source)
            targets = tuple(self._own_role(node, target) for node, target in tensor.consumers)
        else:
            targets = tuple(self._role(node, target) for node, target in tensor.consumers)
        joint = len(source.specs) * math.prod(len(target.specs) for target in targets)
        columns = np.unique(np.concatenate([target.specs for target in targets]))
        columns = columns[columns != NOT_NEEDED]
        if len(targets) == 1 or joint <= min(table_entries, max(4096, len(source.specs) << min(len(columns), 40))):
            scope = (source.variable, *(target.variable for target in targets))
            self._add_cast_table(index, scope, source, targets, -1)
            return
        for column in columns:
            needed = self._variable(2)
            self._add_cast_table(index, (source.variable, needed), source, (), int(column))
            for target in targets:
                if (target.specs == column).any():
                    table = np.zeros((len(target.specs), 2))
                    table[target.specs == column, 0] = np.inf
                    self._factor((target.variable, needed), table)

    def _add_cast_table(
        self, tensor: int, scope: tuple[int, ...], source: _SpecRole, targets: tuple[_SpecRole, ...], column: int
    ) -> None:
        self._casts.append(
            _CastTable(
                factor=self._factor(scope),
                tensor=tensor,
                scope=scope,
                source=source.specs,
                targets=tuple(target.specs for target in targets),
                column=column,
            )
        )

    def _own_role(self, node: int, spec_of: Ints) -> _SpecRole:
        specs, place = np.unique(spec_of, return_inverse=True)
        variable = self._variable(len(specs))
        self._factor((node, variable), np.where(place[:, None] == np.arange(len(specs))[None], 0.0, np.inf))
        return _SpecRole(variable=variable, specs=specs)

    def _order(self, table_entries: int) -> bool:
        """Choose the order by the next table's size, and lay out every step. False where a table is too large."""
        sizes = self._sizes
        near: list[set[int]] = [set() for _ in sizes]
        holders: list[list[int]] = [[] for _ in sizes]
        for factor, scope in enumerate(self._scopes):
            for variable in scope:
                near[variable].update(scope)
                holders[variable].append(factor)
        for variable, others in enumerate(near):
            others.discard(variable)
        weight = [math.log2(size) if size > 1 else 0.0 for size in sizes]
        cost = [weight[v] + sum(weight[u] for u in sorted(near[v])) for v in range(len(sizes))]
        open_variables = set(range(len(sizes)))
        place: dict[int, int] = {}
        used: set[int] = set()
        limit = math.log2(table_entries)
        while open_variables:
            variable = min(open_variables, key=lambda v: (cost[v], v))
            if cost[variable] > limit:
                return False
            open_variables.remove(variable)
            clique = tuple(sorted((variable, *near[variable])))
            shape = tuple(sizes[v] for v in clique)
            self.entries += math.prod(shape)
            inputs = []
            for factor in holders[variable]:
                if factor not in used:
                    used.add(factor)
                    scope = set(self._scopes[factor])
                    inputs.append((factor, tuple(sizes[v] if v in scope else 1 for v in clique)))
            output = self._factor(tuple(v for v in clique if v != variable))
            for other in self._scopes[output]:
                holders[other].append(output)
            place[variable] = len(self._buckets)
            self._buckets.append(
                _Bucket(
                    variable=variable,
                    clique=clique,
                    axis=clique.index(variable),
                    inputs=tuple(sorted(inputs, key=lambda item: math.prod(item[1]))),
                    output=output,
                    parent=-1,
                )
            )
            for other in near[variable]:
                near[other] |= near[variable]
                near[other] -= {other, variable}
            for other in near[variable]:
                cost[other] = weight[other] + sum(weight[u] for u in sorted(near[other]))
        for index, bucket in enumerate(self._buckets):
            scope = self._scopes[bucket.output]
            if scope:
                parent = min(place[v] for v in scope)
                self._buckets[index] = _Bucket(
                    variable=bucket.variable,
                    clique=bucket.clique,
                    axis=bucket.axis,
                    inputs=bucket.inputs,
                    output=bucket.output,
                    parent=parent,
                )
        return True

    # Numbers

    def _tables(self, node_cost: list[Floats], cast_cost: list[Floats]) -> dict[int, Floats]:
        tables: dict[int, Floats] = dict(self._fixed)
        tables.update(enumerate(node_cost))
        for cast in self._casts:
            cost = cast_cost[cast.tensor][cast.source]
            if cast.column >= 0:
                table = np.pad(cost[:, [cast.column]], ((0, 0), (1, 0)))
            else:
                table = _shared_table(np.pad(cost, ((0, 0), (0, 1))), cast.targets)
            tables[cast.factor] = table.transpose(sorted(range(len(cast.scope)), key=lambda axis: cast.scope[axis]))
        return tables

    def _clique(self, bucket: _Bucket, tables: dict[int, Floats]) -> Floats:
        (first, shape), *rest = bucket.inputs
        table = tables[first].reshape(shape)
        for factor, shape in rest:
            table = table + tables[factor].reshape(shape)
        full = tuple(self._sizes[v] for v in bucket.clique)
        return table if table.shape == full else np.broadcast_to(table, full)


def _shared_table(cost: Floats, specs: tuple[Ints, ...]) -> Floats:
    """[A, B_1, B_2, ...] cost of one tensor: each distinct target of the consumers counts once.

    Args:
        cost: [A, B + 1] with a last column of zeros for NOT_NEEDED.
    """
    count = len(specs)
    table = np.zeros((len(cost),) + (1,) * count)
    for place, mine in enumerate(specs):
        shape = [1] * (count + 1)
        shape[0], shape[place + 1] = len(cost), len(mine)
        first: Floats | np.ndarray = np.ones((1,) * count, dtype=bool)
        for before in range(place):
            pair = [1] * count
            pair[before], pair[place] = len(specs[before]), len(mine)
            first = first & (specs[before][:, None] != mine[None, :]).reshape(pair)
        part = cost[:, mine].reshape(shape)
        table = table + (part if place == 0 else np.where(first[None], part, 0.0))
    return table
