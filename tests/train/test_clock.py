from unittest import mock

from ranks import run_ranks
from syncline.trace.merge.clocks import Clock, host_id
from syncline.train.rank.join import ClockMeasurement


def _run(rank, world_size):
    clock = ClockMeasurement(timeout_s=60)
    return host_id(), clock.finish()


def test_ranks_of_one_machine_read_one_clock_and_measure_it_all_the_same():
    (here, zero), (there, other) = run_ranks(_run, 2)
    assert here == there == host_id()
    assert zero == Clock()
    clock = other
    assert abs(clock.offset) <= clock.error
    assert clock.error > 0
    assert clock.at > 0


def _run_beside_nccl(rank, world_size):
    with mock.patch("syncline.train.rank.join.dist.get_backend", return_value="nccl"):
        clock = ClockMeasurement(timeout_s=60)
    return clock._group is not None, clock.finish()


def test_where_the_ranks_group_is_not_gloo_another_one_is_made():
    _, (made, other) = run_ranks(_run_beside_nccl, 2)
    assert made
    assert other.error > 0


def test_a_rank_that_is_alone_has_no_clock_to_compare():
    assert ClockMeasurement(timeout_s=60).finish() is None


def test_another_boot_or_time_namespace_is_another_clock(tmp_path, monkeypatch):
    before = host_id()
    (tmp_path / "boot").write_text("other\n")
    monkeypatch.setattr("syncline.trace.merge.clocks.BOOT_ID", tmp_path / "boot")
    assert host_id() != before
    monkeypatch.setattr("syncline.trace.merge.clocks.TIME_NAMESPACE", tmp_path / "none")
    assert host_id() == "other"
    monkeypatch.setattr("syncline.trace.merge.clocks.BOOT_ID", tmp_path / "none")
    assert host_id() not in (before, "other"), "it does not tell: every process for itself"
