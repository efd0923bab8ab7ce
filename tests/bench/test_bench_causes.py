"""`bench causes`: real loops with injected causes, the cases that are drawn, and the page with the confusion matrix."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from syncline.bench.causes.cases import CAUSES, LOOPS, cases
from syncline.bench.causes.rows import markdown, matrix, summary
from syncline.bench.causes.run import measure, write_page
from syncline.cluster.capabilities import capabilities
from syncline.errors import UsageError

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "benchmarks" / "results" / "causes.json"
# One loop for each cause, so that every loop is there.
QUICK = {
    "straggler": "ddp",
    "slow node": "fsdp",
    "slow link": "gan",
    "slow loader": "attach",
    "oversubscription": "attach",
    "small buckets": "ddp",
}


@pytest.mark.alone
@pytest.mark.namespaces
@pytest.mark.timeout(120)
def test_the_first_verdict_is_the_injected_cause_and_its_milliseconds_are_true():
    able = capabilities()
    if not (able.can_namespaces and able.can_shape):
        pytest.skip(able.why)
    chosen = [replace(case, steps=10) for case in cases(24, seed=1, device="cpu") if QUICK[case.cause] == case.loop]
    assert len(chosen) == len(QUICK)
    lines = []
    rows = measure(chosen, progress=lines.append)
    assert all(row["right"] for row in rows), "\n".join(lines)
    assert all(row["close"] for row in rows), "\n".join(lines)


def test_cases_cover_all_pairs_and_follow_from_the_seed():
    drawn = cases(48, seed=3, device="cpu")
    pairs = [(case.cause, case.loop) for case in drawn]
    on_cpu = [name for name, cause in CAUSES.items() if cause.device == "cpu"]
    assert sorted(set(pairs)) == sorted((cause, loop) for cause in on_cpu for loop in LOOPS)
    assert pairs[:24] == pairs[24:]
    assert len({replace(case, number=0) for case in drawn}) == 48, "no two runs are equal"
    assert drawn == cases(48, seed=3, device="cpu")
    assert drawn != cases(48, seed=4, device="cpu")
    assert {case.cause for case in cases(8, seed=0, device="cuda")} == {"host-bound", "sync points"}


def row(cause, kind, *, right, close=True, loop="ddp"):
    return {"cause": cause, "loop": loop, "verdict": {"kind": kind}, "right": right, "close": close}


def test_the_matrix_counts_first_verdicts(tmp_path):
    rows = [
        row("straggler", "straggler", right=True),
        row("straggler", "straggler", right=False, close=False),  # another rank was named
        row("slow link", "unclear", right=False, close=False, loop="gan"),
        row("slow link", "bandwidth-bound", right=True, close=False),
    ]
    headings, cells = matrix(rows)
    assert headings == ["injected", "straggler", "bandwidth-bound", "unclear", "right", "within 20%"]
    assert cells == [
        ["straggler", "2", "", "", "1 of 2", "1 of 2"],
        ["slow link", "", "1", "1", "1 of 2", "0 of 2"],
        ["all", "", "", "", "2 of 4", "1 of 4"],
    ]
    assert summary(rows) == {"runs": 4, "right": 2, "close": 1}
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- causes -->\nold\n<!-- /causes -->\nafter\n")
    for _ in range(2):
        write_page(page, {"rows": rows})
        assert page.read_text() == f"before\n<!-- causes -->\n{markdown({'rows': rows})}\n<!-- /causes -->\nafter\n"
    page.write_text("no marks")
    with pytest.raises(UsageError, match="no place for the tables"):
        write_page(page, {"rows": rows})


def test_the_page_shows_the_committed_result_and_it_is_good_enough():
    result = json.loads(RESULT.read_text())
    assert markdown(result) in (ROOT / "docs" / "analysis.md").read_text()
    assert result["summary"] == summary(result["rows"])
    assert result["summary"]["runs"] >= 100
    assert {(one["cause"], one["loop"]) for one in result["rows"]} == {
        (cause, loop) for cause in CAUSES for loop in LOOPS
    }
    assert result["summary"]["right"] >= 0.95 * result["summary"]["runs"]
    assert result["summary"]["close"] >= 0.95 * result["summary"]["runs"]
