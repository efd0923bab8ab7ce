"""Plans for nodes with several ranks: bytes over the shared link, links inside nodes, the choice of hierarchical."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from cost_cases import costs
from model_shapes import mlp, vgg19

from syncline.errors import UsageError
from syncline.plan import LinkCost, Plan, Unit, load_costs, search
from syncline.plan.other_network import TargetNetwork, at
from syncline.plan.predict import exchanges_to_weigh, launch, scenario

INSIDE = LinkCost(1e-4, 5e9)
SIZES, COUNT = ((64, 64), (1000,)), 5096


def sent(codec: str, exchange: str, *, world: int = 4, node: int = 2) -> tuple[float, float]:
    """Bytes of one launch over a node's link and inside the node, in units of the dense gradients."""
    shapes = mlp()
    traffic = launch(codec, exchange, SIZES, shapes[0].dtype, 1, world, node)
    return sum(traffic.sent) / (4 * COUNT), sum(traffic.inside) / (4 * COUNT)


@pytest.mark.parametrize(
    ("exchange", "between", "inside"),
    [("allreduce", 1.5, 0), ("ring", 1.5, 0), ("sharded", 2, 0), ("allgather", 3, 0), ("hierarchical(node=2)", 1, 1)],
)
def test_a_nodes_link_carries_the_bytes_of_all_its_ranks(exchange: str, between: float, inside: float) -> None:
    assert sent("none", exchange) == pytest.approx((between, inside), rel=0.01)
    assert sent("bf16", exchange) == pytest.approx((between / 2, inside), rel=0.01)


def test_many_nodes_are_counted_from_few() -> None:
    few, many = (sent("none", "hierarchical(node=4)", world=world, node=4)[0] for world in (16, 4000))
    assert few == pytest.approx(2 * 3 / 4, rel=0.01)
    assert many == pytest.approx(2 * 999 / 1000, rel=0.01)
    # A plan may name other nodes than the machine has.
    assert sent("none", "hierarchical(node=32)", world=64, node=1)[0] > 0


def test_time_inside_a_node_leaves_the_network_free() -> None:
    shapes = mlp()
    names = tuple(shape.name for shape in shapes)
    made = Plan((Unit("all", names, "none", "hierarchical(node=2)"),), (("all", 0),))
    known = costs(shapes, 0.01, world=4, node=2, inside=INSIDE)
    (job,) = scenario(made, shapes, known).jobs
    size = sum(shape.nbytes for shape in shapes)
    assert job.rounds[0].wire == pytest.approx(size / known.link.bytes_per_s, rel=0.01)
    assert job.rounds[0].latency == pytest.approx(known.link.latency + INSIDE.latency + size / INSIDE.bytes_per_s)


def test_hierarchical_is_weighed_only_for_nodes_with_several_ranks() -> None:
    assert exchanges_to_weigh("int8", 4, 2) == ("allgather", "sharded", "hierarchical(node=2)")
    assert exchanges_to_weigh("bf16", 4, 2) == ("allreduce", "hierarchical(node=2)")
    assert exchanges_to_weigh("bf16", 4, 1) == ("allreduce",)
    assert exchanges_to_weigh("bf16", 4, 4) == ("allreduce",)
    assert "hierarchical(node=2)" not in exchanges_to_weigh("dgc", 4, 2)


@pytest.mark.parametrize("codec", ["none", "bf16", "int8"])
def test_the_planner_picks_hierarchical_on_a_slow_network_between_nodes(codec: str) -> None:
    shapes = vgg19()
    slow = costs(shapes, 0.05, world=4, bytes_per_s=119e6, node=2, inside=INSIDE)
    chosen = search(shapes, slow, allowed=[codec], always=(), mix=False)
    assert {unit.exchange for unit in chosen.plan.units} == {"hierarchical(node=2)"}
    flat = search(shapes, replace(slow, node=1), allowed=[codec], always=(), mix=False)
    assert {unit.exchange for unit in flat.plan.units} == {"sharded" if codec == "int8" else "allreduce"}
    assert chosen.step < flat.step / 1.3


def test_the_planner_stays_flat_where_nodes_are_slow_inside() -> None:
    shapes = vgg19()
    slow = costs(shapes, 0.05, world=4, bytes_per_s=119e6, node=2, inside=LinkCost(1e-3, 5e7))
    chosen = search(shapes, slow, allowed=["bf16"], always=(), mix=False)
    assert {unit.exchange for unit in chosen.plan.units} == {"allreduce"}


def test_costs_with_nodes_come_back_and_older_files_have_none(tmp_path: Path) -> None:
    made = costs(mlp(), 0.1, world=4, node=2, inside=INSIDE)
    file = tmp_path / "costs.json"
    file.write_text(made.to_json())
    assert load_costs(file) == made
    table = json.loads(made.to_json())
    del table["node"], table["inside"]
    file.write_text(json.dumps(table))
    assert load_costs(file) == replace(made, node=1, inside=None)
    with pytest.raises(UsageError, match="node=0"):
        replace(made, node=0)


def test_on_another_network_nodes_stay_where_they_fit() -> None:
    made = costs(mlp(), 0.1, world=4, node=2, inside=INSIDE)
    assert at(made, TargetNetwork(8, 1e9)).node == 2
    assert at(made, TargetNetwork(2, 1e9)).node == 1
