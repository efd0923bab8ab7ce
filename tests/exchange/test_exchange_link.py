"""Links: many launches open at once, driven by threads in another order on every rank; subgroups; futures."""

import random
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist

from ranks import run_ranks
from syncline import codecs, exchange
from syncline.codecs import Mean, Merge
from syncline.codecs.algorithms.int8 import coder

OPEN = 12
NAMES = ("ring", "sharded", "hierarchical", "gather-scatter", "allgather", "allreduce")


def values(number: int, rank: int) -> torch.Tensor:
    return torch.randn(50 + number, generator=torch.Generator().manual_seed(10 * number + rank))


def request(number: int, rank: int, name: str) -> codecs.Request:
    return Mean(values(number, rank)) if name == "allreduce" else Merge(values(number, rank), coder(block=16))


def many_at_once(rank: int, world: int) -> list[list[float]]:
    results = []
    for name in NAMES:
        link = exchange.connect(name)
        handles = [link.launch(request(number, rank, name)) for number in range(OPEN)]
        order = list(range(OPEN))
        random.Random(rank).shuffle(order)
        with ThreadPoolExecutor(OPEN) as pool:
            waits = {number: pool.submit(handles[number].wait) for number in order}
            answers = [waits[number].result() for number in range(OPEN)]
        assert all(handle.done for handle in handles)
        results.append([float(getattr(a, "mean", a).sum() if name != "allreduce" else a.sum()) for a in answers])
    return results


def test_launches_finish_in_any_order() -> None:
    ranks = run_ranks(many_at_once, 3)
    assert ranks[0] == ranks[1] == ranks[2]
    for name, sums in zip(NAMES, ranks[0], strict=True):
        for number, got in enumerate(sums):
            answers, _ = exchange.emulate(name)([request(number, rank, name) for rank in range(3)])
            want = answers[0].sum() if name == "allreduce" else answers[0].mean.sum()
            assert abs(got - float(want)) < 1e-3, (name, number)


def several_links(rank: int, world: int) -> list[float]:
    links = [exchange.connect(name) for name in ("ring", "sharded", "gather-scatter")]
    handles = [link.launch(request(number, rank, "ring")) for number in range(4) for link in links]
    order = list(range(len(handles)))
    random.Random(rank).shuffle(order)
    with ThreadPoolExecutor(len(handles)) as pool:
        waits = {i: pool.submit(handles[i].wait) for i in order}
        return [float(waits[i].result().mean.sum()) for i in range(len(handles))]


def test_links_on_one_group_do_not_mix_up_messages() -> None:
    ranks = run_ranks(several_links, 2)
    assert ranks[0] == ranks[1]


def in_a_subgroup(rank: int, world: int) -> tuple[list[float], int]:
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    link = exchange.connect("ring", groups[rank % 2])
    return link.ask(Mean(torch.full((4,), float(rank)))).tolist(), link.sent_bytes


def test_a_subgroup_has_places_of_its_own() -> None:
    ranks = run_ranks(in_a_subgroup, 4)
    assert [r[0] for r in ranks] == [[1.0] * 4, [2.0] * 4, [1.0] * 4, [2.0] * 4]
    assert all(r[1] == 16 for r in ranks)


def futures(rank: int, world: int) -> tuple[bool, bool, bool]:
    reduce, ring = exchange.connect("allreduce"), exchange.connect("ring")
    handle = reduce.launch(Mean(torch.ones(8)))
    future = handle.future()
    assert future is not None
    future.wait()
    ended = handle.advance()
    other = ring.launch(Mean(torch.ones(8)))
    none = other.future() is None
    return ended, none, bool((other.wait() == handle.wait()).all())


def test_futures_where_the_backend_has_them() -> None:
    assert run_ranks(futures, 2) == [(True, True, True)] * 2


def test_the_input_is_not_written_to() -> None:
    for name in exchange.available():
        x = [torch.ones(6), torch.zeros(6)]
        exchange.emulate(name)([Mean(t) for t in x])
        assert torch.equal(x[0], torch.ones(6)), name
        assert torch.equal(x[1], torch.zeros(6)), name
