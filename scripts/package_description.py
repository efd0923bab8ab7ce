"""Build hook: the description of the package is README.md without relative links, which are broken on a package index.

With `project.urls.Source` in pyproject.toml they become absolute links, without it text that names the file.
"""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_RELATIVE_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)]+)\)")


class Description(MetadataHookInterface):
    """Sets `project.readme`."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Called by hatchling with the content of `[project]`."""
        source = metadata.get("urls", {}).get("Source", "")
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": describe(text, source)}


def describe(readme: str, source: str) -> str:
    """The text of a README, with its relative links below the address `source`, or as text if that is empty."""

    def replace(link: re.Match[str]) -> str:
        picture, text, path = link.groups()
        if source:
            return f"{picture}[{text}]({source.rstrip('/')}/{'raw' if picture else 'blob'}/HEAD/{path})"
        if picture:
            return f"(Picture `{path}`: {text}.)"
        return f"`{path}`" if text == path else f"{text} (`{path}`)"

    return _RELATIVE_LINK.sub(replace, readme)
