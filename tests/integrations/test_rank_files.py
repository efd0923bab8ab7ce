"""Codec state of ranks in checkpoint folders: other numbers of ranks, folders that are written again, missing files."""

import logging
from pathlib import Path

import pytest
import torch
from torch import Tensor

from syncline.integrations.rank_files import load_rank_state, save_rank_state


def state(value: float) -> dict[str, Tensor]:
    return {"w.error": torch.tensor([value]), "syncline.step": torch.tensor(5)}


def save(folder: Path, values: list[float]) -> None:
    for rank, value in enumerate(values):
        save_rank_state(state(value), folder, rank=rank, world=len(values))


def test_each_rank_gets_its_own_state_and_another_world_the_mean(tmp_path: Path) -> None:
    save(tmp_path, [1.0, 3.0])
    assert [float(load_rank_state(tmp_path, rank=r, world=2)["w.error"]) for r in range(2)] == [1.0, 3.0]
    assert [float(load_rank_state(tmp_path, rank=r, world=3)["w.error"]) for r in range(3)] == [2.0, 2.0, 2.0]


@pytest.mark.parametrize("again", [[5.0, 6.0, 7.0], [6.0]])
def test_a_folder_that_another_number_of_ranks_wrote_again_gives_the_newer_state(
    tmp_path: Path, again: list[float]
) -> None:
    save(tmp_path, [1.0, 3.0])
    save(tmp_path, again)
    assert float(load_rank_state(tmp_path, rank=0, world=2)["w.error"]) == 6.0


def test_a_missing_rank_is_a_warning_and_an_empty_state(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path, [1.0, 3.0])
    (tmp_path / "syncline-model0-rank1-of-2.pt").unlink()
    with caplog.at_level(logging.WARNING, logger="syncline"):
        assert load_rank_state(tmp_path, rank=0, world=3).keys() == {"syncline.step"}
    assert "residuals start at zero" in caplog.text
