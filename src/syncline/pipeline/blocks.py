"""A repeated-block model (ViT, BERT, transformer LM) as a sequence of sublayers: what freezes, and where it can be cut.

`Blocks.of(model)` finds the blocks. A model that knows its own sublayers has a method `split()`; for classes of other
packages, register a function of the model in `ADAPTERS` under the name of the class.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from syncline.errors import UsageError
from syncline.pipeline import adapters
from syncline.pipeline.split import ADAPTERS as ADAPTERS
from syncline.pipeline.split import Part as Part
from syncline.pipeline.split import Split as Split
from syncline.pipeline.split import Values as Values

_BUILT_IN = adapters


@dataclass(frozen=True)
class Sublayer:
    """One step of the forward pass; `block` is its block, -1 before the first block, the number of blocks after it."""

    block: int
    module: nn.Module


@dataclass(frozen=True)
class Blocks:
    """The repeated blocks of a model.

    `sublayers` is empty for a model that can freeze but cannot be cut, since nobody says how its forward pass runs
    outside of the block list.
    """

    model: nn.Module
    members: tuple[tuple[nn.Module, ...], ...]
    before: tuple[nn.Module, ...]
    sublayers: tuple[Sublayer, ...] = ()
    inputs: int = 1
    loss: Callable[..., Tensor] | None = None
    correct: Callable[..., tuple[Tensor, int]] | None = None
    bare: tuple[nn.Parameter, ...] = ()
    """Parameters of the modules around the list of blocks, such as a class token or a scale of the output."""
    tokens: tuple[nn.Parameter, ...] = ()
    """Those of them that are used in front of the first block: `with_tokens` finds them."""

    @classmethod
    def of(cls, model: nn.Module, path: str | None = None) -> "Blocks":
        """The blocks of a model. `path` names the list of blocks, such as `encoder.layers`, where the model does not.

        Without `path` and without a known split, it is the longest list of modules of one class.
        """
        split = None if path is not None else known_split(model)
        if split is not None:
            return cls._of_split(model, split)
        name, found = _named_list(model, path) if path is not None else _longest_list(model)
        if not found:
            raise UsageError(
                f"{type(model).__name__} has no list of equal blocks: name it, such as path='encoder.layers' (in a"
                " freeze policy: blocks=encoder.layers), or give the model a method split()"
            )
        ids = {id(p) for block in found for p in block.parameters()}
        before = _modules_before(model, name, ids)
        return cls(model, tuple((block,) for block in found), before, bare=_bare_parameters(model, name))

    @classmethod
    def _of_split(cls, model: nn.Module, split: Split) -> "Blocks":
        last = len(split.blocks)
        sublayers = [
            *(Sublayer(-1, module) for module in split.before),
            *(Sublayer(number, module) for number, block in enumerate(split.blocks) for module in block),
            *(Sublayer(last, module) for module in split.after),
        ]
        made = cls(
            model,
            tuple(tuple(block) for block in split.blocks),
            tuple(split.before),
            tuple(sublayers),
            split.inputs,
            split.loss,
            split.correct,
        )
        used = {id(p) for sublayer in sublayers for p in sublayer.module.parameters()}
        if missing := [name for name, p in model.named_parameters() if id(p) not in used]:
            raise UsageError(
                f"the split of {type(model).__name__} leaves out parameter '{missing[0]}': put it into a part"
            )
        return made

    def __len__(self) -> int:
        """The number of blocks."""
        return len(self.members)

    def parameters(self, block: int) -> Iterator[nn.Parameter]:
        """The parameters of a block; -1: those in front of the first block (embeddings, class token)."""
        for module in self.modules(block):
            yield from module.parameters()
        if block < 0:
            yield from self.tokens

    def with_tokens(self, inputs: Sequence[Any]) -> "Blocks":
        """The same, with the bare parameters that the inputs of the first block were computed from."""
        used = leaves(value for value in inputs if isinstance(value, Tensor))
        return replace(self, tokens=tuple(p for p in self.bare if id(p) in used))

    def names(self, block: int) -> list[str]:
        """The names of these parameters in the model."""
        wanted = {id(p) for p in self.parameters(block)}
        return [name for name, p in self.model.named_parameters() if id(p) in wanted]

    def modules(self, block: int) -> list[nn.Module]:
        """The modules of a block; -1: those before the first block."""
        return list(self.before if block < 0 else self.members[block])

    def frozen(self) -> int:
        """The number of blocks, from the input, without a trainable parameter; 0 while an embedding trains."""
        if any(p.requires_grad for p in self.parameters(-1)):
            return 0
        active = (n for n in range(len(self)) if any(p.requires_grad for p in self.parameters(n)))
        return next(active, len(self))

    def cut(self) -> tuple[Sublayer, ...]:
        """The sublayers, or an error where the model cannot be cut into stages."""
        if not self.sublayers:
            raise UsageError(
                f"{type(self.model).__name__} cannot be cut into stages: give it a method split(), or register a"
                " function in syncline.pipeline.blocks.ADAPTERS under the name of its class"
            )
        return self.sublayers

    def forward(self, *inputs: Tensor) -> Any:
        """The output of the last sublayer: the model's forward pass without its loss."""
        return run(self.cut(), inputs)


def run(sublayers: Sequence[Sublayer], values: Values) -> Any:
    """Pass values through some sublayers in order."""
    out: Any = values
    for sublayer in sublayers:
        out = sublayer.module(*as_values(out))
    return out


def as_values(out: Any) -> Values:
    """The output of a sublayer as the arguments of the next one."""
    return tuple(out) if isinstance(out, tuple | list) else (out,)


def leaves(values: Iterable[Tensor]) -> set[int]:
    """The ids of the parameters that these values were computed from, by their graph."""
    given = list(values)
    found = {id(value) for value in given if value.is_leaf}
    open_nodes: list[Any] = [value.grad_fn for value in given if value.grad_fn is not None]
    seen = set(open_nodes)
    while open_nodes:
        node = open_nodes.pop()
        if (variable := getattr(node, "variable", None)) is not None:
            found.add(id(variable))
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                open_nodes.append(following)
    return found


def known_split(model: nn.Module) -> Split | None:
    """How the model splits: by its own method `split`, by an adapter, or as a sequence that repeats itself."""
    if callable(own := getattr(model, "split", None)):
        made = own()
        if not isinstance(made, Split):
            raise UsageError(f"split() of {type(model).__name__} returned a {type(made).__name__}: return a Split")
        return made
    known = ADAPTERS.names()
    adapter = next((kind.__name__ for kind in type(model).__mro__ if kind.__name__ in known), None)
    if adapter is not None:
        return ADAPTERS.get(adapter)(model)
    return split_sequence(model) if isinstance(model, nn.Sequential) else None


def split_sequence(model: nn.Sequential) -> Split | None:
    """Split a plain sequence at its longest repeated pattern of classes: A B A B A B has three blocks of A and B."""
    modules = _flat(model)
    kinds = [type(module) for module in modules]
    best = (0, 0, 1)  # (sublayers, start, period)
    for period in (1, 2, 3, 4):
        start = 0
        while start + 2 * period <= len(kinds):
            end = start + period
            while end < len(kinds) and kinds[end] == kinds[end - period]:
                end += 1
            whole = (end - start) // period * period
            if whole >= 2 * period and whole > best[0]:
                best = (whole, start, period)
            start = max(start + 1, end - period)
    length, start, period = best
    if not length:
        return None
    blocks = [modules[at : at + period] for at in range(start, start + length, period)]
    return Split(modules[:start], blocks, modules[start + length :])


def _flat(sequence: nn.Sequential) -> list[nn.Module]:
    """The members of a sequence, with nested plain sequences opened where that finds a list of blocks."""
    out: list[nn.Module] = []
    for module in sequence:
        nested = type(module) is nn.Sequential and len(module) > 1 and len({type(m) for m in module}) == 1
        out.extend(module if nested else [module])  # type: ignore[arg-type]
    return out


def _longest_list(model: nn.Module) -> tuple[str, list[nn.Module]]:
    lists = [
        (name, list(module))
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList | nn.Sequential) and len(module) > 1 and len({type(m) for m in module}) == 1
    ]
    return max(lists, key=lambda found: len(found[1]), default=("", []))


def _named_list(model: nn.Module, path: str) -> tuple[str, list[nn.Module]]:
    try:
        module = model.get_submodule(path)
    except AttributeError as error:
        lists = [name for name, m in model.named_modules() if isinstance(m, nn.ModuleList | nn.Sequential)]
        raise UsageError(
            f"{type(model).__name__} has no module '{path}': name a list of blocks ({', '.join(lists) or 'none'})"
        ) from error
    if not isinstance(module, nn.ModuleList | nn.Sequential) or not len(module):
        raise UsageError(f"'{path}' is a {type(module).__name__}: name a ModuleList or Sequential of blocks")
    return path, list(module)


def _bare_parameters(model: nn.Module, path: str) -> tuple[nn.Parameter, ...]:
    """The parameters of the modules on the path to the block list, without those of their children."""
    on_path, here = [model], model
    for part in path.split(".")[:-1]:
        here = here.get_submodule(part)
        on_path.append(here)
    return tuple(p for module in on_path for p in module.parameters(recurse=False))


def _modules_before(model: nn.Module, path: str, block_parameters: set[int]) -> tuple[nn.Module, ...]:
    """The modules registered in front of the block list: by convention the embeddings, in every known transformer."""
    before: list[nn.Module] = []
    here = model
    for part in path.split("."):
        for name, child in here.named_children():
            if name == part:
                here = child
                break
            if not any(id(p) in block_parameters for p in child.parameters()):
                before.append(child)
    return tuple(before)
