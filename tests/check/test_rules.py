"""Every rule fires on a plan that breaks it, says where and what to do, and is silent on plans that do not."""

import math

import msgspec
import pytest

from costmodel.cluster import parse_cluster
from planner.check.codes import COMPILE_RULES, MODEL_RULES, RULE_BY_CODE, RULES
from planner.check.rules import check_plan
from planner.check.sharding import itemsize
from planner.planfile.codec import decode, encode
from planner.planfile.lines import find_lines
from planner.planfile.schema import Plan, Transfer, UpdateJoin
from tests.plans import GIB, cluster_document, tiny_cluster, tiny_plan, with_own_step, with_uneven_transfers

GOOD = {
    "two stages": {},
    "one stage": {"stages": 1},
    "uneven": {"stages": 3, "layers": 5, "devices": 8},
    "gpipe": {"schedule": "gpipe"},
    "tied": {"tied": True},
    "zero 0": {"zero": 0},
    "zero 2": {"zero": 2},
    "zero 3": {"zero": 3},
    "tied, four stages": {"stages": 4, "devices": 8, "tied": True},
    "one device a stage": {"data": 1, "model": 1},
    "odd": {"data": 3, "model": 1, "zero": 0, "microbatch_size": 9},
}


@pytest.mark.parametrize("kind", GOOD)
def test_good_plans_have_no_findings(kind):
    plan = tiny_plan(**GOOD[kind])
    assert check_plan(plan, tiny_cluster(GOOD[kind].get("devices", 4))) == ()
    assert check_plan(decode(encode(plan)), tiny_cluster(GOOD[kind].get("devices", 4))) == ()


def edit(plan: Plan, path: str, value) -> Plan:
    """The plan with the value at `path` (``stages.1.groups.0.kind``) replaced, or changed by a function."""

    def walk(record, steps):
        if not steps:
            return value(record) if callable(value) else value
        step = steps[0]
        if isinstance(record, tuple):
            at = int(step)
            return (*record[:at], walk(record[at], steps[1:]), *record[at + 1 :])
        if isinstance(record, dict):
            return {**record, step: walk(record[step], steps[1:])}
        return msgspec.structs.replace(record, **{step: walk(getattr(record, step), steps[1:])})

    return walk(plan, path.split("."))


def saving(memory, saved_bytes):
    total_bytes = memory.total_bytes - memory.saved_bytes + saved_bytes
    return msgspec.structs.replace(memory, saved_bytes=saved_bytes, total_bytes=total_bytes)


def later(time, time_s):
    """Gradient reduction that takes longer, and all that happens once a step with it."""
    reduction_s = time.gradient_reduction_s + time_s
    return msgspec.structs.replace(time, gradient_reduction_s=reduction_s, once_s=time.once_s + time_s)


G0, G1 = "stages.0.groups.0", "stages.1.groups.0"

BROKEN = [
    ("MP600", "cluster.fingerprint", "sha256:other", "made for cluster"),
    ("MP601", f"{G0}.devices.2", "large/0/9", "large/0/9"),
    ("MP601", f"{G1}.devices.0", "nowhere/0/0", "nowhere/0/0"),
    ("MP601", f"{G1}.devices.0", "not an id", "not an id"),
    ("MP602", f"{G0}.devices.1", "large/0/0", "large/0/0"),
    ("MP602", f"{G1}.devices.3", "large/0/3", "again by stage 1"),
    ("MP603", f"{G1}.kind", "Large-80GB", "Small-32GB"),
    ("MP603", f"{G0}.devices.3", "small/0/3", "small/0/3"),
    ("MP604", f"{G0}.mesh.0.size", 4, "data=4 x model=2 has 8 places, the group has 4 devices"),
    ("MP604", f"{G0}.mesh.1.name", "data", "one name twice"),
    ("MP604", f"{G0}.mesh.1.size", 0, "empty axis"),
    ("MP604", f"{G0}.devices", (), "no devices"),
    ("MP606", "stages.1.blocks", ("layers[3:4]", "head"), "layers[2]"),
    ("MP606", "stages.1.blocks", ("layers[2:4]",), "1 of 6 blocks are in no stage: head"),
    ("MP606", "stages.1.blocks", ("layers[1:4]", "head"), "layers[1] is in stage 0 and again in stage 1"),
    ("MP606", "stages.1.blocks", ("layers[2:4]", "tail"), "tail"),
    ("MP606", "stages.1.blocks", ("head", "layers[2:4]"), "after head"),
    ("MP606", "stages.1.blocks", ("layers[4:2]",), "layers[4:2]"),
    ("MP606", "stages.1.blocks", (), "stage 1 has no blocks"),
    ("MP606", "stages.0.block_count", 7, "states 7 blocks and names 3"),
    ("MP606", "model.block_count", 5, "states 5 blocks and names 6"),
    ("MP607", f"{G0}.parameters.0.value", (("data", "model"), ("data",)), "'data' 2 times"),
    ("MP607", f"{G0}.parameters.0.value", (("modle",), ()), "'modle'"),
    ("MP607", f"{G0}.parameters.0.value", ((),), "1 entries for 2 dims"),
    ("MP607", f"{G0}.parameters.0.reduced_over", ("x",), "reduced_over"),
    ("MP607", f"{G0}.strategies.0.ops", {"dot.0": {"seq": "b"}}, "strategy of op dot.0"),
    ("MP607", f"{G1}.strategies.0.outputs.y.varying", ("q",), "spec of y"),
    ("MP608", "global_batch", 33, "4 microbatches of 8 examples are 32 examples, the global batch is 33"),
    ("MP608", "microbatch_size", 0, "0 examples"),
    ("MP609", f"{G0}.microbatches", (0, 1, 2), "nobody runs 3"),
    ("MP609", f"{G0}.microbatches", (0, 1, 2, 3, 3), "run twice: 3"),
    ("MP609", f"{G0}.microbatches", (0, 1, 2, 3, 4), "not among them: 4"),
    ("MP609", "stages.0.groups", (), "no group"),
    ("MP610", "schedule.actors.0.actions", "0F0 0B0 0F1 0B1 0F2 0B2 0F3", "0B3 is missing"),
    ("MP611", "schedule.actors.0.actions", "0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3 0F3", "0F3 is duplicated"),
    ("MP612", "schedule.actors.1.actions", "1B0 1F0 1F1 1B1 1F2 1B2 1F3 1B3", "1B0"),
    ("MP613", "schedule.actors.0.actions", "0F1 0B1 0F0 0F2 0B0 0F3 0B2 0B3", "deadlock"),
    ("MP614", "schedule.actors.1.actions", "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3 0F0", "stage 0"),
    ("MP615", "schedule.actors.0.actions", "0F0 0X0", "0X0"),
    ("MP615", "schedule.actors", lambda actors: actors[:1], "no action list"),
    ("MP615", "schedule.actors.1.stage", 2, "stage 2 group 0"),
    ("MP615", "schedule.actors.1.stage", 0, "twice"),
    ("MP615", "schedule.microbatches", 5, "5 microbatches"),
    ("MP616", "transfers.0.to_stage", 2, "from stage 0 to stage 2"),
    ("MP616", "transfers", (), "nothing is handed from stage 0 to stage 1"),
    ("MP617", "update_joins", (UpdateJoin(stage=0, waits_for=(0, 2), time_s=1e-5),), "the plan has 2 stages"),
    ("MP625", "update_joins", (UpdateJoin(stage=0, waits_for=(0, 1), time_s=-1.0),), "stage 0 waits -1.0 s"),
    ("MP620", f"{G1}.memory", lambda memory: saving(memory, 40 * GIB), "too much (saved 40.00 GiB"),
    ("MP620", f"{G0}.memory.limit_bytes", GIB, "the plan's limit"),
    ("MP621", f"{G0}.memory.total_bytes", 7, "add up to"),
    ("MP621", f"{G0}.memory.saved_bytes", -1, "negative memory for saved"),
    ("MP621", "prediction.peak_memory_bytes", 5, "the worst group needs"),
    ("MP621", f"{G0}.parameters.0.dtype", "bfloat16", "its parameters as they are split take"),
    ("MP621", f"{G0}.parameters.0.value", ((), ()), "its parameters as they are split take"),
    ("MP622", f"{G0}.memory.in_flight", 1, "counted for 1 microbatch in flight, the schedule holds 2"),
    ("MP625", "prediction.step_time_s", math.nan, "step_time_s is nan"),
    ("MP625", "prediction.step_time_s", 0.0, "step_time_s is 0"),
    ("MP625", "prediction.examples_per_s", math.inf, "examples_per_s is inf"),
    ("MP625", "prediction.tokens_per_s", -1.0, "tokens_per_s is -1"),
    ("MP625", "prediction.mfu", 1.2, "above the devices' peak"),
    ("MP625", "prediction.bubble_s", -1e-3, "bubble_s"),
    ("MP625", "prediction.exposed_communication_s", {"all_gather": math.nan}, "all_gather"),
    ("MP625", f"{G0}.time.backward_s", math.inf, "backward_s is inf"),
    ("MP625", f"{G0}.time.gradient_reduction_s", -1.0, "gradient_reduction_s is -1"),
    ("MP625", "transfers.0.time_s", math.inf, "inf s"),
    ("MP625", "transfers.0.gradient_bytes", -4, "-4 back"),
    ("MP626", "certificate.lower_bound_s", 0.051, "above the predicted step time"),
    ("MP626", "certificate.hardware_bound_s", 0.06, "hardware_bound_s"),
    ("MP626", "certificate.lower_bound_s", math.nan, "nan"),
    ("MP626", "certificate.gap", 0.5, "gap is 0.5000"),
    ("MP627", f"{G1}.parameters", lambda ps: ps[:1], "head/kernel"),
    ("MP627", f"{G0}.parameters.1.shape", (1, 64, 256), "layers/w"),
    ("MP627", f"{G0}.parameters.1.path", "layers/v", "layers/v"),
    ("MP627", f"{G0}.parameters.1.shape", (0, 64, 256), "layers/w"),
    ("MP618", "model.reduction", "median", "'median'"),
    ("MP618", "schedule.name", "2f2b", "'2f2b'"),
    ("MP618", "certificate.status", "sure", "'sure'"),
    ("MP618", "prediction.provenance.links", "heard", "'heard'"),
    ("MP618", f"{G0}.parameters.0.dtype", "float33", "'float33', which is no dtype"),
    ("MP618", f"{G0}.parameters.0.gradient_dtype", "", "no dtype"),
    ("MP618", f"{G0}.time.collectives", {"forward all_reduce expert": 1}, "forward all_reduce expert"),
    ("MP619", "schedule.name", "gpipe", "order of the schedule 'gpipe'"),
    ("MP619", "schedule.actors.1.actions", "1F0 1F1 1B0 1B1 1F2 1B2 1F3 1B3", "stage 1"),
    ("MP622", f"{G0}.memory.in_flight", 3, "counted for 3 microbatches in flight, the schedule holds 2"),
    ("MP625", f"{G0}.time.collectives", {"forward all_reduce model": -1}, "negative number of collectives"),
    ("MP625", f"{G0}.memory.saved_per_microbatch_bytes", -1, "saved_per_microbatch_bytes is -1"),
    ("MP625", f"{G0}.memory.limit_bytes", -1, "limit_bytes is -1"),
    ("MP625", "baselines.0.step_time_s", -0.5, "takes -0.5 s"),
    ("MP625", "baselines.0.step_time_s", None, "takes None s"),
    ("MP626", "certificate.status", "optimal", "leaves a gap of 0.0400"),
    ("MP626", "certificate.lower_bound_s", 0.04520001, "the plan's own time"),
    ("MP628", f"{G0}.strategies", (), "runs block embedding of class"),
    ("MP628", f"{G1}.strategies", lambda kept: kept[:1], "runs block head of class"),
    ("MP628", f"{G1}.strategies", lambda kept: (*kept, kept[0]), "has two strategies"),
    ("MP628", f"{G0}.strategies.1.block_class", "sha256:x", "of which it runs no block"),
    ("MP628", f"{G0}.parameters", lambda kept: (*kept, kept[0]), "embedding/table twice"),
    ("MP628", "model.block_classes", {"sha256:x": ("layers[4:2]",)}, "layers[4:2]"),
    ("MP629", "model.parameters", -1, "states -1 parameters"),
    ("MP629", "model.parameters", 196609, "states 196,609 parameters, its shapes have 196,608"),
    ("MP629", "model.trained_parameters", 200000, "200,000 of 196,608"),
    ("MP629", "model.parameter_shapes", {"a": (-1, 5)}, "negative sizes"),
    ("MP629", "model.trained_parameters", 1000, "1,000 of its parameters are trained, the stages train 196,608"),
    ("MP629", f"{G0}.parameters.1.trained", False, "some stages train layers/w, others do not"),
    ("MP629", f"{G1}.parameters.1.trained", False, "196,608 of its parameters are trained, the stages train 131,072"),
    ("MP629", "model.sequence", 0, "sequence length is 0"),
    ("MP629", "model.block_classes", {"sha256:x": ("embedding", "head")}, "layers[0]"),
    ("MP629", "cluster.devices", 9, "states 9 devices, its kinds have 8"),
    ("MP640", "prediction.examples_per_s", 709.0, "global_batch / step_time_s is 707.965"),
    ("MP640", "prediction.tokens_per_s", 81999.0, "no whole number"),
    ("MP640", "prediction.compute_s", 0.028, "add up to 55.2 ms"),
    ("MP640", "prediction.mfu", 0.5, "mfu is 0.5"),
    ("MP640", "prediction.model_flops", 1e12, "model_flops"),
    ("MP625", "prediction.price_per_step", -1.0, "price_per_step is -1.0"),
    ("MP640", f"{G0}.time.once_s", 0.1, "once_s is 100 ms"),
    ("MP640", f"{G0}.time.forward_communication_s", 0.1, "forward communication takes 100 ms"),
    ("MP640", f"{G0}.memory", lambda memory: saving(memory, GIB // 4), "in flight save"),
    ("MP640", f"{G0}.time.weight_s", 0.005, "weight gradients take 5 ms of backward's 4 ms"),
    ("MP641", f"{G0}.time.forward_s", 0.003, "step_time_s is 45.2 ms, the schedule with the stages"),
    ("MP641", f"{G1}.time.backward_s", 0.0, "the schedule with the stages' times and transfers takes"),
    ("MP641", "transfers.0.time_s", 5e-3, "transfers takes"),
    ("MP641", "prediction.step_time_s", 0.046, "step_time_s is 46 ms"),
    ("MP641", f"{G0}.time", lambda time: later(time, 1e-3), "the schedule with the stages"),
    ("MP641", "prediction.compute_s", 0.02, "compute_s is 20 ms, on the stage that ends the step it is 18 ms"),
    ("MP641", f"{G0}.time.backward_communication_s", 0.002, "casts"),
    ("MP640", f"{G0}.memory.limit_bytes", 81 * GIB, "limit_bytes is 81.00 GiB, the memory of Large-80GB is 80.00 GiB"),
]  # fmt: skip


@pytest.mark.parametrize(("code", "path", "value", "part"), BROKEN)
def test_a_broken_plan_is_found(code, path, value, part):
    plan = edit(tiny_plan(), path, value)
    findings = [finding for finding in check_plan(plan, tiny_cluster()) if finding.code == code]
    assert findings, check_plan(plan, tiny_cluster())
    assert any(part in finding.message for finding in findings), findings
    for finding in findings:
        assert finding.severity == RULE_BY_CODE[code].severity and finding.where


def test_dim_that_does_not_divide_names_sizes():
    plan = edit(tiny_plan(data=3, model=1, zero=1, microbatch_size=9), f"{G0}.microbatches", (0, 1, 2, 3))
    found = next(f for f in check_plan(plan, tiny_cluster()) if f.code == "MP607")
    for part in ("optimizer of parameter embedding/table", "dim 1 of size 64", "data=3", "remainder 1"):
        assert part in found.message
    assert "63 or 66" in found.hint and "split by 2" in found.hint


def test_memory_is_judged_by_the_cluster_at_hand():
    document = cluster_document()
    document["group"][1]["device"] = {**document["group"][1]["device"], "memory_bytes": 6 * GIB, "reserve_bytes": 0}
    findings = check_plan(tiny_plan(), parse_cluster(document, {}))
    assert [f.code for f in findings] == ["MP620", "MP600"]  # errors first
    assert "the memory of Small-32GB is 6.00 GiB" in findings[0].message


def test_missing_link():
    cluster = tiny_cluster()
    cut = msgspec.structs.replace(cluster, links=())
    found = [f for f in check_plan(tiny_plan(), cut) if f.code == "MP605"]
    assert len(found) == 1 and "no link between 'large' and 'small'" in found[0].message and "[[link]]" in found[0].hint


def test_groups_that_share_no_microbatch_need_no_link():
    plan = tiny_plan()
    cut = msgspec.structs.replace(tiny_cluster(), links=())
    plan = edit(edit(plan, f"{G0}.microbatches", (0, 1)), f"{G1}.microbatches", (2, 3))
    assert "MP605" not in {f.code for f in check_plan(plan, cut)}


def test_large_replicated_parameter():
    plan = edit(tiny_plan(zero=0), f"{G0}.parameters.0.shape", (1 << 20, 1 << 10))
    found = next(f for f in check_plan(plan, tiny_cluster()) if f.code == "MP623")
    assert found.severity == "warning" and "(4.00 GiB) is held 2 times, 2.00 GiB on each of 4 devices" in found.message
    assert "free 1.00 GiB" in found.hint


def test_tied_parameters():
    plan = tiny_plan(tied=True)
    cases = [
        (edit(plan, "tied.0.owner_stage", 5), "stage 5"),
        (edit(plan, "tied.0.other_stages", ()), "read by []"),
        (
            edit(plan, f"{G1}.parameters", lambda ps: tuple(p for p in ps if p.path != "embedding/table")),
            "does not hold it",
        ),
        (edit(plan, "tied", ()), "has no owner"),
    ]
    for broken, part in cases:
        assert any(f.code == "MP624" and part in f.message for f in check_plan(broken, tiny_cluster())), part


@pytest.mark.parametrize(
    ("code", "path", "value", "part"),
    [
        ("MP616", "transfers.0.links.0.from_group", 1, "between groups 1 and 0 of stages with 1 and 1"),
        ("MP616", "transfers.0.links.0.to_group", -1, "between groups 0 and -1"),
        ("MP616", "transfers.0.links", lambda links: links * 2, "two links between groups 0 and 0"),
        ("MP640", "transfers.0.time_s", 2e-3, "time_s is 2 ms, its slowest link takes 1.02 ms"),
        ("MP641", "transfers.0.links.0.gradient_s", 9e-3, "the schedule with the stages' times and transfers takes"),
    ],
)
def test_links_of_transfers(code, path, value, part):
    plan = with_own_step(with_uneven_transfers(tiny_plan()))
    assert check_plan(plan, tiny_cluster()) == ()
    found = [finding for finding in check_plan(edit(plan, path, value), tiny_cluster()) if finding.code == code]
    assert any(part in finding.message and finding.where for finding in found), found


def test_a_tied_parameter_has_its_own_bytes():
    plan = edit(tiny_plan(tied=True), "tied.0.bytes", 5)
    (found,) = check_plan(plan, tiny_cluster())
    assert found.code == "MP624" and "bytes is 5, the parameter has 262144" in found.message


def test_two_groups_of_a_stage():
    """A stage of a large and a small group that share its microbatches."""
    plan = tiny_plan(stages=1)
    group = plan.stages[0].groups[0]
    large = msgspec.structs.replace(group, microbatches=(0, 1, 2))
    small = msgspec.structs.replace(
        group, name="other", kind="Small-32GB", devices=tuple(f"small/0/{i}" for i in range(4)), microbatches=(3,),
        memory=msgspec.structs.replace(group.memory, limit_bytes=32 * GIB),
    )  # fmt: skip
    actors = plan.schedule.actors
    texts = ("0F0 0B0 0F1 0B1 0F2 0B2", "0F3 0B3")
    actors = tuple(msgspec.structs.replace(actors[0], group=at, actions=text) for at, text in enumerate(texts))
    plan = edit(edit(plan, "stages.0.groups", (large, small)), "schedule.actors", actors)
    plan = with_own_step(edit(plan, "prediction.mfu", 0.41 * 2 / 3))  # of the rates of both groups
    assert check_plan(plan, tiny_cluster()) == ()
    swapped = edit(plan, "stages.0.groups.1.microbatches", (2,))
    codes = {f.code for f in check_plan(swapped, tiny_cluster())}
    assert {"MP609", "MP615"} <= codes
    named = next(f for f in check_plan(edit(plan, "stages.0.groups.1.kind", "x"), tiny_cluster()) if f.code == "MP603")
    assert "stage 0 group 'other'" in named.message


def test_every_rule_is_broken_by_a_test():
    broken = {code for code, *_ in BROKEN} | {"MP605", "MP623", "MP624"}
    assert broken == {rule.code for rule in RULES if rule.code not in (*MODEL_RULES, *COMPILE_RULES)}


def test_findings_point_into_the_file():
    for code, path, value, _ in BROKEN:
        plan = edit(tiny_plan(), path, value)
        try:
            text = encode(plan).decode()
        except Exception:  # a NaN cannot be written
            continue
        wheres = tuple(f.where for f in check_plan(plan, tiny_cluster()) if f.code == code)
        assert all(line > 1 for line in find_lines(text, wheres)), (code, wheres)


def test_an_empty_plan_does_not_crash():
    transfer = Transfer(from_stage=0, to_stage=1, values=(), bytes=0, gradient_bytes=0, time_s=0.0)
    plan = edit(edit(edit(tiny_plan(), "stages", ()), "schedule.actors", ()), "transfers", (transfer,))
    assert {"MP606", "MP615", "MP616"} <= {f.code for f in check_plan(plan, tiny_cluster())}


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        ("float32", 4),
        ("bfloat16", 2),
        ("float8_e4m3fn", 1),
        ("int4", 1),
        ("bool", 1),
        ("complex64", 8),
        ("key<fry>", 8),
    ],
)
def test_itemsize(dtype, size):
    assert itemsize(dtype) == size


def test_rules_have_names_of_their_own():
    assert len({rule.name for rule in RULES}) == len({rule.code for rule in RULES}) == len(RULES)


def test_a_plan_without_classes_is_checked_for_strategies_too():
    plan = edit(edit(tiny_plan(), "model.block_classes", {}), f"{G1}.strategies", ())
    found = [f for f in check_plan(plan, tiny_cluster()) if f.code == "MP628"]
    assert len(found) == 1 and "stage 1 runs 3 blocks and has no strategy for any" in found[0].message


def test_figures_of_another_cluster_are_not_compared_with_this_one():
    document = cluster_document()
    document["group"][0]["device"] = {**document["group"][0]["device"], "peak_flops_per_s": {"float32": 1e12}}
    found = check_plan(tiny_plan(), parse_cluster(document, {}))
    assert {f.code for f in found} == {"MP600"}
