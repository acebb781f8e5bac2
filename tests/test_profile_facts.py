"""A profile in a plan: at which microbatch size its ops were timed, and how much of the plan they cover."""

import pytest

import planner
from costmodel.cluster import parse_cluster
from costmodel.errors import ProfileError
from planner.frontend.capture import capture
from planner.frontend.graph import model_graph
from planner.models import gpt
from planner.profile_facts import coverage_findings, facts_of_kinds, with_measured_size
from planner.search.pinned import GroupPin, StagePin
from profiles.catalogue import device_kind
from profiles.schema import CopyLine, OpTime, Profile, Pulse
from tests.small_profiles import small_profile

TASK = gpt(hidden=32, layers=2, heads=2, vocab=64, seq=8, dtype="float32")
GRAPHS = {size: model_graph(capture(TASK, size)) for size in (1, 2, 3, 4, 8, 16, 32)}
CPUS = parse_cluster(
    {"name": "c", "group": [{"name": "g", "nodes": 1, "device": "cpu", "devices_per_node": 2}]},
    {"cpu": device_kind("cpu")},
)
SIZES = (32, 16, 8, 4, 2, 1)


def profiled_at(*sizes: int, says: bool = True, most: int = 1000) -> Profile:
    keys = sorted({op.key for size in sizes for cls in GRAPHS[size].classes.values() for op in cls.ops if op.flops})
    ops = {key: OpTime(forward_s=1e-3, backward_s=2e-3) for key in keys[:most]}
    return small_profile(ops=ops, microbatches=sizes if says else (), gaps=())


def used(profile: Profile) -> tuple[int | None, list[int]]:
    """The microbatch size that the profile is found to be of, and those captured to find it."""
    asked: list[int] = []

    def graph_of(size: int):
        asked.append(size)
        return GRAPHS[size]

    kinds = with_measured_size(facts_of_kinds(CPUS, profile), profile, graph_of, SIZES)
    found = kinds.facts["cpu"].measured
    return found and found.microbatch, asked


@pytest.mark.parametrize("size", SIZES)
def test_the_measured_size_is_found_whatever_it_is(size: int) -> None:
    assert used(profiled_at(size, says=False)) == (size, [one for one in sorted(SIZES) if one <= size])


def test_a_profile_that_says_its_sizes_takes_one_capture() -> None:
    assert used(profiled_at(16)) == (16, [16])
    assert used(profiled_at(3)) == (3, [3])  # no divisor of the global batch


def test_a_profile_without_ops_takes_no_capture() -> None:
    assert used(small_profile(ops={})) == (None, [])
    assert used(small_profile(ops={"of another model": OpTime(forward_s=1.0)})) == (None, sorted(SIZES))


def test_op_times_are_scaled_once_a_size() -> None:
    profile = profiled_at(8)
    facts = with_measured_size(facts_of_kinds(CPUS, profile), profile, GRAPHS.__getitem__, SIZES).facts["cpu"]
    assert facts.op_times_of(GRAPHS[4]) is facts.op_times_of(GRAPHS[4])
    assert facts.op_times_of(GRAPHS[4]) != facts.op_times_of(GRAPHS[2])


@pytest.mark.parametrize(
    ("profile", "severity", "words"),
    [
        (profiled_at(4), "note", "are measured"),
        (profiled_at(8), "note", "are carried over from another microbatch size"),
        (profiled_at(4, most=2), "warning", "2 of"),
        (small_profile(ops={}), "warning", "0 of"),
    ],
)
def test_coverage_is_a_finding_and_little_of_it_a_warning(profile: Profile, severity: str, words: str) -> None:
    kinds = with_measured_size(facts_of_kinds(CPUS, profile), profile, GRAPHS.__getitem__, SIZES)
    (finding,) = coverage_findings(kinds, profile, GRAPHS[4])
    assert (finding.code, finding.severity) == ("MP173", severity)
    assert words in finding.message and "microbatch 4" in finding.message
    assert ("--microbatch 4" in finding.hint) == (severity == "warning")


def test_a_plan_reports_how_much_of_it_was_measured() -> None:
    plan = planner.plan(TASK, cluster=CPUS, global_batch=4, profile=profiled_at(2), baselines=False)
    (finding,) = (one for one in plan.findings if one.code == "MP173")
    assert finding.severity == "note" and f"microbatch {plan.microbatch_size}" in finding.message
    assert not any(one.code == "MP173" for one in planner.plan(TASK, cluster=CPUS, global_batch=4).findings)


@pytest.mark.parametrize("slope", [1e-10, 1e-7])
def test_transfers_between_stages_take_the_time_of_measured_copies(slope: float) -> None:
    line = CopyLine(route="device_to_device", lanes=1, fixed_s=1e-3, s_per_byte=slope)
    pins = (StagePin(groups=(GroupPin(pool="g", devices=1),)),) * 2
    profile = small_profile(copy_lines=(line,))
    plan = planner.plan(TASK, cluster=CPUS, global_batch=4, microbatch=2, pins=pins, profile=profile, baselines=False)
    (transfer,) = plan.transfers
    assert transfer.bytes > 0 and transfer.time_s == pytest.approx(1e-3 + slope * transfer.bytes)


def test_a_profile_of_no_kind_of_the_cluster_is_refused() -> None:
    with pytest.raises(ProfileError, match="MP301"):
        facts_of_kinds(CPUS, small_profile(device_kind="x1", jax_device_kind="x1"))


def test_a_profile_of_another_version_of_jax_or_an_unsteady_device_is_noted() -> None:
    assert not [note for note in facts_of_kinds(CPUS, small_profile()).notes if "JAX" in note or "slowed" in note]
    pulses = (Pulse(after_s=1, time_s=1.0), Pulse(after_s=31, time_s=1.5))
    notes = facts_of_kinds(CPUS, small_profile(software={"jax": "0.1.75"}, pulses=pulses)).notes
    assert any("measured with JAX 0.1.75, this is JAX" in note for note in notes)
    assert any("the device slowed down: the same product took 50% longer 30 s later" in note for note in notes)
    assert not [note for note in facts_of_kinds(CPUS, small_profile(software={})).notes if "JAX" in note]
