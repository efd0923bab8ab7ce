"""Where ranks run: emulated nodes where asked and possible, and each rank's place on them."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from syncline.cluster.capabilities import capabilities
from syncline.cluster.gpu import Mps, rank_environment
from syncline.cluster.nodes import Cluster, Node
from syncline.cluster.ranks import Place
from syncline.errors import UsageError
from syncline.train.config import Config, Train

_THIS_MACHINE = Node(index=0, address="127.0.0.1", interface="lo", netns="")


@contextmanager
def emulated(config: Config, *, servers: int = 0) -> Iterator[tuple[Cluster | None, str | None]]:
    """The emulated nodes, or none and the reason why."""
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
def shared_gpu(train: Train, world_size: int) -> Iterator[Mapping[str, str]]:
    """The variables by which so many ranks share a GPU at the same time; none where each has its own."""
    gpus = _gpus(train)
    if gpus and world_size > gpus:
        with Mps() as variables:
            yield variables
    else:
        yield {}


def places(
    config: Config, *, workers: int, servers: int, cluster: Cluster | None, variables: Mapping[str, str]
) -> list[Place]:
    """Workers node by node, aggregators on nodes of their own; `variables` come from `shared_gpu`."""
    world_size, gpus = workers + servers, _gpus(config.train)
    nodes = config.cluster.nodes or 1
    per_node = -(-workers // nodes)
    made = []
    for rank in range(world_size):
        index = rank // per_node if rank < workers else nodes + rank - workers
        node = cluster.nodes[index] if cluster is not None else _THIS_MACHINE
        environment = {**variables, "GLOO_SOCKET_IFNAME": node.interface}
        if gpus:
            environment |= rank_environment(rank, node, ranks_on_gpu=-(-world_size // gpus))
        made.append(
            Place(
                rank=rank,
                world_size=world_size,
                local_rank=rank,
                node=index if cluster is not None else 0,
                netns=node.netns or None,
                environment=environment,
            )
        )
    return made


def _gpus(train: Train) -> int:
    return torch.cuda.device_count() if train.device in ("auto", "cuda") else 0
