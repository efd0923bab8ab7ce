"""A loader under the recorder."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from syncline.trace.record.recorder import Recorder


class Loaded:
    """A loader whose batches are timed; everything else is the loader's."""

    def __init__(self, recorder: Callable[[], Recorder | None], loader: Iterable[Any]) -> None:
        self._recorder, self._loader = recorder, loader

    def __iter__(self) -> Iterator[Any]:
        items = iter(self._loader)
        while True:
            recorder = self._recorder()
            start = recorder.mark("data") if recorder is not None else None
            try:
                item = next(items)
            except StopIteration:
                return
            if recorder is not None:
                recorder.add("data", "data", start, recorder.mark("data"))
            yield item

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # a copy asks before there is a loader
            raise AttributeError(name)
        return getattr(self._loader, name)
