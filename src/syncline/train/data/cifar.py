"""CIFAR-10 and CIFAR-100 from the binary archives (`.tar.gz`, or extracted `.bin` files). Nothing is unpickled.

An archive is downloaded only on request: checked and moved into place; ranks of a machine share it.
"""

import fcntl
import hashlib
import os
import tarfile
import tempfile
import urllib.error
import urllib.request
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from syncline.errors import UsageError
from syncline.train.data.base import Data, Need, data
from syncline.train.data.images import StoredImages, checked_side, choose, class_range

_SIDE = 32
_PIXELS = 3 * _SIDE * _SIDE
_MAX_DOWNLOAD = 1 << 30


@dataclass(frozen=True)
class _Set:
    name: str
    archive: str
    folder: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    label_bytes: int
    classes: int
    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    sha256: str

    @property
    def url(self) -> str:
        return f"https://www.cs.toronto.edu/~kriz/{self.archive}"

    @property
    def max_bytes(self) -> int:
        # A split has 50,000 records; more than 100,000 is not a CIFAR file.
        return 100_000 * (self.label_bytes + _PIXELS)


_CIFAR10 = _Set(
    name="cifar10",
    archive="cifar-10-binary.tar.gz",
    folder="cifar-10-batches-bin",
    train=tuple(f"data_batch_{i}.bin" for i in range(1, 6)),
    test=("test_batch.bin",),
    label_bytes=1,
    classes=10,
    mean=(0.4914, 0.4822, 0.4465),
    deviation=(0.2470, 0.2435, 0.2616),
    sha256="c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
)
_CIFAR100 = _Set(
    name="cifar100",
    archive="cifar-100-binary.tar.gz",
    folder="cifar-100-binary",
    train=("train.bin",),
    test=("test.bin",),
    label_bytes=2,
    classes=100,
    mean=(0.5071, 0.4865, 0.4409),
    deviation=(0.2673, 0.2564, 0.2762),
    sha256="58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
)


def _register(kind: _Set) -> None:
    @data(kind.name, tasks=("images",))
    def load(
        need: Need, *, seed: int, root: str | None = None, augment: bool = False, download: bool = False,
        classes: str | None = None, train: int | None = None, image_size: int | None = None,
    ) -> Data:  # fmt: skip
        """32x32 colour images. `augment=true`: random crop and mirror; `download=true`: fetch it if missing.

        `classes='0-4'` takes some of the classes, `train` so many of the training images; `image_size=224` enlarges
        them.
        """
        kinds, side = class_range(classes, kind.classes), checked_side(image_size, stored=_SIDE)
        folder = Path(root).expanduser() if root else cache_folder()
        training, test = (_split(kind, folder, names, download=download) for names in (kind.train, kind.test))
        return Data(
            StoredImages(*choose(training, kinds, most=train), kind.mean, kind.deviation, augment, seed, side),
            StoredImages(*choose(test, kinds), kind.mean, kind.deviation, side=side),
            classes=len(kinds),
            channels=3,
            image_size=side or _SIDE,
        )


_register(_CIFAR10)
_register(_CIFAR100)


def _split(kind: _Set, folder: Path, names: tuple[str, ...], *, download: bool) -> tuple[Tensor, Tensor]:
    for place in (folder, folder / kind.folder):
        if all((place / name).is_file() for name in names):
            raw = [_read(place / name, kind) for name in names]
            break
    else:
        archive = folder / kind.archive
        if not archive.is_file() and download:
            fetch(kind.url, archive, sha256=kind.sha256)
        if not archive.is_file():
            raise UsageError(
                f"{kind.name}: there is neither {archive} nor {folder / kind.folder / names[0]}: put the binary"
                f" version there ({kind.url}; the python version is a pickle and is not read), or say root=FOLDER,"
                f" or {kind.name}(download=true)"
            )
        raw = _members(archive, kind, names)
    images, labels = zip(*(_records(body, kind, name) for body, name in zip(raw, names, strict=True)), strict=True)
    return torch.cat(images), torch.cat(labels)


def _read(path: Path, kind: _Set) -> bytes:
    if path.stat().st_size > kind.max_bytes:
        raise UsageError(f"{path} is too large for a {kind.name} file")
    return path.read_bytes()


def _members(archive: Path, kind: _Set, names: tuple[str, ...]) -> list[bytes]:
    """The named files out of the archive, read in memory: nothing is extracted to the disk."""
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for member in tar:
                name = member.name.removeprefix("./").removeprefix(f"{kind.folder}/")
                if name in names and member.isfile() and member.size <= kind.max_bytes:
                    file = tar.extractfile(member)
                    assert file is not None
                    found[name] = file.read()
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        raise UsageError(f"{archive} cannot be read: {error}; fetch it again from {kind.url}") from error
    missing = [name for name in names if name not in found]
    if missing:
        raise UsageError(f"{archive} has no {', '.join(missing)}: fetch it again from {kind.url}")
    return [found[name] for name in names]


def _records(body: bytes, kind: _Set, name: str) -> tuple[Tensor, Tensor]:
    size = kind.label_bytes + _PIXELS
    if not body or len(body) % size:
        raise UsageError(f"{name} is damaged: {len(body)} bytes are not whole records of {size}; fetch it again")
    rows = torch.frombuffer(bytearray(body), dtype=torch.uint8).view(-1, size)
    # CIFAR-100 has the coarse label first, the fine one next to the pixels.
    labels = rows[:, kind.label_bytes - 1].long()
    if int(labels.max()) >= kind.classes:
        raise UsageError(f"{name} is damaged: label {int(labels.max())} of {kind.classes}; fetch it again")
    return rows[:, kind.label_bytes :].reshape(-1, 3, 32, 32), labels


def cache_folder() -> Path:
    """The default folder for data: `$XDG_CACHE_HOME/syncline`, else `~/.cache/syncline`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "syncline"


def fetch(url: str, target: Path, *, sha256: str, timeout: float = 30) -> None:
    """Download `url` to `target` unless it is there; a failure or a wrong checksum is a `UsageError`."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / f".{target.name}.lock").open("w") as lock:
        # Several ranks call this at once: the first downloads, the others wait and find the file.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.is_file():
            _download(url, target, sha256, timeout)


def _download(url: str, target: Path, sha256: str, timeout: float) -> None:
    digest, size = hashlib.sha256(), 0
    with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}.") as partial:
        try:
            with urllib.request.urlopen(url, timeout=timeout) as answer:  # noqa: S310 (our own https address)
                while chunk := answer.read(1 << 20):
                    size += len(chunk)
                    if size > _MAX_DOWNLOAD:
                        raise UsageError(f"{url} sends more than {_MAX_DOWNLOAD >> 30} GiB: not what was expected")
                    digest.update(chunk)
                    partial.write(chunk)
        except (urllib.error.URLError, OSError) as error:
            raise UsageError(
                f"cannot download {url} ({error}): fetch it where there is a network, and put it at {target}"
            ) from error
        if digest.hexdigest() != sha256:
            raise UsageError(f"{url} has the SHA-256 {digest.hexdigest()}, not {sha256}: it was deleted")
        partial.flush()
        # The temporary name goes away with the block; a link of the finished file stays, in one step.
        os.link(partial.name, target)
