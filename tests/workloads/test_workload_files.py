"""Data from files: IDX and CIFAR, as they should be, cut off, damaged, missing; downloads only when asked."""

import gzip
import hashlib
import struct
import tarfile
from pathlib import Path

import pytest
import torch

from syncline.errors import UsageError
from syncline.train.data import cifar
from syncline.train.data.cifar import fetch
from syncline.train.data.fashion_mnist import DEBIAN, read_idx
from syncline.train.data.images import crop_and_flip
from syncline.train.workload import build


def idx(shape: tuple[int, ...], body: bytes) -> bytes:
    """An IDX file of bytes."""
    return bytes((0, 0, 8, len(shape))) + struct.pack(f">{len(shape)}I", *shape) + body


def write_fashion(folder: Path, *, gzipped: bool) -> None:
    """Both splits with six images each: image i is all i, its label is i."""
    for split in ("train", "t10k"):
        images = idx((6, 28, 28), b"".join(bytes([i]) * 784 for i in range(6)))
        for name, body in (("images-idx3", images), ("labels-idx1", idx((6,), bytes(range(6))))):
            path = folder / f"{split}-{name}-ubyte{'.gz' if gzipped else ''}"
            path.write_bytes(gzip.compress(body) if gzipped else body)


def write_cifar(folder: Path, *, records: int = 3) -> Path:
    """The extracted CIFAR-10 files; record i of every file has label i and pixels i."""
    inner = folder / "cifar-10-batches-bin"
    inner.mkdir(parents=True)
    body = b"".join(bytes([i]) + bytes([i]) * 3072 for i in range(records))
    for name in [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]:
        (inner / name).write_bytes(body)
    return inner


@pytest.mark.parametrize("gzipped", [True, False])
def test_fashion_mnist_from_a_folder(tmp_path: Path, gzipped: bool) -> None:
    write_fashion(tmp_path, gzipped=gzipped)
    workload = build("mlp", f'fashion-mnist(root="{tmp_path}", channels=3)')
    images, labels = workload.train.batch(torch.tensor([5, 0]))
    assert images.shape == (2, 3, 32, 32)
    assert labels.tolist() == [5, 0]
    assert float(images[0, 0, 16, 16]) > float(images[0, 0, 0, 0])
    assert len(workload.train) == 6


@pytest.mark.skipif(not DEBIAN.is_dir(), reason="Debian's package dataset-fashion-mnist is not installed")
def test_the_real_fashion_mnist() -> None:
    workload = build("vgg11(width=0.0625)", "fashion-mnist")
    assert workload.test is not None
    assert (len(workload.train), len(workload.test)) == (60_000, 10_000)
    images, labels = workload.train.batch(torch.arange(0, 60_000, 20))
    assert images.shape == (3000, 1, 32, 32)
    assert abs(float(images.mean())) < 0.02
    assert abs(float(images.std()) - 1) < 0.02
    assert labels.bincount().tolist() == pytest.approx([300] * 10, abs=60)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not an IDX file"),
        (b"\0\0\x0d\1\0\0\0\1\0\0\0\0", "not an IDX file"),
        (idx((4,), b"abc"), "has only 3"),
        (idx((4,), b"abcde"), "has more"),
        (idx((0,), b""), "announces the shape"),
        (idx((2**32 - 1,), b""), "announces the shape"),
    ],
)
def test_damaged_idx_files(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "labels"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=message):
        read_idx(path, dimensions=1)
    packed = tmp_path / "labels.gz"
    packed.write_bytes(gzip.compress(content))
    with pytest.raises(UsageError, match=message):
        read_idx(packed, dimensions=1)


@pytest.mark.parametrize(
    "content", [b"not gzip at all", gzip.compress(idx((64,), bytes(range(64))))[:-20]], ids=["other", "cut"]
)
def test_damaged_gzip(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "labels.gz"
    path.write_bytes(content)
    with pytest.raises(UsageError, match="cannot be read"):
        read_idx(path, dimensions=1)


def test_missing_and_mismatched_fashion_files(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"train-images-idx3-ubyte\[.gz\]: install Debian's package"):
        build("mlp", f'fashion-mnist(root="{tmp_path}")')
    write_fashion(tmp_path, gzipped=False)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx((5,), bytes(5)))
    with pytest.raises(UsageError, match="as many labels"):
        build("mlp", f'fashion-mnist(root="{tmp_path}")')
    with pytest.raises(UsageError, match="1 or 3"):
        build("mlp", f'fashion-mnist(root="{tmp_path}", channels=2)')


def test_cifar10_extracted_and_archived(tmp_path: Path) -> None:
    inner = write_cifar(tmp_path / "plain")
    packed = tmp_path / "packed"
    packed.mkdir()
    with tarfile.open(packed / "cifar-10-binary.tar.gz", "w:gz") as tar:
        tar.add(inner, arcname=inner.name)
    batches = []
    for folder in (tmp_path / "plain", inner, packed):
        workload = build("mlp", f'cifar10(root="{folder}")')
        assert len(workload.train) == 15
        batches.append(workload.train.batch(torch.tensor([2, 4])))
    assert batches[0][1].tolist() == [2, 1]
    assert all(torch.equal(batch[0], batches[0][0]) for batch in batches)


def test_cifar100_takes_the_fine_label(tmp_path: Path) -> None:
    for name in ("train.bin", "test.bin"):
        (tmp_path / name).write_bytes(bytes([7, 93]) + bytes(3072))
    workload = build("mlp", f'cifar100(root="{tmp_path}")')
    assert workload.train.batch(torch.tensor([0]))[1].tolist() == [93]


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "whole records"), (bytes(100), "whole records"), (bytes([10]) + bytes(3072), "label 10")],
)
def test_damaged_cifar_files(tmp_path: Path, content: bytes, message: str) -> None:
    inner = write_cifar(tmp_path)
    (inner / "data_batch_3.bin").write_bytes(content)
    with pytest.raises(UsageError, match=message):
        build("mlp", f'cifar10(root="{tmp_path}")')


def test_damaged_and_incomplete_cifar_archives(tmp_path: Path) -> None:
    archive = tmp_path / "cifar-10-binary.tar.gz"
    archive.write_bytes(b"not an archive")
    with pytest.raises(UsageError, match="cannot be read"):
        build("mlp", f'cifar10(root="{tmp_path}")')
    with tarfile.open(archive, "w:gz"):
        pass
    with pytest.raises(UsageError, match=r"has no data_batch_1.bin"):
        build("mlp", f'cifar10(root="{tmp_path}")')


def test_missing_cifar_says_what_to_fetch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"cifar-10-binary.tar.gz.*download=true"):
        build("mlp", f'cifar10(root="{tmp_path}")')
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(UsageError, match=r"cache/syncline/cifar-100-binary.tar.gz"):
        build("mlp", "cifar100")


def test_augmentation_varies_by_epoch_and_not_by_batch(tmp_path: Path) -> None:
    inner = write_cifar(tmp_path)
    for path in inner.iterdir():
        path.write_bytes((bytes([1]) + bytes(i % 251 for i in range(3072))) * 4)
    samples = build("mlp", f'cifar10(root="{tmp_path}", augment=true)', seed=3).train
    first = samples.batch(torch.arange(8), epoch=0)[0]
    assert torch.equal(first[5:6], samples.batch(torch.tensor([5]), epoch=0)[0])
    assert not torch.equal(first, samples.batch(torch.arange(8), epoch=1)[0])
    plain = build("mlp", f'cifar10(root="{tmp_path}")', seed=3).train
    assert torch.equal(plain.batch(torch.arange(8), epoch=0)[0], plain.batch(torch.arange(8), epoch=1)[0])


def test_crop_and_flip() -> None:
    image = torch.arange(1, 65, dtype=torch.float32).view(1, 1, 8, 8)
    assert torch.equal(crop_and_flip(image, torch.tensor([[4, 4, 0]])), image)
    assert torch.equal(crop_and_flip(image, torch.tensor([[4, 4, 1]])), image.flip(3))
    moved = crop_and_flip(image, torch.tensor([[5, 4, 0]]))
    assert torch.equal(moved[..., :7, :], image[..., 1:, :])
    assert float(moved[..., 7, :].sum()) == 0


def test_downloads_are_checked_and_kept_only_when_right(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"content")
    target = tmp_path / "cache" / "file"
    with pytest.raises(UsageError, match="it was deleted"):
        fetch(source.as_uri(), target, sha256="0" * 64)
    assert not target.exists()
    fetch(source.as_uri(), target, sha256=hashlib.sha256(b"content").hexdigest())
    assert target.read_bytes() == b"content"
    source.unlink()
    fetch(source.as_uri(), target, sha256="0" * 64)
    with pytest.raises(UsageError, match="cannot download"):
        fetch(source.as_uri(), tmp_path / "cache" / "other", sha256="0" * 64)


def test_a_download_without_network_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cifar._Set, "url", property(lambda self: (tmp_path / "nowhere").as_uri()))
    with pytest.raises(UsageError, match="where there is a network"):
        build("mlp", f'cifar10(root="{tmp_path}", download=true)')
