"""`syncline cluster`: run a command on emulated nodes, or measure their links."""

import json
from itertools import permutations
from typing import Annotated

import typer

from syncline.cli.app import new_app
from syncline.cluster.measure import measure_bandwidth
from syncline.cluster.nodes import Cluster
from syncline.cluster.privileges import ensure_privileges
from syncline.cluster.quantities import format_bandwidth
from syncline.cluster.run import run_on_nodes
from syncline.errors import UsageError

app = new_app()


# The first word that is no option begins the command; what follows are the command's own options.
@app.command(context_settings={"allow_extra_args": True, "allow_interspersed_args": False})
def cluster(
    context: typer.Context,
    nodes: Annotated[int, typer.Option(help="Number of nodes to emulate.")] = 4,
    bandwidth: Annotated[
        str | None,
        typer.Option(help="Bandwidth of each node's link in each direction: 1Gbit, 100Mbit. Default: no limit."),
    ] = None,
    latency: Annotated[str | None, typer.Option(help="One-way latency between two nodes: 5ms (needs netem).")] = None,
    loss: Annotated[str | None, typer.Option(help="Share of packets lost: 0.1% (needs netem).")] = None,
    nproc_per_node: Annotated[int, typer.Option(help="Number of processes of the command on each node.")] = 1,
    measure: Annotated[bool, typer.Option("--measure", help="Measure every link first.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the measurements as JSON.")] = False,
) -> None:
    """Run a command on emulated nodes of this machine: syncline cluster --nodes 4 --bandwidth 1Gbit -- CMD.

    The command runs once on each node, with RANK, WORLD_SIZE, NODE_RANK, MASTER_ADDR, MASTER_PORT and the rest of
    the rendezvous environment set. The first failure stops the others and gives the exit code.
    """
    command = list(context.args)
    if not command and not measure:
        raise UsageError("nothing to do: write a command after '--', or ask for --measure")
    if measure and nodes < 2:
        raise UsageError("there is no link to measure on one node: choose --nodes 2 or more")
    ensure_privileges(reexec=True)
    with Cluster(nodes, bandwidth=bandwidth, latency=latency, loss=loss) as running:
        if measure:
            _measure(running, as_json=as_json)
        if command:
            raise typer.Exit(run_on_nodes(running, command, nproc_per_node=nproc_per_node))


def _measure(running: Cluster, *, as_json: bool) -> None:
    links = []
    for source, target in permutations(range(len(running.nodes)), 2):
        bits = measure_bandwidth(running, source=source, target=target, seconds=0.5)
        links.append({"source": source, "target": target, "bits_per_second": round(bits)})
        if not as_json:
            print(f"node {source} -> node {target}: {format_bandwidth(bits)}", flush=True)
    if as_json:
        print(json.dumps({"asked": running.bandwidth, "links": links}), flush=True)
