"""`load_data`: the data set of a spec: a registered name, or the user's own data set, also a torch `Dataset`."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils.data import default_collate

from syncline import spec
from syncline.errors import UsageError, short
from syncline.train.data.base import DATA, Batch, Data, Need, Source


def load_data(text: str, need: Need, *, model: str, seed: int) -> Data:
    """The data set of a spec, made for the model's needs; one of the wrong kind is a `UsageError`."""
    call = spec.parse_one(text)
    source: Any = DATA.get(call.name, makes=(object,))
    if not isinstance(source, Source):
        return _own_images(call, source, need, model=model)
    if need.task not in source.tasks:
        legal = ", ".join(name for name in DATA.names() if need.task in DATA.get(name).tasks)
        raise UsageError(f"model '{model}' cannot train on data '{call.name}': it needs {need.task} ({legal})")
    made: Any = spec.apply(call, source.make, need, seed=seed)
    if not isinstance(made, Data):
        raise UsageError(f"data '{call.name}' returned a {type(made).__name__}, not a syncline Data")
    return made


class Collated:
    """A user's map-style data set (`__len__` and `__getitem__`), read in batches."""

    def __init__(self, samples: Any) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def batch(self, indices: Tensor, *, epoch: int = 0) -> Batch:
        """The samples at `indices`, stacked."""
        return tuple(default_collate([self._samples[i] for i in indices.tolist()]))


def _own_images(call: spec.Call, make: Callable[..., Any], need: Need, *, model: str) -> Data:
    """The images of a user's own class or function; sizes are those of the first sample."""
    if need.task != "images":
        raise UsageError(
            f"data '{call.name}' is a data set of images, and model '{model}' needs {need.task}: make the data with"
            f" @syncline.train.data.data(NAME, tasks=('{need.task}',))"
        )
    if isinstance(make, type) and (missing := [name for name in _METHODS if not hasattr(make, name)]):
        raise UsageError(
            f"data '{call.name}' is a class {make.__name__} without {' and '.join(missing)}: name a class of a data"
            " set, such as a torch Dataset of (image, label)"
        )
    made = spec.apply(call, make)
    if missing := [name for name in _METHODS if not hasattr(made, name)]:
        raise UsageError(
            f"data '{call.name}' returned a {type(made).__name__} without {' and '.join(missing)}: return a data set,"
            " such as a torch Dataset of (image, label)"
        )
    image, label = _first(call, made)
    kinds: Any = getattr(made, "classes", None)
    if not isinstance(kinds, int):
        if not hasattr(kinds, "__len__"):
            raise UsageError(
                f"data '{call.name}' does not say how many classes it has: give it an attribute `classes`, the number"
                " or the names"
            )
        kinds = len(kinds)
    if not 0 <= label < kinds:
        raise UsageError(f"data '{call.name}': the label {label} of its first sample is not below its {kinds} classes")
    channels, height, width = image.shape
    if height != width:
        raise UsageError(f"data '{call.name}': its images are {height}x{width}, and models here need square ones")
    return Data(Collated(made), None, classes=kinds, channels=channels, image_size=height)


_METHODS = ("__len__", "__getitem__")


def _first(call: spec.Call, samples: Any) -> tuple[Tensor, int]:
    """The first sample, if it is a pair of an image tensor and a label."""
    if not len(samples):
        raise UsageError(f"data '{call.name}' has no samples")
    sample = samples[0]
    if not isinstance(sample, tuple | list) or len(sample) != 2:
        raise UsageError(f"data '{call.name}': its first sample is {short(sample)}, not a pair (image, label)")
    image, label = sample
    if not isinstance(image, Tensor) or image.dim() != 3 or not image.is_floating_point():
        what = (
            f"a tensor of {image.dtype} and shape {tuple(image.shape)}" if isinstance(image, Tensor) else short(image)
        )
        raise UsageError(
            f"data '{call.name}': its first image is {what}, not a float tensor of shape (channels, height, width)"
        )
    return image, int(label)
