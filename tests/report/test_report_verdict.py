"""Sentences of the verdicts, on made-up results with known answers."""

import math

import pytest

import report_samples as samples
from syncline.report.verdict import cautions, headline, verdicts
from syncline.results.schema import AT_MOST, Run


def said(results: object, label: str) -> str:
    found = {v.label: v for v in verdicts(results)}[label]  # type: ignore[arg-type]
    return " ".join([found.sentence, *found.remarks])


def test_gather_scatter_is_explained_by_its_bytes() -> None:
    text = said(samples.results(), "gather-scatter")
    assert "66% of it is exposed exchange" in text
    assert "2(N-1)S = 221 MB" in text
    assert "at 1 Gbit/s" in text
    assert "moving 4.0x its bytes" in text
    assert "losses equal those of all-reduce" in text
    assert "BatchNorm buffers differ" in text


def test_ddp_moves_the_same_bytes_but_hides_them() -> None:
    text = said(samples.results(), "ddp")
    assert "the fastest of 4" in text
    assert "with the same bytes: it hides more of them behind backward" in text
    assert "BatchNorm" not in text


def test_single_has_nothing_to_exchange() -> None:
    text = said(samples.results(), "single")
    assert "nothing is exchanged" in text
    assert "computing 256 samples per rank instead of 64" in text


def test_a_straggler_is_named() -> None:
    run = samples.run("ddp")
    shares = samples.shares_of(0.2, 0.2, 0.05, 0.5)
    run["breakdown"] = shares
    for rank in run["ranks"]:
        rank["breakdown"] = shares | {"wait": 0.02 if rank["rank"] == 1 else 0.6}
    assert "50% of it is waiting for a late rank (rank 1 is the late one" in said(samples.results(run), "ddp")


def test_changes_of_codecs_are_named() -> None:
    run = samples.run("syncline(auto)")
    assert "changed codecs" not in said(samples.results(run), "syncline(auto)")
    run["guarded_at"] = [29, 44]
    assert "It changed codecs after step 29, 44, because of the errors" in said(samples.results(run), "syncline(auto)")


def test_a_crash_names_rank_steps_and_reason() -> None:
    results = samples.results(samples.run("ddp"), samples.crashed(steps=17))
    text = said(results, "ddp-powersgd(rank=4)")
    assert text.startswith("crashed on rank 2 after 17 steps: RuntimeError")
    assert headline(results).endswith("1 run crashed.")


def test_all_crashed_and_nothing_run() -> None:
    assert headline(samples.results(samples.crashed())) == "No strategy finished."
    assert headline({**samples.results(), "runs": []}) == "Nothing was run."


def test_equal_runs_are_not_ranked() -> None:
    results = samples.results(samples.run("ddp", seed=1), samples.run("ring", seed=2, step=985.0))
    assert "equal within noise" in headline(results)
    assert any("within noise" in v.sentence for v in verdicts(results))


def test_the_fastest_is_compared_with_all_runs_not_only_with_the_next() -> None:
    steady, noisy = samples.run("ring", seed=2, step=995.0), samples.run("all-reduce", seed=3, step=1000.0)
    steady["step_ms_series"] = [995.0 + i % 2 for i in range(40)]
    noisy["step_ms_series"] = [700.0 if i % 2 else 1300.0 for i in range(40)]
    best = samples.run("ddp", seed=1, step=985.0)
    best["step_ms_series"] = [985.0 + i % 2 for i in range(40)]
    results = samples.results(best, steady, noisy)
    assert headline(results).startswith("ddp and all-reduce are the fastest, equal within noise")
    assert "equal to all-reduce within noise" in said(results, "ddp")


def test_where_one_rank_is_fastest_the_others_are_compared_with_each_other() -> None:
    results = samples.results(
        samples.run("single", step=20.0), samples.run("ddp", step=985.0), samples.run("ddp-bf16", step=902.0)
    )
    assert headline(results).startswith("single is the fastest of 3: 20 ms")
    assert "(median). ddp-bf16 is the fastest of 2 with several ranks: 897 ms" in headline(results)
    assert "against ddp-bf16 it spends" in said(results, "ddp")
    assert "against ddp it spends" in said(results, "ddp-bf16")
    alone = samples.results(samples.run("single", step=20.0), samples.run("ddp", step=985.0))
    assert "several ranks" not in headline(alone)


def curve(run: Run, losses: list[float]) -> Run:
    return run | {"loss": losses}


def test_a_run_that_trains_worse_is_not_called_the_fastest() -> None:
    dense = [2.0 - 0.02 * step + 0.1 * (step % 3) for step in range(60)]
    ddp, bf16, low = (samples.run(name, step=ms) for name, ms in (("ddp", 900.0), ("ddp-bf16", 500.0), ("low", 200.0)))
    ddp["wire_bytes_per_step"], bf16["wire_bytes_per_step"], low["wire_bytes_per_step"] = 4e6, 2e6, 1e5
    noisy = [loss * (1.05 if step % 2 else 0.98) for step, loss in enumerate(dense)]
    late = [loss + 0.01 * step for step, loss in enumerate(dense)]
    results = samples.results(curve(ddp, dense), curve(bf16, noisy), curve(low, late))
    base = sum(dense[-15:]) / 15
    above = round(100 * (sum(late[-15:]) / 15 / base - 1))
    worse = f"its loss is {above}% above that of ddp (mean of 15 steps)"
    assert headline(results).startswith("ddp-bf16 is the fastest of 2 that train equally well: 497 ms")
    assert headline(results).endswith(f"low takes 200 ms, but {worse}.")
    assert f"It trains worse: {worse}. So its speed is no gain." in said(results, "low")
    assert "the fastest" not in said(results, "low")
    assert said(results, "low").startswith("200 ms per step, 0.40x ddp-bf16's")
    assert "the fastest of 2;" in said(results, "ddp-bf16")
    assert "trains worse" not in said(results, "ddp-bf16")
    assert "against ddp-bf16" in said(results, "ddp"), "not against the one that trains worse"
    for equal in (dense, [loss * 1.15 for loss in dense]):
        assert headline(samples.results(curve(ddp, dense), curve(low, equal))).startswith("low is the fastest of 2: ")
    diverged = [*dense[:50], *([None] * 10)]
    results = samples.results(curve(ddp, dense), curve(low, diverged))
    gone = "its loss is not a finite number at the end, where ddp still trains"
    assert headline(results) == f"ddp takes 905 ms per step (median). low takes 200 ms, but {gone}."
    short = samples.results(curve(ddp, dense[:30]), curve(low, late[:30]))
    assert headline(short).startswith("low is the fastest of 2: "), "too few steps to tell"


def test_a_speed_up_beyond_the_ranks_has_no_efficiency() -> None:
    single, ddp = samples.run("single"), samples.run("ddp")
    ddp["samples_per_s"] = 14 * single["samples_per_s"]
    results = samples.results(single, ddp)
    assert "efficiency." not in headline(results)
    assert "14.0x the throughput of single" in headline(results)
    assert "No efficiency is shown: its throughput is 14.0x that of single" in said(results, "ddp")


def test_start_up_that_dominates_is_reported_with_its_part() -> None:
    text = said(samples.scaling(), "ddp x4")
    assert "The first epoch takes 22.4 s, 45x a later one" in text
    assert "Start-up is" in text
    assert "most of it first step" in text


@pytest.mark.parametrize("bad", [None, math.nan, math.inf])
def test_a_loss_that_overflows_is_reported(bad: float | None) -> None:
    run = samples.run("ddp")
    run["loss"][9] = bad
    assert "from step 10 on: the training diverged" in said(samples.results(run), "ddp")


def test_bytes_that_differ_from_theory_are_reported() -> None:
    run = samples.run("ddp")
    run["wire_bytes_per_step"] *= 1.5
    theory = run["wire"]["theory_bytes"] / 1e6
    text = said(samples.results(run), "ddp")
    assert f"Its link carried {1.551 * theory:.1f} MB per step, where the formula gives {theory:.1f} MB. " in text
    assert "The formula counts gradients only" in text
    run["wire_bytes_per_step"] /= 3
    assert "In some of its steps it sent less" in said(samples.results(run), "ddp")
    run["wire"]["formula"] += AT_MOST
    assert "where the formula gives" not in said(samples.results(run), "ddp")


def test_oversubscription_and_unshaped_links_are_cautions() -> None:
    found = cautions(samples.results())
    assert found[0].startswith("4 ranks share 2 cores, so forward and backward are slower than on 4 machines")
    here = samples.results(bandwidth=None)
    here["runs"] = [run | {"nodes": 1} for run in here["runs"]]
    assert any("not over shaped links" in text for text in cautions(here))
    assert cautions(samples.results(environment={"cores": 8})) == []
    real = samples.results(bandwidth=None)
    real["runs"] = [run | {"nodes": 2} for run in real["runs"]]
    assert not any("inside one machine" in text for text in cautions(real)), "two machines have a network"
    assert cautions(samples.results(environment={"cores": 2, "gpu": "H200"})) == []


def test_shares_that_do_not_sum_to_one_are_a_caution() -> None:
    run = samples.run("ddp")
    run["breakdown"]["forward"] += 0.2
    assert any("sum to 1.20" in text for text in cautions(samples.results(run)))


def test_the_same_results_give_the_same_words() -> None:
    assert verdicts(samples.results()) == verdicts(samples.results())


def test_a_run_without_optional_figures_still_has_a_verdict() -> None:
    keep = ("strategy", "status", "world_size", "step_ms", "loss", "samples_per_s", "breakdown")
    bare = {key: value for key, value in samples.run("ddp").items() if key in keep}
    assert "per step" in said(samples.results(bare), "ddp")
