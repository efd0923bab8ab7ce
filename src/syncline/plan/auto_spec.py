"""The spec of automatic compression: `auto`, `auto(error=0.1)`, `auto(int8, powersgd(rank=4))`, or both together.

>>> parse_auto("auto(int8, powersgd(rank=4) | bf16, error=0.1)").codecs
('int8', 'powersgd(rank=4) | bf16')
>>> parse_auto("auto").budget.error
0.01
"""

from dataclasses import dataclass, field, replace
from typing import Any

from syncline import exchange
from syncline.errors import UsageError
from syncline.plan.errors import ADAPTIVE_ERROR, DEFAULT_ERROR, Budget
from syncline.spec import parse_one, show, split

CODECS = ("int8", "int4", "powersgd(rank=64) | bf16", "powersgd(rank=16) | bf16", "powersgd(rank=4) | bf16")
"""The lossy codecs of plain `auto`. Others lose more than the budget on most jobs, or need their own momentum."""
ADAPTIVE_CODECS = ("int8", "int4")
"""The same for optimizers that scale each value, as Adam does: they enlarge the small parts that PowerSGD omits."""
_USE = "use auto, auto(error=0.1), auto(int8, powersgd(rank=4)) or auto(int8, error=0.1)"


@dataclass(frozen=True)
class Auto:
    """What automatic compression may do."""

    codecs: tuple[str, ...] = CODECS
    """Lossy codecs to choose from."""
    budget: Budget = field(default_factory=Budget)
    asked: bool = False
    """Whether the user gave the budget."""
    listed: bool = False
    """Whether the user gave the codecs."""

    def suited(self, *, adaptive: bool) -> "Auto":
        """With the default budget and codecs for this kind of optimizer, unless the user gave them."""
        error = self.budget.error if self.asked else ADAPTIVE_ERROR if adaptive else DEFAULT_ERROR
        codecs = self.codecs if self.listed else ADAPTIVE_CODECS if adaptive else CODECS
        return replace(self, budget=Budget(error, adaptive=adaptive), codecs=codecs)

    def __str__(self) -> str:
        return f"auto({', '.join(self.codecs)}, error={self.budget.error:g})"


def parse_auto(text: str) -> Auto | None:
    """Read a spec of automatic compression; None if the spec names a codec. Mistakes raise a `UsageError`."""
    if text.strip().partition("(")[0].strip() != "auto":
        return None
    call = parse_one(text)
    options = dict(call.kwargs)
    asked = "error" in options
    error, listed = options.pop("error", DEFAULT_ERROR), options.pop("codecs", ())
    if options:
        raise UsageError(f"'{text}': auto has no option '{min(options)}': {_USE}")
    if type(error) not in (int, float):
        raise UsageError(f"'{text}': error takes a number, such as 0.1, the relative squared error that is allowed")
    codecs = [_text(arg) for arg in call.args]
    codecs += split(listed) if isinstance(listed, str) else [_text(listed)] if listed else []
    for codec in codecs:
        exchange.legal(codec)
    return Auto(tuple(codecs) or CODECS, Budget(float(error)), asked, bool(codecs))


def _text(value: Any) -> str:
    return show(value) if isinstance(value, tuple) else str(value)
