"""Names of a user's own code, `package.module:name`, may be imported if the user gave them; those in files may not.

A name in a recipe, a plan or a run folder was perhaps written by somebody else, and importing or calling it runs code.
It is used if the user repeats it on the command line or trusts the file (`--trust`, `plan.load(path, trust=True)`).
A program that calls Syncline gives names itself: only those that it reads from files are checked.
"""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from syncline.errors import UsageError, short

_SEPARATORS = re.compile(r"[\s(),|=\"']+")


@dataclass(frozen=True)
class Trust:
    """The names that the user gave; `everything` trusts all files, `imports_checked` refuses all other imports."""

    names: frozenset[str] = frozenset()
    everything: bool = False
    imports_checked: bool = False

    def covers(self, name: str) -> bool:
        """Whether a name may come from a file."""
        return self.everything or name in self.names


_current = Trust()


def current() -> Trust:
    """What is trusted in this process."""
    return _current


def use(trust: Trust) -> None:
    """Set what is trusted in this process: a rank trusts what the command that started it does."""
    global _current
    _current = trust


@contextmanager
def command_line(texts: Iterable[str], *, everything: bool = False) -> Iterator[None]:
    """Inside, only the names in these texts are imported, or those of all files if `everything` is trusted."""
    before = current()
    use(Trust(frozenset(name for text in texts for name in imports(text)), everything, imports_checked=True))
    try:
        yield
    finally:
        use(before)


def is_import(name: str) -> bool:
    """Whether a name has the form `package.module:name`, and is imported instead of looked up."""
    module, _, attribute = name.partition(":")
    return all(part.isidentifier() for part in (*module.split("."), *attribute.split(".")))


def imports(text: str) -> list[str]:
    """The names in a spec that would be imported.

    >>> imports("syncline(my.codecs:half(2) | int8)"), imports("cifar10(root=C:/data)")
    (['my.codecs:half'], [])
    """
    return [word for word in _SEPARATORS.split(text) if ":" in word and is_import(word)]


def check_file(text: str, *, source: str, fix: str) -> None:
    """Raise a `UsageError` if a spec from the file `source` names code that the user did not name; `fix` says how."""
    for name in imports(text):
        if not current().covers(name):
            raise UsageError(f"{source} would run code that is not Syncline's, {short(name)}: {fix}")


def check_import(name: str, *, kind: str) -> None:
    """Raise a `UsageError` if this command may not import a name."""
    if current().imports_checked and not current().covers(name):
        raise UsageError(
            f"{kind} {short(name)} is code that is not Syncline's, and a file names it: repeat the name on the command"
            " line, or use --trust if you trust the file"
        )
