"""`optimizer.state` while updates are in flight: every use of it gives what the plain loop gives."""

import copy
import logging
import pickle
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import by_hand
import pytest
import torch
import torch.distributed as dist

from ranks import run_ranks
from syncline.engine.optimizer.waiting_state import WaitingState

STEPS = range(6)
Use = Callable[[Any, list[Any], dict[str, Any], int], Any]
"""A use of the state, straight after a step: of the optimizer, its parameters, things kept from before, the step."""


def moments(entry: dict[str, Any]) -> list[Any]:
    return [entry["exp_avg"].flatten().tolist(), entry["exp_avg_sq"].flatten().tolist(), float(entry["step"])]


def all_of(state: Any) -> list[Any]:
    return [moments(entry) for entry in state.values()]


def replace(optimizer: Any, parameters: list[Any], kept: dict[str, Any], step: int) -> Any:
    kept["old"], before = optimizer.state, kept.get("old", {})
    if step in (1, 3):
        optimizer.state = defaultdict(dict)
    return len(optimizer.state), all_of(before)


def replace_and_keep(optimizer: Any, parameters: list[Any], kept: dict[str, Any], step: int) -> Any:
    if step == 1:
        kept["mine"] = optimizer.state = defaultdict(dict)
    return all_of(kept["mine"]) if "mine" in kept else None


def keep_entry(optimizer: Any, parameters: list[Any], kept: dict[str, Any], step: int) -> Any:
    if step == 1:
        kept["entry"] = optimizer.state[parameters[2]]
    return moments(kept["entry"]) if "entry" in kept else None


def keep_tensors(optimizer: Any, parameters: list[Any], kept: dict[str, Any], step: int) -> Any:
    if step == 1:
        kept["tensors"] = [entry["exp_avg"] for entry in optimizer.state.values()]
        kept["views"] = [entry["exp_avg_sq"].view(-1)[:2] for entry in optimizer.state.values()]
    return [t.flatten().tolist() for t in (*kept.get("tensors", []), *kept.get("views", []))]


def keep_state_dict(optimizer: Any, parameters: list[Any], kept: dict[str, Any], step: int) -> Any:
    if step == 1:
        kept["dict"] = optimizer.state_dict()
    return all_of(kept["dict"]["state"]) if "dict" in kept else None


def flat_memory(optimizer: Any, parameters: list[Any], kept: dict[str, Any], step: int) -> Any:
    if step == 1:
        kept["flat"] = flat = torch.zeros(sum(p.numel() for p in parameters))
        for p, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            optimizer.state[p]["exp_avg"] = part.view(p.shape)
    return kept["flat"].tolist() if "flat" in kept else None


def remove(optimizer: Any, parameters: list[Any], kept: dict[str, Any], step: int) -> Any:
    state, p = optimizer.state, parameters[step % 3]
    if step == 2:
        last = state.popitem()
        return [last[0] is p for p in parameters], moments(last[1])
    if step == 3:
        del state[p]
        return len(state), p in state
    return moments(state.pop(p)), state.pop(p, "none")


def clear(optimizer: Any, parameters: list[Any], kept: dict[str, Any], step: int) -> Any:
    found = len(optimizer.state)
    if step in (1, 2):
        optimizer.state.clear()
    return found, len(optimizer.state), bool(optimizer.state)


def write(optimizer: Any, parameters: list[Any], kept: dict[str, Any], step: int) -> Any:
    state, (first, second, *_) = optimizer.state, parameters
    fresh = {"step": torch.tensor(1.0), "exp_avg": torch.ones(8, 6), "exp_avg_sq": torch.ones(8, 6)}
    if step == 1:
        state[first] = fresh
    elif step == 2:
        state.update({first: fresh})
    elif step == 3:
        state |= {first: fresh}
    return moments(state.setdefault(first, {})), moments(state.setdefault(second, {})), moments(state.get(first))


def dict_methods(optimizer: Any, parameters: list[Any], kept: dict[str, Any], step: int) -> Any:
    state = optimizer.state
    place = {id(p): i for i, p in enumerate(parameters)}
    results = {
        "keys": [place[id(p)] for p in state.keys()],  # noqa: SIM118 - `keys` is what is tried here
        "iter": [place[id(p)] for p in state],
        "reversed": [place[id(p)] for p in reversed(state)],
        "items": [(place[id(p)], moments(entry)) for p, entry in state.items()],
        "values": all_of(state),
        "len": len(state),
        "in": [p in state for p in parameters],
        "copy": all_of(state.copy()),
        "copy.copy": all_of(copy.copy(state)),
        "deepcopy": all_of(copy.deepcopy(state)),
        "or": all_of(state | {}) + all_of({} | state),
        "dict": all_of(dict(state)) + all_of({**state}),
        "pickle": all_of(pickle.loads(pickle.dumps(state))),
        "kinds": [type(s) for s in (state.copy(), copy.copy(state), state | {}, pickle.loads(pickle.dumps(state)))],
        "eq": (state == {}, state != {}, state == state.copy(), state.copy() == state),
        "repr": repr(state),
    }
    # An entry that only this reads: it is there, as in every defaultdict.
    results["missing"] = (state["extra"], len(state), state.pop("extra"))
    return results


def all_reduce(optimizer: Any, parameters: list[Any], kept: dict[str, Any], step: int) -> Any:
    """As people average moments: shapes differ, so another order on another rank would break it."""
    for entry in optimizer.state.values():
        dist.all_reduce(entry["exp_avg"])
    return all_of(optimizer.state)


USES: list[Use] = [
    replace, replace_and_keep, keep_entry, keep_tensors, keep_state_dict, flat_memory, remove, clear, write,
    dict_methods, all_reduce,
]  # fmt: skip


def every_use(rank: int, world: int) -> dict[str, Any]:
    said: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    logging.getLogger("syncline").addHandler(Keep())
    waits: dict[str, Any] = {}
    for use in USES:

        def case(rank: int, hand: bool, attach: Any, use: Use = use) -> Any:
            model, kept = by_hand.net(), {}
            parameters = list(model.parameters())
            optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
            attach(model, optimizer)
            assert hand or isinstance(optimizer.state, WaitingState)
            kept_at = {}

            def after(step: int) -> Any:
                if use is keep_tensors and step > 1:
                    kept_at[step] = [t.data_ptr() for t in kept["tensors"]]
                return use(optimizer, parameters, kept, step)

            seen = by_hand.train(rank, model, optimizer, STEPS, by_hand=hand, after=after)
            if use is keep_tensors:
                assert all(e["exp_avg"] is t for e, t in zip(optimizer.state.values(), kept["tensors"], strict=True))
                assert len({tuple(pointers) for pointers in kept_at.values()}) == 1, "the same memory"
            return seen, by_hand.values(model)

        said.clear()
        want, got = by_hand.both(rank, case)
        for number, (a, b) in enumerate(zip(want[0], got[0], strict=True)):
            assert a == b, f"{use.__name__}, step {number}"
        assert want[1] == got[1], use.__name__
        waits[use.__name__] = [text for text in said if "optimizer.state" in text]
    return waits


def test_every_use_gives_what_the_plain_loop_gives() -> None:
    waits, _ = run_ranks(every_use, 2)
    holds = {"replace_and_keep", "keep_entry", "keep_tensors", "keep_state_dict", "flat_memory"}
    for name, said in waits.items():
        # On a busy machine all_reduce was once taken for a holder, perhaps because Gloo's thread still had the tensor.
        assert name == "all_reduce" or bool(said) == (name in holds), (name, said)
        assert len(said) <= 1, "said once"


def in_order(rank: int, world: int) -> Any:
    """What a plain loop's state looks like: entries in the order of the groups, none for SGD without momentum."""

    def case(rank: int, hand: bool, attach: Any) -> Any:
        seen = []
        for momentum in (0.9, 0.0):
            model = by_hand.net()
            groups = [{"params": model[4].parameters(), "lr": 0.01}, {"params": [*model[2].parameters()]}]
            optimizer: Any = torch.optim.SGD(groups, lr=0.1, momentum=momentum)
            place = {id(p): name for name, p in model.named_parameters()}
            attach(model, optimizer)
            by_hand.train(rank, model, optimizer, range(3), by_hand=hand)
            optimizer.add_param_group({"params": [*model[0].parameters()]})
            by_hand.train(rank, model, optimizer, range(3, 5), by_hand=hand)
            seen += [[place[id(p)] for p in optimizer.state], list(optimizer.state_dict()["state"])]
        return seen

    return by_hand.both(rank, case)


def test_entries_are_in_the_order_of_the_plain_loop() -> None:
    for plain, attached in run_ranks(in_order, 2):
        assert attached == plain
        assert plain[0] == ["4.weight", "4.bias", "2.weight", "2.bias", "0.weight", "0.bias"]
        assert plain[2] == []


@pytest.mark.parametrize("held", ["nothing", "entry", "tensor", "view"])
def test_who_holds_an_entry_is_noticed(held: str) -> None:
    p = torch.zeros(2)
    state = WaitingState(defaultdict(dict, {p: {"step": torch.tensor(1.0), "exp_avg": torch.zeros(2), "n": 3}}), int)
    kept = {"nothing": None, "entry": state[p], "tensor": state[p]["exp_avg"], "view": state[p]["exp_avg"][:1]}[held]
    assert state.is_held(p) == (kept is not None)
