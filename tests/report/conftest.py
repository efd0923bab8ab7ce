"""Chromium for the tests of the page, one for each module."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chromium import CHROMIUM, OPTIONS


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("needs Chromium")
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as play:
        chromium = play.chromium.launch(executable_path=str(CHROMIUM), args=list(OPTIONS))
        yield chromium
        chromium.close()


@pytest.fixture
def visit_file(browser: Any) -> Iterator[Any]:
    """Opens a page; at the end, whatever the console, the content policy or the network said is a failure."""
    trouble: list[str] = []
    contexts = []

    def run(path: Path, *, width: int = 1280, scheme: str = "light", **more: Any) -> Any:
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, **more)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: trouble.append(message.text))
        page.on("pageerror", lambda error: trouble.append(str(error)))
        page.on("request", lambda r: None if r.url.startswith(("file:", "data:")) else trouble.append(r.url))
        page.goto(path.as_uri())
        return page

    yield run
    for context in contexts:
        context.close()
    assert trouble == []
