"""The placement of ranks: emulated nodes where asked and possible, GPU sharing, and each rank's node."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from syncline.cluster.capabilities import capabilities
from syncline.cluster.gpu import mps_daemon, rank_environment
from syncline.cluster.nodes import Cluster, Node
from syncline.cluster.ranks import Place
from syncline.errors import UsageError
from syncline.train.config import Config, Train
from syncline.train.rank.worker import RunSpec

_THIS_MACHINE = Node(index=0, address="127.0.0.1", interface="lo", netns="")


@contextmanager
def emulated_cluster(config: Config, *, servers: int = 0) -> Iterator[tuple[Cluster | None, str | None]]:
    """The emulated nodes, or None; the second value is the reason why nodes that were asked for are missing."""
    asked = config.cluster
    if not asked.nodes:
        if asked.bandwidth or asked.latency or asked.loss:
            raise UsageError("--bandwidth, latency and loss shape the links between nodes: add --nodes N")
        yield None, None
        return
    able = capabilities()
    if not able.can_namespaces:
        yield None, f"nodes cannot be emulated here ({able.why}): plain local ranks, unshaped network"
        return
    with Cluster(
        asked.nodes + servers,
        bandwidth=asked.bandwidth or None,
        latency=asked.latency or None,
        loss=asked.loss or None,
    ) as cluster:
        yield cluster, None


@contextmanager
def shared_gpu_environment(train: Train, world_size: int) -> Iterator[Mapping[str, str]]:
    """Environment variables that let ranks use one GPU at the same time; empty where each rank has its own GPU."""
    gpus = _gpus(train)
    if gpus and world_size > gpus:
        with mps_daemon() as variables:
            yield variables
    else:
        yield {}


def place_ranks(config: Config, run: RunSpec, *, cluster: Cluster | None, variables: Mapping[str, str]) -> list[Place]:
    """Workers node by node, aggregators on nodes of their own; `variables` come from `shared_gpu_environment`."""
    gpus, nodes = _gpus(config.train), config.cluster.nodes or 1
    per_node = -(-run.workers // nodes)
    places = []
    for rank in range(run.ranks):
        index = rank // per_node if rank < run.workers else nodes + rank - run.workers
        node = cluster.nodes[index] if cluster is not None else _THIS_MACHINE
        environment = {**variables, "GLOO_SOCKET_IFNAME": node.interface}
        if gpus:
            environment |= rank_environment(rank, node, ranks_on_gpu=-(-run.ranks // gpus))
        netns = node.netns or None
        places.append(Place(rank, run.ranks, rank, node=node.index, netns=netns, environment=environment))
    return places


def _gpus(train: Train) -> int:
    return torch.cuda.device_count() if train.device in ("auto", "cuda") else 0
