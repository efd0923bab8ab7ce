"""Recorded loops of users in which ranks wait inside a phase: the late rank is found, and the phases stay right."""

import pytest
from loop_ranks import LATE_S, STEPS, loops

from ranks import run_ranks
from syncline.trace import analyze, load
from syncline.trace.analysis.diff import diff, side

pytestmark = pytest.mark.alone
LATE_MS = 1000 * LATE_S


def straggler(told):
    """The finding about late ranks, which costs more than any other that does not come from a busy machine."""
    aside = ("oversubscribed", "start-up", "long-steps")
    found = next(finding for finding in told.findings if finding.kind not in aside)
    assert found.kind == "straggler", told.findings
    return found


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("loops")
    met = run_ranks(loops, 4, str(folder))
    assert [one["late"] for one in met] == [STEPS] * 4, "the delays were met"
    assert [one["gan"] for one in met] == [3 * STEPS] * 4
    assert all(one[name] == STEPS for one in met for name in ("one", "pair", "attached", "sharded"))
    return folder


def test_a_rank_that_is_late_for_the_broadcast_of_buffers_is_the_straggler(recorded):
    told = analyze(recorded / "late")
    assert straggler(told).sentence.startswith("Rank 0 is late, delayed in data loading")
    assert straggler(told).recoverable_ms == pytest.approx(LATE_MS, rel=0.2)
    for row in told.ranks[1:]:
        assert row.breakdown_ms["wait"] > 0.8 * LATE_MS
        assert row.breakdown_ms["forward"] < LATE_MS / 3, "waiting inside forward is no forward work"
    assert {unit.unit for unit in told.units} == {"buffers", "bucket 0"}


def test_the_difference_of_two_runs_is_a_wait_and_not_forward(recorded):
    quick, late = (side(load(recorded / name)) for name in ("quick", "late"))
    changes = diff(quick, late).phases
    assert max(changes, key=lambda phase: changes[phase].difference_ms) == "wait"
    assert abs(changes["forward"].difference_ms) < LATE_MS / 3


def test_a_late_rank_of_a_loop_with_two_models_is_found(recorded):
    told = analyze(recorded / "gan")
    assert (told.straggler.ranks, told.straggler.doing) == ((1,), "forward")
    assert straggler(told).recoverable_ms == pytest.approx(LATE_MS, rel=0.2)


@pytest.mark.parametrize("loop", ["one", "attached"])
def test_collectives_are_matched_in_their_process_group(recorded, loop):
    trace = load(recorded / loop)
    # An engine's last exchanges end after the recording.
    whole = [exchange for exchange in trace.exchanges if exchange.step < STEPS - 1]
    groups = {exchange.group: tuple(exchange.joined) for exchange in whole}
    assert sorted(groups.values()) == [(0, 1), (0, 2), (1, 3), (2, 3)]
    assert any(name.endswith(" (ranks 0-1)") for name in groups)
    assert all(len(exchange.members) == 2 for exchange in whole)
    told = analyze(trace)
    assert (told.straggler.ranks, told.straggler.doing) == ((3,), "forward"), "not rank 2, which waits for it"
    assert straggler(told).recoverable_ms == pytest.approx(LATE_MS, rel=0.25 if loop == "one" else 0.5)


def test_ranks_of_a_process_group_that_are_late_together_are_named_as_it(recorded):
    told = analyze(recorded / "pair")
    assert straggler(told).sentence.startswith("Ranks 2-3 (process group ")
    assert straggler(told).recoverable_ms == pytest.approx(LATE_MS, rel=0.25)


def test_waits_for_sharded_parameters_are_waits(recorded):
    told = analyze(recorded / "sharded")
    assert (told.straggler.ranks, told.straggler.doing) == ((1,), "forward")
    assert straggler(told).recoverable_ms == pytest.approx(LATE_MS, rel=0.25)
    assert {unit.name for unit in told.units} == {"all-gather", "reduce-scatter"}
    assert not [note for note in told.notes if "collective has no span" in note]
