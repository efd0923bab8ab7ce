"""Text and JSON on standard output."""

import json
import sys

from rich.console import Console

from syncline.report.figures import printable
from syncline.results.file import strict


def say(text: str, console: Console | None = None) -> None:
    """Print text as it is: no markup, no line breaks but its own, no control characters from somebody's file."""
    (console or Console()).print(printable(text), markup=False, highlight=False, soft_wrap=True)


def print_json(content: object) -> None:
    """Print one JSON document, with null for numbers that JSON does not have."""
    json.dump(strict(content), sys.stdout, indent=1, allow_nan=False)
    sys.stdout.write("\n")
