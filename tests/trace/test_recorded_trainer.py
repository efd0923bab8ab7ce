"""The loop of transformers' Trainer: a late rank is found, in a recording of it and where transformers is installed."""

from pathlib import Path

import pytest
import trainer_ranks

from ranks import run_ranks
from syncline.trace.analysis.analyze import analyze

FIXTURES = Path(__file__).parent / "fixtures"


def assert_rank_1_is_late(told):
    assert told.verdict.kind == "straggler", told.verdict.sentence
    assert told.verdict.sentence.startswith("Rank 1 is late, delayed in forward")
    assert told.verdict.recoverable_ms == pytest.approx(trainer_ranks.LATE_S * 1e3, rel=0.2)


def test_a_recording_of_the_trainer():
    assert_rank_1_is_late(analyze(FIXTURES / "trainer.json.gz"))


@pytest.mark.full  # transformers is not among the packages of `make test`
@pytest.mark.alone
def test_the_trainer(tmp_path):
    pytest.importorskip("transformers")
    assert run_ranks(trainer_ranks.train, 2, str(tmp_path)) == [0, trainer_ranks.STEPS]
    assert_rank_1_is_late(analyze(tmp_path / "trace.json.gz"))
