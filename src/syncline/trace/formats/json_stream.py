"""Reads JSON as a stream: one value at a time from a window of the text, in bounded memory.

The standard library decodes each value. Everything that could fill the memory has a limit: bytes after decompression,
the size of one value, nesting.
"""

import codecs
import gzip
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from io import BufferedReader
from pathlib import Path
from typing import Any

from syncline.errors import UsageError

_CHUNK = 1 << 18
_SPACE = re.compile(r"[ \t\r\n]*")
_TOKEN = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+("?)|([\[{])|([\]}])', re.DOTALL)
_GOES_ON = re.compile(r"(?:[.eE][+-]?)?")
# Control characters in strings are accepted (profilers do not escape them); NaN and Infinity are not times.
_DECODER = json.JSONDecoder(strict=False, parse_constant=lambda _: None)

COMMAS = re.compile(r"[ \t\r\n,]*")
"""Separators between the entries of an array; an extra comma is normal in a timeline."""

_CUT_SHORT = "its compressed data ends early"

CUT: Any = object()
"""The result of `Window.value` where the file ends inside a value."""


@dataclass(frozen=True)
class Limits:
    """Limits for reading one file: bytes after decompression, events, bytes of one event, nesting, spans.

    `spans` bounds the records that stay in memory, about 300 bytes each. The commands have `--limit spans=2000000`.
    """

    bytes: int = 2 << 30
    events: int = 20_000_000
    event_bytes: int = 1 << 18
    depth: int = 32
    spans: int = 2_000_000

    def exceeded(self, path: Path, name: str, what: str) -> UsageError:
        """The error for a file that exceeds the limit `name`; `what` says what there is too much of."""
        most: int = getattr(self, name)
        return UsageError(
            f"{path} has {what.format(f'{most:,}')}: raise the limit with --limit {name}={2 * most}"
            f" (in Python: Limits({name}={2 * most})), or profile fewer steps"
        )


class Window:
    """The part of a file's text that is being decoded."""

    def __init__(self, path: Path, raw: BufferedReader | gzip.GzipFile, limits: Limits) -> None:
        self._path, self._raw, self._limits = path, raw, limits
        self._text, self._at, self._read = "", 0, 0
        self.damage = ""
        """Why the compressed data could not be read to its end."""
        self._ended = False
        self._decode = codecs.getincrementaldecoder("utf-8-sig")(errors="replace")

    def peek(self, skip: re.Pattern[str] = _SPACE) -> str:
        """The next character that is not skipped; empty at the end of the file."""
        while True:
            found = skip.match(self._text, self._at)
            assert found is not None
            self._at = found.end()
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more():
                return ""

    def take(self) -> str:
        """Consume the next character that is not white space."""
        mark = self.peek()
        self._at += len(mark)
        return mark

    def value(self, most: int) -> Any:
        """Decode the next value, `most` characters at most; `CUT` where the file ends inside it."""
        self.peek()
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._at)
            except RecursionError:
                raise self._deep() from None
            except ValueError:
                value, end = CUT, -1
            # A number at the end of the window may go on in the next one, as 12 does in 123 and in 12e+3.
            if end >= 0 and (self._ended or not _GOES_ON.fullmatch(self._text, end)):
                self._check(end, most)
                self._at = end
                return value
            if len(self._text) - self._at > most:
                raise self._long(most) if end >= 0 or self._unfinished() else self.broken()
            if not self._more() and end < 0:
                if self._unfinished():
                    return CUT
                raise self.broken()

    def ending(self, where: str) -> str:
        """A sentence about how the file stopped early."""
        return f"{where} ({self.damage or 'it is cut off'})"

    def broken(self) -> UsageError:
        """The error for text that is not valid JSON here, or for compressed data whose damage is the reason."""
        near = max(0, self._read - len(self._text) + self._at)
        self.check_rest()
        return UsageError(f"{self._path} is not valid JSON near byte {near}: export the trace again")

    def check_rest(self) -> None:
        """Read to the end of compressed data, where its checksum is; `UsageError` if the data are damaged."""
        while isinstance(self._raw, gzip.GzipFile) and not self._ended:
            self._at = len(self._text)
            self._more()
        if self.damage and self.damage != _CUT_SHORT:
            raise UsageError(f"{self._path} is damaged ({self.damage}): copy or export it again")

    def _check(self, end: int, most: int) -> None:
        if end - self._at > most:
            raise self._long(most)
        openers = self._text.count("{", self._at, end) + self._text.count("[", self._at, end)
        # The number of brackets bounds the depth, so only unusual values need the exact count.
        if openers > self._limits.depth and max(_depths(self._text[self._at : end])) > self._limits.depth:
            raise self._deep()

    def _unfinished(self) -> bool:
        """Whether the rest of the text can be the start of a value: a bracket or a string is open."""
        left = 0
        for left in _depths(self._text[self._at :]):
            if left <= 0:
                return False
        return left > 0

    def _more(self) -> bool:
        if self._ended:
            return False
        # Double the window: a long value is then decoded only a few times.
        data, wanted = bytearray(), max(_CHUNK, len(self._text) - self._at)
        try:
            while len(data) < wanted and (part := self._raw.read1(wanted - len(data))):
                data += part
        except EOFError:
            self.damage = _CUT_SHORT
        except (zlib.error, gzip.BadGzipFile) as error:
            # Bytes after the end of the compressed data do no harm.
            if not str(error).startswith("Not a gzipped file"):
                self.damage = f"its compressed data cannot be read: {error}"
        self._read += len(data)
        if self._read > self._limits.bytes:
            raise self._limits.exceeded(self._path, "bytes", "more than {} bytes")
        self._ended = len(data) < wanted
        self._text = self._text[self._at :] + self._decode.decode(data, final=self._ended)
        self._at = 0
        return bool(data)

    def _long(self, most: int) -> UsageError:
        limits = replace(self._limits, event_bytes=most)
        return limits.exceeded(self._path, "event_bytes", "a value of more than {} characters")

    def _deep(self) -> UsageError:
        return self._limits.exceeded(self._path, "depth", "values that nest more than {} deep")


def _depths(text: str) -> Iterator[int]:
    """The depth after every bracket; an open string counts as one level."""
    depth = 0
    for token in _TOKEN.finditer(text):
        if token[2]:
            depth += 1
        elif token[3]:
            depth -= 1
        elif not token[1]:
            depth += 1
        yield depth
