"""The plan's file: an exact round trip for any names, and an error a person can act on for any mistake."""

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline.errors import UsageError
from syncline.plan import Plan, Unit, load, save

UNIT = '[[unit]]\nname = "a"\nparameters = ["a.weight"]\n'
GOOD = f'version = 1\norder = ["a"]\n{UNIT}'

# Names that look like parts of other names are the hard ones.
NAMES = st.one_of(st.text(max_size=6), st.from_regex(r"\A[ab](\[[0-2]\]){0,2}\Z"))
FACTS = st.one_of(st.text(), st.integers(-(2**63) + 1, 2**63 - 1), st.floats(allow_nan=False), st.booleans())


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    names = draw(st.lists(NAMES, unique=True, max_size=6))
    texts = st.lists(st.text(max_size=8), max_size=3).map(tuple)
    # With a colon, a codec or an exchange is code of the user's, which is not read from files.
    specs = st.text(st.characters(exclude_characters=":", exclude_categories=["Cs"]), max_size=5)
    units = tuple(Unit(n, draw(texts), draw(specs), draw(specs), draw(st.integers(1, 3))) for n in names)
    parts = [(u.name, i) for u in units for i in range(u.partitions)]
    return Plan(units, tuple(draw(st.permutations(parts))), draw(st.dictionaries(st.text(max_size=8), FACTS)))


@settings(deadline=None)
@given(plans())
def test_what_is_saved_is_loaded(tmp_path_factory: pytest.TempPathFactory, plan: Plan) -> None:
    path = tmp_path_factory.getbasetemp() / "round" / "plan.toml"
    save(plan, path)
    again = load(path)
    assert again == plan
    assert again.hash == plan.hash
    assert [p.name for p in path.parent.iterdir()] == ["plan.toml"]


def test_the_file_reads_well(tmp_path: Path) -> None:
    path = tmp_path / "new" / "plan.toml"
    units = (Unit("in", ("in.weight", "in.bias")), Unit("out", ("out.weight",), "topk(0.01) | int8", "allgather", 2))
    save(Plan(units, (("out", 0), ("in", 0), ("out", 1)), {"step_ms": 12.5, "made by": "me", "fast": True}), path)
    text = path.read_text()
    assert text.startswith("# A Syncline plan")
    assert text.split("\n\n", 1)[1] == (
        'version = 1\n\norder = [\n  "out[0]",\n  "in",\n  "out[1]",\n]\n\n'
        '[about]\nfast = true\n"made by" = "me"\nstep_ms = 12.5\n\n'
        '[[unit]]\nname = "in"\nparameters = ["in.weight", "in.bias"]\ncodec = "none"\nexchange = "allreduce"\n\n'
        '[[unit]]\nname = "out"\nparameters = ["out.weight"]\ncodec = "topk(0.01) | int8"\nexchange = "allgather"\n'
        "partitions = 2\n"
    )


def test_the_order_of_facts_does_not_matter(tmp_path: Path) -> None:
    for name, about in (("a", {"x": 1, "y": 2}), ("b", {"y": 2, "x": 1})):
        save(Plan((), (), about), tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize("prefix", ["", "\ufeff"])
def test_keys_may_come_in_any_order_and_be_left_out(tmp_path: Path, prefix: str) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(f'{prefix}order = ["a[0]"]\nversion = 1\n[[unit]]\nparameters = ["a.weight"]\nname = "a"\n')
    assert load(path) == Plan((Unit("a", ("a.weight",)),), (("a", 0),))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("order = [", "is not valid TOML"),
        ("order = " + "[" * 10000, "is not valid TOML"),
        ("", "version = 1"),
        (GOOD.replace("version = 1\n", ""), "version = 1"),
        (GOOD.replace("= 1", "= true"), "version = 1"),
        (GOOD.replace("= 1", "= 2"), "version 2 and this Syncline reads version 1"),
        (GOOD.replace("[[unit]]", "[unit]"), "write [[unit]]"),
        (f"version = 1\n{UNIT}", "'order' is missing"),
        (f"orders = 1\n{GOOD}", "unknown key 'orders': did you mean 'order'"),
        (f"{GOOD}codek = 'none'", "unit 'a': unknown key 'codek': did you mean 'codec'"),
        (GOOD.replace('name = "a"\n', ""), "unit 1: 'name' is missing"),
        (GOOD.replace('parameters = ["a.weight"]\n', ""), "unit 'a': 'parameters' is missing"),
        (GOOD.replace('["a.weight"]', '"a.weight"'), "unit 'a': parameters takes a list, not 'a.weight'"),
        (GOOD.replace('["a.weight"]', "[3]"), "unit 'a': parameters takes a list of names in quotes, not 3"),
        (f"{GOOD}name2 = 1", "unknown key 'name2'"),
        (GOOD.replace('name = "a"', "name = 3"), "unit 1: name takes text in quotes, not 3"),
        (f"{GOOD}codec = 8", "unit 'a': codec takes text in quotes, not 8"),
        (f"{GOOD}exchange = ['ring']", "unit 'a': exchange takes text in quotes"),
        (f"{GOOD}partitions = '2'", "unit 'a': partitions takes a whole number, not '2'"),
        (f"{GOOD}partitions = true", "unit 'a': partitions takes a whole number, not True"),
        (f"{GOOD}partitions = 0", "partitions = 0: use 1 or more"),
        (f"{GOOD}partitions = 2", "'a', which has several parts: write 'a[0]', 'a[1]'"),
        (GOOD.replace('["a"]', '"a"'), "order takes a list, not 'a'"),
        (GOOD.replace('["a"]', "[1]"), "order takes a list of names in quotes, not 1"),
        (GOOD.replace('["a"]', "[]"), "does not launch 'a'"),
        (GOOD.replace('["a"]', '["a", "a"]'), "launches 'a' twice"),
        (GOOD.replace('["a"]', '["a", "a[0]"]'), "launches 'a' twice"),
        (GOOD.replace('["a"]', '["a", "a[1]"]'), "launches 'a[1]': the last part of that unit is 'a'"),
        (GOOD.replace('["a"]', '["a", "x[1]"]'), "launches 'x', which is not a unit"),
        (GOOD + UNIT, "two units are called 'a'"),
        ("version = 1\norder = []\nunit = [1]", "unit 1 is not a table"),
        ("version = 1\norder = []\nunit = 'a'", "unit takes a list, not 'a'"),
        (f"about = 1\n{GOOD}", "about takes a table, not 1"),
        (f"{GOOD}[about]\nday = 2024-01-01", "[about] day is a date"),
    ],
)
def test_load_names_the_file_and_the_mistake(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=re.escape(says)) as caught:
        load(path)
    assert f"plan '{path}'" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_cannot_be_read_at_all(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no plan"):
        load(tmp_path / "nothing.toml")
    with pytest.raises(UsageError, match="cannot read the plan"):
        load(tmp_path)
    (tmp_path / "latin.toml").write_bytes(b"# \xff")
    with pytest.raises(UsageError, match="UTF-8"):
        load(tmp_path / "latin.toml")


def test_save_refuses_what_load_would(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    one = Unit("a", ("a",))
    with pytest.raises(UsageError, match="does not launch 'a'"):
        save(Plan((one,), ()), path)
    with pytest.raises(UsageError, match="not valid Unicode"):
        save(Plan((Unit("\ud800", ()),), (("\ud800", 0),)), path)
    with pytest.raises(UsageError, match=r"about\['x'\] is a list"):
        save(Plan((one,), (("a", 0),), {"x": []}), path)  # type: ignore[dict-item]
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write the plan"):
        save(Plan((), ()), tmp_path / "file" / "plan.toml")


def test_a_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.toml"
    save(Plan((), ()), path)
    before = path.read_bytes()

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(UsageError, match="No space left"):
        save(Plan((), (), {"x": 1}), path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["plan.toml"]
