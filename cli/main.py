"""The `meshplan` command. Subcommands are imported when they run, so that `--help` answers at once."""

import difflib
import logging
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import click

from cli.exitcodes import INTERRUPTED, MEANINGS, USAGE
from cli.failures import show_internal_error, show_plan_error, show_usage_error, wants_json
from costmodel.errors import PlanError

COMMANDS = {
    "plan": ("cli.plan", "Search the best plan of a model for a cluster."),
    "estimate": ("cli.estimate", "What a given configuration would take: step time, memory, throughput."),
    "explain": ("cli.explain", "Show what a plan does, what it costs and how good it is proven to be."),
    "simulate": ("cli.simulate", "Simulate a plan's step: timeline, memory, what if something is slow or fails."),
    "validate": ("cli.validate", "Check plans against clusters, without devices."),
    "run": ("cli.run", "Run steps of a plan on the attached devices."),
    "profile": ("cli.profile", "Measure the attached devices."),
    "cluster": ("cli.cluster", "Write or show cluster files."),
    "models": ("cli.models", "List built-in models, or show one."),
}


class MeshplanGroup(click.Group):
    """A group that loads commands late and reports every error in one style."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        return import_module(COMMANDS[cmd_name][0]).command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, help_text) for name, (_, help_text) in COMMANDS.items()])
        with formatter.section("Exit codes"):
            formatter.write_dl([(str(code), meaning) for code, meaning in MEANINGS.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if not name.startswith("-") and name not in COMMANDS and not ctx.resilient_parsing:
            near = difflib.get_close_matches(name, COMMANDS, 1)
            guess = f"did you mean {near[0]}?" if near else f"commands are {', '.join(COMMANDS)}"
            raise click.UsageError(f"no command {name!r}; {guess}", ctx)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        debug = ctx.params.get("debug", False)
        try:
            return super().invoke(ctx)
        except PlanError as error:
            if debug:
                traceback.print_exc()
            ctx.exit(show_plan_error(error, ctx))
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            ctx.exit(INTERRUPTED)
        except BrokenPipeError:
            raise
        except Exception as error:
            if debug:
                traceback.print_exc()
            ctx.exit(show_internal_error(error, ctx))

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        if not standalone_mode:
            return super().main(args, prog_name, complete_var, False, **extra)
        from cli.output import keep_stdout_clean

        keep_stdout_clean()
        try:
            code = super().main(args, prog_name or "meshplan", complete_var, False, **extra)
        except click.Abort:
            click.echo("interrupted", err=True)
            code = INTERRUPTED
        except click.ClickException as error:
            path = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "meshplan"
            given = sys.argv[1:] if args is None else args
            show_usage_error(error.format_message(), f"`{path} --help` lists what is understood", wants_json(given))
            code = USAGE
        sys.exit(code if isinstance(code, int) else 0)


def _show_version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        from importlib.metadata import PackageNotFoundError, version

        try:
            click.echo(f"meshplan {version('meshplan')}")
        except PackageNotFoundError:
            click.echo("meshplan (not installed)")
        ctx.exit()


@click.group("meshplan", cls=MeshplanGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--debug", is_flag=True, help="Show tracebacks of errors and debug logs.")
@click.option("-v", "--verbose", is_flag=True, help="Log what is done.")
@click.option(
    "--version", is_flag=True, expose_value=False, is_eager=True, callback=_show_version, help="Show the version."
)
def main(debug: bool, verbose: bool) -> None:
    """Compile a JAX training step and a cluster description into a parallel plan that is proven good and runs."""
    level = logging.DEBUG if debug else logging.INFO if verbose else logging.WARNING
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    for package in ("cli", "planner", "profiles", "costmodel"):
        logging.getLogger(package).setLevel(level)
