"""`meshplan estimate`: what given configurations would take."""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import click

from cli.exitcodes import FINDINGS, OK
from cli.failures import JSON_WANTED, error_document, show_error, wants_json
from cli.fake_devices import look_for_no_accelerator
from cli.options import COUNT, DURATION, json_option, model_option, output_option, require_effect
from cli.output import emit, emit_report, note, progress
from costmodel.errors import PlanError

if TYPE_CHECKING:
    from costmodel.cluster import Cluster
    from planner.compile_check import CompiledGroup
    from planner.estimating import Estimate
    from planner.planfile.schema import Finding

T = TypeVar("T")

_EXAMPLE = "dp=8,tp=8,pp=4,microbatch=1,remat=full,zero=1,sp=on"


class _Command(click.Command):
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[JSON_WANTED] = wants_json(args)  # known to --list-stacks, wherever --json stands
        return super().parse_args(ctx, args)


@click.command(
    "estimate", cls=_Command, short_help="What a given configuration would take: step time, memory, throughput."
)
@model_option("What to train", required=True)
@click.option("--seq", type=COUNT, help="Sequence length instead of the model's own.")
@click.option("--cluster", metavar="FILE", help="Cluster file. Default: the attached devices.")
@click.option("--global-batch", type=COUNT, required=True, help="Examples in one step.")
@click.option(
    "--strategy",
    "strategies",
    metavar="TEXT",
    multiple=True,
    required=True,
    help=f"The configuration, such as {_EXAMPLE}; repeat to compare.",
)
@click.option("--profile", metavar="FILE", help="Profile to take costs from.")
@click.option("--layer-model", metavar="NAME", help="Whose layer times to take, where the profile has several models'.")
@click.option(
    "--stack",
    metavar="NAME",
    help="Software stack: a shipped one (--list-stacks) or a document of constants. Default: meshplan's own programs.",
)
@click.option(
    "--list-stacks",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=lambda ctx, param, value: _list(ctx, value),
    help="Name the shipped stacks and what they were fitted on.",
)
@click.option(
    "--compile",
    "compiling",
    is_flag=True,
    help="Ask the compilers of the device kinds, which need not be attached.",
)
@click.option(
    "--compile-timeout", type=DURATION, default="10m", show_default=True, help="Wall time of one program's compilation."
)
@json_option
@output_option("the report")
def command(
    model: str,
    seq: int | None,
    cluster: str | None,
    global_batch: int,
    strategies: tuple[str, ...],
    profile: str | None,
    layer_model: str | None,
    stack: str | None,
    compiling: bool,
    compile_timeout: float,
    as_json: bool,
    output: str | None,
) -> int:
    """What given configurations would take, from the planner's own costs: step time with its error bar, memory of each
    stage, throughput. Exits with 1 if none of them fits its devices. Of several strategies, one that cannot be
    estimated is said on stderr and in the exit code; the others are shown.

    With --compile each strategy is planned and its programs are compiled for their own device kinds: memory and
    collectives are then also the compiler's.
    """
    require_effect("compile_timeout", compiling, "nothing is compiled without --compile")
    look_for_no_accelerator()
    import planner
    from planner.report.estimate import HEADINGS, render_comparison, render_estimate
    from planner.strategy.constants import STACK

    asked = [_Asked(text, alone=len(strategies) == 1) for text in strategies]
    with_own = [STACK in (one.attempt(lambda one=one: one.constants) or ()) for one in asked]
    require_effect("stack", not all(with_own), "every strategy names a stack of its own")
    if cluster is not None:
        target = planner.load_cluster(cluster)
    else:
        from profiles.devices import attached_cluster

        target = attached_cluster()
        note(f"no --cluster: estimating for the {target.device_count} attached devices")
    estimator = planner.Estimator(
        model=model, cluster=target, profile=profile, stack=stack, sequence=seq, layer_model=layer_model
    )
    for one in asked:
        one.estimate = one.attempt(lambda text=one.text: estimator(text, global_batch))
    if compiling:
        _compile(asked, model, target, global_batch, profile, seq, compile_timeout)
    if as_json:
        documents = [one.document() for one in asked]
        emit(json.dumps(documents[0] if len(documents) == 1 else documents, indent=1) + "\n", output)
    else:
        found = [(one.estimate, one.compiled, one.said, one.constants) for one in asked if one.estimate is not None]
        if len(asked) == 1:
            emit_report(render_estimate(*found[0][:3]), output, HEADINGS)
        elif found:
            emit_report(render_comparison(*zip(*found, strict=True)), output, HEADINGS)
    errors = [one.error for one in asked if one.error is not None]
    if errors:
        return errors[0].exit_code
    return OK if any(one.fits for one in asked) else FINDINGS


@dataclass
class _Asked:
    """One --strategy and what came of it.

    Attributes:
        alone: whether it is the only one.
    """

    text: str
    alone: bool
    estimate: "Estimate | None" = None
    compiled: "tuple[CompiledGroup, ...]" = ()
    said: "tuple[Finding, ...]" = ()
    error: PlanError | None = None

    @property
    def fits(self) -> bool:
        """Whether its devices have the memory, by the estimate and by compilers where they were asked."""
        refused = any(finding.severity == "error" for finding in self.said)
        return self.estimate is not None and self.estimate.fits and not refused

    @property
    def constants(self) -> dict[str, Any]:
        """Of the software stack, as they were given among the strategy."""
        from planner.strategy.constants import split_constants

        return split_constants(self.text)[1]

    @property
    def own(self) -> str:
        """The strategy without them: no plan knows them."""
        from planner.strategy.constants import split_constants

        return str(split_constants(self.text)[0])

    def attempt(self, step: Callable[[], T]) -> T | None:
        """What a step returns; None if it or one before has failed. An error is shown and kept, so that other
        strategies go on; that of a single one without any result is raised.
        """
        if self.error is not None:
            return None
        try:
            return step()
        except PlanError as error:
            if self.alone and self.estimate is None:
                raise
            self.error = error
            where = "" if self.alone else f"strategy {self.text!r}: "
            show_error(error.code, f"{where}{error.message}", error.hint)
            return None

    def document(self) -> dict[str, Any]:
        from planner.report.estimate import document

        found = {"given": self.text} if self.estimate is None else document(self.estimate, self.compiled, self.said)
        if self.error is not None:
            found |= error_document(self.error.code, self.error.message, self.error.hint, self.error.exit_code)
        return found


def _compile(
    asked: Sequence[_Asked],
    model: str,
    cluster: "Cluster",
    global_batch: int,
    profile: str | None,
    seq: int | None,
    timeout_s: float,
) -> None:
    """Has the plans compiled that strategies name. What cannot be planned is said before any is compiled."""
    from planner.api import strategy_pins

    for one in asked:
        one.attempt(lambda one=one: strategy_pins(one.own, cluster, global_batch))
    for one in asked:
        found = one.attempt(lambda one=one: _compiled(model, cluster, global_batch, one, profile, seq, timeout_s))
        one.compiled, one.said = found or ((), ())


def _compiled(
    model: str,
    cluster: "Cluster",
    global_batch: int,
    asked: _Asked,
    profile: str | None,
    seq: int | None,
    timeout_s: float,
) -> "tuple[tuple[CompiledGroup, ...], tuple[Finding, ...]]":
    """What compilers say of the plan that a strategy names, and what is wrong with its figures."""
    import planner
    from planner.compile_check import compile_groups
    from planner.compile_findings import estimate_findings
    from profiles.compiled.oracle import Limits, default_oracle
    from profiles.constants import COMPILED

    task = planner.load_task(model, seq)
    oracle = default_oracle(os.environ, limits=Limits(time_s=timeout_s))
    with progress() as report:
        plan = planner.plan(
            task,
            cluster=cluster,
            global_batch=global_batch,
            strategy=asked.own,
            profile=profile,
            baselines=False,
            progress=report,
        )
        kinds = {group.device.name: group.device for group in cluster.groups}
        groups = compile_groups(plan, task, kinds=kinds, oracle=oracle, progress=report)
    estimate = asked.estimate
    own = estimate is not None and estimate.stack == COMPILED.name and not asked.constants
    return groups, estimate_findings(plan, groups, estimate.memory.stages if own else ())


def _list(ctx: click.Context, wanted: bool) -> None:
    if not wanted or ctx.resilient_parsing:
        return
    from profiles.constants import shipped_stacks

    stacks = shipped_stacks()
    if ctx.meta.get(JSON_WANTED):
        import msgspec

        click.echo(json.dumps([msgspec.to_builtins(stack) for stack in stacks.values()], indent=1))
    else:
        for name, stack in stacks.items():
            click.echo(f"{name}: {stack.fitted_on or 'assumed constants'}")
    ctx.exit()
