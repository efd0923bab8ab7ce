"""Two domains of images without pairs, for image translation: filled figures, and line drawings of figures."""

from dataclasses import dataclass

import torch
from torch import Tensor

from syncline.errors import UsageError
from syncline.train.data.base import Batch, Data, Need, data
from syncline.train.data.counter import bits, uniform
from syncline.train.data.shapes import FIGURES, coverage, grain


@dataclass(frozen=True)
class Unpaired:
    """Samples are (painted, drawn), each [n, 3, size, size] in -1..1; the two show different figures."""

    length: int
    size: int
    seed: int
    stream: int

    def __len__(self) -> int:
        return self.length

    def batch(self, indices: Tensor, *, epoch: int = 0) -> Batch:
        """Draw both domains' samples at `indices`; they are the same in every epoch."""
        del epoch
        return self._domain(indices, self.stream, drawn=False), self._domain(indices, self.stream + 8, drawn=True)

    def _domain(self, indices: Tensor, stream: int, *, drawn: bool) -> Tensor:
        n = len(indices)
        labels = bits(self.seed, stream, indices, 1).squeeze(1) % len(FIGURES)
        draws = uniform(self.seed, stream + 1, indices, 10)
        cover = coverage(labels, draws, size=self.size, outline=drawn).unsqueeze(1)
        if drawn:
            paper, ink = torch.tensor(0.9, device="cpu"), (0.3 * draws[:, 4]).view(n, 1, 1, 1)
            image = (paper + cover * (ink - paper)).expand(n, 3, self.size, self.size)
        else:
            back, fore = (0.5 * draws[:, 4:7]).view(n, 3, 1, 1), (0.4 + 0.6 * draws[:, 7:10]).view(n, 3, 1, 1)
            image = back + cover * (fore - back)
        image = image + 0.1 * grain(self.seed, stream + 2, indices, (3, self.size, self.size))
        return image.clamp(0.0, 1.0) * 2.0 - 1.0


@data("unpaired", tasks=("unpaired",))
def unpaired(need: Need, *, seed: int, train: int = 5_000, image_size: int | None = None) -> Data:
    """Filled and outlined figures, `train` of each, at the model's image size. No test set: nothing to score."""
    size = image_size or need.image_size or 32
    if train < 1 or not 8 <= size <= 1024:
        raise UsageError(f"unpaired({train=}, image_size={size}): samples >= 1, image_size 8 to 1024")
    return Data(
        name="unpaired",
        task="unpaired",
        train=Unpaired(train, size, seed, 32),
        test=None,
        samples="images",
        channels=3,
        image_size=size,
    )
