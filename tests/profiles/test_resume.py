"""Runs that are stopped lose nothing, and the next one measures only what is missing."""

from pathlib import Path

import msgspec
import pytest

from costmodel.errors import ProfileError
from profiles.blockbench import BlockProgram
from profiles.collect import planned_jobs, profile_devices
from profiles.jobs import Job
from profiles.partial import partial_path, read_partial, remove_partial, write_partial
from profiles.records import Record, key_of, records_of, with_records
from profiles.resume import outlook
from profiles.runner import LocalRunner
from profiles.schema import (
    BandwidthSample,
    BlockTime,
    CollectiveSample,
    CopySample,
    KernelSample,
    MatmulSample,
    OpTime,
    Profile,
)
from profiles.store import decode_profile, encode_profile
from tests.small_profiles import small_profile


class Recorded(LocalRunner):
    """Notes what is run; raises at the nth job."""

    def __init__(self, stop_at: int | None = None) -> None:
        super().__init__(2)
        self.ran: list[str] = []
        self.stop_at = stop_at

    def run(self, job: Job, runs_s: float) -> Record:
        self.ran.append(job.key)
        if len(self.ran) == self.stop_at:
            raise KeyboardInterrupt
        return super().run(job, runs_s)


def test_a_run_that_is_stopped_leaves_what_it_had_and_the_next_goes_on() -> None:
    left: list[Profile] = []
    with pytest.raises(KeyboardInterrupt):
        profile_devices(budget_s=30.0, runner=Recorded(stop_at=4), checkpoint=left.append)  # spent on no machine
    partial = left[-1]
    first = [key for key, _ in records_of(partial)]
    assert len(first) == 3 and partial.rates.matmul_flops_per_s and partial.rates.launch_s is not None
    waiting = {gap.what: gap.cause for gap in partial.gaps}
    assert len(waiting) > 20 and set(waiting.values()) == {"the run was stopped before it"}
    assert decode_profile(encode_profile(partial)) == partial

    runner = Recorded()
    whole = profile_devices(budget_s=2.0, runner=runner, known=partial)
    assert not set(first) & set(runner.ran)
    assert set(first) <= {key for key, _ in records_of(whole)}
    assert not any("stopped" in gap.cause for gap in whole.gaps)


def test_each_measurement_is_handed_out_as_it_is_made() -> None:
    counts: list[int] = []
    profile_devices(devices=1, budget_s=0.0, checkpoint=lambda one: counts.append(sum(1 for _ in records_of(one))))
    assert counts == [1, 2]


def test_a_full_profile_leaves_nothing_to_do() -> None:
    facts = LocalRunner(2).start(None)
    plan = planned_jobs(facts, ())
    assert [part for part, jobs in plan.items() if jobs] == ["rates", "collectives", "copies", "shapes"]
    keys = [job.key for jobs in plan.values() for job in jobs]
    assert len(keys) == len(set(keys)) > 80
    found = outlook(facts, plan, 0)
    assert found.total_s == pytest.approx(sum(found.seconds.values())) and found.total_s > 10
    some = small_profile(matmuls=(MatmulSample(dtype="float32", shape=(512, 512, 512), time_s=1e-3),))
    less = planned_jobs(facts, (), some)
    assert {job.key for job in plan["rates"]} - {job.key for job in less["rates"]} == {"matmul float32 512x512x512"}


def test_blocks_that_were_timed_in_another_loop_are_timed_again() -> None:
    facts = LocalRunner(2).start(None)
    program = BlockProgram(block_class="a", microbatch=4, layers=4)
    for layers, left in ((1, 1), (3, 1), (4, 0)):
        block = BlockTime(block_class="a", mesh=(1,), microbatch=4, forward_s=1e-3, backward_s=1e-3, layers=layers)
        assert len(planned_jobs(facts, (program,), small_profile(blocks=(block,)))["blocks"]) == left
    other = BlockTime(block_class="b", mesh=(1,), microbatch=4, forward_s=1e-3, backward_s=1e-3)
    assert len(planned_jobs(facts, (program,), small_profile(blocks=(other,)))["blocks"]) == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"devices": 3}, r"devices: 3 x cpu then, 2 x cpu now"),
        ({"device_kind": "T4"}, r"devices: 2 x T4 then"),
        ({"software": {"jax": "0.1.2"}}, r"jax: 0\.1\.2 then, .* now"),
    ],
)
def test_a_profile_of_other_devices_or_versions_is_not_gone_on_with(changes: dict, words: str) -> None:
    software = LocalRunner(2).start(None).software
    known = small_profile(**{"software": software, **changes})
    with pytest.raises(ProfileError, match=f"MP308.*{words}") as caught:
        profile_devices(devices=2, budget_s=0.0, known=known)
    assert "--fresh" in caught.value.hint


def test_the_partial_profile_lies_beside_the_whole_one(tmp_path: Path) -> None:
    target = tmp_path / "folder" / "a.profile.json"
    assert read_partial(target) is None
    write_partial(target, small_profile())
    assert read_partial(target) == small_profile() and not target.exists()
    partial_path(target).write_bytes(b'{"schema_version": 1, "dev')
    with pytest.raises(ProfileError, match=r"MP303: an earlier run left .*not whole JSON") as caught:
        read_partial(target)
    assert "--fresh" in caught.value.hint and partial_path(target).exists()
    remove_partial(target)
    remove_partial(target)
    assert list(target.parent.iterdir()) == []


EVERY: tuple[Record, ...] = (
    MatmulSample(dtype="float32", shape=(1, 2, 3), time_s=1.0),
    MatmulSample(dtype="float32", shape=(1, 2, 3), batch=4, time_s=1.0),
    BandwidthSample(op="add", dtype="float32", shape=(4, 5), memory_bytes=9, time_s=1.0),
    KernelSample(op="attention", dtype="float32", shape=(1, 2, 3, 4), backward=False, flops=1.0, time_s=1.0),
    KernelSample(op="attention", dtype="float32", shape=(1, 2, 3, 4), backward=True, flops=3.0, time_s=1.0),
    CollectiveSample(kind="permute", size=2, stride=1, full_bytes=8, time_s=1.0),
    CopySample(route="device_to_device", lanes=1, lane_bytes=8, time_s=1.0),
    CopySample(route="host_to_device", lanes=1, lane_bytes=8, time_s=1.0),
    BlockTime(block_class="b", mesh=(1,), microbatch=2, forward_s=1.0, backward_s=1.0),
    ("tanh f32[4] -> f32[4]", OpTime(forward_s=1.0)),
)


def test_every_record_has_a_key_of_its_own_and_goes_back_to_its_table() -> None:
    keys = [key_of(record) for record in EVERY]
    assert len(set(keys)) == len(keys)
    bare = msgspec.structs.replace(small_profile(), matmuls=(), ops={}, collectives=(), blocks=())
    filled = with_records(bare, EVERY)
    assert dict(records_of(filled)) == dict(zip(keys, EVERY, strict=True))
    assert with_records(filled, ()) == bare
    assert decode_profile(encode_profile(filled)) == filled
