"""Render self-contained HTML pages from the templates, styles and scripts in `assets/`.

A page is one file that fetches nothing and can be opened from disk. Style and script are inlined and allowed by their
hashes alone. Whatever comes from the data is escaped: in markup by the template engine, in the data block by `embed`.
jinja2 is imported when a page is rendered, so that a machine that only trains does not need it.
"""

import base64
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from syncline import __version__
from syncline.files import write_text
from syncline.report import figures
from syncline.report.page import PARTS, page, parts
from syncline.report.palette import COLORS
from syncline.report.panels import Panel, Traces, traces
from syncline.report.spans import ORDER
from syncline.results.schema import Results
from syncline.trace.merge.merge_ranks import Trace

ASSETS = Path(__file__).parent / "assets"
STYLES = ("base", "page", "charts", "diagnosis", "timeline")
CHARTS = ("core", "axes", "lines", "bars")
TIMELINES = (
    "spans", "phases", "shades", "layout", "paint", "ruler", "view", "gestures", "inspect", "finder", "steptable",
    "stepbars", "timeline", "pair",
)  # fmt: skip
"""Files in `assets/css` and `assets/js`, in the order in which they are joined; `TIMELINES` only with spans."""
SECTIONS = (
    "verdicts", "summary", "timeline", "changes", "scaling", "loss", "time", "shares", "wire", "startup", "ranks",
    "crashes", "setup",
)  # fmt: skip
"""Templates in `assets/sections`, in the page's order. A section without content renders nothing."""

_FILTERS = (
    "accuracy", "bandwidth", "between", "duration", "number", "one_line", "percent", "plural", "printable", "seconds",
    "significant", "size", "times", "unbroken", "word_pieces",
)  # fmt: skip


def render_html(results: Results, *, folder: Path | None = None, new_trace: Trace | None = None) -> str:
    """The report page as text. With the run folder, it includes the timelines of the traces found there."""
    content = page(results)
    found = Traces() if folder is None else traces(results, folder, new_trace=new_trace)
    shapes = [{"id": f"shape-{n}", "series": p.shape} for n, p in enumerate(p for p in found.panels if p.changes)]
    return render(
        "page.html.j2",
        content["data"] | {"shapes": shapes},
        spans=[panel.data for panel in found.panels],
        page=content,
        results=results,
        sections=SECTIONS,
        traces=found,
    )


def write_html(
    results: Results, path: str | os.PathLike[str], *, folder: Path | None = None, new_trace: Trace | None = None
) -> None:
    """Write the report page to `path` atomically. Traces are read from `folder`, by default the folder of `path`.

    `new_trace`, which was just written to its `path` in that folder, is used without reading the file.
    """
    write_text(render_html(results, folder=folder or Path(path).parent, new_trace=new_trace), path)


def render_view(panels: Sequence[Panel], *, title: str, source: str, notes: Sequence[str] = ()) -> str:
    """The page of traces without results as text. `notes` name the traces that are missing, and why."""
    return render(
        "view.html.j2",
        {"parts": parts(), "runs": [], "curves": []},
        spans=[panel.data for panel in panels],
        title=title,
        source=source,
        version=__version__,
        traces=Traces(tuple(panels), tuple(notes)),
    )


def render(
    template: str,
    data: Mapping[str, Any],
    *,
    spans: Sequence[Mapping[str, Any]] = (),
    charts: str = "charts",
    **content: Any,
) -> str:
    """A page as text: `data` and `spans` are for the scripts, `charts` is the script that draws this kind of page."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    scripts = [*CHARTS, *TIMELINES, charts, "main", "runs"] if spans else [*CHARTS, charts, "main"]
    style, script = _joined("css", STYLES), _joined("js", scripts)
    environment = Environment(
        loader=FileSystemLoader(ASSETS),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {name: getattr(figures, name) for name in _FILTERS}
    text = environment.get_template(template).render(
        **content,
        parts=PARTS,
        lanes=ORDER[1:],
        colors=COLORS,
        policy=policy(style=style, script=script),
        style=Markup(style),  # noqa: S704 - our own files
        script=Markup(script),  # noqa: S704 - our own files
        data=Markup(embed(data)),  # noqa: S704 - escaped by embed
        trace_data=[Markup(embed(one)) for one in spans],  # noqa: S704 - escaped by embed
    )
    return text.encode("utf-8", "replace").decode("utf-8")  # a lone surrogate in a name must not stop the report


def policy(*, style: str, script: str) -> str:
    """The content security policy: nothing may be fetched, and only this style and this script may run."""
    return (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )


def embed(data: Mapping[str, Any]) -> str:
    """`data` as JSON that cannot end its script element, whatever strings it holds."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _joined(kind: str, names: Sequence[str]) -> str:
    return "\n".join((ASSETS / kind / f"{name}.{kind}").read_text(encoding="utf-8") for name in names)


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
