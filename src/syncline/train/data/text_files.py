"""Texts of the user's files for fine-tuning: `labelled` (lines of label and text) and `questions` (SQuAD's JSON)."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from syncline.errors import UsageError, short
from syncline.files import parse_json, reason
from syncline.train.data.base import Batch, Data, Need, data
from syncline.train.data.text import WORD, number_words, read_texts
from syncline.train.data.text_tasks import END, PADDING, START, UNKNOWN

_HELD_OUT = 10
_MOST_BYTES = 1 << 30
_VOCABULARY_BYTES = 3_000_000


@dataclass(frozen=True)
class StoredTexts:
    """Samples in memory: tokens and segments, [n, seq], and their targets, [n] each."""

    parts: Batch
    varies: ClassVar[bool] = False

    def __len__(self) -> int:
        return len(self.parts[0])

    def batch(self, indices: Tensor, *, epoch: int = 0) -> Batch:
        """The samples at `indices`, the same in every epoch."""
        return tuple(part[indices] for part in self.parts)


@dataclass(frozen=True)
class Question:
    """A question, the passage that answers it, and the characters of the passage that are the answer."""

    text: str
    passage: str
    start: int
    end: int


@data("labelled", tasks=("text-classes",))
def labelled(
    need: Need, *, seed: int, path: str, test: str | None = None, words: str | None = None, seq: int | None = None
) -> Data:
    """Texts with labels: a file of lines `label<TAB>text`. `test`: another such file; default: every tenth line.

    `words` is the file or folder whose words were numbered in pretraining (`text(path=...)`); default: this file's.
    """
    length, rows = _length(need, seq), _lines(Path(path).expanduser())
    held = rows[_HELD_OUT - 1 :: _HELD_OUT] if test is None else _lines(Path(test).expanduser())
    rows = [row for n, row in enumerate(rows) if test is not None or n % _HELD_OUT != _HELD_OUT - 1]
    names = sorted({label for label, _ in rows})
    if len(names) < 2 or not held:
        raise UsageError(
            f"labelled: {path} has {len(rows)} texts of {len(names)} labels: 10 texts of 2 labels are needed"
        )
    if unknown := sorted({label for label, _ in held} - set(names)):
        raise UsageError(f"labelled: no training text has the label {short(unknown[0])}: give training texts of it")
    numbers = _numbers(words, [text for _, text in rows], need.vocabulary)

    def store(chosen: Sequence[tuple[str, str]]) -> StoredTexts:
        tokens = [_framed([_ids(text, numbers)[: length - 2]], length) for _, text in chosen]
        labels = torch.tensor([names.index(label) for label, _ in chosen], device="cpu")
        return StoredTexts((*_stacked(tokens), labels))

    return Data(store(rows), store(held), samples="sequences", classes=len(names), sequence=length)


@data("questions", tasks=("qa",))
def questions(
    need: Need, *, seed: int, path: str, test: str | None = None, words: str | None = None, seq: int | None = None
) -> Data:
    """Questions about texts: a JSON file in the format of SQuAD; questions without an answer are left out.

    `test` is another such file; without it every tenth question is held out. `words` as for `labelled`.
    """
    length, asked = _length(need, seq), _questions(Path(path).expanduser())
    held = asked[_HELD_OUT - 1 :: _HELD_OUT] if test is None else _questions(Path(test).expanduser())
    asked = [one for n, one in enumerate(asked) if test is not None or n % _HELD_OUT != _HELD_OUT - 1]
    if not asked or not held:
        raise UsageError(f"questions: {path} has {len(asked)} questions with an answer: 10 or more are needed")
    texts = [text for one in asked for text in (one.text, one.passage)]
    numbers = _numbers(words, texts, need.vocabulary)

    def store(chosen: Sequence[Question]) -> StoredTexts:
        made = [_place(one, numbers, length) for one in chosen]
        ends = [torch.tensor([row[key] for row in made], device="cpu") for key in (1, 2)]
        return StoredTexts((*_stacked([row[0] for row in made]), *ends))

    return Data(store(asked), store(held), samples="sequences", sequence=length)


def _length(need: Need, seq: int | None) -> int:
    length = need.sequence if seq is None else seq
    if not 16 <= length <= 65_536:
        raise UsageError(f"seq={length}: 16 to 65536 tokens")
    return length


def _numbers(words: str | None, own: Iterable[str], vocabulary: int) -> dict[str, int]:
    texts = own if words is None else read_texts(words, _VOCABULARY_BYTES).values()
    return number_words(texts, vocabulary)


def _ids(text: str, numbers: dict[str, int]) -> list[int]:
    return [numbers.get(word, UNKNOWN) for word in WORD.findall(text)]


def _framed(parts: Sequence[Sequence[int]], length: int) -> tuple[list[int], list[int]]:
    """`[START] a [END] b [END]`, padded, and the segment of every token."""
    tokens, segments = [START], [0]
    for segment, part in enumerate(parts):
        tokens += [*part, END]
        segments += [segment] * (len(part) + 1)
    rest = length - len(tokens)
    return tokens + [PADDING] * rest, segments + [0] * rest


def _stacked(rows: Sequence[tuple[list[int], list[int]]]) -> tuple[Tensor, Tensor]:
    tokens, segments = zip(*rows, strict=True)
    return torch.tensor(tokens, device="cpu"), torch.tensor(segments, device="cpu")


def _place(question: Question, numbers: dict[str, int], length: int) -> tuple[tuple[list[int], list[int]], int, int]:
    """The framed sample and the places of the answer's first and last word; a long passage is cut around the answer."""
    asked = _ids(question.text, numbers)[: length // 3]
    found = list(WORD.finditer(question.passage))
    inside = [n for n, word in enumerate(found) if word.end() > question.start and word.start() < question.end]
    room = length - len(asked) - 3
    first, last = inside[0], min(inside[-1], inside[0] + room - 1)
    begin = max(0, min(first - (room - (last - first + 1)) // 2, len(found) - room))
    passage = [numbers.get(word.group(), UNKNOWN) for word in found[begin : begin + room]]
    offset = 2 + len(asked) - begin
    return _framed([asked, passage], length), first + offset, last + offset


def _read(path: Path) -> str:
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise UsageError(f"{path} is larger than {_MOST_BYTES >> 30} GiB: give a smaller file")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {reason(error)}") from None


def _lines(path: Path) -> list[tuple[str, str]]:
    rows = []
    for number, line in enumerate(_read(path).splitlines(), start=1):
        label, tab, text = line.partition("\t")
        if not tab or not WORD.search(text):
            raise UsageError(f"{path}, line {number}: {short(line)} is not a label, a tab and a text")
        rows.append((label.strip(), text))
    return rows


def _questions(path: Path) -> list[Question]:
    try:
        table: Any = parse_json(_read(path))
        return [
            question
            for article in table["data"]
            for paragraph in article["paragraphs"]
            for asked in paragraph["qas"]
            for question in _answered(asked, paragraph["context"])
        ]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(
            f"{path} is not in the format of SQuAD ({reason(error)}): data, paragraphs, context, qas"
        ) from None


def _answered(asked: dict[str, Any], passage: str) -> list[Question]:
    """The question with its first answer, if that is in the passage."""
    for answer in asked.get("answers", [])[:1]:
        start, text = int(answer["answer_start"]), str(answer["text"])
        if passage[start : start + len(text)] != text:
            raise UsageError(
                f"the answer {short(text)} is not at character {start} of its passage: correct answer_start"
            )
        if re.search(r"\w", text):
            return [Question(str(asked["question"]), passage, start, start + len(text))]
    return []
