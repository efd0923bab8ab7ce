"""Models, sizes, strategies and bandwidths of `bench models`, and which of them `--only` chooses. Pure functions."""

from collections.abc import Sequence
from dataclasses import dataclass

from syncline.errors import UsageError

REFERENCE = "ddp"
"""Runs in every contest: the dense loss, and the time that others are compared with."""
STRATEGIES = (
    REFERENCE,
    "ddp-bf16",
    "ddp-powersgd(rank=4)",
    "byteps",
    "ring-dgc",
    # CompLL's codecs. Optimizers have their own momentum here, so dgc has none.
    "syncline(onebit)",
    "syncline(tbq)",
    "syncline(terngrad)",
    "syncline(dgc(momentum=0))",
    "syncline(graddrop)",
    "syncline(auto)",
)
BANDWIDTHS = ("1Gbit", "10Gbit", "25Gbit")


@dataclass(frozen=True)
class Setting:
    """A model at one size, as `train` names it; `batch` is the one of all ranks together."""

    model: str
    batch: int
    data: str = "auto"


SIZES: dict[str, dict[str, Setting]] = {
    # As published, for a GPU.
    "paper": {
        "vgg19": Setting("vgg19", 64),
        "resnet50": Setting("resnet50", 64),
        "bert": Setting("bert(size=base, head=pretraining)", 16),
        "transformer": Setting("transformer(size=base)", 32),
        "lstm": Setting("lstm(size=paper)", 40),
        "ugatit": Setting("ugatit-light(size=paper)", 2),
    },
    # The same layers with fewer channels: steps of a fraction of a second on two cores.
    "small": {
        "vgg19": Setting("vgg19(width=0.125)", 16, "shapes"),
        "resnet50": Setting("resnet50(width=0.25)", 16, "shapes"),
        "bert": Setting("bert(size=mini, head=pretraining)", 8),
        "transformer": Setting("transformer(size=tiny)", 16),
        "lstm": Setting("lstm(size=tiny)", 16),
        "ugatit": Setting("ugatit-light(size=tiny)", 2),
    },
}
QUICK = ("lstm",), (REFERENCE, "byteps", "ring-dgc", "syncline(onebit)", "syncline(auto)"), ("1Gbit",)
"""Models, strategies and bandwidths of `--quick`."""


@dataclass(frozen=True)
class Cell:
    """One row of the table."""

    model: str
    bandwidth: str
    strategy: str

    @property
    def label(self) -> str:
        """What `--only` searches."""
        return f"{self.model} {self.bandwidth} {self.strategy}"


def chosen(only: str = "", *, quick: bool = False) -> list[Cell]:
    """The cells whose label contains every word of `only`.

    >>> [cell.label for cell in chosen("vgg19 10Gbit auto")]
    ['vgg19 10Gbit syncline(auto)']
    """
    models, strategies, bandwidths = QUICK if quick else (tuple(SIZES["paper"]), STRATEGIES, BANDWIDTHS)
    cells = [Cell(m, b, s) for m in models for b in bandwidths for s in strategies]
    found = [cell for cell in cells if all(_has_word(cell, word) for word in only.split())]
    if not found:
        names = f"{', '.join(models)}; {', '.join(bandwidths)}; {', '.join(strategies)}"
        raise UsageError(f"--only '{only}' fits no cell: use words of a model, a bandwidth or a strategy ({names})")
    return found


def _has_word(cell: Cell, word: str) -> bool:
    """Whether a part of the label is the word or contains it; `ddp` and `1Gbit` mean themselves only."""
    parts = (cell.model, cell.bandwidth, cell.strategy)
    whole = {*SIZES["paper"], *BANDWIDTHS, *STRATEGIES}
    return word in parts if word in whole else any(word in part for part in parts)


def contests(cells: Sequence[Cell], done: Sequence[Cell], *, at_once: int) -> list[tuple[Cell, ...]]:
    """Groups of cells of one model and bandwidth that are not done and run together, each with the reference first."""
    groups: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        if cell not in done:
            groups.setdefault((cell.model, cell.bandwidth), []).append(cell)
    made = []
    for (model, bandwidth), members in groups.items():
        reference = Cell(model, bandwidth, REFERENCE)
        others = [cell for cell in members if cell != reference]
        for first in range(0, max(1, len(others)), at_once - 1):
            made.append((reference, *others[first : first + at_once - 1]))
    return made
