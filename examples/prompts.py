"""Functions of Python's standard library: documents to train on, and prompts for the demo.

A document is the source of one function or method, moved to the left margin. The modules of
`HELD_OUT` are never trained on; their functions measure the loss, and their headers with
docstrings are the prompts.
"""

from __future__ import annotations

import ast
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tiny_model import BEGIN, END

HELD_OUT = (
    "bisect", "calendar", "cmd", "colorsys", "copy", "csv", "difflib", "fractions", "graphlib",
    "heapq", "ipaddress", "netrc", "queue", "random", "reprlib", "shlex", "statistics", "textwrap",
)  # fmt: skip
SKIPPED = {"site-packages", "test", "tests", "idlelib", "idle_test", "turtledemo", "__pycache__"}


def library() -> Path:
    """The folder of the running Python's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def training_files() -> list[Path]:
    """Sources to train on, sorted: no tests, no installed packages, nothing held out."""
    root = library()
    files = sorted(root.rglob("*.py"))
    held = {root / f"{name}.py" for name in HELD_OUT}
    return [f for f in files if f not in held and not SKIPPED & set(f.relative_to(root).parts)]


def held_out_files() -> list[Path]:
    """The sources of the held-out modules."""
    return [library() / f"{name}.py" for name in HELD_OUT]


def functions(path: Path) -> Iterator[tuple[str, str]]:
    """(source, header) of each function of a module and of its classes, at the left margin.

    The header runs through the docstring, newline included; it is empty for a function without
    one. A file that does not parse has no functions.
    """
    try:
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
    except (SyntaxError, UnicodeDecodeError):
        return
    lines = text.splitlines(keepends=True)
    for node in _function_nodes(tree):
        body = lines[node.lineno - 1 : node.end_lineno]
        margin = body[0][: len(body[0]) - len(body[0].lstrip())]
        body = [line.removeprefix(margin) for line in body]
        documented = ast.get_docstring(node) and len(node.body) > 1
        header = node.body[0].end_lineno - node.lineno + 1 if documented else 0
        yield "".join(body), "".join(body[:header])


def _function_nodes(node: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
        elif isinstance(child, ast.ClassDef | ast.If | ast.Try):
            yield from _function_nodes(child)


def documents(files: list[Path]) -> list[np.ndarray]:
    """Each distinct function as i32[bytes + 2] tokens, between BEGIN and END."""
    sources = dict.fromkeys(source for path in files for source, _ in functions(path))
    return [encode(source, closed=True) for source in sources]


def encode(text: str, closed: bool = False) -> np.ndarray:
    """BEGIN and the text's UTF-8 bytes, i32[T]; and END if `closed`."""
    return np.array([BEGIN, *text.encode(), *([END] if closed else [])], np.int32)


def decode(tokens: np.ndarray) -> str:
    """The text of a row of tokens; what is not a byte is left out."""
    return bytes(t for t in np.asarray(tokens).tolist() if t < 256).decode(errors="replace")


def prompts(count: int, seed: int = 0, shortest: int = 40, longest: int = 352) -> list[np.ndarray]:
    """`count` prompts from the held-out modules, each i32[T] with BEGIN first.

    They are distinct headers of `shortest` to `longest` bytes, in an order fixed by `seed`.
    Raises ValueError if the library has fewer.
    """
    found = dict.fromkeys(header for f in held_out_files() for _, header in functions(f))
    fitting = [h for h in found if shortest <= len(h.encode()) <= longest]
    if len(fitting) < count:
        raise ValueError(f"asked for {count} prompts, the held-out modules have {len(fitting)}")
    order = np.random.default_rng(seed).permutation(len(fitting))[:count]
    return [encode(fitting[i]) for i in order]
