"""Bad input: a code, a sentence, a hint, the right exit code, and never a traceback (`call` looks for that)."""

import json

import pytest

from planner.planfile.codec import encode
from tests.plans import tiny_plan

GOOD = encode(tiny_plan()).decode()
PLANS = {
    "cut": (GOOD[:700], "MP151"),
    "empty": ("", "MP151"),
    "text": ("hello", "MP151"),
    "list": ("[]", "MP152"),
    "unknown field": (GOOD.replace('"microbatches": 4,', '"microbatches": 4, "pipline": 1,', 1), "MP152"),
    "missing field": (GOOD.replace('"microbatch_size": 8,', "", 1), "MP152"),
    "wrong type": (GOOD.replace('"global_batch": 32', '"global_batch": "32"'), "MP152"),
    "newer": (GOOD.replace('"schema_version": 1', '"schema_version": 7'), "MP153"),
    "a cluster": ('name = "x"', "MP151"),
}


@pytest.mark.parametrize("kind", PLANS)
@pytest.mark.parametrize("command", ["explain", "validate", "run"])
def test_bad_plan_files(call, tmp_path, kind, command):
    text, code = PLANS[kind]
    (tmp_path / "bad.plan.json").write_text(text)
    args = ["--cluster", "mixed.toml"] if command == "validate" else []
    done = call(command, "bad.plan.json", *args)
    assert done.code == 2 and code in done.out + done.err and "bad.plan.json" in done.out + done.err
    assert "hint:" in done.out + done.err


@pytest.mark.parametrize(
    "args",
    [
        ["explain", "none.json"],
        ["explain", "."],
        ["run", "none.json"],
        ["validate", "good.plan.json", "--cluster", "none.toml"],
        ["cluster", "show", "none.toml"],
        ["cluster", "show", "."],
        ["plan", "--model", "gpt2", "--global-batch", "8", "--cluster", "none.toml"],
        ["models", "gpt5"],
        ["models", "gpt2(hiden=3)"],
        ["models", "none.json"],
        ["models", "none.py:task"],
    ],
)
def test_missing_or_unknown(call, args):
    done = call(*args)
    assert done.code == 2 and done.err.startswith("error MP1") and "hint:" in done.err and not done.out


@pytest.mark.parametrize(
    ("text", "code", "part"),
    [
        ("name = ", "MP130", "bad.toml"),
        ('name = "x"\n', "MP131", "group"),
        ('name = "x"\n[[group]]\nname = "g"\nnodes = 1\ndevice = "H100-SXM9"\ndevices_per_node = 8\n', "MP132", "H100"),
        ('name = "x"\n[[group]]\nname = "g"\nnodes = 0\ndevice = "T4"\ndevices_per_node = 8\n', "MP13", ""),
        ('name = "x"\n[[group]]\nname = "g"\nnode = 1\ndevice = "T4"\ndevices_per_node = 8\n', "MP131", "nodes"),
    ],
)
def test_bad_cluster_files(call, tmp_path, text, code, part):
    (tmp_path / "bad.toml").write_text(text)
    for args in (["cluster", "show", "bad.toml"], ["validate", "good.plan.json", "--cluster", "bad.toml"]):
        done = call(*args)
        assert done.code == 2 and f"error {code}" in done.err and part in done.err


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (["plann"], "did you mean plan?"),
        (["xyzzy"], "commands are plan, estimate, explain"),
        (["--bogus"], "No such option"),
        (["explain"], "Missing argument"),
        (["explain", "good.plan.json", "--htm"], "--html"),
        (["explain", "good.plan.json", "extra"], "extra"),
        (["validate", "good.plan.json"], "--cluster"),
        (["validate", "--cluster", "mixed.toml"], "PLAN"),
        (["validate", "good.plan.json", "--cluster", "mixed.toml", "--format", "xml"], "junit"),
        (["plan", "--global-batch", "8"], "--model"),
        (["plan", "--model", "gpt2"], "--global-batch"),
        (["plan", "--model", "gpt2", "--global-batch", "0"], "--global-batch"),
        (["plan", "--model", "gpt2", "--global-batch", "8", "--schedule", "2f2b"], "gpipe"),
        (["run", "good.plan.json", "--steps", "0"], "--steps"),
        (["profile", "extra"], "extra"),
        (["profile", "-o", "x", "--budget", "soon"], "90s"),
        (["profile", "-o", "x", "--budget", "0"], "90s"),
        (["cluster"], ""),
        (["cluster", "destroy"], "destroy"),
    ],
)
def test_usage(call, args, part):
    done = call(*args)
    assert done.code in (0, 2) if args == ["cluster"] else done.code == 2
    assert part in done.err + done.out
    if args != ["cluster"]:
        assert done.err.startswith("error MP100: ") and "--help` lists" in done.err


ESTIMATE = ["estimate", "--model", "gpt2", "--global-batch", "8", "--cluster", "mixed.toml", "--strategy"]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["simulate", "good.plan.json", "--seed", "3"], "--seed changes nothing: it is the seed of --jitter"),
        (["simulate", "good.plan.json", "--seed", "3", "--jitter", "0"], "--seed changes nothing"),
        ([*ESTIMATE, "dp=2", "--compile-timeout", "9s"], "--compile-timeout changes nothing"),
        ([*ESTIMATE, "dp=2,stack=selene", "--stack", "vtrain"], "--stack changes nothing: every strategy names"),
        (
            ["validate", "good.plan.json", "--cluster", "mixed.toml", "--compile-timeout", "10m"],
            "--compile-timeout changes nothing: nothing is compiled without --compile",
        ),
        (["validate", "good.plan.json", "--cluster", "mixed.toml", "--seq", "8"], "--seq changes nothing"),
        (
            ["validate", "good.plan.json", "--cluster", "mixed.toml", "--json", "--format", "text"],
            "--json and --format text were both given",
        ),
        (["models", "--seq", "8"], "--seq changes nothing: the list has each model with its own"),
        (["profile", "--seq", "8", "-o", "x"], "--seq changes nothing: without --model"),
        (["profile", "--microbatch", "1", "-o", "x"], "--microbatch changes nothing: without --model"),
        (["profile", "--budget", "9s", "--json", "show", "x"], "--budget, --json before 'show'"),
    ],
)
def test_options_that_change_nothing_are_refused(call, args, said):
    done = call(*args)
    assert done.code == 2 and done.err.startswith("error MP100: ") and said in " ".join(done.err.split())


def test_options_that_change_something_are_not(call):
    assert call("simulate", "good.plan.json", "--seed", "3", "--jitter", "5%").code == 0
    assert call("validate", "good.plan.json", "--cluster", "mixed.toml", "--json", "--format", "json").code == 0


def test_errors_are_documents_too_with_json(call):
    done = call("explain", "none.json", "--json")
    assert done.code == 2
    error = json.loads(done.out)["error"]
    assert error["code"] == "MP150" and error["exit_code"] == 2 and error["hint"]


@pytest.mark.parametrize(
    "args",
    [
        ["plann", "--json"],
        ["plan", "--bogus", "--json"],
        ["plan", "--json", "--model", "gpt2", "--global-batch", "0"],
        ["explain", "--json"],
        ["validate", "--format", "json"],
        ["validate", "--format=json", "good.plan.json"],
        ["run", "--json", "good.plan.json", "--steps", "1.5"],
    ],
)
def test_usage_errors_are_documents_too_with_json(call, args):
    done = call(*args)
    assert done.code == 2 and done.err.startswith("error MP100: ")
    error = json.loads(done.out)["error"]
    assert error["code"] == "MP100" and error["exit_code"] == 2 and error["hint"] and error["message"] in done.err + " "


def test_usage_errors_are_text_alone_without_json(call):
    assert not call("plan", "--bogus").out
    assert not call("explain", "--bogus", "--", "--json").out


@pytest.mark.parametrize("count", ["0", "-1", "1.5", "x", "", "1" + "0" * 30])
def test_counts(call, count):
    done = call("run", "good.plan.json", "--steps", count)
    assert done.code == 2 and f"'{count}' is not a whole number of at least 1" in " ".join(done.err.split())


@pytest.mark.parametrize(
    "args",
    [
        ["plan", "--model", "none.py:task", "--global-batch", "8"],
        ["explain", "none.plan.json"],
        ["validate", "none.plan.json", "--cluster", "none.toml"],
        ["profile", "--model", "none.py:task"],
        ["cluster", "init"],
        ["cluster", "show", "none.toml"],
        ["models", "none"],
        ["simulate", "none.plan.json"],
    ],
)
@pytest.mark.parametrize("place", ["no/such/folder/x", ".", "good.plan.json/x", ""])
def test_a_place_that_cannot_be_written_is_found_before_anything_else(call, args, place):
    done = call(*args, "-o", place, *(["--json"] if args[0] != "validate" else []))
    assert done.code == 2 and done.err.startswith("error MP156: cannot write "), done.err
    assert args[0] == "validate" or json.loads(done.out)["error"]["code"] == "MP156"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("m.py:mlp:x", "MP124: 'm.py:mlp:x' is not path.py:function"),
        ("m.py:", "MP124: m.py: names no function"),
        (":", "MP120: ':' names no model"),
        ("", "MP120: '' names no model"),
        ("gpt(hidden=12,hidden=24,layers=1,heads=1,vocab=8,seq=8)", "MP121: hidden= is given twice"),
    ],
)
def test_texts_that_name_no_model(call, spec, message):
    done = call("models", spec)
    assert done.code == 2 and message in done.err and done.err.count("hint:") == 1


def test_a_task_says_itself_what_is_wrong_with_it(call, tmp_path):
    (tmp_path / "own.py").write_text(
        "import jax.numpy as jnp, optax, planner\n"
        "def task():\n"
        "    batch = {'x': jnp.zeros((3, 2)), 'y': jnp.zeros(4)}\n"
        "    return planner.TrainingTask(lambda p, b: 0.0, params={}, batch=batch, optimizer=optax.sgd(1.0))\n"
    )
    done = call("models", "own.py:task")
    assert done.code == 2 and done.err.startswith("error MP111: own.py:4: batch leaves disagree on the batch size")
    assert done.err.count("hint:") == 1 and "MP124" not in done.err
