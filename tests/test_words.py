"""Docstrings are understood before the code is read: none begins with half a sentence."""

import re
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src" / "tailrace"
HALF = re.compile(r'^ *r?""" *(What\b|Of\b|Those\b|It\b|The (same|reverse)\b|As [`\w]+[.`]).*', re.MULTILINE)
"""`What it printed last.`, `Of the last step.`, `As Trainer.save.`: who reads them must know the code."""


def test_no_docstring_begins_with_half_a_sentence() -> None:
    """Those of attributes, too: each string that begins a line."""
    files = sorted(PACKAGE.rglob("*.py"))
    found = [
        f"{path.relative_to(PACKAGE)}: {match[0].strip()}"
        for path in files
        for match in HALF.finditer(path.read_text(encoding="utf-8"))
    ]
    assert len(files) > 200
    assert found == []
