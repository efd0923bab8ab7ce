"""Late ranks: several that are late together, chains of waits through process groups, and ranks that never meet."""

import pytest
from analysis_spans import MS, span, steps

from syncline.trace import Span, Trace, analyze
from syncline.trace.span import group_label

PAIRS = (group_label("1", [0, 1]), group_label("2", [2, 3]))
ACROSS = (group_label("3", [0, 2]), group_label("4", [1, 3]))


def rank(forward):
    return [("forward", forward), ("backward", 20), ("exchange", 1, "w", 1000), ("update", 4)]


def mesh(forwards, *, count=8, across=True):
    """Four ranks of a 2 x 2 mesh: an all-reduce in pairs after forward, one across the pairs after backward."""
    spans, at = [], [0.0] * 4
    for step in range(count):
        begins = list(at)
        for lane, long in (("forward", forwards), ("backward", [20] * 4)):
            for r in range(4):
                spans.append(span(lane, at[r], at[r] + long[r], rank=r, step=step))
                at[r] += long[r]
            if lane == "forward" or across:
                for group, members in zip(
                    *((PAIRS, ((0, 1), (2, 3))) if lane == "forward" else (ACROSS, ((0, 2), (1, 3)))), strict=True
                ):
                    end = max(at[r] for r in members) + 1
                    for r in members:
                        times = (round(at[r] * MS), round(end * MS))
                        spans.append(Span(r, "exchange", "all-reduce", "w", step, *times, 1000, group))
                        at[r] = end
        spans += [span("step", begins[r], at[r], rank=r, step=step) for r in range(4)]
    return analyze(Trace.of(spans))


def test_collectives_of_two_process_groups_are_not_matched_with_each_other():
    told = mesh([10, 10, 49, 49], across=False)
    assert told.late == ()
    assert told.breakdown_ms["wait"] == 0


def test_the_rank_at_the_end_of_a_chain_of_waits_is_the_late_one():
    # Rank 2 waits for rank 3 in their pair, and is then late for rank 0: that is rank 3's doing as well.
    told = mesh([10, 10, 10, 40])
    assert told.verdict.kind == "straggler"
    assert told.verdict.sentence.startswith("Rank 3 is late, delayed in forward (40.0 ms there, the others 10.0 ms)")
    assert told.late[0].share == pytest.approx(1)
    assert told.verdict.recoverable_ms == pytest.approx(30)


def test_a_late_rank_of_a_group_apart_does_not_cost_the_other_group():
    told = mesh([10, 10, 10, 40], across=False)
    assert told.straggler.ranks == (3,)
    assert told.straggler.wait_ms == pytest.approx(30), "rank 2 alone waits for it"


def test_ranks_that_are_late_together_are_one_straggler_named_by_host():
    # Which of the two joins last changes from step to step.
    spans = []
    for step in range(10):
        slow = [(60, 60.5), (60.5, 60)][step % 2]
        made = steps(1, rank(20), rank(20), rank(slow[0]), rank(slow[1]))
        spans += [
            Span(s.rank, s.lane, s.name, s.unit, step, s.start + step * 200 * MS, s.end + step * 200 * MS, s.bytes)
            for s in made
        ]
    hosts = {"0": "a", "1": "a", "2": "b", "3": "b"}
    told = analyze(Trace.of(spans, metadata={"world_size": 4, "nodes": hosts}))
    assert told.verdict.kind == "straggler"
    assert told.verdict.sentence.startswith("Ranks 2-3 (host b) are late together, delayed in forward (60.2 ms there,")
    assert told.verdict.recoverable_ms == pytest.approx(40, rel=0.05)
    assert told.as_json()["exchanges"]["straggler"]["ranks"] == [2, 3]
    unnamed = analyze(Trace.of(spans, metadata={"world_size": 4}))
    assert unnamed.verdict.sentence.startswith("Ranks 2-3 are late together")


def test_ranks_that_are_late_together_are_named_by_process_group():
    told = mesh([10, 10, 40, 40])
    assert told.verdict.sentence.startswith("Ranks 2-3 (process group 2 (ranks 2-3)) are late together")
    assert told.verdict.recoverable_ms == pytest.approx(30)


def test_two_ranks_late_by_the_same_time_are_both_named_even_if_one_is_always_last():
    told = analyze(Trace.of(steps(8, rank(20), rank(20), rank(60), rank(60.2)), metadata={"world_size": 4}))
    assert told.straggler.ranks == (2, 3), "without rank 3's delay alone nothing would be gained"
    assert told.verdict.recoverable_ms == pytest.approx(40, rel=0.02)


def test_all_figures_of_a_step_agree_and_a_long_step_is_reported_apart():
    spans, at = [], 0
    for step in range(20):
        shift = at
        checkpoint = 300.0 if step % 7 == 6 else 0.0
        made = [
            span("between", 0, checkpoint, name="checkpoint", step=step),
            span("forward", checkpoint, checkpoint + 60, step=step),
            span("update", checkpoint + 60, checkpoint + 100, step=step),
            span("step", 0, checkpoint + 100, step=step),
        ]
        for s in made:
            spans += [Span(r, s.lane, s.name, "", step, s.start + shift, s.end + shift) for r in (0, 1)]
        at += round((checkpoint + 100) * MS)
    told = analyze(Trace.of(spans))
    assert told.step_ms["usual"] == pytest.approx(100)
    assert sum(told.breakdown_ms.values()) == pytest.approx(told.step_ms["usual"])
    assert told.bound.bound_ms == pytest.approx(100)
    assert told.bound.distance == pytest.approx(0)
    assert told.verdict.kind == "long-steps"
    assert "2 of 19 steady steps take 300.0 ms longer than the others (checkpoint 300.0 ms)" in told.verdict.sentence
    assert told.verdict.recoverable_ms == pytest.approx(300 * 2 / 19)


def buckets_behind_backward(forwards, *, transfer, count=8, turn=0):
    """Four buckets of 2.5 ms of backward each, their transfers one after the other behind it; the step's length too.

    `turn`: in each step the forward times move on by as many ranks.
    """
    spans, at, network = [], [0.0] * len(forwards), 0.0
    for step in range(count):
        begins = list(at)
        for r in range(len(forwards)):
            long = forwards[(r + turn * step) % len(forwards)]
            spans.append(span("forward", at[r], at[r] + long, rank=r, step=step))
            at[r] += long
        begun = list(at)
        for bucket in range(4):
            at = [time + 2.5 for time in at]
            # A rank joins when its gradients are ready and its last transfer has ended.
            joined = [max(time, network) for time in at]
            network = max(joined) + transfer
            for r, time in enumerate(joined):
                spans.append(
                    span("exchange", time, network, rank=r, name="all-reduce", unit=f"b{bucket}", step=step, size=10**7)
                )
        spans += [span("backward", begun[r], at[r], rank=r, step=step) for r in range(len(at))]
        spans += [span("update", network, network + 1, rank=r, step=step) for r in range(len(at))]
        at = [network + 1] * len(at)
        spans += [span("step", begins[r], at[r], rank=r, step=step) for r in range(len(at))]
    return spans, at[0] / count


@pytest.mark.parametrize(("late", "transfer"), [(6.0, 2.0), (3.0, 2.5), (6.0, 2.5), (12.0, 2.0), (6.0, 4.0)])
def test_a_straggler_costs_what_its_late_transfers_cost_even_if_compute_hides_the_waits(late, transfer):
    # The other ranks wait behind their backward pass. That alone is free, but all of their transfers move into the time
    # after it, where they looked like a slow network.
    spans, slow = buckets_behind_backward([5.0, 5.0, 5.0 + late], transfer=transfer)
    _, even = buckets_behind_backward([5.0, 5.0, 5.0], transfer=transfer)
    told = analyze(Trace.of(spans))
    found = {finding.kind: finding for finding in told.findings}
    assert found["straggler"].sentence.startswith(f"Rank 2 is late, delayed in forward ({5 + late:.1f} ms there, the")
    assert found["straggler"].recoverable_ms == pytest.approx(slow - even, rel=0.01) == pytest.approx(late, rel=0.01)
    assert told.straggler.delayed_ms > 0
    assert told.straggler.wait_ms == pytest.approx(late, rel=0.01)
    # Without the straggler the visible part of the transfers would be this.
    assert found["bandwidth-bound"].recoverable_ms == pytest.approx(even - 16, rel=0.01)


def test_ranks_that_are_late_in_turn_cost_their_late_transfers_too():
    spans, slow = buckets_behind_backward([5.0, 5.0, 11.0], transfer=2.0, count=9, turn=1)
    _, even = buckets_behind_backward([5.0, 5.0, 5.0], transfer=2.0)
    verdict = analyze(Trace.of(spans)).verdict
    assert verdict.kind == "unclear"
    assert "ms of it in transfers that start late) for one another, and none is always late" in verdict.sentence
    assert verdict.recoverable_ms == pytest.approx(slow - even, rel=0.01)


def test_a_chain_of_waits_behind_compute_ends_at_the_rank_that_is_late():
    # Rank 3 delays rank 2 in their pair. Both are then late for the all-reduce across the pairs, which ranks 0 and 1
    # wait for behind their backward pass.
    spans, at, network = [], [0.0] * 4, [0.0] * 4
    for step in range(8):
        begins = list(at)
        for layer in range(4):
            for r in range(4):
                end = at[r] + (2.5 if r == 3 else 1.0)
                spans.append(span("forward", at[r], end, rank=r, step=step))
                at[r] = end
            for group, members in zip(PAIRS, ((0, 1), (2, 3)), strict=True):
                end = max(at[r] for r in members) + 0.3
                for r in members:
                    times = (round(at[r] * MS), round(end * MS))
                    spans.append(Span(r, "exchange", "all-reduce", f"layer {layer}", step, *times, 1000, group))
                    at[r] = end
        spans += [span("backward", at[r], at[r] + 8, rank=r, step=step) for r in range(4)]
        for bucket in range(4):
            at = [time + 2 for time in at]
            for group, members in zip(ACROSS, ((0, 2), (1, 3)), strict=True):
                joined = {r: max(at[r], network[r]) for r in members}
                end = max(joined.values()) + 1
                for r, time in joined.items():
                    times = (round(time * MS), round(end * MS))
                    spans.append(Span(r, "exchange", "all-reduce", f"bucket {bucket}", step, *times, 10**7, group))
                    network[r] = end
        at = [end + 1 for end in network]
        spans += [span("update", at[r] - 1, at[r], rank=r, step=step) for r in range(4)]
        spans += [span("step", begins[r], at[r], rank=r, step=step) for r in range(4)]
    told = analyze(Trace.of(spans))
    assert told.verdict.kind == "straggler"
    assert told.verdict.sentence.startswith("Rank 3 is late, delayed in forward (10.0 ms there, the others 4.0 ms)")
    assert told.verdict.recoverable_ms == pytest.approx(6, rel=0.01)


def test_time_between_steps_is_the_data_loader_s_only_if_the_loader_was_timed():
    def run(lane, name):
        made = []
        for step in range(8):
            for r in (0, 1):
                pieces = [(lane, name, 40), ("between", "logging", 10), ("forward", "", 20), ("backward", "", 20)]
                at = step * 90.0
                for kind, called, long in pieces:
                    made.append(span(kind, at, at + long, rank=r, name=called, step=step))
                    at += long
                made.append(span("step", step * 90.0, at, rank=r, step=step))
        return analyze(Trace.of(made)).verdict

    timed, guessed = run("data", "data"), run("between", "between steps")
    assert timed.kind == "input-bound"
    assert timed.recoverable_ms == pytest.approx(40)
    assert guessed.kind == "between-steps"
    assert guessed.recoverable_ms == pytest.approx(50)
    assert guessed.sentence == (
        "Every rank spends 50.0 ms per step (56%) between the end of a step and the next forward pass: logging 10.0 ms,"
        " 40.0 ms in code that is not recorded, which may be a data loader that was not timed (use"
        " recording.data(loader))."
    )
