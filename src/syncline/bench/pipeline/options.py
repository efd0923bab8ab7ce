"""Settings of `bench pipeline`: the fine-tuning job, and the ways to train it that are compared."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Way:
    """How a job is trained. `stages` 0 is torch's DDP; all others are pipelines of the engine.

    `stages` None: the first steps choose the shape. Every rank of this benchmark can hold the whole model.
    """

    name: str
    stages: int | None
    freeze: bool = False
    pipe: bool = False
    """Balance the stages again after each freeze."""
    dp: bool = False
    """Halve the stages when they fit, so that replicas double."""
    cache: bool = False
    bf16: bool = False
    """DDP sends gradients in BF16."""


def ablation(stages: int) -> tuple[Way, ...]:
    """PipeTransformer's ablation, with DDP, and with a shape that is chosen at the start."""
    return (
        Way("ddp", 0),
        Way("ddp-bf16", 0, bf16=True),
        Way("none", stages),
        Way("freeze", stages, freeze=True),
        Way("freeze+pipe+cache", stages, freeze=True, pipe=True, cache=True),
        Way("freeze+pipe+dp", stages, freeze=True, pipe=True, dp=True),
        Way("freeze+pipe+dp+cache", stages, freeze=True, pipe=True, dp=True, cache=True),
        Way("all", None, freeze=True, pipe=True, dp=True, cache=True),
    )


@dataclass(frozen=True)
class Options:
    """A fine-tuning job on several ranks. Epochs are over `data`, the whole of it each."""

    model: str = "vit(size=tiny, layers=8, patch=8)"
    data: str = "fashion-mnist(classes='0-3', train=10240)"
    pretrain: str = "fashion-mnist(classes='4-9', augment=True)"
    """The data of the pretraining: other classes. Empty: random weights, for figures of speed alone."""
    pretrain_model: str = ""
    """The model of the pretraining, such as a BERT with another head; empty: `model`."""
    pretrain_epochs: int = 20
    optimizer: str = "adamw(lr=0.001, weight_decay=0.05)"
    freeze: str = "schedule(alpha=0.9, after=2, keep=1)"
    freeze_every: int = 1
    """Epochs of the data between two decisions of the policy."""
    device: str = "cpu"
    ranks: int = 4
    stages: int = 4
    compress: str = ""
    """The codec for the gradients of replicas; empty: none."""
    batch: int = 256
    epochs: int = 18
    test_samples: int = 4000
    """0: no accuracy, only speed."""
    gpu: int = 0
    ram: int = 1_000_000_000
    disk: int = 0
    """Bytes of the cache on the GPU, in RAM and on disk."""
    threads: int = 1
    autocast: bool = False
    timeout_s: float = 300.0
    seeds: tuple[int, ...] = (0, 1, 2)
    ways: tuple[str, ...] = ()
    """The ways to compare, in the order of their runs; empty: all of the ablation, and DDP in BF16 on a GPU alone."""
    reference: str = "none"
    """The way that the others are compared with."""

    def chosen(self) -> list[Way]:
        """The ways of this run, in the order of the table."""
        known = {way.name: way for way in ablation(self.stages)}
        # A small model's gradients cost next to nothing on a CPU's loopback interface.
        usual = [name for name, way in known.items() if not way.bf16 or self.device == "cuda"]
        return [known[name] for name in self.ways or usual]
