"""The run folder: it holds all files of a session. An earlier run in the same place is moved aside, not overwritten."""

import itertools
import json
import re
import shutil
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from syncline.errors import UsageError
from syncline.files import read_text, real_path, write_text
from syncline.report.html import write_html
from syncline.results import file as results_file
from syncline.results.schema import Results
from syncline.trace.merge.merge_ranks import Trace
from syncline.train.config import Config

_DESCRIPTIONS = ("config.json", "versions.json")


class RunFolder:
    """`config.json`, `versions.json`, `results.json`, `report.html`, and one folder per strategy under `runs/`."""

    def __init__(self, path: Path | None, *, label: str, reopen: bool = False) -> None:
        """Make a new folder, under `runs/` if `path` is None; or `reopen` the folder of an earlier run to resume it."""
        self._aside: Path | None = None
        self._before: dict[str, str] = {}
        self._unnamed = path is None
        self.reopened = reopen
        """Whether an earlier run is resumed here. Its files stay until newer ones replace them."""
        if path is not None and reopen:
            self.path = path
            for name in _DESCRIPTIONS:
                with suppress(OSError, ValueError):  # new ones replace them; a damaged one is no loss
                    self._before[name] = read_text(path / name)
        else:
            self.path = _fresh(label) if path is None else self._claim(path)
        (self.path / "runs").mkdir(exist_ok=True)

    def discard(self) -> None:
        """Undo the creation of the folder; an earlier run that was moved aside is moved back."""
        if self.reopened:
            for name, text in self._before.items():
                write_text(text, self.path / name)
            return
        shutil.rmtree(self.path)
        if self._unnamed:
            with suppress(OSError):  # other runs are in `runs/`
                self.path.parent.rmdir()
        if self._aside is not None:
            self._aside.rename(self.path)

    def describe(self, config: Config, environment: dict[str, Any]) -> None:
        """Write the settings and the environment, before anything can fail."""
        for name, content in zip(_DESCRIPTIONS, (config.as_dict(), environment), strict=True):
            write_text(json.dumps(content, indent=1) + "\n", self.path / name)

    def strategy(self, name: str, *, world_size: int, several: bool) -> Path:
        """A folder for one strategy's logs, steps and trace."""
        slug = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:80] or "strategy"
        base = f"{slug}-{world_size}" if several else slug
        path, number = self.path / "runs" / base, 1
        while path.exists() and not self.reopened:
            number += 1
            path = self.path / "runs" / f"{base}-{number}"
        path.mkdir(exist_ok=True)
        return path

    def save(self, results: Results, *, new_trace: Trace | None = None) -> None:
        """Write `results.json` and then `report.html`, each in one move. `new_trace` was written just now."""
        results_file.save(results, self.path / results_file.FILE_NAME)
        write_html(results, self.path / "report.html", new_trace=new_trace)

    def _claim(self, path: Path) -> Path:
        path = real_path(path)
        try:
            if path.exists() and not path.is_dir():
                raise UsageError(f"--out {path} is a file: name a folder")
            if path.is_dir() and any(path.iterdir()):
                if not (path / "config.json").exists() or not (path / "runs").is_dir():
                    raise UsageError(f"--out {path} holds files that are not a run: name a new or empty folder")
                names = (path.with_name(f"{path.name}.{number}") for number in itertools.count(1))
                self._aside = path.rename(next(name for name in names if not name.exists()))
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"cannot make --out {path}: {error.strerror}") from None
        return path


def _fresh(label: str) -> Path:
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    slug = re.sub(r"[^A-Za-z0-9]+", "-", label).strip("-")[:40]
    for number in itertools.count():
        path = Path("runs") / f"{stamp}-{slug}{f'-{number}' if number else ''}"
        try:
            path.mkdir(parents=True)
            break
        except OSError as error:
            if not path.is_dir():  # else a session that began in the same second has it
                raise UsageError(f"cannot make {path}: {error.strerror}; name a folder with --out DIR") from None
    return path
