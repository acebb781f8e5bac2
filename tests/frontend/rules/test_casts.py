"""Every cast between two specs is the identity forward and backward, and compiles to its stated collectives."""

import itertools
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from costmodel.sharding import PARTIAL, REPLICATED, VARYING, CastStep, Spec, cast, divides
from planner.lowering.casts import apply_cast
from tests.frontend.rules.harness import AXES, FAST_COMPILE, parts_of, whole_of

SHAPE = (12, 24)
CODES = (REPLICATED, VARYING, PARTIAL, 0, 1)
BATCH = 40
# Otherwise XLA joins the all-reduces of different cases into one.
COMPILE = {**FAST_COMPILE, "xla_disable_hlo_passes": "cpu-all-reduce-combiner"}


@dataclass(frozen=True)
class Case:
    source: Spec
    target: Spec
    steps: tuple[CastStep, ...]
    value: np.ndarray
    cotangent: np.ndarray

    def run(self, index: int, mesh: tuple[int, ...], value: Any, cotangent: Any) -> tuple[Any, Any]:
        lead = (0,) * len(mesh)

        def moved(x: Any) -> Any:
            with jax.named_scope(f"case{index}_"):
                return apply_cast(x, self.steps, AXES, mesh)

        result, pull = jax.vjp(moved, value[lead])
        (gradient,) = pull(cotangent[lead])
        return result[(None,) * len(mesh)], gradient[(None,) * len(mesh)]


def partition(spec: Spec) -> PartitionSpec:
    return PartitionSpec(*(None if code == REPLICATED else name for code, name in zip(spec, AXES, strict=False)))


def legal_cases(mesh: tuple[int, ...], sample: int | None = None) -> list[Case]:
    rng = np.random.default_rng(0)
    specs = [spec for spec in itertools.product(CODES, repeat=len(mesh)) if divides(SHAPE, spec, mesh)]
    pairs = list(itertools.product(specs, specs))
    if sample is not None:
        pairs = [pairs[i] for i in rng.choice(len(pairs), len(pairs), replace=False)]
    cases = []
    for source, target in pairs:
        steps = cast(SHAPE, 4, source, target, mesh)
        if steps is None:
            continue
        whole, cotangent = (rng.integers(-8, 8, SHAPE).astype(np.float32) for _ in range(2))
        given = parts_of(whole, 2, source, mesh, PARTIAL, rng), parts_of(cotangent, 2, target, mesh, VARYING, rng)
        cases.append(Case(source, target, steps, *given))
        if len(cases) == sample:
            break
    return cases


HLO_COLLECTIVE = re.compile(
    r"= (?P<result>.*?) (?P<kind>all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
)
HLO_ARRAY = re.compile(r"[a-z]+(?P<bits>\d+)\[(?P<shape>[\d,]*)\]")


def collectives_in(text: str) -> dict[int, Counter]:
    """Case index -> Counter of (kind, bytes of the whole tensor) in a compiled module, by the scope in ``op_name``."""
    found: dict[int, Counter] = {}
    for line in text.splitlines():
        if (match := HLO_COLLECTIVE.search(line)) is None:
            continue
        scope = re.search(r"case(\d+)_", line)
        assert scope, f"a collective outside every cast: {line}"
        nbytes = 0
        for array in HLO_ARRAY.finditer(match["result"]):
            nbytes += int(array["bits"]) // 8 * int(np.prod([int(n) for n in array["shape"].split(",") if n]))
        kind = match["kind"].replace("-", "_")
        if kind == "reduce_scatter":
            nbytes *= group_size(line)
        found.setdefault(int(scope[1]), Counter())[kind, nbytes] += 1
    return found


def group_size(line: str) -> int:
    listed = re.search(r"replica_groups=\{\{([\d,]+)\}", line)
    if listed:
        return len(listed[1].split(","))
    tiled = re.search(r"replica_groups=\[\d+,(\d+)\]", line)
    assert tiled, line
    return int(tiled[1])


def check(cases: list[Case], mesh: tuple[int, ...]) -> None:
    devices = jax.make_mesh(mesh, AXES[: len(mesh)], axis_types=(jax.sharding.AxisType.Auto,) * len(mesh))
    ins = [(partition(case.source), partition(case.target)) for case in cases]
    outs = [(partition(case.target), partition(case.source)) for case in cases]

    def every(inputs: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        return [case.run(i, mesh, *given) for i, (case, given) in enumerate(zip(cases, inputs, strict=True))]

    inputs = [(case.value, case.cotangent) for case in cases]
    mapped = jax.shard_map(every, mesh=devices, in_specs=(ins,), out_specs=outs, check_vma=True)
    program = jax.jit(mapped).lower(inputs).compile(compiler_options=COMPILE)
    compiled = collectives_in(program.as_text())
    given = jax.device_put(inputs, jax.tree.map(lambda s: jax.sharding.NamedSharding(devices, s), ins))
    for i, (case, (result, gradient)) in enumerate(zip(cases, jax.device_get(program(given)), strict=True)):
        said = f"{case.source} -> {case.target} on {mesh}: {[(s.kind, s.axis) for s in case.steps]}"
        for what, parts, spec, summands, start in (
            ("value", result, case.target, PARTIAL, (case.value, case.source)),
            ("cotangent", gradient, case.source, VARYING, (case.cotangent, case.target)),
        ):
            want = whole_of(start[0], 2, start[1], mesh, summands, rtol=1e-5, atol=1e-4)
            got = whole_of(np.asarray(parts), 2, spec, mesh, summands, rtol=1e-5, atol=1e-4)
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4, err_msg=f"{what} of {said}")
        planned = Counter((kind, s.full_bytes) for s in case.steps for kind in (s.forward, s.backward) if kind)
        assert compiled.get(i, Counter()) == planned, (
            f"collectives of {said}: compiled {compiled.get(i)}, planned {planned}"
        )


@pytest.mark.parametrize(("mesh", "sample"), [((2,), None), ((2, 3), None), ((2, 2, 2), 160)])
def test_casts_keep_values_and_cotangents_and_compile_to_their_collectives(
    mesh: tuple[int, ...], sample: int | None
) -> None:
    cases = legal_cases(mesh, sample)
    for start in range(0, len(cases), BATCH):
        check(cases[start : start + BATCH], mesh)
    assert len(cases) >= {1: 14, 2: 190, 3: 160}[len(mesh)]
