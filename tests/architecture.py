"""Checks of the source tree's shape: import direction, cycles, private access, private torch API, first lines.

Every check takes `{module name: source text}` and returns sentences about what is wrong, so that a test can show that
it fails on a bad tree (`test_architecture.py`).
"""

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

Sources = Mapping[str, str]

# package: the packages it may import, besides the small modules at the root
MAY_IMPORT = {
    "codecs": set(),
    "exchange": {"codecs"},
    "trace": set(),
    "sim": {"trace"},
    "plan": {"codecs", "exchange", "sim"},
    "engine": {"codecs", "exchange", "trace", "sim", "plan"},
    "pipeline": {"codecs", "exchange", "trace", "sim", "plan", "engine"},
    "cluster": set(),
    "results": {"trace"},
    "report": {"trace", "sim", "results"},
    "train": {"codecs", "exchange", "trace", "sim", "plan", "engine", "pipeline", "cluster", "results", "report"},
    "integrations": {"codecs", "exchange", "trace", "plan", "engine"},
    "bench": {"codecs", "exchange", "trace", "sim", "plan", "engine", "pipeline", "cluster", "results", "report",
              "train", "integrations"},
}  # fmt: skip

# package: its rooms (sub-packages and loose modules) in import order; a room may import those before it
ROOM_ORDER = {
    "codecs": [
        "wire",
        "kernels",
        "ops",
        "coder",
        "requests",
        "state",
        "definition",
        "program",
        "build",
        "group",
        "lockstep",
        "algorithms",
    ],
    "exchange": ["definition", "moves", "patterns", "build", "emulate", "link"],
    "trace": ["span", "merge", "formats", "analysis", "record"],
    "sim": ["network", "steady", "replay"],
    "engine": [
        "process_groups",
        "shutdown",
        "launch",
        "protocols",
        "step_state",
        "health",
        "inflight",
        "executors",
        "optimizer",
        "tuning",
        "running_plan",
        "backward",
        "sync",
        "attach",
    ],
    "cluster": [
        "quantities",
        "namespaces",
        "guard",
        "privileges",
        "network",
        "capabilities",
        "nodes",
        "gpu",
        "measure",
        "run",
        "ranks",
    ],
    "integrations": ["ddp_hook", "ddp_wrapper"],
    "results": ["schema", "file"],
    "train": ["config", "data", "models", "workload", "strategies", "checkpoint", "rank", "session"],
    "report": [
        "figures",
        "changes",
        "compare",
        "scaling",
        "verdict",
        "page",
        "spans",
        "panels",
        "html",
        "bench_pages",
        "tables",
    ],
    "bench": ["timing", "output", "training", "ranks", "codecs", "quality", "overhead", "recorder", "overlap"],
}

RIDDLES = re.compile(
    r"\b(mend(s|ed|ing)?|dear(er|est)?|manieth|told (from|apart)|stand(s|ing)? still|stood still|let(s|ting)? go|"
    r"a (step|unit|rank|row|round|launch|parameter) (each|apiece)|comes? to light|so seldom|of itself|anew|thereof)\b",
    re.IGNORECASE,
)
# Public in spite of their names: os and named tuples.
PUBLIC = {"_exit", "_replace", "_asdict", "_fields"}
QUESTION_STARTS = ("What ", "Who ", "Whom ", "Where ", "How ", "Whether ", "Which ", "Has ", "Why ")


_parsed = cache(ast.parse)
"""The tree of a source text; all checks share it, and none changes it."""


@dataclass(frozen=True)
class Import:
    """An import statement of ours, anywhere in a module (under TYPE_CHECKING and inside functions too)."""

    module: str
    target: str
    line: int


def imports(sources: Sources) -> Iterator[Import]:
    """All imports of syncline's modules; `from package import module` counts as that module."""
    for module, text in sources.items():
        for node in ast.walk(_parsed(text)):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name.split(".")[0] == "syncline":
                        yield Import(module, alias.name, node.lineno)
            elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "syncline":
                for alias in node.names:
                    full = f"{node.module}.{alias.name}"
                    yield Import(module, full if full in sources else str(node.module), node.lineno)


def cycles(sources: Sources) -> list[str]:
    """Modules that import each other, directly or through others."""
    graph: dict[str, set[str]] = {module: set() for module in sources}
    for found in imports(sources):
        if found.target in graph and found.target != found.module:
            graph[found.module].add(found.target)
    return [f"cycle: {' -> '.join(cycle)}" for cycle in _strong_components(graph)]


def _strong_components(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Groups of two or more nodes that reach each other (Tarjan, iterative)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    on_stack: set[str] = set()
    groups: list[list[str]] = []
    for root in sorted(graph):
        if root in index:
            continue
        work = [(root, iter(sorted(graph[root])))]
        index[root] = low[root] = len(index)
        stack.append(root)
        on_stack.add(root)
        while work:
            node, successors = work[-1]
            for successor in successors:
                if successor not in index:
                    index[successor] = low[successor] = len(index)
                    stack.append(successor)
                    on_stack.add(successor)
                    work.append((successor, iter(sorted(graph[successor]))))
                    break
                if successor in on_stack:
                    low[node] = min(low[node], index[successor])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    group = []
                    while True:
                        member = stack.pop()
                        on_stack.discard(member)
                        group.append(member)
                        if member == node:
                            break
                    if len(group) > 1:
                        groups.append(sorted(group))
    return groups


def directions(sources: Sources) -> list[str]:
    """Imports against the order of packages, or of rooms within a package."""
    root = {module.split(".")[1] for module in sources if module.count(".") == 1} - set(MAY_IMPORT) - {"cli"}
    wrong = []
    for found in imports(sources):
        here, there = found.module.split(".")[1:], found.target.split(".")[1:]
        if not here or here[0] in root | {"cli"} or not there or there[0] in root:
            continue
        where = f"{found.module}:{found.line} imports {found.target}"
        if here[0] not in MAY_IMPORT:
            wrong.append(f"{found.module}: '{here[0]}' is not a package of the design")
        elif here[0] != there[0]:
            if there[0] not in MAY_IMPORT[here[0]]:
                wrong.append(f"{where}: '{here[0]}' may not import '{there[0]}'")
        elif len(here) > 1 and len(there) > 1 and here[1] != there[1]:
            order = ROOM_ORDER.get(here[0], [])
            if here[1] in order and there[1] in order and order.index(there[1]) > order.index(here[1]):
                wrong.append(f"{where}: room '{here[1]}' comes before room '{there[1]}'")
    return wrong + _room_cycles(sources)


def _room_cycles(sources: Sources) -> list[str]:
    graph: dict[str, set[str]] = {}
    for found in imports(sources):
        here, there = found.module.split(".")[:3], found.target.split(".")[:3]
        if len(here) == 3 and len(there) == 3 and here[1] == there[1] and here != there:
            graph.setdefault(".".join(here), set()).add(".".join(there))
            graph.setdefault(".".join(there), set())
    return [f"rooms import each other: {', '.join(group)}" for group in _strong_components(graph)]


def private_access(sources: Sources) -> list[str]:
    """`other._private` where `_private` is defined in another module, and imports of private names."""
    wrong = []
    for module, text in sources.items():
        if module.startswith("syncline._compat"):
            continue
        tree = _parsed(text)
        own = _private_names_defined(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and _is_private(node.attr) and node.attr not in own:
                wrong.append(f"{module}:{node.lineno} reads '{node.attr}', private to another module")
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) > 1:
                name = node.args[1]
                if (
                    node.func.id in ("getattr", "setattr", "hasattr", "delattr")
                    and isinstance(name, ast.Constant)
                    and isinstance(name.value, str)
                    and _is_private(name.value)
                    and name.value not in own
                ):
                    wrong.append(f"{module}:{node.lineno} reads '{name.value}', private to another module")
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("syncline"):
                wrong += [
                    f"{module}:{node.lineno} imports '{alias.name}', private to {node.module}"
                    for alias in node.names
                    if _is_private(alias.name) and f"{node.module}.{alias.name}" not in sources
                ]
    return wrong


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_" and name not in PUBLIC


def _private_names_defined(tree: ast.Module) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                names.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return {name for name in names if _is_private(name)}


def private_torch(sources: Sources) -> list[str]:
    """Private torch API outside `_compat/`: `torch._x`, `torch.a._b`, `from torch._c import d`."""
    wrong = []
    for module, text in sources.items():
        if module.startswith("syncline._compat"):
            continue
        for node in ast.walk(_parsed(text)):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Attribute):
                names = [_dotted(node)]
            for name in names:
                parts = name.split(".")
                if parts[0] in ("torch", "dist", "triton") and any(_is_private(part) for part in parts):
                    wrong.append(f"{module}:{node.lineno} uses '{name}': put it into _compat/")
    return wrong


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        before = _dotted(node.value)
        return f"{before}.{node.attr}" if before else ""
    return node.id if isinstance(node, ast.Name) else ""


def first_lines(sources: Sources) -> list[str]:
    """Modules whose docstring does not begin with one plain sentence that says what the module contains."""
    wrong = []
    for module, text in sources.items():
        docstring = ast.get_docstring(_parsed(text))
        line = (docstring or "").split("\n")[0]
        if not line:
            wrong.append(f"{module}: no docstring")
        elif not line.endswith("."):
            wrong.append(f"{module}: the first line is not a whole sentence: {line}")
        elif line.startswith(QUESTION_STARTS):
            wrong.append(f"{module}: the first line asks instead of naming the content: {line}")
        elif riddle := RIDDLES.search(line):
            wrong.append(f"{module}: '{riddle[0]}' puzzles readers (style.md): {line}")
    return wrong


def riddles(texts: Mapping[str, str]) -> list[str]:
    """Lines with words that style.md asks us not to use."""
    return [
        f"{name}:{number} '{found[0]}': {line.strip()}"
        for name, text in texts.items()
        for number, line in enumerate(text.split("\n"), 1)
        if (found := RIDDLES.search(line))
    ]


def missing_docstrings(sources: Sources) -> list[str]:
    """Public functions and classes without a docstring."""
    return [
        f"{module}: {node.name}"
        for module, text in sources.items()
        for node in _parsed(text).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        and not node.name.startswith("_")
        and not ast.get_docstring(node)
    ]
