"""Checkpoints without the command line: files that are whole or not there, and what is in them."""

import json
import random
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
from checkpoint_content import CPU, content
from torch import nn

from ranks import run_ranks
from resumable import ErrorFeedback
from syncline.errors import DamagedCheckpoint, UsageError
from syncline.trace import Recorder
from syncline.train.checkpoint import files as checkpoint
from syncline.train.checkpoint.history import History
from syncline.train.checkpoint.randomness import random_state, seed_all, set_random_state
from syncline.train.config import Train
from syncline.train.rank.snapshot import Snapshots
from syncline.train.strategies import Context, Strategy


def _write(folder, step, *, barrier=lambda: None, **extra):
    checkpoint.write(folder, content(step, **extra), rank=0, workers=1, barrier=barrier)


def _names(folder):
    return [path.name for path in checkpoint.list_checkpoints(folder)]


def test_the_newest_two_are_kept_and_named_by_step(tmp_path):
    assert checkpoint.list_checkpoints(tmp_path / "nothing") == []
    for step in (9, 10, 100):
        _write(tmp_path, step)
    assert _names(tmp_path) == ["step-00000100", "step-00000010"]
    assert len(list(tmp_path.iterdir())) == 2
    assert all(checkpoint.find_damage(path) is None for path in checkpoint.list_checkpoints(tmp_path))


def test_a_rank_that_ends_during_the_write_leaves_the_old_checkpoint(tmp_path):
    def die():
        raise InterruptedError

    _write(tmp_path, 1)
    with pytest.raises(InterruptedError):
        _write(tmp_path, 2, barrier=die)
    assert _names(tmp_path) == ["step-00000001"]
    assert (tmp_path / "step-00000002.tmp" / "rank0.pt").exists()
    checkpoint.remove_later(tmp_path, than=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_later_checkpoints_are_set_aside_again_and_again(tmp_path):
    for _ in range(2):
        for step in (1, 2):
            if not (tmp_path / f"step-{step:08d}").exists():
                _write(tmp_path, step)
        checkpoint.remove_later(tmp_path, than=1)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002.aside"]


def test_a_file_that_another_machine_kept_for_itself_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "_VISIBLE_WITHIN_S", 0.0)
    content = {"step": 3}
    with pytest.raises(FileNotFoundError, match=r"rank1.pt was written by its rank.*that they share"):
        checkpoint.write(tmp_path, content, rank=0, workers=2, barrier=lambda: None)
    assert checkpoint.list_checkpoints(tmp_path) == []


@pytest.mark.parametrize("keep", [0, 1, 100, -1000, -100, -1])
def test_every_truncation_is_damage(keep, tmp_path):
    _write(tmp_path, 1)
    part = tmp_path / "step-00000001" / "rank0.pt"
    part.write_bytes(part.read_bytes()[:keep])
    assert "rank0.pt is truncated" in checkpoint.find_damage(part.parent)


def test_a_single_bit_is_damage(tmp_path):
    _write(tmp_path, 1)
    part = tmp_path / "step-00000001" / "rank0.pt"
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content)
    assert checkpoint.find_damage(part.parent) == "rank0.pt has changed since it was written"


def test_damage_by_other_means(tmp_path):
    _write(tmp_path, 1)
    _write(tmp_path, 2, workers=2)
    one, two = tmp_path / "step-00000001", tmp_path / "step-00000002"
    assert checkpoint.find_damage(two) == "rank1.pt is missing"
    (one / "rank0.pt").rename(two / "rank1.pt")
    assert checkpoint.find_damage(two) == "rank1.pt is of step 1, rank 0"
    _write(tmp_path, 3, format=2)
    three = tmp_path / "step-00000003"
    assert "another version" in checkpoint.find_damage(three)
    torch.save(SimpleNamespace(), three / "rank0.pt")
    assert "not a checkpoint" in checkpoint.find_damage(three), "objects are not loaded"


def test_rows_after_the_checkpoint_are_cut_on_the_own_log_and_on_those_of_ranks_that_are_no_more(tmp_path):
    for rank in range(4):
        rows = "".join(json.dumps({"step": step, "loss": None, "step_ms": 1}) + "\n" for step in range(5))
        (tmp_path / f"rank{rank}.steps.jsonl").write_text(rows + '{"step": 5, "lo')
    checkpoint.cut_logs(tmp_path, rank=0, workers=2, after=3)
    lengths = [len((tmp_path / f"rank{rank}.steps.jsonl").read_text().splitlines()) for rank in range(4)]
    assert lengths == [3, 6, 3, 3]


def test_random_states_come_back():
    seed_all(3)
    state = random_state(CPU)
    drawn = [(torch.rand(3).tolist(), random.gauss(0, 1), numpy.random.normal()) for _ in range(2)]
    set_random_state(state, CPU)
    assert [(torch.rand(3).tolist(), random.gauss(0, 1), numpy.random.normal()) for _ in range(2)] == drawn


def _loop(*, rank=0, workers=1, strategy=None, seed=0, steps=5):
    """The parts of a loop that a checkpoint holds."""
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    context = Context(rank=rank, workers=workers, recorder=Recorder(rank=rank))
    return SimpleNamespace(
        train=Train(),
        steps=steps,
        context=context,
        device=CPU,
        workload=SimpleNamespace(phases=[SimpleNamespace(module=module)]),
        synchronisers=[(strategy or Strategy)().attach(module, context, optimizer)],
        optimizers=[optimizer],
    )


def _module(loop):
    return loop.workload.phases[0].module


def _step(loop):
    (synchroniser,), (optimizer,) = loop.synchronisers, loop.optimizers
    optimizer.zero_grad()
    _module(loop)(torch.randn(6, 4)).pow(2).mean().backward()
    synchroniser.synchronise()
    optimizer.step()


def test_a_snapshot_is_taken_up_bit_for_bit(tmp_path):
    first, second, snapshots = _loop(), _loop(seed=1), Snapshots(tmp_path, "mine")
    _step(first)
    epochs = [{"epoch": 1, "train_s": 1.5, "test_s": None, "loss": 2.0}]
    history = History(losses=[0.1, float("nan")], step_ms=[1.0, 2.0], epochs=epochs, accuracy=0.5, epoch_s=3.0)
    snapshots.save(first, history)
    _step(first)
    history = snapshots.restore(second, tmp_path / "step-00000002")
    _step(second)
    for a, b in zip(*(_module(loop).state_dict().values() for loop in (first, second)), strict=True):
        assert torch.equal(a, b)
    assert (history.losses[0], history.step_ms, history.accuracy, history.epoch_s) == (0.1, [1.0, 2.0], 0.5, 3.0)
    assert history.epochs == [{"epoch": 1, "train_s": 1.5, "test_s": None, "loss": 2.0}]
    assert history.resumed_at == [2]


def test_a_view_is_saved_without_the_rest_of_its_storage(tmp_path):
    loop = _loop()
    loop.synchronisers[0].state_dict = lambda: {"w.error": torch.zeros(1_000_000)[:3]}
    Snapshots(tmp_path, "mine").save(loop, History(losses=[1.0], step_ms=[1.0]))
    assert (tmp_path / "step-00000001" / "rank0.pt").stat().st_size < 100_000


def test_what_could_not_be_loaded_again_is_refused_when_it_is_saved(tmp_path):
    loop, snapshots = _loop(), Snapshots(tmp_path, "mine")
    loop.optimizers[0].param_groups[0]["scale"] = numpy.float64(2.0)
    snapshots.save(loop, History(losses=[1.0], step_ms=[1.0]))
    assert checkpoint.find_damage(tmp_path / "step-00000001") is None
    loop.optimizers[0].param_groups[0]["schedule"] = object()
    with pytest.raises(UsageError, match=r"cannot hold optimizers\[0\].param_groups\[0\].schedule, a object"):
        snapshots.save(loop, History(losses=[1.0, 1.0], step_ms=[1.0, 1.0]))


def test_another_model_or_data_set_is_refused(tmp_path):
    snapshots = Snapshots(tmp_path, "mine")
    snapshots.save(_loop(), History(losses=[1.0], step_ms=[1.0]))
    other = _loop()
    _module(other)[0] = nn.Linear(5, 3)
    with pytest.raises(UsageError, match=r"not of this model: '0.weight' is missing or has another shape"):
        snapshots.restore(other, tmp_path / "step-00000001")
    other = _loop()
    other.optimizers[0].param_groups[0]["lr"] = "fast"
    Snapshots(tmp_path, "mine").save(other, History(losses=[1.0, 1.0], step_ms=[1.0, 1.0]))
    with pytest.raises(DamagedCheckpoint, match="the optimizer's 'lr' is 'fast', not a number"):
        snapshots.restore(_loop(), tmp_path / "step-00000002")
    with pytest.raises(UsageError, match="an epoch had 5 steps and now has 6"):
        snapshots.restore(_loop(steps=6), tmp_path / "step-00000001")


def _save_on_ranks(rank, world_size, folder):
    loop = _loop(rank=rank, workers=world_size, strategy=ErrorFeedback)
    torch.manual_seed(rank)
    _step(loop)
    epochs = [{"epoch": 1, "train_s": 1.0 + rank, "test_s": None, "loss": float(rank)}]
    history = History(losses=[float(rank)], step_ms=[10.0 + rank], epochs=epochs)
    Snapshots(Path(folder), "mine").save(loop, history)
    return {name: error.tolist() for name, error in loop.synchronisers[0].errors.items()}


def _restore_on_ranks(rank, world_size, folder):
    loop = _loop(rank=rank, workers=world_size, strategy=ErrorFeedback, seed=rank)
    history = Snapshots(Path(folder), "mine").restore(loop, Path(folder) / "step-00000001")
    parameters = [p.tolist() for p in _module(loop).parameters()]
    errors = {name: error.tolist() for name, error in loop.synchronisers[0].errors.items()}
    return errors, (history.losses, history.step_ms, history.epochs), parameters, torch.rand(2).tolist()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_residuals_keep_their_mean_at_another_world_size(world_size, tmp_path):
    old = run_ranks(_save_on_ranks, 2, str(tmp_path))
    assert old[0] != old[1], "each rank owes something else"
    new = run_ranks(_restore_on_ranks, world_size, str(tmp_path))
    for name in old[0]:
        before = torch.tensor([errors[name] for errors in old]).mean(0)
        after = torch.tensor([errors[name] for errors, *_ in new]).mean(0)
        assert torch.allclose(before, after, rtol=1e-6, atol=1e-12)
    assert [result[0] for result in new] == old or world_size != 2
    for _, history, parameters, _ in new:
        assert parameters == new[0][2]
        if world_size != 2:
            assert history == ([0.5], [11.0], [{"epoch": 1, "train_s": 2.0, "test_s": None, "loss": 0.5}])
    drawn = [tuple(numbers) for *_, numbers in new]
    assert len(set(drawn)) == world_size, "ranks draw different numbers"
