"""The activation cache against plain recomputation: augmentation, moves, tiers, damage, faults, and shared ranks."""

import errno
import os
import resource
import signal
import threading
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ranks import run_ranks
from syncline.errors import SynclineWarning, UsageError
from syncline.pipeline.cache import ActivationCache, shared_cache
from syncline.pipeline.cache.entry import Layout, checksums, digest, mixed
from syncline.pipeline.cache.stats import Payoff
from syncline.pipeline.cache.store import SHARED_MEMORY
from syncline.train.data.images import StoredImages

SAMPLES, WIDTH = 24, 8
MB = 1_000_000


class _Mix(nn.Module):
    """A block with attention-like mixing of the sequence, and a mask that travels along."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, mask):
        return torch.tanh(self.inside(x)) * mask.unsqueeze(-1) + x.mean(1, keepdim=True), mask


class _Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, WIDTH)

    def forward(self, tokens):
        return self.words(tokens), tokens != 0


class _Scale(nn.Module):
    """Scales each value: unlike a matrix product, it gives the same bits in a batch of any size, on every CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(WIDTH)), nn.Parameter(torch.randn(WIDTH))

    def forward(self, x):
        return x[..., :WIDTH] * self.weight + self.bias


def _vision(depth=6):
    torch.manual_seed(0)
    patches = nn.Sequential(nn.Flatten(2), _Scale())
    return [patches, *(nn.Sequential(_Scale(), nn.GELU()) for _ in range(depth))]


def _images(augment=False):
    images = torch.randint(0, 255, (SAMPLES, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    return StoredImages(images, torch.zeros(SAMPLES).long(), (0.5,) * 3, (0.2,) * 3, augment=augment, seed=3)


@torch.no_grad()
def _plain(layers, count, inputs):
    state = inputs
    for layer in layers[:count]:
        state = layer(*(state if isinstance(state, tuple) else (state,)))
    return state


def _cache(layers, **options):
    chosen = {"samples": SAMPLES, "ram": MB, "must_pay": False, "check": 0.0, **options}
    return ActivationCache(layers, **chosen)


def _batches(epoch, size=6):
    return torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(epoch)).split(size)


def _same(a, b):
    pairs = zip(a, b, strict=True) if isinstance(a, tuple) else [(a, b)]
    return all(x.dtype == y.dtype and torch.equal(x, y) for x, y in pairs)


def test_hits_are_bit_equal_to_recomputation_and_a_move_continues_from_the_old_entries():
    layers, data = _vision(), _images()
    cache = _cache(layers)
    wanted = {0: (2, "misses"), 1: (2, "hits"), 2: (4, "continued"), 3: (4, "hits"), 4: (6, "continued")}
    for epoch, (boundary, source) in wanted.items():
        before = getattr(cache.stats, source)
        cache.move(boundary)
        for ids in _batches(epoch):
            (inputs, _) = data.batch(ids, epoch=epoch)
            assert _same(cache(ids, inputs), _plain(layers, boundary, inputs))
        assert getattr(cache.stats, source) - before == SAMPLES, source
    assert cache.stats.ram_bytes <= MB
    cache.close()


def test_random_augmentation_is_never_served_from_another_view_and_repeated_views_hit():
    layers, data = _vision(), _images(augment=True)
    cache = _cache(layers, views=2)
    cache.move(3)
    for epoch, hits in ((0, 0), (1, 0), (2, 0), (1, SAMPLES), (2, 2 * SAMPLES), (0, 2 * SAMPLES)):
        for ids in _batches(epoch + 10):
            inputs, _ = data.batch(ids, epoch=epoch)
            assert _same(cache(ids, inputs, view=epoch), _plain(layers, 3, inputs))
        assert cache.stats.hits == hits, epoch
    cache.close()


def test_tuples_half_precision_and_partly_known_batches():
    torch.manual_seed(0)
    layers = [_Embed(), *(_Mix() for _ in range(3))]
    tokens = torch.randint(0, 50, (SAMPLES, 5))
    for mode in (torch.float32, torch.bfloat16):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=mode is torch.bfloat16):
            cache = _cache(layers)
            cache.move(3)
            for ids in (torch.arange(4), torch.arange(2, 9), torch.tensor([0, 9, 3, 11]), torch.arange(8)):
                assert _same(cache((ids), tokens[ids]), _plain(layers, 3, tokens[ids]))
            assert (cache.stats.hits, cache.stats.misses) == (2 + 2 + 8, 4 + 5 + 2)
            cache.close()


def test_a_change_of_weights_or_precision_is_another_entry():
    layers, data = _vision(), _images()
    cache, ids = _cache(layers), torch.arange(6)
    inputs, _ = data.batch(ids)
    cache.move(3)
    cache(ids, inputs)
    cache.move(0)  # unfrozen, trained on, and frozen again
    assert cache(ids, inputs) is inputs
    with torch.no_grad():
        layers[1][0].weight.mul_(1.5)
    cache.move(3)
    assert _same(cache(ids, inputs), _plain(layers, 3, inputs))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert _same(cache(ids, inputs), _plain(layers, 3, inputs))
    assert cache.stats.hits == cache.stats.continued == 0
    cache.move(4)  # called outside of autocast, where loops freeze
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert _same(cache(ids, inputs), _plain(layers, 4, inputs))
    assert cache.stats.continued == 6
    cache.close()


def test_the_budget_holds_and_the_rest_goes_to_disk_or_is_computed(tmp_path):
    layers, data = _vision(), _images()
    entry = Layout.of(_plain(layers, 2, data.batch(torch.arange(1))[0])).bytes
    table = 8 * (24 + SAMPLES * 5)
    ram, disk = table + 7 * entry + 3, 10 * entry
    cache = _cache(layers, ram=ram, disk=disk, folder=tmp_path / "cache")
    cache.move(2)
    for epoch in range(3):
        for ids in _batches(epoch):
            inputs, _ = data.batch(ids)
            assert _same(cache(ids, inputs), _plain(layers, 2, inputs))
    assert cache.stats.hits == 2 * 17, "7 in RAM and 10 on disk"
    assert (cache.stats.ram_bytes, cache.stats.disk_bytes) == (table + 7 * entry, disk)
    sizes = [os.fstat(file).st_size for file in cache.files]
    assert sizes == [table, 7 * entry, 10 * entry]
    cache.close()


def test_entries_of_old_levels_give_their_place_to_new_ones():
    layers, data = _vision(), _images()
    entry = Layout.of(_plain(layers, 2, data.batch(torch.arange(1))[0])).bytes
    cache = _cache(layers, ram=8 * (24 + SAMPLES * 5) + 6 * entry)
    first, second = torch.arange(6), torch.arange(6, 12)
    for boundary, ids in ((1, first), (2, first), (3, second), (4, second), (4, second)):
        cache.move(boundary)
        inputs, _ = data.batch(ids)
        assert _same(cache(ids, inputs), _plain(layers, boundary, inputs))
    assert cache.stats.stored == 6 + 6 + 0 + 6, "at level 3 the places are still those of level 2, which may be read"
    assert cache.stats.hits == 6
    cache.close()


@pytest.mark.parametrize("tier", [1, 2])
@pytest.mark.parametrize("damage", ["byte", "short"])
def test_a_damaged_file_is_noticed_and_its_entries_are_computed_again(tmp_path, tier, damage):
    layers, data = _vision(), _images()
    entry = Layout.of(_plain(layers, 2, data.batch(torch.arange(1))[0])).bytes
    cache = _cache(layers, ram=8 * (24 + SAMPLES * 5) + 12 * entry, disk=MB, folder=tmp_path)
    cache.move(2)
    ids = torch.arange(SAMPLES)
    inputs, _ = data.batch(ids)
    expected = _plain(layers, 2, inputs)
    cache(ids, inputs)
    file = cache.files[tier]
    if damage == "byte":
        old = os.pread(file, 1, 3 * entry + 5)
        os.pwrite(file, bytes([old[0] ^ 16]), 3 * entry + 5)
    else:
        os.ftruncate(file, 3 * entry + 1)
    lost = 1 if damage == "byte" else 9
    assert _same(cache(ids, inputs), expected)
    assert (cache.stats.damaged, cache.stats.hits) == (lost, SAMPLES - lost)
    assert _same(cache(ids, inputs), expected)
    assert (cache.stats.damaged, cache.stats.hits) == (lost, 2 * SAMPLES - lost), "stored again"
    cache.close()


def test_any_changed_word_or_key_changes_the_checksum():
    entries = torch.randint(0, 255, (1, 64), dtype=torch.uint8)
    total = checksums(entries, mixed(torch.tensor([3]), 0, 7))
    for place in range(64):
        for bit in (1, 128):
            changed = entries.clone()
            changed[0, place] ^= bit
            assert checksums(changed, mixed(torch.tensor([3]), 0, 7)) != total
    assert checksums(entries, mixed(torch.tensor([4]), 0, 7)) != total
    large = [torch.randn(300, 401)]
    other = [large[0].clone()]
    other[0][299, 400] += 1e-4
    assert digest(large, 1) == digest([large[0].clone()], 1) not in (digest(other, 1), digest(large, 2))


def test_the_sampled_check_finds_wrong_values_and_uses_the_computed_ones():
    layers, data = _vision(), _images()
    cache, ids = _cache(layers, check=1.0), torch.arange(6)
    inputs, _ = data.batch(ids)
    cache.move(3)
    cache(ids, inputs)
    cache(ids, inputs)
    assert (cache.stats.checked, cache.stats.rounded, cache.stats.wrong) == (6, 0, 0), "bit-equal"
    with torch.no_grad():
        layers[0][1].weight.add_(1.0)  # "frozen", but somebody changes it
    for batch in (ids, ids + 6, ids + 12):
        inputs, _ = data.batch(batch)
        with torch.no_grad():
            layers[0][1].weight.sub_(1.0)
            cache(batch, inputs)
            layers[0][1].weight.add_(1.0)
        with pytest.warns(SynclineWarning, match=r"differ"):
            assert _same(cache(batch, inputs), _plain(layers, 3, inputs))
    assert cache.stats.wrong == 3
    assert "differ from the computed ones" in cache.why_off
    cache.close()


@pytest.mark.parametrize(("extra", "why"), [(nn.Dropout(0.3), "random"), (nn.BatchNorm1d(3), "mix the samples")])
def test_random_layers_switch_it_off_with_a_warning_and_leave_no_trace(extra, why):
    layers, data = [*_vision(2), extra], _images()
    cache, ids = _cache(layers), torch.arange(6)
    inputs, _ = data.batch(ids)
    cache.move(4)
    start = {name: value.clone() for name, value in extra.state_dict().items()}
    torch.manual_seed(5)
    expected = _plain(layers, 4, inputs)
    random_state, buffers = torch.get_rng_state(), [buffer.clone() for buffer in extra.buffers()]
    extra.load_state_dict(start)
    torch.manual_seed(5)
    with pytest.warns(SynclineWarning, match=why):
        assert _same(cache(ids, inputs), expected)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(torch.equal(a, b) for a, b in zip(extra.buffers(), buffers, strict=True))
    assert why in cache.why_off
    extra.eval()
    cache.move(3)
    assert not cache.why_off
    cache.close()


def test_a_random_layer_behind_the_old_boundary_is_found_too():
    layers, data = [*_vision(2), nn.Dropout(0.3)], _images()
    cache, ids = _cache(layers), torch.arange(6)
    inputs, _ = data.batch(ids)
    cache.move(3)
    cache(ids, inputs)
    cache.move(4)
    with pytest.warns(SynclineWarning, match="random"):
        cache(ids, inputs)
    assert cache.stats.continued == 6
    assert cache.stats.stored == 6, "only those of the old boundary"
    cache.close()


def test_it_stops_where_it_does_not_pay_and_tries_again_behind_more_layers():
    layers, data = _vision(), _images()
    now = [0.0]

    def clock():
        now[0] += 1.0  # reading, storing and computing take one tick each: no gain
        return now[0]

    cache = ActivationCache(layers, samples=SAMPLES, ram=MB, check=0, timing=clock)
    cache.move(1)
    for ids in _batches(0):
        inputs, _ = data.batch(ids)
        assert _same(cache(ids, inputs), _plain(layers, 1, inputs))
    assert "reading a sample takes" in cache.why_off
    assert cache.stats.stored == 18, "after three batches it knows"
    cache.move(2)
    assert not cache.why_off
    cache.close()


def test_it_stops_where_views_never_repeat(monkeypatch):
    monkeypatch.setattr(Payoff, "known", lambda payoff: False)  # whatever reading costs
    layers, data = _vision(), _images(augment=True)
    cache = _cache(layers, must_pay=True)
    cache.move(3)
    for epoch in range(3):
        for ids in _batches(epoch):
            inputs, _ = data.batch(ids, epoch=epoch)
            assert _same(cache(ids, inputs, view=epoch), _plain(layers, 3, inputs))
    assert "views of samples do not repeat" in cache.why_off
    assert cache.stats.stored == SAMPLES, "in the first epoch alone"
    cache.close()


def test_the_decision():
    def why(compute, read, store, epochs):
        made = Payoff()
        made.compute.extend([compute] * 3)
        made.read.extend([read] * 3)
        made.store.extend([store] * 3)
        assert made.known()
        return made.why_not(epochs_left=epochs)

    assert why(2e-3, 1e-3, 1e-3, 4) == ""
    assert why(1e-3, 2e-3, 0, 4) == "reading a sample takes 2 ms and computing it 1 ms"
    assert "storing a sample takes 5 ms, and reading it 4 more times saves 4 ms" in why(2e-3, 1e-3, 5e-3, 4)
    assert not Payoff().known()


@pytest.mark.parametrize("micro", [6, 2])
def test_prefetched_batches_are_read_in_the_background_and_taken_whole_or_in_micro_batches(micro):
    layers, data = _vision(), _images()
    cache = _cache(layers)
    cache.move(2)
    for epoch in range(2):
        batches = _batches(epoch)
        for number, ids in enumerate(batches):
            if number + 1 < len(batches):
                cache.prefetch(batches[number + 1])
            for part in ids.split(micro):
                inputs, _ = data.batch(part)
                assert _same(cache(part, inputs), _plain(layers, 2, inputs))
    assert (cache.stats.hits, cache.stats.prefetched) == (SAMPLES, SAMPLES - 6)
    cache.move(4)
    for part in (torch.arange(4), torch.tensor([9, 1, 5])):
        cache.prefetch(torch.cat((part, torch.tensor([0, 20]))))
        inputs, _ = data.batch(part)
        assert _same(cache(part, inputs), _plain(layers, 4, inputs))
    cache.prefetch(torch.arange(3))  # announced, and never asked for
    cache(torch.arange(4), data.batch(torch.arange(4))[0])
    cache.close()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("syncline-cache")]


def test_files_that_cannot_be_created_or_filled_are_a_warning(tmp_path, monkeypatch):
    layers, data = _vision(), _images()
    ids = torch.arange(SAMPLES)
    inputs, _ = data.batch(ids)
    blocker = tmp_path / "file"
    blocker.write_text("")
    with pytest.warns(SynclineWarning, match="the activation cache is off: its files cannot be created"):
        cache = _cache(layers, disk=MB, folder=blocker)
    cache.move(2)
    assert _same(cache(ids, inputs), _plain(layers, 2, inputs))
    cache.close()

    real, full = os.pwrite, []

    def pwrite(file, content, offset):
        if offset > 100:
            full.append(offset)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(file, content, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    cache = _cache(layers)
    cache.move(2)
    with pytest.warns(SynclineWarning, match="takes no more entries .No space left on device."):
        cache(ids, inputs)
    with warnings.catch_warnings(action="error"):
        assert _same(cache(ids, inputs), _plain(layers, 2, inputs))
    assert full
    assert cache.stats.hits == 2
    cache.close()


def test_a_limit_of_the_kernel_on_files_is_a_warning():
    layers, data = _vision(), _images()
    ids = torch.arange(SAMPLES)
    inputs, _ = data.batch(ids)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    cache = _cache(layers)
    cache.move(2)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, before[1]))
    try:
        with pytest.warns(SynclineWarning, match="takes no more entries"):
            assert _same(cache(ids, inputs), _plain(layers, 2, inputs))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert 0 < cache.stats.stored < SAMPLES
    cache.close()


def test_wrong_arguments_have_one_sentence():
    layers = _vision()
    with pytest.raises(UsageError, match="samples and views of 1 or more"):
        ActivationCache(layers, samples=0, ram=MB)
    cache = _cache(layers)
    with pytest.raises(UsageError, match="not one of 0 to 7 layers"):
        cache.move(9)
    cache.move(1)
    with pytest.raises(UsageError, match="the samples 0 to 23"):
        cache(torch.tensor([SAMPLES]), torch.zeros(1, 3, 8, 8))
    cache.close()
    assert not list(SHARED_MEMORY.glob("syncline-cache-*"))


def _share(rank, world, folder):
    layers, data = _vision(), _images()
    cache = shared_cache(
        layers, samples=SAMPLES, ram=MB, disk=MB, folder=Path(folder), must_pay=False, check=0.5, epochs=4
    )
    dist.barrier()
    names = sorted(path.name for path in SHARED_MEMORY.glob("syncline-cache-*"))
    cache.move(3)
    for epoch in range(3):
        for ids in _batches(epoch, 6)[rank::world]:
            inputs, _ = data.batch(ids)
            assert _same(cache(ids, inputs), _plain(layers, 3, inputs))
        dist.barrier()
    hits = torch.tensor([cache.stats.hits])
    dist.all_reduce(hits)
    cache.close()
    return int(hits), cache.stats.wrong, names


def test_ranks_of_a_node_share_entries_and_the_files_have_no_names(tmp_path):
    for hits, wrong, names in run_ranks(_share, 2, str(tmp_path)):
        assert hits == 2 * SAMPLES, "each epoch has another order: half of the hits were stored by the other rank"
        assert wrong == 0
        assert names == [], "nothing is left behind, even by a rank that is killed"
    assert list(tmp_path.iterdir()) == []
