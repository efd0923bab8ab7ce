"""`bench integrations`: rows from records, the table, and quick runs of both parts."""

import json
from pathlib import Path
from typing import Any

import pytest

from syncline.bench.integrations import fsdp, rows, run, trainer
from syncline.cluster.capabilities import capabilities
from syncline.errors import UsageError


def test_rows_are_ratios_of_the_same_round() -> None:
    options = fsdp.Options(codecs=("bf16",))
    records = [
        {
            "times": {way: [100.0 * (n + 1), 200.0 * (n + 1)] for n, way in enumerate(options.ways)},
            "losses": {way: [3.0, 2.0] for way in options.ways},
            "gradient_bytes": 4e6,
        }
    ] * 4
    made = rows.fsdp_rows(records, options)
    assert [row["way"] for row in made] == list(options.ways)
    assert [row["gain"]["median"] for row in made] == pytest.approx([3 / (n + 1) for n in range(len(made))])
    assert made[0]["loss"] == [2.5]


def test_losses_are_compared_with_dense_sharding_of_the_same_seed() -> None:
    options = fsdp.Options(codecs=(), loss_seeds=(0, 1))
    losses = {fsdp.HYBRID: [[4.0, 2.0], [8.0, 4.0]], fsdp.HYBRID_BF16: [[4.0, 2.0], [8.0, 4.0]]}
    made = rows.fsdp_losses([{**losses, "syncline.fsdp": [[4.0, 2.3], [8.0, 3.4]]}] * 4, options)
    assert made[2]["loss"] == pytest.approx([3.15, 5.7])
    assert made[2]["above_dense_percent"] == pytest.approx([5.0, -5.0])
    _, cells = rows.loss_table({"losses": made})
    assert cells[2] == ["syncline.fsdp", "3.150 5.700", "+0.00", "-5.00 to +5.00"]


def test_a_run_of_the_trainer_counts_all_steps_but_the_first() -> None:
    options = trainer.Options(models=("gpt2",), steps=3)
    slow = {"step_ms": [900.0, 100.0, 300.0], "losses": [3.0, 2.0, 1.0]}
    fast = {"step_ms": [900.0, 80.0, 20.0], "losses": [3.0, 2.0, 1.0]}
    made = rows.trainer_rows([{"gpt2": {trainer.DDP: [slow], trainer.AUTO: [fast]}}] * 2, options, "200Mbit")
    assert [row["step_ms"]["median"] for row in made] == [200.0, 50.0]
    assert [row["last_third_ms"]["median"] for row in made] == [300.0, 20.0]
    assert made[1]["gain"]["median"] == 4.0
    headings, cells = rows.table({"rows": made})
    assert cells[1] == ["Trainer, gpt2", "200Mbit", trainer.AUTO, "50", "4.00 (4.00-4.00)", "2.000"]
    assert len(headings) == len(cells[0])


def test_an_unknown_part_is_an_error() -> None:
    with pytest.raises(UsageError, match="did you mean 'fsdp'"):
        run.measure(["fsdpp"])


@pytest.mark.full
@pytest.mark.namespaces
@pytest.mark.parametrize("part", ["fsdp", pytest.param("trainer", marks=pytest.mark.full)])
def test_a_quick_run(part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    able = capabilities()
    if not (able.can_namespaces and able.can_shape):
        pytest.skip(able.why)
    out = tmp_path / "integrations.json"
    assert run.main(["--parts", part, "--quick", "--out", str(out)]) == 0
    result: dict[str, Any] = json.loads(out.read_text())
    assert len(result["rows"]) == (10 if part == "fsdp" else 8)
    assert all(row["step_ms"]["median"] > 0 for row in result["rows"])
    assert result["rows"][0]["what"] in capsys.readouterr().out
