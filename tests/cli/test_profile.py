"""`meshplan profile` and its subcommands: what they measure, write, join, import and say."""

import json
import sys
import types
from pathlib import Path

import pytest

from profiles.partial import partial_path, write_partial
from profiles.records import records_of
from profiles.runner import LocalRunner
from profiles.schema import BlockTime, CollectiveLine, CopyLine, Fit, Gap, MatmulSample, Profile, Pulse, Rates
from profiles.store import decode_profile, read_profile, write_profile
from tests.golden_files import check_golden
from tests.small_profiles import small_profile

MODEL = "gpt(hidden=32,layers=2,heads=2,vocab=64,seq=8)"
PROFILE = Profile(
    device_kind="x1",
    jax_device_kind="cpu",
    platform="cpu",
    devices=2,
    measured_at="2026-01-01T00:00:00+00:00",
    usable_memory_bytes=1 << 30,
    rates=Rates(matmul_flops_per_s={"float32": Fit(value=5e10, error=0.05, samples=4)}, launch_s=Fit(value=1e-6)),
    matmuls=(MatmulSample(dtype="float32", shape=(1, 512, 512), time_s=1e-5, drift=0.25),),
    collective_lines=(CollectiveLine(kind="all_reduce", size=2, stride=1, fixed_s=1e-5, s_per_byte=1e-9),),
    copy_lines=(CopyLine(route="device_to_device", lanes=1, fixed_s=1e-5, s_per_byte=1e-9),),
    blocks=(
        BlockTime(block_class="gpt/0", mesh=(2,), microbatch=4, forward_s=1e-3, backward_s=2e-3, saved_bytes=1 << 20),
    ),
    pulses=(Pulse(after_s=1.0, time_s=1e-3), Pulse(after_s=31.0, time_s=1.2e-3)),
    gaps=(Gap(what="op dot", cause="out of time"),),
)


def test_options_reach_the_profiler_and_its_result_is_written_and_shown(call, monkeypatch, tmp_path):
    seen = {}

    def profile_devices(*, budget_s, progress, programs, known, checkpoint, runner):
        facts = LocalRunner(2).start(None)
        seen.update(budget_s=budget_s, devices=runner.devices, programs=programs(facts), known=known(facts))
        progress("matmul", 0, 3)
        checkpoint(PROFILE)
        return PROFILE

    collect = types.ModuleType("profiles.collect")
    collect.profile_devices = profile_devices
    monkeypatch.setitem(sys.modules, "profiles.collect", collect)
    args = ("--devices", "2", "--out", "x.profile.json", "--budget", "1.5m", "--model", MODEL, "--microbatch", "4")
    done = call("profile", *args, "--microbatch", "2", "--blocks")
    assert done.code == 0 and done.err == "matmul (3) ...\nwrote x.profile.json\n"
    programs = seen.pop("programs")
    assert seen == {"devices": 2, "budget_s": 90.0, "known": None}
    assert {program.microbatch for program in programs} == {2, 4}
    assert any(hasattr(program, "block_class") and program.forward for program in programs)
    assert any(getattr(program, "key", "").startswith("dot_general") and not program.problem for program in programs)
    assert read_profile("x.profile.json") == PROFILE and not Path("x.profile.json.partial").exists()
    check_golden("profile.txt", done.out)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    done = call("profile", "--json")
    assert decode_profile(done.out.encode()) == PROFILE and seen["programs"] == () and seen["budget_s"] == 120
    assert read_profile(tmp_path / "cache" / "meshplan" / "profiles" / "x1.profile.json") == PROFILE
    done = call("profile", "show", "x.profile.json")
    check_golden("profile.txt", done.out)


def test_a_run_in_a_process_of_its_own_and_going_on_from_what_it_left(call):
    done = call("profile", "--devices", "1", "--budget", "0.1s", "-o", "a.profile.json")
    assert done.code == 0, done.err
    first = read_profile("a.profile.json")
    assert first.matmuls and first.gaps and not Path("a.profile.json.partial").exists()
    write_partial(Path("a.profile.json"), first)
    done = call("profile", "--devices", "1", "--budget", "0.1s", "-o", "a.profile.json", "--json")
    there = sum(1 for _ in records_of(first))
    assert f"going on from a.profile.json.partial: {there} measurements are there" in done.err
    again = decode_profile(done.out.encode())
    assert set(dict(records_of(first))) < set(dict(records_of(again)))
    done = call("profile", "--devices", "2", "--budget", "0.1s", "--resume", "a.profile.json", "-o", "b.profile.json")
    assert done.code == 4 and "MP308" in done.err and "1 x cpu then, 2 x cpu now" in done.err
    assert not Path("b.profile.json").exists()


def test_what_is_left_and_cannot_be_used_is_kept(call):
    partial_path(Path("a.profile.json")).write_text("{")
    done = call("profile", "--devices", "1", "--budget", "0.1s", "-o", "a.profile.json")
    assert done.code == 4 and "MP303" in done.err and "--fresh" in done.err
    assert partial_path(Path("a.profile.json")).read_text() == "{"
    assert call("profile", "--devices", "1", "--budget", "0.1s", "-o", "a.profile.json", "--fresh").code == 0


def test_an_interrupted_run_says_where_its_measurements_are(call, monkeypatch):
    def profile_devices(*, checkpoint, **_):
        checkpoint(PROFILE)
        raise KeyboardInterrupt

    collect = types.ModuleType("profiles.collect")
    collect.profile_devices = profile_devices
    monkeypatch.setitem(sys.modules, "profiles.collect", collect)
    done = call("profile", "-o", "a.profile.json")
    assert done.code == 130 and "what was measured is in a.profile.json.partial" in done.err
    assert read_profile("a.profile.json.partial") == PROFILE


def test_a_dry_run_says_what_and_how_long_and_measures_nothing(call):
    done = call(
        "profile", "--devices", "2", "--dry-run", "--json", "--model", MODEL, "--blocks", "-o", "a.profile.json"
    )
    assert done.code == 0 and not list(Path().glob("a.profile*"))
    found = json.loads(done.out)
    parts = {part["part"]: part for part in found["parts"]}
    assert found["devices"] == "2 x cpu" and found["there"] == 0 and found["expected_s"] > 10
    assert all(part["keys"] and part["expected_s"] > 0 for part in parts.values())
    assert set(parts) == {"rates", "collectives", "copies", "shapes", "ops", "blocks"}
    software = LocalRunner(1).start(None).software
    write_profile("some.profile.json", small_profile(device_kind="cpu", devices=2, software=software))
    done = call("profile", "--devices", "2", "--dry-run", "--resume", "some.profile.json", "--budget", "1s")
    assert "are there already" in done.out and "ends before" in done.out


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--blocks"], "--blocks needs --model"),
        (["--resume", "a", "--fresh"], "give one of them"),
        (["merge", "a"], "-o FILE is missing"),
        (["merge"], "FILE..."),
        (["import", "a.csv", "--model", "m", "--device", "cpu"], "-o FILE is missing"),
        (["import", "a.csv", "--model", "m", "--device", "cpu", "-o", "b", "--column", "tp"], "WHAT=NAME"),
    ],
)
def test_usage(call, args, words):
    done = call("profile", *args)
    assert done.code == 2 and words in " ".join(done.err.split())


def test_merge_writes_one_profile_and_says_what_disagrees(call):
    other = small_profile(matmuls=(MatmulSample(dtype="float32", shape=(8, 16, 4), time_s=2e-4),), blocks=())
    write_profile("a.profile.json", small_profile())
    write_profile("b.profile.json", other)
    done = call("profile", "merge", "a.profile.json", "b.profile.json", "-o", "c.profile.json")
    assert done.code == 0 and "matmul float32 8x16x4: 100 us in a.profile.json, 200 us in b.profile.json" in done.out
    assert read_profile("c.profile.json").blocks == small_profile().blocks
    done = call("profile", "merge", "a.profile.json", "b.profile.json", "-o", "c.profile.json", "--json")
    assert json.loads(done.out)["measurements"] == 5
    write_profile("v.profile.json", small_profile(device_kind="T4"))
    done = call("profile", "merge", "a.profile.json", "v.profile.json", "-o", "d.profile.json")
    assert done.code == 4 and "MP301" in done.err and not Path("d.profile.json").exists()


TABLE = """model,gpu,micro_batch_seqs,tp,layer,forward_s,backward_s,update_s,source
m,x,1,1,0,0.01,0.02,0.001,somewhere
m,x,2,1,0,0.02,0.04,0.001,somewhere
m,y,1,1,0,0.03,0.06,0.001,somewhere
"""


def test_import_makes_a_profile_of_a_table(call):
    Path("t.csv").write_text(TABLE)
    args = ("profile", "import", "t.csv", "--model", "m", "--device", "A100-SXM4-40GB")
    done = call(*args, "-o", "p.profile.json")
    assert (
        done.code == 2 and "error MP165" in done.err and "gpu x, y" in done.err and not Path("p.profile.json").exists()
    )
    done = call(*args, "--gpu", "x", "-o", "p.profile.json")
    assert done.code == 0 and "m/0 at microbatch 2" in done.out
    profile = read_profile("p.profile.json")
    assert profile.device_kind == "A100-SXM4-40GB" and len(profile.blocks) == 2 and "somewhere" in profile.sources
    done = call("profile", "import", "none.csv", "--model", "m", "--device", "T4", "-o", "p.profile.json")
    assert done.code == 2 and "MP165" in done.err and read_profile("p.profile.json") == profile
    assert call("profile", "import", "t.csv", "--model", "m", "--device", "A1", "-o", "q.profile.json").code == 2


def test_coverage_says_what_a_model_needs_and_what_is_missing(call):
    write_profile("a.profile.json", small_profile())
    done = call("profile", "coverage", "a.profile.json", "--model", MODEL, "--json")
    found = json.loads(done.out)
    assert found["measured"] == [] and any(key.startswith("dot_general") for key in found["missing"])
    assert found["blocks"] == [] and len(found["blocks_missing"]) == 3
    key = found["missing"][0]
    block = BlockTime(block_class=found["blocks_missing"][0], mesh=(1,), microbatch=1, forward_s=1e-3, backward_s=1e-3)
    write_profile("b.profile.json", small_profile(ops={key: small_profile().ops.popitem()[1]}, blocks=(block,)))
    done = call("profile", "coverage", "b.profile.json", "--model", MODEL)
    assert "1 of 3 block classes are measured" in done.out and f"- {key}" not in done.out
