"""`syncline.fsdp.attach` on FSDP2: dense equals torch's hybrid sharding, codecs train alike, state goes through DCP."""

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import ranks
import syncline
from ranks import run_ranks, run_until_killed
from syncline import fsdp
from syncline.errors import UsageError
from syncline.integrations.buckets import BucketExchange

STEPS, STEPS_PLAIN = 3, 20


class Block(nn.Module):
    """An uneven number of rows (29) for any number of shards; `twice` uses the second layer a second time."""

    def __init__(self, *, twice: bool = False) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(29, 58), nn.Linear(58, 29)
        self.twice = twice

    def forward(self, x: Tensor) -> Tensor:
        return x + self.two(self.one(x).tanh())


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed, self.blocks, self.head = (
            nn.Linear(29, 29),
            nn.ModuleList(Block() for _ in range(3)),
            nn.Linear(29, 5),
        )
        self.unused = nn.Linear(29, 29) if kind == "unused" else None
        self.kind, self.uses_all = kind, False

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        if self.unused is not None and self.uses_all:
            h = self.unused(h)
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=False) if self.kind == "checkpointing" else block(h)
        if self.kind == "twice":
            h = self.blocks[0](h)
        out: Tensor = self.head(h)
        return out


def freeze(model: Net, step: int) -> None:
    """A whole block, and one parameter beside others, are frozen; later some of them train, and others do not."""
    for p in model.blocks[1].parameters():
        p.requires_grad_(step == 2)
    model.head.bias.requires_grad_(step == 1)
    model.blocks[0].one.weight.requires_grad_(step != 1)  # type: ignore[union-attr]


def sharded(kind: str, mesh: DeviceMesh) -> Net:
    policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16) if kind == "bf16" else MixedPrecisionPolicy()
    model = Net(kind)
    if kind == "frozen":
        freeze(model, 0)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def batch(step: int, micro: int = 0, rank: int | None = None) -> tuple[Tensor, Tensor]:
    number = dist.get_rank() if rank is None else rank
    generator = torch.Generator().manual_seed(1000 * step + 100 * micro + number)
    return torch.randn(6, 29, generator=generator), torch.randn(6, 5, generator=generator)


def run(model: Any, optimizer: torch.optim.Optimizer, kind: str, steps: range) -> list[float]:
    losses = []
    for step in steps:
        if kind == "frozen":
            freeze(model, step)
        micros = 3 if kind.startswith("accumulate") else 1
        for micro in range(micros):
            if kind == "accumulate, no reduce-scatter":
                model.set_requires_gradient_sync(micro == micros - 1)
            elif kind == "accumulate, no all-reduce":
                model.set_requires_all_reduce(micro == micros - 1)
            x, y = batch(step, micro)
            loss = F.mse_loss(model(x), y)
            loss.backward()
        if kind == "clip":
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def weights(model: nn.Module) -> list[Tensor]:
    return [p.full_tensor().detach().clone() for p in model.parameters()]  # type: ignore[attr-defined]


@contextmanager
def counted() -> Iterator[list[str]]:
    """The units that are launched while the block runs."""
    launched: list[str] = []
    original = BucketExchange.launch

    def launch(self: BucketExchange, unit: Any) -> None:
        launched.append(unit.row.name)
        original(self, unit)

    BucketExchange.launch = launch  # type: ignore[method-assign]
    try:
        yield launched
    finally:
        BucketExchange.launch = original  # type: ignore[method-assign]


KINDS = ["plain", "clip", "unused", "frozen", "twice", "checkpointing", "bf16", "accumulate",
         "accumulate, no all-reduce", "accumulate, no reduce-scatter"]  # fmt: skip


def against_hybrid(rank: int, world: int, shape: tuple[int, int], kinds: list[str]) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    results: dict[str, Any] = {}
    for kind in kinds:
        steps = range(STEPS_PLAIN if kind == "plain" else STEPS)
        native = sharded(kind, mesh)
        expected = run(native, torch.optim.AdamW(native.parameters(), lr=0.01), kind, steps)
        model = sharded(kind, mesh["shard"])
        sync = fsdp.attach(model, replicate=mesh["replicate"])
        with counted() as launched:
            got = run(model, torch.optim.AdamW(model.parameters(), lr=0.01), kind, steps)
        pairs = list(zip(weights(model), weights(native), strict=True))
        results[kind] = (
            got == expected and all(torch.equal(a, b) for a, b in pairs),
            max(float((a - b).abs().max()) for a, b in pairs),
            len(launched) / len(steps), launched[:4], sync.step / len(steps),
        )  # fmt: skip
        sync.close()
    return results


def test_dense_equals_torchs_hybrid_sharding() -> None:
    for result in run_ranks(against_hybrid, 4, (2, 2), KINDS, timeout=120):
        for kind, (same, _, units, order, steps) in result.items():
            if kind not in ("bf16", "accumulate", "accumulate, no all-reduce"):
                assert same, kind
            expected = {"accumulate": 12, "frozen": 10 / 3}.get(
                kind, 4
            )  # one block of four units is frozen in two steps
            assert units == expected, (kind, "units are sent once for each exchange")
            assert steps == (3 if kind == "accumulate" else 1)
            if kind == "twice":
                assert order[-1] == "blocks.0", "a module that is used twice is sent when its gradient is complete"
        # torch adds accumulated shards in another order, and rounds the sum of replicas to bfloat16 once more.
        assert max(result[kind][1] for kind in ("accumulate", "accumulate, no all-reduce")) < 1e-6
        assert result["bf16"][1] < 2e-2


@pytest.mark.full
def test_four_replicas_equal_hybrid_sharding_to_rounding() -> None:
    kinds = ["plain", "unused", "accumulate, no all-reduce"]
    for result in run_ranks(against_hybrid, 4, (4, 1), kinds):
        assert max(result[kind][1] for kind in kinds) < 1e-5


CODECS = ["powersgd(rank=4)", "topk(0.05)", "powersgd(rank=4) | bf16"]


def codecs_and_state(rank: int, world: int, folder: str) -> None:
    """With each codec: save after six steps, train on, and keep what came of it."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for number, codec in enumerate(CODECS):
        model, path = sharded("plain", mesh["shard"]), Path(folder) / str(number)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        sync = fsdp.attach(model, replicate=mesh["replicate"], compress=codec)
        first = run(model, optimizer, "plain", range(6))
        momentum = get_optimizer_state_dict(model, optimizer)
        dcp.save({"codec": sync.state_dict(), "model": model.state_dict(), "momentum": momentum}, checkpoint_id=path)
        straight = run(model, optimizer, "plain", range(6, 9))
        replicas = [torch.empty_like(p.to_local()) for p in model.parameters() for _ in range(2)]
        for p, at in zip(model.parameters(), range(0, len(replicas), 2), strict=True):
            dist.all_gather(
                replicas[at : at + 2], p.to_local().detach().contiguous(), group=mesh["replicate"].get_group()
            )
        equal = all(torch.equal(replicas[at], replicas[at + 1]) for at in range(0, len(replicas), 2))
        result = {"first": first, "straight": straight, "replicas equal": equal, "weights": weights(model)}
        torch.save(result, path.with_suffix(f".rank{rank}.pt"))
        sync.close()


def codecs_resumed(rank: int, world: int, folder: str) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    results: dict[str, Any] = {}
    for number, codec in enumerate(CODECS):
        path = Path(folder) / str(number)
        before = torch.load(path.with_suffix(f".rank{rank}.pt"), weights_only=True)
        model = sharded("plain", mesh["shard"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        sync = fsdp.attach(model, replicate=mesh["replicate"], compress=codec)
        values = {"model": model.state_dict(), "momentum": get_optimizer_state_dict(model, optimizer)}
        dcp.load(values, checkpoint_id=path)
        model.load_state_dict(values["model"])
        set_optimizer_state_dict(model, optimizer, values["momentum"])
        sync.load(path, prefix="codec")
        results[codec] = {
            "step": sync.step,
            "resumed": run(model, optimizer, "plain", range(6, 9)) == before["straight"],
            "same weights": all(torch.equal(a, b) for a, b in zip(weights(model), before["weights"], strict=True)),
            "replicas equal": before["replicas equal"],
            "losses": before["first"],
        }
        sync.close()
    return results


def other_world(rank: int, world: int, folder: str, shape: tuple[int, int]) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    model = sharded("plain", mesh["shard"])
    sync = fsdp.attach(model, replicate=mesh["replicate"], compress=CODECS[0])
    sync.load(Path(folder) / "0", prefix="codec")
    saved = {name: t.full_tensor() for name, t in sync.state_dict().items() if name.endswith(".error")}
    run(model, torch.optim.SGD(model.parameters(), lr=0.05), "plain", range(2))
    return {
        "step": sync.step,
        "residual": {name: t.mean(0).tolist() for name, t in saved.items()},
        "replicas": len(next(iter(saved.values()))),
    }


@pytest.mark.full  # the losses of all codecs are compared above
def test_codecs_resume_bit_for_bit_after_a_kill_and_on_other_worlds(tmp_path: Path) -> None:
    run_until_killed(codecs_and_state, 4, str(tmp_path), timeout=120)
    result = run_ranks(codecs_resumed, 4, str(tmp_path), timeout=120)[0]
    for codec in CODECS:
        row = result[codec]
        assert (row["step"], row["resumed"], row["same weights"], row["replicas equal"]) == (6, True, True, True), codec
        assert row["losses"][-1] < row["losses"][0], codec
    before = other_world_reference(tmp_path)
    for world, shape in ((2, (2, 1)), (6, (2, 3)), (3, (3, 1))):
        other = run_ranks(other_world, world, str(tmp_path), shape)[0]
        assert (other["step"], other["replicas"]) == (8, shape[0])
        assert other["residual"].keys() == before.keys()
        for name, mean in before.items():
            torch.testing.assert_close(torch.tensor(other["residual"][name]), mean, msg=f"{shape} {name}")


def other_world_reference(folder: Path) -> dict[str, Tensor]:
    """The mean over replicas of each residual in the checkpoint, read by one process without FSDP."""
    dcp_to_torch_save(folder / "0", folder / "plain.pt")
    state = torch.load(folder / "plain.pt", weights_only=True)["codec"]
    return {name: t.mean(0) for name, t in state.items() if name.endswith(".error")}


def bad_uses(rank: int, world: int) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    cases: list[Callable[[], Any]] = [
        lambda: fsdp.attach(Net("plain"), replicate=mesh["replicate"]),
        lambda: fsdp.attach(sharded("plain", mesh), replicate=mesh["replicate"]),
        lambda: fsdp.attach(sharded("plain", mesh["shard"]), replicate=mesh["shard"]),
        lambda: fsdp.attach(sharded("plain", mesh["shard"]), replicate=mesh),
        lambda: fsdp.attach(sharded("plain", mesh["shard"]), replicate=mesh["replicate"], compress="auto"),
        lambda: fsdp.attach(sharded("plain", mesh["shard"]), replicate=mesh["replicate"], compress="powersdg"),
        lambda: syncline.attach(sharded("plain", mesh["shard"])),
    ]
    messages = []
    for case in cases:
        with pytest.raises(UsageError) as error:
            case()
        messages.append(str(error.value))
    return messages


def test_bad_uses_get_a_sentence_with_the_fix() -> None:
    plain, hybrid, same, whole, auto, typo, engine = run_ranks(bad_uses, 4)[0]
    assert "fully_shard(model, mesh=mesh['shard'])" in plain
    assert "torch averages its gradient itself" in hybrid
    assert "mesh=mesh['shard']" in hybrid
    assert "mesh['replicate']" in same
    assert "mesh['replicate']" in whole
    assert "powersgd(rank=4)" in auto
    assert "powersgd" in typo
    assert "syncline.fsdp.attach" in engine


def frozen_state(rank: int, world: int, folder: str) -> tuple[Any, ...]:
    """What is sent while parameters are frozen, and whether their residuals survive that and a checkpoint."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model = sharded("unused", mesh["shard"])
    sync = fsdp.attach(model, replicate=mesh["replicate"], compress="topk(0.05)")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model.uses_all = True
    run(model, optimizer, "plain", range(2))
    model.uses_all = False
    before = sync.state_dict()
    with counted() as launched:
        run(model, optimizer, "frozen", range(3, 5))
    root = next(unit.run.row for unit in sync._units if unit.run.row.name == "root")
    dcp.save({"codec": sync.state_dict()}, checkpoint_id=folder)
    sync.load(folder, prefix="codec")
    after = sync.state_dict()
    frozen = [name for name in before if name.startswith(("blocks.1.", "head.bias", "unused."))]
    assert len(frozen) == 4 + 1 + 2
    same = all(torch.equal(before[n].full_tensor(), after[n].full_tensor()) for n in frozen)
    with pytest.raises(UsageError) as twice:
        fsdp.attach(model, replicate=mesh["replicate"])
    model.set_gradient_divide_factor(2.0)
    with pytest.raises(UsageError) as divided:
        run(model, optimizer, "plain", range(1))
    return root.parameters, launched, same, str(twice.value), str(divided.value)


def test_frozen_and_unused_parameters_are_not_sent_and_keep_their_residuals(tmp_path: Path) -> None:
    root, launched, same, twice, divided = run_ranks(frozen_state, 2, str(tmp_path / "kept"))[0]
    assert not {"head.bias", "unused.weight"} & set(root)
    assert "head.weight" in root
    assert "blocks.1" not in launched
    assert same, "residuals of frozen and unused parameters"
    assert "attached already" in twice
    assert "set_gradient_divide_factor(2)" in divided


def lost_node(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = sharded("plain", mesh["shard"])
    fsdp.attach(model, replicate=mesh["replicate"], compress="powersgd(rank=4)")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    run(model, optimizer, "plain", range(2))
    if rank >= 2:
        os._exit(9)
    run(model, optimizer, "plain", range(2, 4))


def test_a_lost_node_is_an_error_that_names_its_rank() -> None:
    with tempfile.TemporaryDirectory() as folder:
        pipes = [ranks.CONTEXT.Pipe(duplex=False) for _ in range(4)]
        processes = [
            ranks.CONTEXT.Process(target=ranks._rank, args=(lost_node, rank, 4, (), folder, pipes[rank][1], 15))
            for rank in range(4)
        ]
        try:
            for process in processes:
                process.start()
            errors = []
            for receiver, _ in pipes[:2]:
                assert receiver.poll(60), "a rank hangs"
                errors.append(receiver.recv()[0])
            processes[3].join(10)
            assert processes[3].exitcode == 9
        finally:
            for process in processes:
                process.kill()
                process.join()
    # When one rank of a node has ended with the error, torch's own collective fails on the other.
    named = [f"rank {rank + 2}" in error for rank, error in enumerate(errors) if "PeerError" in error]
    assert named, errors
    assert all(named), errors
