"""Where Chromium is, for tests of pages: the headless shell, which needs less processor time, or the browser."""

from pathlib import Path

_NAMES = ("chromium-headless-shell", "chromium")
CHROMIUM = next((path for path in (Path("/usr/bin") / name for name in _NAMES) if path.exists()), None)
"""The program, or None where there is none."""
OPTIONS = (
    "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--no-first-run",
)  # fmt: skip
"""Nothing but the page itself may use the network."""
