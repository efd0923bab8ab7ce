"""`sync.metrics()` against numbers counted by hand, and its log in the real TensorBoard and in an object like W&B's."""

import math
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import syncline
from ranks import run_ranks
from syncline.errors import UsageError
from syncline.integrations.metrics_log import MetricsLog
from syncline.trace import recording

WIDTH, STEPS = 64, 6
VALUES = WIDTH * WIDTH + WIDTH


def _trained(rank, compress, *, sentinel=2, after=lambda sync: None):
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = syncline.attach(model, optimizer, compress=compress, sentinel=sentinel, tune=False)
    for step in range(STEPS):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        after(sync)
    return sync


def _metrics(rank, world, compress, folder):
    if folder:
        with recording(path=f"{folder}/trace.json.gz", every=1):
            sync = _trained(rank, compress)
            found = sync.metrics()
    else:
        sync = _trained(rank, compress)
        found = sync.metrics()
    sent = [link.sent_bytes for links in sync.links.values() for link in links]
    sync.close()
    return found, sum(sent)


@pytest.mark.parametrize(("compress", "world"), [(None, 2), ("bf16", 3), ("topk(0.1)", 2), ("int8", 2)])
def test_bytes_are_those_that_were_sent(compress, world):
    for found, sent in run_ranks(_metrics, world, compress, ""):
        assert all(isinstance(value, float) and math.isfinite(value) for value in found.values())
        assert found["step"] == STEPS
        if sent:  # the busiest rank's are reported, and all send alike here
            assert found["sent_bytes"] == pytest.approx(sent / STEPS, rel=0.02)
        dense = 2 * (world - 1) / world * 4 * VALUES
        assert found["sent_bytes"] * found["compression_ratio"] == pytest.approx(dense)
        assert found["step_ms"] > 0
        assert "exposed_ms" not in found, "nothing was recorded"
        assert "predicted_step_ms" not in found, "nothing was planned"
        assert (found["residual_share"] > 0.1) is (compress == "topk(0.1)")


def test_exposed_time_is_known_while_steps_are_recorded(tmp_path):
    for found, _ in run_ranks(_metrics, 2, "bf16", str(tmp_path)):
        assert 0 <= found["exposed_ms"] < found["step_ms"] * STEPS


def _residuals(rank, world):
    sync = _trained(rank, "topk(0.1)", sentinel=1)
    state = sync.state_dict()
    sync.close()
    return sync.metrics()["residual_share"], float(
        torch.cat([t.flatten() for k, t in state.items() if "error" in k]).norm()
    )


def test_the_residual_share_is_the_same_on_all_ranks():
    (first, norm), (second, _) = run_ranks(_residuals, 2)
    assert first == second > 0
    assert norm > 0


class Run:
    """As a W&B run."""

    def __init__(self):
        self.rows = []

    def log(self, row, step):
        self.rows.append((step, row))


def _logged(rank, world, folder):
    run, logs = Run(), []

    def after(sync):
        if not logs:
            logs.extend([MetricsLog(sync, run, every=2), MetricsLog(sync, folder, every=3)])
        for log in logs:
            log(loss=1.5)

    sync = _trained(rank, "bf16", after=after)
    for log in logs:
        log.close()
    sync.close()
    return run.rows


def test_rows_in_tensorboard_and_in_an_object_with_log(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    mine, other = run_ranks(_logged, 2, str(tmp_path))
    assert other == [], "rank 0 writes"
    assert [step for step, _ in mine] == [2, 4, 6]
    assert mine[0][1]["loss"] == 1.5
    assert {"syncline/sent_bytes", "syncline/compression_ratio", "syncline/step_ms"} < set(mine[1][1])
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert set(events.Tags()["scalars"]) > {"syncline/compression_ratio", "loss"}
    assert [event.step for event in events.Scalars("syncline/compression_ratio")] == [3, 6]
    assert events.Scalars("syncline/compression_ratio")[0].value == 2.0


def _alone(step=1.0):
    return SimpleNamespace(rank=0, metrics=lambda: {"step": step})


@pytest.mark.parametrize(("step", "written"), [(105.0, 105), (0.0, 2)])
def test_rows_go_on_at_the_step_of_a_loaded_checkpoint(step, written):
    run = Run()
    log = MetricsLog(_alone(step), run, every=2)
    log(loss=1.0)
    log(loss=2.0)
    assert run.rows == [(written, {"loss": 2.0})]


@pytest.mark.parametrize(("to", "every", "said"), [(3, 1, "cannot log to a int"), (Run(), 0, "every is 0")])
def test_what_cannot_be_logged_to(to, every, said):
    with pytest.raises(UsageError, match=said):
        MetricsLog(_alone(), to, every=every)


def test_without_tensorboard_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(UsageError, match=r"pip install 'syncline\[tensorboard\]'"):
        MetricsLog(_alone(), tmp_path)


def _one_rank(rank, world):
    sync = _trained(rank, "bf16")
    found = sync.metrics()
    sync.close()
    return found


def test_one_rank_alone_sends_nothing():
    assert run_ranks(_one_rank, 1) == [{"step": 0.0, "sent_bytes": 0.0, "compression_ratio": 1.0}]
