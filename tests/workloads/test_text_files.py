"""Texts of the user's own files: labelled lines and questions in SQuAD's format become samples, or a named error."""

import json

import pytest
import torch

from syncline.errors import UsageError
from syncline.train.data import Need, load_data
from syncline.train.data.text_tasks import END, PADDING, START
from syncline.train.workload import build

LABELS = Need("text-classes", vocabulary=64, sequence=16)
QA = Need("qa", vocabulary=128, sequence=24)


def load(text, need):
    return load_data(text, need, model="bert", seed=0)


def labelled(tmp_path, count=40):
    file = tmp_path / "texts.tsv"
    file.write_text(
        "".join(f"{'ab'[n % 2]}\t{'good day' if n % 2 else 'bad night'} number {n}\n" for n in range(count))
    )
    return file


def test_labelled_lines_are_samples_and_every_tenth_is_held_out(tmp_path):
    data = load(f"labelled(path='{labelled(tmp_path)}')", LABELS)
    assert (len(data.train), len(data.test), data.classes) == (36, 4, 2)
    tokens, segments, labels = data.train.batch(torch.arange(3))
    assert tokens.shape == segments.shape == (3, 16)
    assert tokens[0, 0] == START
    assert (tokens[0] == END).sum() == 1
    assert tokens[0, -1] == PADDING
    assert labels.tolist() == [0, 1, 0]
    assert torch.equal(tokens[0, 1:3], tokens[2, 1:3]), "the same words have the same numbers"


def squad(tmp_path, count=20, **changes):
    passages = [f"The river number {n} flows to the city of town{n} and then to the sea ." for n in range(count)]
    qas = [
        {
            "question": f"Where does river {n} flow ?",
            "answers": [{"text": f"town{n}", "answer_start": text.index("town")}],
        }
        for n, text in enumerate(passages)
    ]
    qas[0]["answers"][0] |= changes
    content = {"data": [{"paragraphs": [{"context": c, "qas": [q]} for c, q in zip(passages, qas, strict=True)]}]}
    content["data"][0]["paragraphs"][-1]["qas"].append({"question": "Why ?", "answers": [], "is_impossible": True})
    file = tmp_path / "questions.json"
    file.write_text(json.dumps(content))
    return file


@pytest.mark.parametrize("seq", [16, 24, 48])
def test_questions_point_at_their_answer_also_where_the_passage_is_cut(tmp_path, seq):
    data = load(f"questions(path='{squad(tmp_path)}', seq={seq})", QA)
    assert (len(data.train), len(data.test)) == (18, 2)
    tokens, segments, start, end = data.train.batch(torch.arange(18))
    assert tokens.shape == (18, seq)
    assert torch.equal(start, end), "one word"
    answers = tokens.gather(1, start.unsqueeze(1)).squeeze(1)
    assert len(set(answers.tolist())) == 18, "every answer is another word"
    assert (segments.gather(1, start.unsqueeze(1)) == 1).all(), "in the passage"
    assert (tokens == END).sum() == 36


def test_the_words_of_pretraining_number_those_of_the_task(tmp_path):
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("night " * 5 + "day " * 3)
    data = load(f"labelled(path='{labelled(tmp_path)}', words='{corpus}')", LABELS)
    assert data.train.batch(torch.tensor([0]))[0][0, :4].tolist() == [START, 1, 5, 1], "bad night number"


def test_bert_trains_on_them(tmp_path):
    for model, text in (
        ("bert", f"labelled(path='{labelled(tmp_path)}')"),
        ("bert(head=qa)", f"questions(path='{squad(tmp_path)}')"),
    ):
        workload = build(model, text)
        batch = workload.train.batch(torch.arange(4))
        assert workload.phases[0].module(*batch).isfinite()
        assert workload.evaluate(workload.test.batch(torch.arange(2)))[1] == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("labelled(path='none.tsv')", "cannot read none.tsv"),
        ("labelled(path='{0}/bad.tsv')", "line 2: 'no tab' is not a label"),
        ("labelled(path='{0}/one.tsv')", "2 labels are needed"),
        ("labelled(path='{0}/texts.tsv', test='{0}/other.tsv')", "no training text has the label 'c'"),
        ("labelled(path='{0}/texts.tsv', seq=4)", "16 to 65536"),
    ],
)
def test_wrong_files_are_named_errors(tmp_path, text, said):
    labelled(tmp_path)
    (tmp_path / "bad.tsv").write_text("a\tx\nno tab\n")
    (tmp_path / "one.tsv").write_text("a\tx\n" * 20)
    (tmp_path / "other.tsv").write_text("c\tx\n")
    with pytest.raises(UsageError, match=said):
        load(text.format(tmp_path), LABELS)


def test_wrong_questions_are_named_errors(tmp_path):
    with pytest.raises(UsageError, match="is not at character 0"):
        load(f"questions(path='{squad(tmp_path, answer_start=0)}')", QA)
    (tmp_path / "questions.json").write_text("{}")
    with pytest.raises(UsageError, match="not in the format of SQuAD"):
        load(f"questions(path='{tmp_path}/questions.json')", QA)
