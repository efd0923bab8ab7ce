"""`set_frozen`: make the first blocks of a model frozen and all others trainable; `keep_frozen_in_eval`.

Nothing but the model is touched. Optimizers keep their groups: torch's skip parameters without a gradient. Frozen
modules run in evaluation mode: dropout is off and BatchNorm's statistics stay, so a frozen block is a fixed function.
"""

from collections.abc import Sequence

from torch import nn

from syncline.pipeline.blocks import Blocks


def set_frozen(blocks: Blocks, frozen: int) -> list[nn.Module]:
    """Freeze the modules before the first block and the first `frozen` blocks; with 0 everything trains again.

    Frozen parameters lose their gradient: an optimizer would apply it again. Parameters that are shared with a frozen
    block freeze with it. Returns the modules that are wholly frozen, for `keep_frozen_in_eval`.
    """
    assert 0 <= frozen <= len(blocks)
    mine = [list(blocks.parameters(block)) for block in range(-1, len(blocks))]
    stopped = {id(p) for parameters in mine[: frozen + 1 if frozen else 0] for p in parameters}
    was_frozen = _outermost(blocks.model, {id(p) for ps in mine for p in ps if not p.requires_grad})
    for parameter in (p for parameters in mine for p in parameters):
        parameter.requires_grad_(id(parameter) not in stopped)
        if id(parameter) in stopped:
            parameter.grad = None
    for module in was_frozen:
        module.train(blocks.model.training)
    still = _outermost(blocks.model, stopped)
    keep_frozen_in_eval(still)
    return still


def keep_frozen_in_eval(modules: Sequence[nn.Module]) -> None:
    """Put frozen modules back into evaluation mode; `model.train()` has perhaps changed them."""
    for module in modules:
        if module.training:
            module.eval()


def _outermost(model: nn.Module, parameters: set[int]) -> list[nn.Module]:
    """The largest modules that have parameters, all of them among these."""
    found: list[nn.Module] = []
    if not parameters:
        return found

    def visit(module: nn.Module) -> None:
        mine = {id(p) for p in module.parameters()}
        if mine and mine <= parameters:
            found.append(module)
        elif mine & parameters:
            for child in module.children():
                visit(child)

    visit(model)
    return found
