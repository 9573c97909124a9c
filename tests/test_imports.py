"""The direction of imports: ground <- rooms <- run <- config <- schedules <- commands <- cli.

A room may import the ground, another room's contract (`base.py`) and the events; everything else that it may
import of another room stands in a table here, with the reason.
"""

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import tailrace

ROOT = Path(tailrace.__file__).parent
GROUND = (
    *("types", "errors", "clock", "settings", "importing"),
    *("compiling", "vectors", "attending", "processor", "products"),
)
ROOMS = (
    "data",
    "reward",
    "engine",
    "weights",
    "algo",
    "trainer",
    "record",
    "ledger",
    "rollout",
    "workers",
    "sim",
)
RUN = ("parts", "standing", "ahead", "watchdog", "drawing", "between", "run", "drive")
STOREYS = [GROUND, ROOMS, RUN, ("config",), ("schedules",), ("commands",), ("cli",)]
LEVEL = {part: level for level, parts in enumerate(STOREYS) for part in parts}

INSIDES = {
    # The pool settles what it takes in and gives out.
    ("rollout", "ledger.ledger"),
    # The loss is the trainer's; it stands apart because it is pure.
    ("trainer", "algo.advantages"),
    ("trainer", "algo.corrections"),
    ("trainer", "algo.ess"),
    ("trainer", "algo.kl"),
    ("trainer", "algo.losses"),
    ("trainer", "algo.segments"),
    # A procedural prompt brings its own scorer.
    ("reward", "data.procedural"),
    # A worker process is where the insides of a room run.
    ("workers", "data.tokenizer"),
    ("workers", "engine.native.engine"),
    ("workers", "reward.functions"),
    ("workers", "trainer.reference"),
    ("workers", "trainer.passes"),
    ("workers", "trainer.torch_trainer"),
    ("workers", "trainer.wire"),
    ("workers", "weights.shared_memory"),
    # The simulated parts are handed over as what a run is wired from.
    ("sim", "parts"),
    # Simulated rows come in epochs as real ones do.
    ("sim", "data.epochs"),
}


def modules() -> dict[str, Path]:
    names = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in ROOT.rglob("*.py")}
    return {name.removesuffix(".__init__"): path for path, name in names.items() if name != "__init__"}


MODULES = modules()


def imported(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """The modules of the package that these statements import."""
    for node in nodes:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            inside = name.removeprefix("tailrace.")
            if inside == name:
                continue
            yield inside if inside in MODULES else inside.rpartition(".")[0]


def part_of(module: str) -> str:
    return module.partition(".")[0]


TREES = {name: ast.parse(path.read_text()) for name, path in MODULES.items()}
EDGES = [(name, other) for name, tree in TREES.items() for other in imported(ast.walk(tree)) if other]


@pytest.mark.parametrize("name", MODULES)
def test_a_module_imports_only_downwards(name: str) -> None:
    for importer, other in EDGES:
        if importer == name and (part_of(importer), other) not in INSIDES:
            assert LEVEL[part_of(other)] <= LEVEL[part_of(importer)], f"{importer} imports {other}"


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_knows_only_the_contracts_of_the_others(room: str) -> None:
    for importer, other in EDGES:
        if part_of(importer) != room or part_of(other) in (room, *GROUND):
            continue
        contract = other.endswith(".base") or other == "record.events"
        assert contract or (room, other) in INSIDES, f"{importer} imports {other}"


def test_nothing_is_allowed_that_nobody_does() -> None:
    assert {(part_of(importer), other) for importer, other in EDGES} >= INSIDES


def test_no_module_imports_itself_by_a_detour() -> None:
    """While it loads: what needs an optional dependency is imported in the function that needs it."""
    graph = {name: set(imported(tree.body)) - {"", name} for name, tree in TREES.items()}
    list(TopologicalSorter(graph).static_order())


@pytest.mark.parametrize("module", ["drive", "config", "schedules", "schedules.resolve", "sim.world", "cli"])
def test_the_controller_does_not_load_torch(module: str) -> None:
    code = f"import sys, tailrace.{module}; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
