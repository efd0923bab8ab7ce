import contextlib
import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st

import syncline.errors
import syncline.spec
from syncline.errors import UsageError
from syncline.registry import Registry
from syncline.spec import Call, apply, parse, parse_one, show, split


@pytest.mark.parametrize("module", [syncline.spec, syncline.errors])
def test_docstrings(module):
    assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize(
    "text", ["powersgd(", "a|", "3", "a(b=1, b=2)", "a(b=1, 2)", "", "a b", "a(b))", "a(,)", "x(" * 40 + ")" * 40, "é"]
)
def test_broken_specs_are_usage_errors(text):
    with pytest.raises(UsageError, match="cannot read"):
        parse(text)


def test_values_keep_their_types():
    call = parse_one("x(1, 2.5, true, none, word, 'a b', k=-3e-2, n=f(1) | g)")
    assert call.args == (1, 2.5, True, None, "word", "a b")
    assert call.kwargs == {"k": -0.03, "n": (Call("f", (1,)), Call("g"))}


_names = st.from_regex(r"[a-z][a-z0-9-]{0,8}", fullmatch=True).filter(lambda s: s not in ("true", "false", "none"))
_values = st.one_of(
    st.integers(-99, 99), st.booleans(), st.none(), _names, st.floats(0.001, 100).map(lambda f: round(f, 4))
)
_calls = st.builds(
    Call,
    _names,
    st.lists(_values, max_size=3).map(tuple),
    st.dictionaries(st.from_regex(r"[a-z]{1,5}", fullmatch=True), _values, max_size=3),
)


@given(st.lists(_calls, min_size=1, max_size=3).map(tuple))
def test_show_and_parse_are_inverse(chain):
    assert parse(show(chain)) == chain


@given(st.text(max_size=40))
def test_any_text_parses_or_is_a_usage_error(text):
    with contextlib.suppress(UsageError):
        parse(text)


def test_commas_inside_parentheses_do_not_split():
    assert split("ddp, syncline(powersgd(rank=4, x=1) | bf16),ring") == [
        "ddp",
        "syncline(powersgd(rank=4, x=1) | bf16)",
        "ring",
    ]


def test_wrong_arguments_name_what_is_legal():
    def make(rank=4, *, warm=True):
        return rank

    assert apply(parse_one("p(rank=2)"), make) == 2
    with pytest.raises(UsageError, match=r"p takes \(rank=4, warm=True\)"):
        apply(parse_one("p(rnk=2)"), make)


@pytest.mark.parametrize(
    ("text", "fits"), [("p(2)", True), ("p(2.5)", False), ("p(abc)", False), ("p(scale=1)", True),
                       ("p(scale=x)", False),
                       ("p(warm=1)", False), ("p(warm=true)", True), ("p(most=none)", True), ("p(most=2)", True)]
)  # fmt: skip
def test_values_must_have_the_annotated_type(text, fits):
    def make(rank: int = 4, *, scale: float = 1.0, warm: bool = True, most: int | None = None) -> int:
        return rank

    if fits:
        apply(parse_one(text), make)
    else:
        with pytest.raises(UsageError, match="takes"):
            apply(parse_one(text), make)


def test_registry_names_the_nearest():
    registry = Registry("codec")
    registry.register("powersgd")(1)
    with pytest.raises(UsageError, match="did you mean 'powersgd'"):
        registry.get("powerSGD")
    with pytest.raises(UsageError, match="registered twice"):
        registry.register("powersgd")(2)
    assert registry.names() == ["powersgd"]
