"""Flight-recorder dumps: the culprit of hangs and stragglers is named, on real dumps and on invented jobs."""

import json
import pickle

import pytest
from flight_jobs import FLIGHT, Job

from syncline.trace.analysis.flight import diagnose
from syncline.trace.formats.flight_read import dump_files, read_dumps

PAIRS = {"1": (0, 1), "2": (2, 3)}


def hang(*missing, backend="nccl", size=4096):
    """Five steps, then a call that some ranks do not make."""
    others = [rank for rank in range(4) if rank not in missing]
    return Job(backend).steps().call(size=size, ranks=others, state="started" if backend == "nccl" else "scheduled")


def skipped():
    job = Job().steps(2)
    job.call("broadcast", 7, ranks=[0, 1, 3])
    return job.call("all_gather", 9).call("all_reduce", 11, ranks=[0, 1, 2], state="started")


def one_more():
    job = Job().steps(2)
    job.add(1, "barrier", 1)
    return job.call("all_gather", 9).call("all_reduce", 11, state="started")


def other_order():
    job = Job().steps(2)
    for rank in range(4):
        for size in (30, 20) if rank == 3 else (20, 30):
            job.add(rank, size=size, state="started")
    return job


def differs(rank, **fields):
    job = Job().steps(2)
    for other in range(4):
        job.add(other, **({"state": "started"} | (fields if other == rank else {})))
    return job


def without_dump():
    job = hang(2)
    job.lost = (2,)
    return job


def not_started():
    job = Job().steps(3)
    for rank in range(4):
        job.add(rank, state="scheduled" if rank == 1 else "started")
    return job


def pair_hang(*, name=None):
    groups = PAIRS if name is None else {name: (2, 3)}
    job = Job(groups=groups).steps(3)
    for group in groups:
        job.call("all_gather", 8, group=group)
    job.call("all_gather", 8, group="2" if name is None else name, ranks=[2], state="started")
    return job


def chain():
    """Rank 3 is stuck in its own code; rank 2 waits for it in their pair, and the others wait for both."""
    job = pair_hang()
    return job.call(ranks=[0, 1], state="started")


def deadlock():
    """Two groups of the same two ranks, in the opposite order."""
    job = Job(world=2, groups={"1": (0, 1), "2": (0, 1)}).steps(2)
    job.add(0, group="1", state="started")
    job.add(1, group="2", state="started")
    return job


def message(op, rank):
    job = Job().steps(2)
    job.add(rank, op, 16, state="started")
    return job


def waiting_for_each_other(other):
    """Rank 0 receives from rank 1, which is in another call that needs rank 0."""
    job = Job(world=2).steps(2)
    job.add(0, "recv 0<-1", 16, state="started")
    job.add(1, other, 16, state="started")
    return job


def message_sizes():
    job = Job().steps(2)
    job.add(0, "send 0->1", 16, state="started")
    job.add(1, "recv 1<-0", 32, state="started")
    return job


def with_coalesced(*ops, p2p=False, end="ALLGATHER_coalesced", calls=3):
    """Coalesced calls that have ended: NCCL records that in an entry at the end; their parts stay `scheduled`."""
    job = Job().steps(2)
    for number in range(5, 5 + calls):
        for rank in range(4):
            for op in ops:
                job.add(rank, op.format(rank=rank, to=rank ^ 1), 10, state="scheduled", number=number)
            job.add(rank, end, 0, number=number, p2p=p2p)
    return job


def missing_after_coalesced():
    job = with_coalesced("all_gather_into_tensor", "all_gather_into_tensor")
    for rank in (0, 1, 3):
        job.add(rank, state="started", number=8)
    return job


def overwritten():
    """The buffer holds the last calls only, and not the same ones on all ranks."""
    job = hang(1)
    for rank, mine in job.entries.items():
        del mine[: 3 + rank]
    return job


def old_format():
    """torch 2.3 wrote `seq_id`."""
    job = hang(3)
    for mine in job.entries.values():
        for entry in mine:
            entry["seq_id"] = entry.pop("collective_seq_id")
    return job


def coalesced():
    """Two calls under one number; rank 0 never makes them."""
    job = Job().steps(3)
    for rank in (1, 2, 3):
        for size in (10, 20):
            job.add(rank, "reduce_scatter_tensor_coalesced", size, state="started", number=7)
    return job


def late(*ranks, backend="nccl", ms=8.0):
    return Job(backend).steps(8, late=dict.fromkeys(ranks, ms))


def sometimes_late(rank=0, every=2):
    job = Job().steps(2)
    for step in range(24):
        job.call(late={rank: 0.5 if step % every else 30.0})
    return job


# name: job, kind of the first finding, ranks to blame
CASES = {
    "rank 0 is missing": (lambda: hang(0), "missing", [0]),
    "the last rank is missing": (lambda: hang(3), "missing", [3]),
    "two ranks are missing": (lambda: hang(1, 2), "missing", [1, 2]),
    "a rank called nothing": (lambda: Job().call(ranks=[0, 2, 3], state="started"), "missing", [1]),
    "Gloo: a rank is missing": (lambda: hang(2, backend="gloo"), "missing", [2]),
    "a call is skipped": (skipped, "mismatch", [2]),
    "one call more": (one_more, "mismatch", [1]),
    "another order": (other_order, "mismatch", [3]),
    "another size": (lambda: differs(2, size=4095), "mismatch", [2]),
    "another type": (lambda: differs(0, dtype="Half"), "mismatch", [0]),
    "another operation": (lambda: differs(3, op="broadcast"), "mismatch", [3]),
    "no dump": (without_dump, "no dump", [2]),
    "the GPU did not start it": (not_started, "not started", [1]),
    "missing in a pair": (pair_hang, "missing", [3]),
    "missing in a mesh": (lambda: pair_hang(name="mesh_dp"), "missing", [3]),
    "a chain of waits": (chain, "missing", [3]),
    "two groups in opposite order": (deadlock, "deadlock", [0, 1]),
    "a send without its receive": (lambda: message("send 0->1", 0), "missing", [1]),
    "a receive without its send": (lambda: message("recv 2<-3", 2), "missing", [3]),
    "two receives that wait for each other": (lambda: waiting_for_each_other("recv 1<-0"), "deadlock", [0, 1]),
    "a receive against a collective": (lambda: waiting_for_each_other("all_reduce"), "deadlock", [0, 1]),
    "a send and a receive of different sizes": (message_sizes, "mismatch", [0, 1]),
    "missing after coalesced calls": (missing_after_coalesced, "missing", [2]),
    "the buffer was full": (overwritten, "missing", [1]),
    "dumps of torch 2.3": (old_format, "missing", [3]),
    "coalesced calls": (coalesced, "missing", [0]),
    "straggler": (lambda: late(2), "straggler", [2]),
    "rank 0 is the straggler": (lambda: late(0), "straggler", [0]),
    "Gloo: straggler": (lambda: late(1, backend="gloo"), "straggler", [1]),
    "two ranks late together": (lambda: late(2, 3), "straggler", [2, 3]),
    "late every second step": (sometimes_late, "straggler", [0]),
    "late every third step": (lambda: sometimes_late(3, 3), "straggler", [3]),
    "a small delay": (lambda: late(3, ms=2.0), "straggler", [3]),
}


def read(folder):
    return diagnose(read_dumps(dump_files(folder)))


@pytest.mark.parametrize("text", [False, True], ids=["pickle", "JSON"])
@pytest.mark.parametrize("name", CASES)
def test_the_culprit_is_named(tmp_path, name, text):
    make, kind, ranks = CASES[name]
    found = read(make().write(tmp_path, text=text))
    assert (found.findings[0].kind, list(found.culprits)) == (kind, ranks), found.sentence
    first = found.findings[0]
    assert all(f"{rank}" in found.sentence for rank in ranks)
    if kind != "straggler":
        assert first.op in found.sentence
        assert first.group in found.sentence
        assert first.sizes
    assert bool(first.frames) is not text, "where in the code; JSON does not say"
    json.dumps(found.as_json("x"), allow_nan=False)


@pytest.mark.parametrize(
    ("name", "said"),
    {
        "a call is skipped": "rank 2 has skipped that call",
        "one call more": "rank 1 has made one call more",
        "another order": "opposite order",
        "another size": "4,096 Float elements at train.py:31 (train_step) as number 5 of group 0",
        "a chain of waits": "rank 2 waits for it",
        "a rank called nothing": "rank 1 has called nothing in that group",
        "no dump": "rank 2 left no dump",
        "two groups in opposite order": "make these calls in the same order",
    }.items(),
)
def test_the_sentence_explains_it(tmp_path, name, said):
    assert said in read(CASES[name][0]().write(tmp_path)).sentence


def test_the_other_ranks_of_a_chain_are_not_blamed(tmp_path):
    found = read(chain().write(tmp_path))
    assert [finding.ranks for finding in found.findings] == [(3,), (3,)]
    assert found.findings[1].waiting == (0, 1)


@pytest.mark.parametrize(
    "job",
    [
        lambda: Job().steps(),
        lambda: Job("gloo").steps(),
        lambda: late(1, ms=0.0),
        lambda: Job(groups=PAIRS).steps(),
        lambda: with_coalesced("all_gather_into_tensor", "all_gather_into_tensor"),
        lambda: with_coalesced("send {rank}->{to}", "recv {rank}<-{to}", p2p=True, end="coalesced"),
    ],
)
def test_nobody_is_blamed_in_a_healthy_job(tmp_path, job):
    found = read(job().write(tmp_path))
    assert found.findings == ()
    assert found.sentence.startswith("no rank is missing or late")


def test_dumps_without_calls_are_not_called_healthy(tmp_path):
    assert read(Job().write(tmp_path)).sentence.startswith("nothing hangs, and the dumps hold no collectives")


def test_a_collective_that_all_ranks_have_joined_blames_nobody(tmp_path):
    found = read(Job().steps(1).call(state="started").write(tmp_path))
    assert [(one.kind, one.ranks) for one in found.findings] == [("not finished", ())]
    assert "the network is slow or broken" in found.sentence


def test_a_message_that_both_sides_have_called_blames_nobody(tmp_path):
    job = Job().steps(1)
    for rank, op in ((0, "send 0->1"), (0, "send 0->1"), (1, "recv 1<-0")):
        job.add(rank, op, 16, state="started")
    found = read(job.write(tmp_path))
    assert [(one.kind, one.ranks, one.waiting) for one in found.findings] == [("not finished", (), (0, 1))]
    assert "ranks 0 and 1 have both called send 0->1" in found.sentence


def test_a_receive_that_is_under_way_does_not_blame_the_sender(tmp_path):
    job = message("recv 1<-0", 1)
    job.add(0, "send 0->1", 16)
    assert read(job.write(tmp_path)).culprits == ()


@pytest.mark.parametrize("rank", [2, 0])
def test_a_clock_that_is_ahead_makes_no_straggler(tmp_path, rank):
    found = read(late(rank, ms=5000.0).write(tmp_path))
    assert found.findings == ()
    assert found.arrivals == ()
    assert f"the clock of rank {rank} is about 5e+03 ms ahead of the others" in found.notes[0]


def test_an_uneven_all_to_all_is_no_mismatch(tmp_path):
    job = Job().steps(1)
    for rank in range(4):
        job.add(rank, "all_to_all", 10 + rank)
    assert read(job.write(tmp_path)).findings == ()


def test_ranks_of_groups_with_one_name_are_separate_groups(tmp_path):
    """Groups of a mesh share a name: their calls must not be compared with one another."""
    job = Job(groups={"1": (0, 1)}).steps(1)
    for rank in (0, 1):
        job.add(rank, size=5, group="1")
    dumps = {rank: job.dump(rank) for rank in range(4)}
    for rank in (2, 3):
        other = Job(groups={"1": (2, 3)}).steps(1)
        other.add(rank, size=7, group="1")
        dumps[rank] = other.dump(rank)
    for rank, content in dumps.items():
        (tmp_path / f"dump_{rank}").write_bytes(pickle.dumps(content, protocol=2))
    assert read(tmp_path).findings == ()


def test_real_dumps_of_gloo():
    healthy, slow, stuck = (read(FLIGHT / f"gloo-{case}") for case in ("healthy", "late", "hang"))
    assert healthy.findings == ()
    assert (slow.findings[0].kind, slow.culprits) == ("straggler", (1,))
    assert (stuck.findings[0].kind, stuck.culprits, stuck.findings[0].waiting) == ("missing", (2,), (0, 1, 3))
    assert (stuck.findings[0].sequence, stuck.findings[0].sizes) == (7, ((64, 32),))
    assert [frame.name for frame in stuck.findings[0].frames] == ["train_step", "train", "<module>"]
    for found in (healthy, slow, stuck):
        assert any("only the order of arrival is known" in note for note in found.notes)


def test_real_dumps_of_nccl():
    """Of an H200. The first calls of each group take NCCL longer than the late rank is late."""
    healthy, slow, stuck = (read(FLIGHT / f"nccl-{case}") for case in ("healthy", "late", "hang"))
    assert healthy.findings == ()
    assert (slow.findings[0].kind, slow.culprits) == ("straggler", (1,))
    assert (stuck.findings[0].kind, stuck.culprits, stuck.findings[0].waiting) == ("missing", (2,), (0, 1, 3))
    assert (stuck.findings[0].sequence, stuck.findings[0].sizes) == (7, ((64, 32),))
    assert [frame.name for frame in stuck.findings[0].frames] == ["train_step", "train", "<module>"]
