"""The layout of a pipeline: the sublayers of each stage, and the tensors that each rank holds. Plain data."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from syncline.pipeline.blocks import Blocks
from syncline.pipeline.mesh import Shape
from syncline.pipeline.partition import Stages, balanced, costs_by_parameters
from syncline.pipeline.schedule import find_schedule, rank_of_stage


@dataclass(frozen=True)
class Layout:
    """Stages in the order of the forward pass on a mesh of this shape; a schedule may give a rank several stages."""

    shape: Shape
    schedule: str
    stages: Stages

    def position(self, stage: int) -> int:
        """The position in the pipeline that runs a stage."""
        return rank_of_stage(stage, ranks=self.shape.stages, v_shape=find_schedule(self.schedule).v_shape)

    def stages_at(self, position: int) -> list[int]:
        """The stages that a position runs."""
        return [stage for stage in range(len(self.stages)) if self.position(stage) == position]

    def sublayers_at(self, position: int) -> list[int]:
        """The sublayers that a position runs."""
        return [at for stage in self.stages_at(position) for at in self.stages[stage]]

    def frozen_stages(self, frozen: int) -> int:
        """The number of stages that have frozen sublayers alone, if the first `frozen` sublayers are."""
        return sum(stage.stop <= frozen for stage in self.stages)


def lay_out(
    shape: Shape,
    sizes: Sequence[int],
    *,
    schedule: str,
    frozen: int = 0,
    costs: Sequence[float] | None = None,
    together: bool = False,
) -> Layout:
    """Balance the sublayers over the stages by measured costs, or by their sizes before there are any.

    The first `frozen` sublayers are frozen; `together` keeps them in the first stage, for a cache of their activations,
    as far as every stage gets a sublayer. There they cost nothing: they are read.
    """
    costs = costs_by_parameters(sizes, frozen=frozen) if costs is None else costs
    stages = shape.stages * (find_schedule(schedule).per_rank if shape.stages > 1 else 1)
    first = max(0, min(frozen, len(sizes) - stages + 1)) if together else 0
    costs = [0.0] * first + list(costs[first:])
    return Layout(shape, schedule, balanced(costs, stages, together=first))


def parameter_counts(blocks: Blocks) -> list[int]:
    """The parameters of each sublayer; on a rank that holds the whole model."""
    return [sum(p.numel() for p in sublayer.module.parameters()) for sublayer in blocks.cut()]


def frozen_sublayers(blocks: Blocks) -> int:
    """The number of sublayers, from the input, that need no backward pass."""
    frozen = blocks.frozen()
    return sum(sublayer.block < frozen for sublayer in blocks.cut()) if frozen else 0


def holders(blocks: Blocks, layout: Layout) -> dict[str, list[int]]:
    """The positions that hold each tensor (parameter or buffer) of the model, in order; several for tied weights.

    A buffer that is in no sublayer, such as a mask of the model itself, is held by all.
    """
    names = {id(tensor): name for name, tensor in tensors_of(blocks).items()}
    found: dict[str, list[int]] = {name: [] for name in names.values()}
    for position in range(layout.shape.stages):
        for at in layout.sublayers_at(position):
            module = blocks.cut()[at].module
            for tensor in (*module.parameters(), *module.buffers()):
                where = found[names[id(tensor)]]
                if position not in where:
                    where.append(position)
    return {name: where or list(range(layout.shape.stages)) for name, where in found.items()}


def tensors_of(blocks: Blocks) -> dict[str, Tensor]:
    """The parameters and buffers of the model by name."""
    return {**dict(blocks.model.named_parameters()), **dict(blocks.model.named_buffers())}
