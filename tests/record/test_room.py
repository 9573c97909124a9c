"""The files of the room import one another in one direction, inside functions, too."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import tailrace.record

ROOM = Path(tailrace.record.__file__).parent


def imports_of(path: Path) -> set[str]:
    """The files of the room that a file imports anywhere."""
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
    modules = [node.module or "" for node in nodes]
    prefix = "tailrace.record."
    return {module.removeprefix(prefix) for module in modules if module.startswith(prefix)}


def test_no_file_of_the_room_imports_itself_by_a_detour() -> None:
    graph = {path.stem: imports_of(path) for path in ROOM.glob("*.py")}
    list(TopologicalSorter(graph).static_order())
