"""The self-contained page: one file, no fetch, opened from disk or served, with a strict content policy.

Style and script are inlined from `assets/` and allowed by their hashes alone; whatever comes from the results is
escaped, in markup by the template engine and in the data block by `embed`.
"""

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from syncline import __version__
from syncline.report import figures
from syncline.report.columns import ORDER
from syncline.report.page import PARTS, page
from syncline.report.panels import Panel
from syncline.report.traces import Traces
from syncline.results.schema import Results

ASSETS = Path(__file__).parent / "assets"
STYLES = ("base.css", "page.css", "charts.css", "diagnosis.css", "timeline.css")
CHARTS = ("core.js", "axes.js", "lines.js", "bars.js", "charts.js", "main.js")
TIMELINES = (
    "spans.js",
    "phases.js",
    "shades.js",
    "layout.js",
    "paint.js",
    "ruler.js",
    "view.js",
    "gestures.js",
    "inspect.js",
    "finder.js",
    "steptable.js",
    "stepbars.js",
    "timeline.js",
    "pair.js",
    "runs.js",
)
"""The scripts, in the order in which they are put together; the second part is for pages with timelines."""
SECTIONS = (
    "verdicts",
    "summary",
    "timeline",
    "scaling",
    "loss",
    "time",
    "shares",
    "wire",
    "startup",
    "ranks",
    "crashes",
    "setup",
)
"""Templates in `assets/sections`, in the page's order; each decides itself whether it has something to show."""

COLORS = 10
"""Colours of the palette; an eleventh strategy takes the first again, with a dashed line."""


def render(results: Results, *, traced: Traces | None = None) -> str:
    """The page of results as text, with the timelines of the runs that have a trace."""
    content, traced = page(results), traced or Traces()
    return _render("page.html.j2", content.data, traced, page=content, results=results, sections=SECTIONS)


def render_view(panels: Sequence[Panel], *, title: str, source: str, notes: Sequence[str] = ()) -> str:
    """The page of traces without results as text; `notes` say which traces are missing, and why."""
    data = {"parts": [{"key": key, "name": name} for key, name in PARTS.items()], "runs": [], "curves": []}
    return _render(
        "view.html.j2", data, Traces(tuple(panels), tuple(notes)), title=title, source=source, version=__version__
    )


def _render(template: str, data: Mapping[str, Any], traced: Traces, **content: Any) -> str:
    style, script = _joined("css", STYLES), _joined("js", CHARTS + (TIMELINES if traced.panels else ()))
    text = (
        _environment()
        .get_template(template)
        .render(
            **content,
            traces=traced,
            parts=PARTS,
            lanes=ORDER[1:],
            colors=COLORS,
            policy=policy(style=style, script=script),
            style=Markup(style),  # noqa: S704 - our own files
            script=Markup(script),  # noqa: S704 - our own files
            data=Markup(embed(data)),  # noqa: S704 - escaped by embed
            trace_data=[Markup(embed(panel.data)) for panel in traced.panels],  # noqa: S704 - escaped by embed
        )
    )
    return text.encode("utf-8", "replace").decode("utf-8")  # a lone surrogate in a name must not stop the report


def policy(*, style: str, script: str) -> str:
    """The content policy: nothing may be fetched, and only this style and this script may run."""
    return (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )


def embed(data: Mapping[str, Any]) -> str:
    """`data` as JSON that cannot end its script element, whatever strings it holds."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(ASSETS),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    names = (
        "accuracy",
        "bandwidth",
        "between",
        "duration",
        "number",
        "one_line",
        "percent",
        "plural",
        "printable",
        "significant",
    )
    for name in (*names, "size", "times", "unbroken"):
        environment.filters[name] = getattr(figures, name)
    return environment


def _joined(kind: str, names: tuple[str, ...]) -> str:
    return "\n".join((ASSETS / kind / name).read_text(encoding="utf-8") for name in names)


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
