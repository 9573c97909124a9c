"""Docstrings are understood before the code is read: none begins with half a sentence."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src" / "tailrace"
HALF = re.compile(r"What\b|Of\b|Those\b|It\b|The (same|reverse)\b|As [`\w]+[.`]")
"""`What it printed last.`, `Of the last step.`, `As Trainer.save.`: who reads them must know the code."""


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Each string that stands as a statement, also below an attribute, with its line."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield node.lineno, text.strip()


def test_no_docstring_begins_with_half_a_sentence() -> None:
    files = sorted(PACKAGE.rglob("*.py"))
    found = [
        f"{path.relative_to(PACKAGE)}:{line}: {text.splitlines()[0]}"
        for path in files
        for line, text in docstrings(path)
        if HALF.match(text)
    ]
    assert len(files) > 200
    assert found == []
