"""A plan says what sharing network cards adds to its step."""

import msgspec
import pytest

import planner
from costmodel.cluster import parse_cluster
from planner.card_findings import card_findings
from tests.plans import LARGE, plan_with_groups, tiny_plan

replace = msgspec.structs.replace


def slow_links(plan, time_s):
    return replace(plan, transfers=tuple(replace(transfer, time_s=time_s) for transfer in plan.transfers))


@pytest.mark.parametrize(("time_s", "severity"), [(4e-3, "note"), (8e-3, "warning")])
def test_it_is_what_simulate_says(time_s, severity):
    """Stages 0 and 2 send over the card of node large/0, stage 1 to both of them over that of small/0."""
    plan = slow_links(plan_with_groups(stages=3, devices=8, microbatches=6), time_s)
    alone, together = (planner.simulate(plan, share_nics=share).makespan_s for share in (False, True))
    (finding,) = card_findings(plan)
    assert finding.code == "MP197" and finding.severity == severity and "(large/0, small/0)" in finding.message
    assert f"{together / alone - 1:.1%} more" in finding.message and "--share-nics" in finding.hint


def test_no_finding_without_sharing_or_without_a_difference():
    assert card_findings(tiny_plan(stages=1)) == ()
    assert card_findings(slow_links(tiny_plan(stages=2), 1.0)) == ()  # each node has one stage
    assert card_findings(slow_links(plan_with_groups(stages=3, devices=8, microbatches=6), 1e-7)) == ()


def test_plans_carry_it():
    cluster = {
        "name": "slow",
        "group": [
            {
                "name": "g",
                "nodes": 3,
                "device": LARGE,
                "devices_per_node": 1,
                "intra": [{"span": 1, "bandwidth_bytes_per_s": 3e11, "latency_s": 3e-6}],
                "inter": {"bandwidth_bytes_per_s": 3e8, "latency_s": 8e-6},
            }
        ],
    }
    plan = planner.plan(
        "gpt(hidden=64,layers=12,heads=4,vocab=512,seq=128)",
        cluster=parse_cluster(cluster, {}),
        global_batch=16,
        microbatch=1,
        stages=3,
        schedule="zb-v",
        baselines=False,
    )
    (finding,) = [entry for entry in plan.findings if entry.code == "MP197"]
    assert finding.message in planner.explain(plan).text.replace("\n    ", " ").replace("\n  ", " ")
