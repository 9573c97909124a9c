"""The names of this package that examples import: no type checker reads them."""

import ast
import importlib
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    "path", sorted(EXAMPLES.rglob("*.py")), ids=lambda path: f"{path.parent.name}-{path.stem}"
)
def test_an_example_imports_names_that_the_package_has(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    ours = [node for node in imports if str(node.module).split(".")[0] == "tailrace"]
    names = [(str(node.module), alias.name) for node in ours for alias in node.names]
    assert [each for each in names if not hasattr(importlib.import_module(each[0]), each[1])] == []
