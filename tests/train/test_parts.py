"""The small parts around the loop: samples, settings, counters, the run folder's figures."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from syncline.errors import UsageError
from syncline.trace import Span
from syncline.trace.merge.clocks import Clock
from syncline.trace.merge.merge_ranks import Part, merge
from syncline.train.checkpoint.history import History
from syncline.train.config import Config, load_recipe, parse_settings, recipes
from syncline.train.data.sampler import Sampler
from syncline.train.rank import network_counters
from syncline.train.rank.network_counters import NetworkBytes, StepTraffic, read_counters
from syncline.train.rank.record import RankRecord
from syncline.train.session.assemble import assemble
from syncline.train.session.machine import busy_share
from syncline.train.session.runs import list_runs
from syncline.train.strategies import Traffic

COST = {"dropped": 0, "overhead_ns_per_step": 5.0}
SERVERS = ("ddp", "server(servers=2, part_mb=1)")


@given(st.integers(1, 5), st.integers(1, 6), st.integers(0, 3), st.integers(0, 40))
def test_ranks_share_the_global_batch_and_every_world_size_sees_the_same(workers, share, seed, step):
    batch, length = workers * share, 97
    whole = Sampler(length, batch=batch, seed=seed)(step)[1]
    parts = [Sampler(length, batch=batch, seed=seed, rank=r, workers=workers)(step)[1] for r in range(workers)]
    assert torch.equal(torch.cat(parts), whole)
    assert len(set(whole.tolist())) == batch, "disjoint"


def test_a_pass_visits_every_sample_once_and_the_next_in_another_order():
    sampler = Sampler(12, batch=4, seed=1)
    first = torch.cat([sampler(step)[1] for step in range(3)])
    second = torch.cat([sampler(step)[1] for step in range(3, 6)])
    assert sorted(first.tolist()) == sorted(second.tolist()) == list(range(12))
    assert not torch.equal(first, second)
    assert sampler(5)[0] == 1


def test_batches_that_cannot_be_cut():
    with pytest.raises(UsageError, match="use --batch 9"):
        Sampler(100, batch=10, seed=0, workers=3)
    with pytest.raises(UsageError, match="larger than the data set"):
        Sampler(5, batch=6, seed=0)


def test_recipes_load_and_every_strategy_in_them_exists():
    assert {"course-vgg11", "horovod-scaling", "demo"} <= set(recipes())
    for name in recipes():
        assert list_runs(load_recipe(name), world_size=4)


def test_course_recipe_is_the_courses_experiment():
    config = load_recipe("course-vgg11")
    assert (config.train.model, config.train.batch, config.train.steps) == ("vgg11", 256, 40)
    assert (config.cluster.nodes, config.compare.strategies) == (4, ("single", "gather-scatter", "all-reduce", "ddp"))


def test_recipe_files(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('[train]\nbatch = 8\n[compare]\nstrategies = ["ddp", "server(servers=2)"]\n')
    config = load_recipe(str(path))
    assert config.train.batch == 8
    assert config.compare.strategies == ("ddp", "server(servers=2)")
    path.write_text("[train\n")
    with pytest.raises(UsageError, match="not valid TOML"):
        load_recipe(str(path))


@pytest.mark.parametrize(
    ("setting", "key", "value"),
    [
        ("train.batch=8", ("train", "batch"), 8),
        ("train.timeout_s=5", ("train", "timeout_s"), 5.0),
        ("train.optimizer=sgd(lr=0.1)", ("train", "optimizer"), "sgd(lr=0.1)"),
        ("cluster.bandwidth=1Gbit", ("cluster", "bandwidth"), "1Gbit"),
        ("compare.strategies=ddp,server(servers=2, part_mb=1)", ("compare", "strategies"), SERVERS),
        ("compare.scale=1,2", ("compare", "scale"), (1, 2)),
        ("compare.scale_batch=true", ("compare", "scale_batch"), True),
    ],
)  # fmt: skip
def test_settings(setting, key, value):
    config = Config().override(parse_settings([setting]))
    assert getattr(getattr(config, key[0]), key[1]) == value


def test_counters_leave_loopback_out(tmp_path):
    file = tmp_path / "dev"
    head = "Inter-| Receive | Transmit\n face |bytes ...\n"
    file.write_text(head + "    lo: 999 0 0 0 0 0 0 0 999 0 0 0 0 0 0 0\n sync0:  10 1 0 0 0 0 0 0  25 1 0 0 0 0 0 0\n")
    assert read_counters(file) == NetworkBytes(sent=25, received=10)
    assert NetworkBytes(35, 14).per_step_since(NetworkBytes(25, 10), steps=2) == NetworkBytes(5, 2)


def test_the_bytes_of_steps_leave_out_what_comes_between_them(monkeypatch):
    readings = iter([NetworkBytes(100, 10), NetworkBytes(300, 20), NetworkBytes(900, 50), NetworkBytes(1000, 60)])
    monkeypatch.setattr(network_counters, "read_counters", lambda: next(readings))
    traffic = StepTraffic()
    traffic.resume()
    traffic.step()
    assert traffic.mean() is None, "nothing counts before `begin`"
    traffic.begin()
    traffic.step()
    traffic.pause()
    traffic.pause()
    traffic.step()  # of an evaluation, say
    traffic.resume()
    traffic.step()
    traffic.pause()
    assert traffic.mean() == NetworkBytes(150, 10), "200 and 100 bytes; the 600 in between are no training"


def test_busy_share_is_a_share():
    assert 0 <= busy_share(0.05) <= 1


def _record(rank, starts, *, boot="b", clock=None, **more):
    """Three steps of 100 ns: 40 forward, then an exchange from `starts` to 90."""
    spans = []
    for step in range(3):
        base = step * 100
        spans.append(Span(rank, "forward", "forward", "", step, base, base + 40, 0))
        spans.append(Span(rank, "exchange", "all-reduce", "w", step, base + starts, base + 90, 8))
        spans.append(Span(rank, "step", "step", "", step, base, base + 100, 0))
    epochs = [{"epoch": 1, "train_s": 1.0, "test_s": None, "loss": 2.0}]
    made = RankRecord(
        part=Part(rank, spans, boot, clock, cores=1, cpu_times=[[0, 1, 2]], recording_cost=COST),
        node=rank, host="h", backend="gloo", phases=1,
        synchronised_bytes=8, startup_ms={"launch": 1.0, "rendezvous": 2.0, "build": 3.0},
        history=History(losses=[3.0, 2.0, 1.0 + rank], epochs=epochs, accuracy=0.5), theory=Traffic(8.0, 8.0, 8.0),
        network=NetworkBytes(10, 12), buffer_divergence=0.25, first_complete_step=0, spans_dropped=0,
    )  # fmt: skip
    return replace(made, **more)


def _assemble(*records):
    spans = merge([record.part for record in records]).spans
    return assemble("all-reduce", records, spans, batch=4, nodes=len(records))


def test_assembled_run_has_means_shares_and_waits():
    run = _assemble(_record(0, 40), _record(1, 70))
    assert run["loss"] == [3.0, 2.0, 1.5]
    assert run["step_ms"]["median"] == pytest.approx(1e-4)
    assert run["samples_per_s"] == pytest.approx(4 / 100e-9)
    assert run["wire_bytes_per_step"] == 11, "both directions at once count once"
    waiting, late = (entry["breakdown"] for entry in run["ranks"])
    assert (waiting["forward"], waiting["wait"], waiting["exposed_exchange"], waiting["other"]) == (0.4, 0.3, 0.2, 0.1)
    assert (late["wait"], late["exposed_exchange"], late["other"]) == (0.0, 0.2, 0.4)


def test_steps_with_dropped_spans_are_left_out_of_the_shares_alone():
    record = _record(0, 40, first_complete_step=2)
    spans = [span for span in record.part.spans if span.lane == "step" or span.step == 2]
    run = _assemble(replace(record, part=replace(record.part, spans=spans)))
    assert len(run["step_ms_series"]) == 3
    assert run["ranks"][0]["breakdown"]["forward"] == 0.4


def test_ranks_of_different_hosts_have_no_common_clock_so_no_waits():
    run = _assemble(_record(0, 40, boot="one"), _record(1, 70, boot="two"))
    assert [entry["breakdown"]["wait"] for entry in run["ranks"]] == [0.0, 0.0]


def test_ranks_of_different_hosts_with_measured_clocks_have_waits():
    late = _record(1, 70, boot="two", clock=Clock(offset=5000.0, drift=0.0, error=2.0, at=0))
    spans = [replace(s, start=s.start + 5000, end=s.end + 5000) for s in late.part.spans]
    late = replace(late, part=replace(late.part, spans=spans))
    records = [_record(0, 40, boot="one", clock=Clock()), late]
    run = _assemble(*records)
    assert [entry["breakdown"]["wait"] for entry in run["ranks"]] == [0.3, 0.0]
    assert merge([record.part for record in records]).clock_error_ns == 2.0


def test_a_record_survives_its_json_form():
    for record in (
        _record(1, 70, clock=Clock(offset=5.0), prediction_ms=3.5),
        _record(2, 70, history=None, network=None),
    ):
        assert RankRecord.from_json(record.to_json()) == record
