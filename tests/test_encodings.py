"""Files have one encoding, whatever the locale of the machine is."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PLACES = ("src", "reproductions", "benchmarks", "examples", "docs")
CALLED = re.compile(r"\b(f?d?open|run|Popen|check_output|write_text|read_text)\(")
"""Other files need no parsing."""


def calls_without_encoding(text: str) -> Iterator[ast.Call]:
    """Calls that read or write text in the encoding of the locale."""
    for call in ast.walk(ast.parse(text)):
        if not isinstance(call, ast.Call):
            continue
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        named = {each.arg for each in call.keywords}
        mode = next((each.value for each in call.args if isinstance(each, ast.Constant)), None)
        is_method = isinstance(call.func, ast.Attribute) and name == "open"
        opens = name in ("open", "fdopen") and ("b" not in mode if isinstance(mode, str) else not is_method)
        pipes = name in ("run", "Popen", "check_output") and {"text", "universal_newlines"} & named
        texts = name == "write_text" or (name == "read_text" and not call.args)  # an argument is the encoding
        if (opens or pipes or texts) and not {"encoding", None} & named:
            yield call


def test_every_file_is_opened_with_its_encoding():
    found = [
        f"{path.relative_to(ROOT)}:{call.lineno}"
        for place in PLACES
        for path in sorted((ROOT / place).rglob("*.py"))
        if CALLED.search(text := path.read_text(encoding="utf-8"))
        for call in calls_without_encoding(text)
    ]
    assert not found


def test_the_check_finds_calls_of_each_kind():
    without = [
        "p.read_text()",
        "p.write_text('é')",
        "open(p)",
        "open(p, 'w')",
        "p.open('a')",
        "fdopen(1, 'w')",
    ]
    without += ["run(c, text=True)"]
    fine = ["p.read_text(encoding='utf-8')", "open(p, 'rb')", "p.open('ab')", "store.open()", "run(c)"]
    assert [bool(list(calls_without_encoding(each))) for each in [*without, *fine]] == [True] * 7 + [
        False
    ] * 5
