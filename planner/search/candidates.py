"""Candidates for stages: meshes of a device group, and the solved decision on each, kept for reuse."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from costmodel.cluster import Cluster, Device, DeviceGroup
from costmodel.collectives import AxisLink, axis_links
from costmodel.estimator import Pricing
from costmodel.graph import ModelGraph, derived_from_parameters
from costmodel.sharding import split_factor
from costmodel.transfers import Transfers
from planner.search.cuts import border_bytes
from planner.search.facts import Facts
from planner.search.intra_op import least_memory, solve
from planner.search.meshes import Mesh, pool_devices
from planner.search.priced import price_memory
from planner.search.problem import IntraOpProblem, SearchBudget, Solution, evaluate
from planner.search.windows import starts
from planner.space.backward import kept_by
from planner.space.decision import Decision
from planner.space.model_space import ModelSpace, Remat, Setting

AXIS_NAMES = ("data", "model")
SCREEN = SearchBudget(relative_gap=0.02, prove=False, mip_nodes=200)
FINAL = SearchBudget(relative_gap=0.02, mip_nodes=50)
_Seen = tuple[tuple[AxisLink, ...], float]  # links of a mesh's axes, slowdown of its slowest device
Restrict = Callable[[ModelSpace, IntraOpProblem], IntraOpProblem]


INSTANT_S = 1e-9
"""Least time of a stage of which nothing is proven."""


def footprint(graph: ModelGraph) -> tuple[float, float, float, float]:
    """Whole bytes: parameters with gradients and optimizer state; all saved activations; all block inputs; the saved
    activations of the block that saves most."""
    state = sum(
        p.elements * (p.itemsize + (p.gradient_itemsize + p.optimizer_bytes_per_element if p.trained else 0.0))
        for p in graph.params.values()
    )
    saved: dict[str, float] = {}
    entries: dict[str, float] = {}
    for key, cls in graph.classes.items():
        derived = derived_from_parameters(cls.ops, cls.tensors)
        kept = kept_by(cls.ops, cls.tensors, derived)
        names = frozenset().union(*(k.names for k in kept.values()))
        own = sum(size for op in cls.ops if kept[op.name].own for _, size, fixed in op.keeps if not fixed)
        saved[key] = float(sum(cls.tensors[n].bytes for n in names) + own)
        entries[key] = float(
            sum(cls.tensors[n].bytes for n in cls.inputs if cls.tensors[n].role in ("activation", "batch"))
        )
    keys = [b.class_key for b in graph.blocks]
    return state, sum(saved[k] for k in keys), sum(entries[k] for k in keys), max(saved.values(), default=0.0)


@dataclass(kw_only=True)
class Candidates:
    """Spaces and decisions, solved once.

    Args:
        graph_of: the model graph at a microbatch size.
        facts: by device kind name.
        restrict: narrows every problem (a user's or a baseline's pins); remats: which are tried.
    """

    cluster: Cluster
    graph_of: Callable[[int], ModelGraph]
    facts: Mapping[str, Facts]
    restrict: Restrict | None = None
    remats: tuple[Remat, ...] = ("none", "full")
    solved: int = 0
    limit_fired: bool = False
    _spaces: dict[tuple[object, ...], ModelSpace] = field(default_factory=dict)
    _best_places: dict[tuple[str, Mesh], _Seen] = field(default_factory=dict)
    _decisions: dict[tuple[object, ...], Decision | float | None] = field(default_factory=dict)
    _price: float | None = None
    _footprints: dict[int, tuple[float, float, float, float]] = field(default_factory=dict)
    _borders: dict[int, list[float]] = field(default_factory=dict)
    _free: dict[tuple[object, ...], Solution] = field(default_factory=dict)

    @cached_property
    def transfers(self) -> Transfers:
        """Links between devices of the cluster, with the copies that were measured."""
        return Transfers(self.cluster, {name: facts.copy_lines for name, facts in self.facts.items()})

    def space(self, pool: DeviceGroup, mesh: Mesh, microbatch: int) -> ModelSpace:
        """The space of the whole model on a mesh, at its best place in a pool."""
        if (pool.name, mesh) not in self._best_places:
            devices, count = pool_devices(self.cluster, pool.name), math.prod(mesh)
            places = [self._seen_from(pool, mesh, devices[at : at + count], at) for at in starts(devices, count)]
            self._best_places[pool.name, mesh] = min(
                places, key=lambda seen: (seen[1], [1 / link.bandwidth_bytes_per_s for link in seen[0]])
            )
        return self._space(pool, mesh, microbatch, *self._best_places[pool.name, mesh])

    def _seen_from(self, pool: DeviceGroup, mesh: Mesh, devices: Sequence[Device], first: int) -> _Seen:
        links = axis_links(pool, mesh, first=first) if mesh else ()
        return links, max(device.slowdown for device in devices)

    def _space(
        self, pool: DeviceGroup, mesh: Mesh, microbatch: int, links: tuple[AxisLink, ...], slowdown: float
    ) -> ModelSpace:
        key = (pool.name, mesh, microbatch, links, slowdown)
        if key not in self._spaces:
            facts = self.facts[pool.device.name]
            pricing = Pricing(
                kind=facts.kind,
                mesh=mesh,
                axis_names=AXIS_NAMES[: len(mesh)] if len(mesh) > 1 else AXIS_NAMES[:1][: len(mesh)],
                links=links,
                op_times=facts.op_times_of(self.graph_of(microbatch)),
                products=facts.products,
                collective_lines=facts.collective_lines,
                slowdown=slowdown,
            )
            graph = self.graph_of(microbatch)
            self._spaces[key] = ModelSpace(graph=graph, pricing=pricing, scales=facts.block_scales_of(graph))
        return self._spaces[key]

    def on_devices(self, decision: Decision, pool: DeviceGroup, devices: Sequence[Device]) -> Decision:
        """The same choice at the prices of a window of the pool: its links and its slowest device count."""
        space, setting = decision.space, decision.setting
        first = pool_devices(self.cluster, pool.name).index(devices[0])
        seen = self._seen_from(pool, space.mesh, devices, first)
        if seen == (space.pricing.links, space.pricing.slowdown):
            return decision
        there = self._space(pool, space.mesh, space.graph.microbatch, *seen)
        found = evaluate(there.problem(setting, limit_bytes=math.inf), decision.choice)
        return replace(decision, space=there, time_s=found.time_s, bound_s=min(decision.bound_s, found.time_s))

    def decide(
        self,
        pool: DeviceGroup,
        mesh: Mesh,
        microbatch: int,
        setting: Setting,
        *,
        share: float = 1.0,
        budget: SearchBudget = SCREEN,
        of_interest_s: float = math.inf,
    ) -> Decision | None:
        """The fastest decision that fits `share` of a device's free memory, or None.

        Args:
            of_interest_s: None also where it is proven to take longer; may fall from call to call, never rise.
        """
        key = (pool.name, mesh, microbatch, setting, share, budget)
        if key not in self._decisions:
            self._decisions[key] = self._decide(pool, mesh, microbatch, setting, share, budget, of_interest_s)
        found = self._decisions[key]
        return found if isinstance(found, Decision) and found.bound_s <= of_interest_s else None

    def _decide(
        self,
        pool: DeviceGroup,
        mesh: Mesh,
        microbatch: int,
        setting: Setting,
        share: float,
        budget: SearchBudget,
        of_interest_s: float,
    ) -> Decision | float | None:
        """A decision; the proven bound of one that is too slow to be of interest; None where nothing fits."""
        if (
            self._least_bytes(microbatch, setting) / math.prod(mesh)
            > share * self.facts[pool.device.name].kind.usable_bytes
        ):
            return None
        space = self.space(pool, mesh, microbatch)
        buffers = self._buffers(microbatch, setting.stages) / math.prod(mesh)
        free_bytes = share * space.pricing.kind.usable_bytes - buffers
        problem = self._problem(space, setting, free_bytes)
        if sum(node.memory_bytes[0].min() for node in problem.nodes) > problem.budget_bytes[0]:
            return None
        solution = None
        if setting.remat == "none":
            free = self.free(pool, mesh, microbatch, setting)
            solution = free if free.status.found and evaluate(problem, free.choice).feasible else None
        if solution is None:
            solution = solve(problem, budget=budget, of_interest_s=of_interest_s)
            self.solved += 1
        if of_interest_s < solution.bound_s < math.inf:
            return solution.bound_s
        if not solution.status.found and solution.limit_fired:
            priced = price_memory(problem, self._solve_free, self._price)
            self._price = priced.price
            if not priced.choice:  # none was met, which proves nothing: the bound stands
                self.limit_fired = True
                known_s = max(solution.bound_s, priced.bound_s)
                return float(known_s) if 0 < known_s < math.inf else None
            found_s = evaluate(problem, priced.choice).time_s
            proven_s = max(bound for bound in (priced.bound_s, solution.bound_s) if math.isfinite(bound))
            return Decision(
                space=space, setting=setting, choice=priced.choice, time_s=found_s, bound_s=min(found_s, proven_s)
            )
        if not solution.status.found:
            return None
        return Decision(
            space=space, setting=setting, choice=solution.choice, time_s=solution.time_s, bound_s=solution.bound_s
        )

    def borders(self, microbatch: int) -> list[float]:
        """`border_bytes` of the model at a microbatch size."""
        if microbatch not in self._borders:
            self._borders[microbatch] = border_bytes(self.graph_of(microbatch))
        return self._borders[microbatch]

    def _buffers(self, microbatch: int, stages: int) -> float:
        """Bytes that a stage's devices hold together, two deep, of what crosses its borders (the largest one)."""
        largest = max((size for size in self.borders(microbatch) if math.isfinite(size)), default=0.0)
        return 2.0 * min(2, stages - 1) * largest

    def buffer_bytes(self, decision: Decision) -> float:
        """The same for one device: values that cross are split as the activations that the blocks take."""
        space, parts = decision.space, []
        for key, cls in space.graph.classes.items():
            specs = [spec for name, spec in decision.input_specs[key].items() if cls.tensors[name].role == "activation"]
            if specs:
                parts.append(max(split_factor(spec, space.mesh) for spec in specs))
        return self._buffers(space.graph.microbatch, decision.setting.stages) / min(parts, default=1)

    def _solve_free(self, problem: IntraOpProblem) -> tuple[tuple[int, ...], float]:
        self.solved += 1
        solution = solve(problem)
        return solution.choice, solution.bound_s

    def _least_bytes(self, microbatch: int, setting: Setting) -> float:
        """The memory row before anything is split: no mesh of n devices needs less than an n-th of it."""
        if microbatch not in self._footprints:
            self._footprints[microbatch] = footprint(self.graph_of(microbatch))
        state, saved, entries, largest = self._footprints[microbatch]
        kept = entries if setting.remat == "full" else saved
        return (state + setting.in_flight * kept) / setting.stages + (largest if setting.remat == "full" else 0.0)

    def _problem(self, space: ModelSpace, setting: Setting, limit_bytes: float) -> IntraOpProblem:
        problem = space.problem(setting, limit_bytes=limit_bytes)
        return problem if self.restrict is None else self.restrict(space, problem)

    def free(self, pool: DeviceGroup, mesh: Mesh, microbatch: int, setting: Setting) -> Solution:
        """The fastest assignment without remat, memory aside; the same for every number of stages that accumulate."""
        key = (pool.name, mesh, microbatch, setting.microbatches, setting.accumulates)
        if key not in self._free:
            self._free[key] = solve(
                self._problem(self.space(pool, mesh, microbatch), setting, math.inf), budget=SearchBudget()
            )
            self.solved += 1
        return self._free[key]

    def bounds(self) -> Iterator[tuple[tuple[str, int, int, int], float]]:
        """((pool, devices, microbatch, stages), least seconds of a step of the whole model on such a stage) of what was
        solved and may fit."""
        proven: dict[tuple[object, ...], float] = {}
        for (*candidate, _budget), decision in self._decisions.items():
            if decision is not None:  # solved with more work, a candidate has a better bound
                bound_s = decision.bound_s if isinstance(decision, Decision) else decision
                proven[tuple(candidate)] = max(proven.get(tuple(candidate), 0.0), bound_s)
        for (pool, mesh, microbatch, setting, *_), bound_s in proven.items():
            yield (str(pool), math.prod(mesh), int(microbatch), setting.stages), bound_s  # type: ignore[arg-type, attr-defined]

    def nearest(self, pool: DeviceGroup, mesh: Mesh, microbatch: int, setting: Setting) -> Decision | None:
        """The decision that needs least memory, whether it fits or not."""
        space = self.space(pool, mesh, microbatch)
        solution = least_memory(self._problem(space, setting, space.pricing.kind.usable_bytes), budget=SCREEN)
        if not solution.choice:
            return None
        return Decision(
            space=space, setting=setting, choice=solution.choice, time_s=solution.time_s, bound_s=solution.bound_s
        )

    def nearest_of(
        self,
        pool: DeviceGroup,
        several: Iterable[Mesh],
        microbatch: int,
        *,
        microbatches: int,
        stages: int,
        in_flight: int,
    ) -> Decision | None:
        """`nearest` of several meshes, with whatever remat is allowed. It may fit stages of unequal parts of the model
        yet: nothing is proven of its time."""
        found: list[tuple[float, Decision]] = []
        for mesh in several:
            for remat in self.remats:
                setting = Setting(microbatches=microbatches, stages=stages, in_flight=in_flight, remat=remat)
                decision = self.nearest(pool, mesh, microbatch, setting)
                if decision is not None:
                    problem = self._problem(decision.space, setting, decision.space.pricing.kind.usable_bytes)
                    found.append((evaluate(problem, decision.choice).excess_bytes, decision))
                    unproven = replace(decision, bound_s=INSTANT_S)
                    self._decisions[pool.name, mesh, microbatch, setting, 1.0, SCREEN] = unproven
        return min(found, key=lambda pair: pair[0])[1] if found else None

    def both(
        self,
        pool: DeviceGroup,
        mesh: Mesh,
        microbatch: int,
        *,
        microbatches: int,
        stages: int,
        in_flight: int,
        share: float = 1.0,
        of_interest_s: float = math.inf,
    ) -> tuple[Decision, ...]:
        """Decisions without remat and, unless the fastest of those fits freely, with it.

        Args:
            of_interest_s: decisions whose bound exceeds this are left out.
        """
        found = []
        for remat in self.remats:
            setting = Setting(microbatches=microbatches, stages=stages, in_flight=in_flight, remat=remat)
            decision = self.decide(pool, mesh, microbatch, setting, share=share, of_interest_s=of_interest_s)
            if decision is None:
                continue
            found.append(decision)
            if remat == "none" and decision.choice == self.free(pool, mesh, microbatch, setting).choice:
                break  # the fastest of all fits: nothing to gain from remat
        return tuple(found)


__all__ = ["AXIS_NAMES", "Candidates", "Remat"]
