"""Schedules that a plan is searched over: by name, the usual ones, and all with those made for its stages."""

import functools
import random

import pytest

import planner
from costmodel.cluster import Cluster
from costmodel.errors import InputError
from costmodel.pipeline import pipeline_lower_bound_s
from costmodel.schedule.actions import Actor
from costmodel.schedule.registry import FAMILIES, make_schedule
from costmodel.simulate import SendTimes, StageTimes, simulate
from planner.arguments import SCHEDULES
from planner.check.rules import check_plan
from planner.models import bert, gpt
from planner.planfile.codec import decode, encode
from planner.planfile.schema import Plan
from planner.search.schedule_choice import EVERY, USUAL, least_bubble
from tests.search.test_windows import nodes_of_a100


def far_apart(memory_bytes: int, latency_s: float = 1e-5) -> Cluster:
    """Four slow devices, each a node, on a network that makes pipelines worthwhile."""
    device = {
        "name": "slow",
        "platform": "cpu",
        "peak_flops_per_s": {"float32": 1e9},
        "memory_bytes": memory_bytes,
        "memory_bandwidth_bytes_per_s": 1e10,
    }
    return nodes_of_a100(4, 1, device=device, inter={"bandwidth_bytes_per_s": 2e7, "latency_s": latency_s})


ROOMY, TIGHT = far_apart(1_000_000_000), far_apart(6_500_000)


def model(layers: int = 8):
    return gpt(hidden=64, layers=layers, heads=4, vocab=256, seq=32, dtype="float32")


@functools.cache
def planned(schedule: str | None, cluster: Cluster = ROOMY, stages: int | None = None) -> Plan:
    plan = planner.plan(model(), cluster=cluster, global_batch=32, schedule=schedule, stages=stages, baselines=False)
    return decode(encode(plan))


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "auto"])
def test_every_schedule_can_be_asked_for(name: str) -> None:
    plan = planned(name)
    assert plan.schedule.name == name
    assert check_plan(plan, ROOMY) == ()
    assert planner.simulate(plan).makespan_s == pytest.approx(plan.prediction.step_time_s, rel=1e-12)
    assert plan.certificate.lower_bound_s <= plan.prediction.step_time_s
    assert not any(line.startswith("not used") for line in plan.certificate.space)
    assert any(f"schedule {name}" in line for line in plan.certificate.space)


@pytest.mark.parametrize(("asked", "names"), [(None, USUAL), ("auto", EVERY)])
def test_the_best_of_several_is_no_slower_than_any_of_them(asked: str | None, names: tuple[str, ...]) -> None:
    best = planned(asked)
    for name in names:
        assert best.prediction.step_time_s <= planned(name).prediction.step_time_s * (1 + 1e-9), name
    assert check_plan(best, ROOMY) == ()
    assert best.certificate.lower_bound_s <= best.prediction.step_time_s
    assert best.schedule.name not in ("1f1b", "gpipe")  # or this test would say nothing


def test_a_schedule_made_for_the_stages_beats_every_fixed_one() -> None:
    made, usual = planned("auto", TIGHT, 3), planned(None, TIGHT, 3)
    assert made.schedule.name == "auto"
    assert check_plan(made, TIGHT) == ()
    assert planner.simulate(made).makespan_s == pytest.approx(made.prediction.step_time_s, rel=1e-12)
    assert made.prediction.step_time_s < usual.prediction.step_time_s
    assert made.prediction.peak_memory_bytes <= 6_500_000
    assert any("made for the costs" in line for line in made.certificate.space)
    again = planner.plan(model(), cluster=TIGHT, global_batch=32, schedule="auto", stages=3, baselines=False)
    assert encode(again) == encode(made)


def test_slow_links_get_extra_forwards() -> None:
    plan = planned(None, far_apart(1_000_000_000, latency_s=3e-2), 4)
    assert plan.schedule.name == "hetero-1f1b"
    first = plan.schedule.actors[0].actions.split()
    assert len([a for a in first[: first.index("0B0")] if "F" in a]) > 4  # 1F1B's


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"schedule": "zb-h1", "stages": 1},
            "schedule zb-h1 needs a pipeline of at least 2 stages, and there can be 1",
        ),
        ({"schedule": "zb-v", "stages": 4}, "on 4 stages runs 8 virtual stages, the model can be cut into 4"),
    ],
)
def test_what_a_schedule_cannot_run_is_said(given: dict, words: str) -> None:
    with pytest.raises(InputError) as caught:
        planner.plan(model(layers=2), cluster=ROOMY, global_batch=32, baselines=False, **given)
    assert caught.value.code == "MP164"
    assert words in str(caught.value)


@pytest.mark.parametrize("schedule", ["auto", "zb-v", "hetero-1f1b", "layer-major"])
def test_one_microbatch(schedule: str) -> None:
    plan = planner.plan(model(layers=2), cluster=ROOMY, global_batch=1, stages=2, schedule=schedule, baselines=False)
    assert plan.microbatches == 1 and check_plan(plan, ROOMY) == ()


def test_layer_major_runs_one_range_a_stage_where_there_are_no_more() -> None:
    plan = planner.plan(model(2), cluster=ROOMY, global_batch=8, stages=3, schedule="layer-major", baselines=False)
    assert (len(plan.stages), len(plan.schedule.actors)) == (3, 3)


def test_more_stages_than_blocks_is_said_with_numbers() -> None:
    with pytest.raises(InputError, match="MP160: stages=5 was asked for; the model has 4 blocks and the cluster 4"):
        planner.plan(model(layers=2), cluster=ROOMY, global_batch=32, stages=5, baselines=False)


def test_the_least_bubble_is_that_of_no_schedule_that_is_tried() -> None:
    assert least_bubble("1f1b") == 1.0 and least_bubble(None) == 0.25 and least_bubble("auto") == 0.0


@pytest.mark.parametrize("name", [n for n, f in FAMILIES.items() if f.chunks == 1 and not f.required])
def test_v1_is_below_every_straight_schedule(name: str) -> None:
    """E3 with W apart where the schedule splits backwards, sends that occupy their links, work once a step."""
    rng = random.Random(name)
    for _ in range(60):
        p, m = rng.randint(1, 6), rng.randint(1, 20)
        schedule = make_schedule(name, p, m)
        split = schedule.splits_backward
        times = [
            StageTimes(
                forward_s=rng.uniform(0, 3), backward_s=rng.uniform(0, 3), weight_s=rng.uniform(0, 3) if split else 0.0,
                reduce_s=rng.uniform(0, 4), update_s=rng.uniform(0, 1),
            )
            for _ in range(p)
        ]  # fmt: skip
        sends = [
            SendTimes(activation_s=rng.uniform(0, 2), gradient_s=rng.uniform(0, 2), latency_s=rng.uniform(0, 2))
            for _ in range(p - 1)
        ]
        bound_s = pipeline_lower_bound_s(
            [t.forward_s for t in times],
            [t.backward_s for t in times],
            schedule.microbatches,
            [s.activation_s + s.latency_s for s in sends],
            [s.gradient_s + s.latency_s for s in sends],
            weight_s=[t.weight_s for t in times],
            step_s=[t.reduce_s + t.update_s for t in times],
        )
        result = simulate(
            schedule,
            {Actor(s, 0): t for s, t in enumerate(times)},
            {(Actor(s, 0), Actor(s + 1, 0)): send for s, send in enumerate(sends)},
        )
        assert bound_s <= result.makespan_s * (1 + 1e-9)


@pytest.mark.parametrize(("microbatch", "pays"), [(1, False), (2, True)])
def test_chunks_that_make_a_step_slower_say_by_how_much(microbatch: int, pays: bool) -> None:
    """With 32 microbatches there are no bubbles left to fill, and each chunk runs as many kernels as a sequence."""
    given = {"cluster": ROOMY, "global_batch": 32, "baselines": False, "stages": 2, "microbatch": microbatch}
    plan = planner.plan(model(2), schedule="sequence-chunks", chunks=8, **given)
    whole = planner.plan(model(2), schedule="1f1b", **given)
    slower = plan.prediction.step_time_s / whole.prediction.step_time_s - 1.0
    said = [one.message for one in plan.findings if one.code == "MP159"]
    assert (slower <= 0, said == []) == (pays, pays)
    assert all(f"{slower:.0%} slower" in one and one.endswith("more a device") for one in said)


def test_chunks_of_sequences_are_those_asked_for() -> None:
    assert planned("sequence-chunks").schedule.chunks == 4
    given = {"cluster": ROOMY, "global_batch": 32, "baselines": False, "stages": 2}
    plan = planner.plan(model(2), schedule="sequence-chunks", chunks=2, **given)
    assert plan.schedule.chunks == 2 and plan.schedule.microbatches == 2 * plan.microbatches
    assert "2 chunks" in planner.explain(plan).summary
    for schedule in (None, "auto", "1f1b"):
        with pytest.raises(InputError, match=r"MP163.*chunks=2"):
            planner.plan(model(2), schedule=schedule, chunks=2, **given)
    for chunks, code in ((0, "MP163"), (5, "MP167")):
        with pytest.raises(InputError) as error:
            planner.plan(model(2), schedule="sequence-chunks", chunks=chunks, **given)
        assert error.value.code == code
    with pytest.raises(InputError, match=r"MP166.*reduce_max"):
        planner.plan(bert(hidden=16, layers=2, heads=2, vocab=32, seq=8), schedule="sequence-chunks", **given)
