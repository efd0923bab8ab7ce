"""Lightning's Trainer and Fabric on real ranks: our strategies equal their DDP strategies, and resume bit for bit."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.fabric.strategies.ddp import DDPStrategy as FabricDDPStrategy
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ranks import run_ranks, run_until_killed
from syncline.errors import UsageError
from syncline.integrations.lightning import SynclineFabricStrategy, SynclineStrategy
from syncline.integrations.rank_files import save_rank_state

STEPS = 20


def network() -> nn.Module:
    torch.manual_seed(0)
    first = (nn.Linear(20, 64), nn.BatchNorm1d(64), nn.Tanh())
    return nn.Sequential(*first, nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 5))


def loader(steps: int = STEPS) -> DataLoader[Any]:
    x = torch.randn(8 * 2 * 2 * steps, 20, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, x[:, :5].sin()), batch_size=8)


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.losses = network(), []  # type: ignore[var-annotated]

    def training_step(self, batch: Any, index: int) -> Tensor:
        x, y = batch
        loss = F.mse_loss(self.net(x), y)
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def trainer(folder: Path, strategy: Any, steps: int, **more: Any) -> L.Trainer:
    return L.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_steps=steps, accumulate_grad_batches=2,
        precision="bf16-mixed", gradient_clip_val=0.5, default_root_dir=folder, logger=False, enable_progress_bar=False,
        enable_model_summary=False, plugins=[TorchElasticEnvironment()], use_distributed_sampler=True, **more,
    )  # fmt: skip


def weights(model: nn.Module) -> list[Any]:
    return [p.detach().tolist() for p in model.parameters()]


def compressed() -> SynclineStrategy:
    return SynclineStrategy(process_group_backend="gloo", compress="powersgd(rank=4)")


def pytorch(rank: int, world: int, folder: str) -> None:
    """Dense with DDP and with the engine; then PowerSGD with a checkpoint after ten steps."""
    environment(rank, world)
    base, results = Path(folder), {}
    for name, kind in (("ddp", DDPStrategy), ("syncline", SynclineStrategy)):
        module = Module()
        trainer(base, kind(process_group_backend="gloo"), STEPS, enable_checkpointing=False).fit(module, loader())
        results[name] = (module.losses, weights(module))
    # Two epochs of ten steps: Lightning resumes a plain loader at the start of an epoch.
    keep = ModelCheckpoint(dirpath=base / "kept", every_n_train_steps=10, save_top_k=-1, filename="{step}")
    straight = Module()
    fitted = trainer(base, compressed(), STEPS, callbacks=[keep])
    fitted.fit(straight, loader(10))
    fitted.save_checkpoint(base / "after.ckpt")
    results["powersgd"] = (straight.losses[20:], weights(straight))
    torch.save(results, base / f"straight-{rank}.pt")


def resumed(rank: int, world: int, folder: str) -> tuple[list[float], list[Any]]:
    environment(rank, world)
    again, kept = Module(), Path(folder) / "kept" / "step=10.ckpt"
    trainer(Path(folder), compressed(), STEPS, enable_checkpointing=False).fit(
        again, loader(10), ckpt_path=str(kept), weights_only=True
    )
    return again.losses, weights(again)


def environment(rank: int, world: int) -> None:
    """What torchrun sets."""
    os.environ.update(
        LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world), GROUP_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29555",
        TORCHELASTIC_RUN_ID="test",
    )  # fmt: skip


def test_lightning_with_the_engine_equals_its_ddp_and_resumes_after_a_kill(tmp_path: Path) -> None:
    run_until_killed(pytorch, 2, str(tmp_path), timeout=120)
    for rank, again in enumerate(run_ranks(resumed, 2, str(tmp_path), timeout=120)):
        result = torch.load(tmp_path / f"straight-{rank}.pt", weights_only=True)
        assert len(result["ddp"][0]) == 2 * STEPS
        assert result["syncline"] == result["ddp"]
        assert len(again[0]) == 20
        assert again == result["powersgd"]
    assert len(list((tmp_path / "kept" / "step=10.ckpt.syncline").iterdir())) == 2
    states = [torch.load(path, weights_only=True) for path in (tmp_path / "after.ckpt.syncline").iterdir()]
    assert [int(state["syncline.step"]) for state in states] == [STEPS, STEPS], "saved when fit had ended"


@pytest.mark.parametrize("strategy", [SynclineStrategy, SynclineFabricStrategy])
def test_hooks_of_ddp_are_refused(strategy: Any) -> None:
    with pytest.raises(UsageError, match="ddp_comm_hook is for torch's DDP: leave it out"):
        strategy(ddp_comm_hook=len)


@pytest.mark.parametrize("function", [TrainerFn.FITTING, TrainerFn.TESTING])
def test_a_checkpoint_that_is_only_tested_leaves_no_codec_state_for_the_next_fit(
    tmp_path: Path, function: TrainerFn
) -> None:
    strategy: Any = SynclineStrategy(compress="topk(0.1)")
    strategy._lightning_module = SimpleNamespace(trainer=SimpleNamespace(state=SimpleNamespace(fn=function)))
    torch.save({}, tmp_path / "kept.ckpt")
    save_rank_state({"w.error": torch.ones(1)}, tmp_path / "kept.ckpt.syncline", rank=0, world=1)
    strategy.load_checkpoint(tmp_path / "kept.ckpt")
    assert (strategy._loaded is None) == (function == TrainerFn.TESTING)


def new_fabric(strategy: Any) -> L.Fabric:
    runner = L.Fabric(
        accelerator="cpu", devices=2, strategy=strategy, precision="bf16-mixed", plugins=[TorchElasticEnvironment()]
    )
    runner.launch()
    return runner


def fabric(rank: int, world: int) -> dict[str, Any]:
    environment(rank, world)
    results = {}
    for name, kind in (("ddp", FabricDDPStrategy), ("syncline", SynclineFabricStrategy)):
        runner, net = new_fabric(kind(process_group_backend="gloo")), network()
        model, optimizer = runner.setup(net, torch.optim.AdamW(net.parameters(), lr=0.01))
        losses = []
        for number, (x, y) in enumerate(runner.setup_dataloaders(loader())):
            gathers = number % 2 == 0
            with runner.no_backward_sync(model, enabled=gathers):
                loss = F.mse_loss(model(x), y)
                runner.backward(loss)
            if not gathers:
                runner.clip_gradients(model, optimizer, max_norm=0.5)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(float(loss.detach()))
        results[name] = (losses, weights(net), sorted(runner.strategy.get_module_state_dict(model)))
    return results


@pytest.mark.full
def test_fabric_with_the_engine_equals_its_ddp() -> None:
    for result in run_ranks(fabric, 2):
        assert len(result["ddp"][0]) == 2 * STEPS
        assert result["syncline"][:2] == result["ddp"][:2]
        assert result["syncline"][2][0] == "0.bias", "names without a wrapper"


def fabric_steps(folder: str, *, load: bool) -> tuple[list[float], list[Any]]:
    """Three steps, a checkpoint (which another run loads), and three more."""
    runner = new_fabric(SynclineFabricStrategy(process_group_backend="gloo", compress="powersgd(rank=4)"))
    net = network()
    model, optimizer = runner.setup(net, torch.optim.AdamW(net.parameters(), lr=0.01))
    state, losses = {"model": model, "optimizer": optimizer}, []
    for number, (x, y) in enumerate(runner.setup_dataloaders(loader(3))):
        if number == 3:
            (runner.load if load else runner.save)(Path(folder) / "kept.ckpt", state)
        if number >= 6 or (load and number < 3):
            continue
        loss = F.mse_loss(model(x), y)
        runner.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    strategy: Any = runner.strategy
    strategy.sync_of(model).close()
    return losses[-3:], weights(net)


def fabric_resumed(rank: int, world: int, folder: str) -> tuple[Any, Any]:
    environment(rank, world)
    return fabric_steps(folder, load=False), fabric_steps(folder, load=True)


@pytest.mark.full  # the Trainer above resumes in the same way
def test_checkpoints_of_fabric_hold_the_codec_state(tmp_path: Path) -> None:
    for straight, again in run_ranks(fabric_resumed, 2, str(tmp_path)):
        assert again == straight
    assert len(list((tmp_path / "kept.ckpt.syncline").iterdir())) == 2
