"""The code blocks of README, CONTRIBUTING and docs: found by their fences, cut into commands, files and programs."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
LANGUAGES = {
    "sh": "commands that a test runs",
    "console": "commands after `$ `, which a test runs, with their output",
    "python": "a program that a test runs, or a file if its first line is `# name.py`",
    "diff": "a change of a program, which a test runs with the change",
    "toml": "settings that a test loads",
    "text": "output or a drawing; nothing to run",
}
_FENCE = re.compile(r"^( *)```([^\n]*)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
_COMMAND = re.compile(r"(syncline|python|torchrun|make|pip|srun) ")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str
    line: int
    language: str
    text: str

    @property
    def place(self) -> str:
        """Where it is, for messages."""
        return f"{self.page}:{self.line}"

    @property
    def file(self) -> str:
        """The name of the file that it is, or an empty text."""
        found = re.match(r"# ([\w/]+\.py)\b", self.text)
        return found[1] if found and self.language == "python" else ""

    @property
    def is_script(self) -> bool:
        """Whether it is a whole shell script."""
        return self.text.startswith("#!")

    @property
    def commands(self) -> list[str]:
        """Its commands, without comments; lines that end with a backslash are joined."""
        if self.language not in ("sh", "console") or self.is_script:
            return []
        lines = re.sub(r"\\\n\s*", "", self.text).splitlines()
        if self.language == "console":
            lines = [line[2:] for line in lines if line.startswith("$ ")]
        return [cut for line in lines if (cut := re.sub(r"(^|\s+)#.*", "", line).strip())]


def pages() -> list[str]:
    """All pages with text for users, by their path from the root."""
    found = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [str(path.relative_to(ROOT)) for path in found]


def blocks(page: str) -> list[Block]:
    """The blocks of a page, in order."""
    text = (ROOT / page).read_text()
    return [Block(page, text.count("\n", 0, m.start()) + 1, m[2].strip(), m[3]) for m in _FENCE.finditer(text)]


def looks_like_a_command(text: str) -> bool:
    """Whether the first line of a text could be run."""
    return _COMMAND.match(text) is not None


def output_pattern(shown: str) -> str:
    """A regular expression for printed text: any number for a number, any text for `...`, any space for a space."""
    words = []
    for word in shown.split():
        parts = re.split(r"(\.\.\.|\d+(?:[.,]\d+)*)", word)
        signs = {part: ".*?" if part == "..." else r"\d+(?:[.,]\d+)*" for part in parts[1::2]}
        words.append("".join(signs.get(part, re.escape(part)) for part in parts))
    return r"(?s)" + r"\s+".join(words)


def changed(program: str, diff: str) -> str:
    """A program with the change of a diff block; its unchanged and removed lines must be in the program."""
    lines = diff.splitlines()
    before = "\n".join(line[1:] for line in lines if not line.startswith("+"))
    after = "\n".join(line[1:] for line in lines if not line.startswith("-"))
    assert program.count(before) == 1, f"not in the program, or more than once:\n{before}"
    return program.replace(before, after)
