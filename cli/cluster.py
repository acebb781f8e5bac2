"""`meshplan cluster init`, `meshplan cluster show` and `meshplan cluster nodes`."""

import json

import click

from cli.options import json_option, output_option
from cli.output import emit, note


@click.group("cluster", short_help="Write or show cluster files.")
def command() -> None:
    """Write or show cluster files."""


@command.command("init", short_help="Write a cluster file of the attached devices.")
@click.option("--name", default="local", show_default=True, help="The cluster's name.")
@json_option
@output_option("the cluster file")
def init(name: str, as_json: bool, output: str | None) -> None:
    """Write a cluster file of the attached devices.

    Facts that are not known of a device are marked as assumed: replace them, or measure them with `meshplan profile`.
    With --json, the description that `cluster show --json` gives instead of a cluster file.
    """
    from profiles.cluster_files import render_cluster
    from profiles.devices import attached_cluster

    cluster = attached_cluster(name)
    if as_json:
        from planner.report.cluster import describe_cluster

        emit(json.dumps(describe_cluster(cluster), indent=1) + "\n", output)
    else:
        emit(render_cluster(cluster), output)
    note(f"{cluster.device_count} devices; links between them are assumed until measured")


@command.command("show", short_help="Show the groups, fabrics and links of a cluster file.")
@click.argument("cluster_file", metavar="FILE")
@json_option
@output_option("the description")
def show(cluster_file: str, as_json: bool, output: str | None) -> None:
    """Show the groups, fabrics and links of a cluster file, with what the file leaves out filled in."""
    from planner.report.cluster import describe_cluster, render_cluster_table
    from profiles.cluster_files import load_cluster

    cluster = load_cluster(cluster_file)
    if as_json:
        emit(json.dumps(describe_cluster(cluster), indent=1) + "\n", output)
    else:
        emit(render_cluster_table(cluster), output)


@command.command("nodes", short_help="List the node types that a cluster file can name.")
@json_option
@output_option("the list")
def nodes(as_json: bool, output: str | None) -> None:
    """List the node types that a cluster file can name: `node = "DGX-H100"` in a group."""
    from planner.report.cluster import describe_node_types, render_node_types
    from profiles.node_types import load_node_types

    known = load_node_types()
    emit(json.dumps(describe_node_types(known), indent=1) + "\n" if as_json else render_node_types(known), output)
