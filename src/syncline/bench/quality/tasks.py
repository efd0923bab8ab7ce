"""The tasks of `bench quality`: model, data and optimizer of each, small for a CPU and in full size for a GPU."""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from syncline import codecs
from syncline.errors import UsageError, unknown
from syncline.spec import Call, parse_one
from syncline.train.data.fashion_mnist import DEBIAN

DENSE, AUTO = "none", "auto"
BASE = "vgg"
"""The task on which every codec is measured at its defaults."""
SIZES = ("small", "full")
# Codecs that need arguments.
_CHOICES = {"warmup": "warmup(topk(0.01), steps=100)"}
_SOME = ("bf16", "int8", "terngrad", "powersgd", "topk")
_OWN_MOMENTUM = re.compile(r"\bdgc\b")


@dataclass(frozen=True)
class Training:
    """What a task trains: specs of model, data and optimizer, and the samples of a step over all ranks."""

    model: str
    optimizer: str
    data: str = "images"
    """`images`: Fashion-MNIST, or generated images where that is not installed."""
    steps: int = 300
    batch: int = 64
    pretrain: str = ""
    """The model that is trained first, without compression, on the same text; its weights are where it starts."""
    pretrain_steps: int = 0


@dataclass(frozen=True)
class Task:
    """A task in both sizes, and the codecs that it is measured with unless others are named."""

    small: Training
    full: Training
    codecs: tuple[str, ...] = (*_SOME, AUTO)


TASKS = {
    BASE: Task(
        Training("vgg11(width=0.125)", "sgd(lr=0.02, momentum=0.9)"),
        Training("vgg11", "sgd(lr=0.02, momentum=0.9)", steps=2000, batch=256),
        codecs=(),
    ),
    "vgg-sgd": Task(
        Training("vgg11(width=0.125, norm=false)", "sgd(lr=0.01, momentum=0.9)"),
        Training("vgg19", "sgd(lr=0.01, momentum=0.9)", "images(channels=3)", steps=2000),
    ),
    "vgg-adam": Task(
        Training("vgg11(width=0.125, norm=false)", "adam(lr=0.001)"),
        Training("vgg19", "adam(lr=0.0001)", "images(channels=3)", steps=2000),
    ),
    "resnet50": Task(
        Training("resnet50(width=0.125)", "sgd(lr=0.05, momentum=0.9)"),
        Training("resnet50", "sgd(lr=0.05, momentum=0.9, weight_decay=0.0001)", steps=2000),
    ),
    "vit": Task(
        Training("vit(size=tiny)", "adamw(lr=0.001, weight_decay=0.05)"),
        Training("vit(size=b16)", "adamw(lr=0.0003, weight_decay=0.05)", "shapes", steps=2000),
    ),
    "gpt2": Task(
        Training("gpt2(size=tiny)", "adamw(lr=0.002)", "text", batch=32),
        Training("gpt2(size=small)", "adamw(lr=0.0006)", "text(megabytes=100.0)", steps=2000, batch=16),
    ),
    "bert": Task(
        Training("bert(size=tiny)", "adamw(lr=0.0005)", "text", 200, 32, "bert(size=tiny, head=pretraining)", 200),
        Training("bert(size=base)", "adamw(lr=0.00005)", "text", 1000, 32, "bert(size=base, head=pretraining)", 5000),
    ),
    "lstm": Task(
        Training("lstm(size=tiny)", "adam(lr=0.01)", "text", batch=32),
        Training("lstm(size=paper)", "adam(lr=0.0005)", "text(megabytes=100.0)", steps=2000),
    ),
    "gan": Task(
        Training("ugatit-light(size=tiny)", "adam(lr=0.0001, beta1=0.5, beta2=0.999)", "unpaired", 200, 8),
        Training("ugatit-light(size=paper)", "adam(lr=0.0001, beta1=0.5, beta2=0.999)", "unpaired", 2000, 4),
    ),
}


@dataclass(frozen=True)
class Job:
    """One training: everything that its figures depend on. Finished jobs are found again by these values."""

    task: str
    codec: str
    seed: int
    model: str
    data: str
    optimizer: str
    batch: int
    steps: int
    workers: int = 2
    device: str = "cpu"
    network: str = ""
    """Bandwidth of the links between real ranks; empty: the ranks run in lockstep in one process."""
    pretrain: str = ""
    pretrain_steps: int = 0


def chosen_tasks(names: Sequence[str]) -> list[str]:
    """The tasks of a list of names; `all` is every task."""
    for name in names:
        if name not in TASKS and name != "all":
            raise unknown("task", name, [*TASKS, "all"])
    return list(TASKS) if "all" in names else list(dict.fromkeys(names))


def codecs_of(task: str, asked: Sequence[str] | None) -> list[str]:
    """The codecs of a task: those asked for, or its own; all that exist for the base task."""
    every = (_CHOICES.get(name, name) for name in codecs.available() if name != DENSE)
    return list(asked or TASKS[task].codecs or every)


def jobs(
    tasks: Sequence[str], *, asked: Sequence[str] | None, seeds: Sequence[int], size: str, network: str,
    on_ranks: bool, changes: dict[str, object], **common: object,
) -> list[Job]:  # fmt: skip
    """All trainings, in the order in which they run: a task's seeds one after the other, each with its dense run first.

    `auto` needs real ranks, and so does its dense run; `on_ranks` puts all codecs there. `changes` replace values of
    the task's `Training`.
    """
    if size not in SIZES:
        raise UsageError(f"--size {size} is not known: use {' or '.join(SIZES)}")
    made: dict[Job, None] = {}
    for task in tasks:
        training = replace(getattr(TASKS[task], size), **changes)
        values = asdict(training) | {"data": _data(training.data), "task": task} | common
        for seed in seeds:
            for codec in codecs_of(task, asked):
                link = network if on_ranks or codec.partition("(")[0] == AUTO else ""
                for name in (DENSE, codec):
                    optimizer = optimizer_for(name, training.optimizer)
                    made[Job(**values | {"codec": name, "seed": seed, "network": link, "optimizer": optimizer})] = None
    return list(made)


def optimizer_for(codec: str, optimizer: str) -> str:
    """The optimizer for a codec: one with its own momentum would count the momentum of SGD twice.

    >>> optimizer_for("warmup(dgc(0.001))", "sgd(lr=0.02, momentum=0.9)")
    'sgd(lr=0.02)'
    """
    call = parse_one(optimizer)
    if not _OWN_MOMENTUM.search(codec) or "momentum" not in call.kwargs:
        return optimizer
    return str(Call(call.name, call.args, {key: value for key, value in call.kwargs.items() if key != "momentum"}))


def _data(text: str) -> str:
    """The data set's spec, with `images` replaced by the images that this machine has."""
    name, bracket, rest = text.partition("(")
    return f"{'fashion-mnist' if DEBIAN.exists() else 'shapes'}{bracket}{rest}" if name == "images" else text
