"""Count the lines of logic of an algorithm: its functions' code, without docstrings, comments, imports and blanks."""

import ast
import inspect
import tokenize
from io import StringIO
from types import ModuleType

SKIP = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def logic_lines(module: ModuleType) -> int:
    """Lines of functions and constants of a module that do something; signatures count."""
    source = inspect.getsource(module)
    tree = ast.parse(source)
    silent: set[int] = set()
    for node in ast.walk(tree):
        is_text = (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        )
        if is_text or isinstance(node, ast.Import | ast.ImportFrom):
            silent.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            silent.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    tokens = tokenize.generate_tokens(StringIO(source).readline)
    code = {line for t in tokens if t.type not in SKIP for line in range(t.start[0], t.end[0] + 1)}
    return len(code - silent)
