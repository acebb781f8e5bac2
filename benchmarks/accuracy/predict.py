"""Predictions of cases with given constants: models and clusters are built once."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from benchmarks.accuracy.cases import Case, Fabric
from costmodel.cluster import Cluster, parse_cluster
from costmodel.device_kind import DeviceKind
from costmodel.stack import Stack
from planner.models.catalog import FAMILIES
from planner.strategy.captured import CapturedModel
from planner.strategy.compose import StepTime
from planner.strategy.estimator import StrategyEstimator
from planner.strategy.memory import StageMemory
from planner.strategy.strategy import Strategy, parse_strategy
from profiles.catalogue import load_catalogue


@dataclass
class Predictor:
    """Captured models by dims and clusters by shape."""

    models: dict[object, CapturedModel] = field(default_factory=dict)
    clusters: dict[object, Cluster] = field(default_factory=dict)
    strategies: dict[object, Strategy] = field(default_factory=dict)

    def model(self, case: Case) -> CapturedModel:
        if case.model not in self.models:
            family, dims = case.model
            self.models[case.model] = CapturedModel(FAMILIES[family](**dict(dims)))
        return self.models[case.model]

    def cluster(self, case: Case) -> Cluster:
        if case.fabrics not in self.clusters:
            self.clusters[case.fabrics] = cluster_of(case.fabrics)
        return self.clusters[case.fabrics]

    def estimator(self, case: Case, kinds: Mapping[str, DeviceKind], stack: Stack) -> StrategyEstimator:
        """An estimator with the constants of a case's kinds (by name; the catalogue's where not given)."""
        cluster = self.cluster(case)
        if any(g.device.name in kinds for g in cluster.groups):
            groups = tuple(
                msgspec.structs.replace(g, device=kinds.get(g.device.name, g.device)) for g in cluster.groups
            )
            cluster = msgspec.structs.replace(cluster, groups=groups)
        return StrategyEstimator(model=self.model(case), cluster=cluster, stack=stack)

    def strategy(self, case: Case) -> Strategy:
        key = tuple(sorted(case.strategy.items()))
        if key not in self.strategies:
            self.strategies[key] = parse_strategy(case.strategy)
        return self.strategies[key]

    def step(self, case: Case, kinds: Mapping[str, DeviceKind], stack: Stack) -> StepTime:
        return self.estimator(case, kinds, stack).step(self.strategy(case), case.global_batch)

    def memory(self, case: Case, kinds: Mapping[str, DeviceKind], stack: Stack) -> tuple[StageMemory, ...]:
        return self.estimator(case, kinds, stack).memory(self.strategy(case), case.global_batch)


def cluster_of(fabrics: tuple[tuple[Fabric, int], ...]) -> Cluster:
    groups = [
        {
            "name": f"g{i}",
            "nodes": nodes,
            "device": fabric.device,
            "devices_per_node": fabric.per_node,
            "intra": [
                {
                    "span": fabric.per_node,
                    "bandwidth_bytes_per_s": fabric.intra,
                    "latency_s": fabric.intra_latency_s,
                }
            ],
            "inter": {
                "bandwidth_bytes_per_s": fabric.inter,
                "latency_s": fabric.inter_latency_s,
                "nics": fabric.nics,
            },
        }
        for i, (fabric, nodes) in enumerate(fabrics)
    ]
    links = [
        {
            "between": [f"g{i}", f"g{j}"],
            "bandwidth_bytes_per_s": min(fabrics[i][0].inter, fabrics[j][0].inter),
            "latency_s": 30e-6,
        }
        for i in range(len(groups))
        for j in range(i + 1, len(groups))
    ]
    document = {"name": "published", "group": groups, **({"link": links} if links else {})}
    return parse_cluster(document, load_catalogue())
