"""The structure of the package, checked by a table of rooms.

    ground <- rooms <- controller <- config <- schedules <- assembly <- plan <- fit <- page <- commands <- cli

A room may import the ground and the contracts (`base.py`) of the rooms in its row of the table. Everything
else that it imports from another room stands in INSIDES, with a reason.
"""

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import tailrace

PACKAGE = Path(tailrace.__file__).parent
REPOSITORY = Path(__file__).parent.parent

GROUND = {"types", "turns", "errors", "clock", "settings", "importing", "devices", "model_folder", "memory"}
ROOMS: Mapping[str, set[str]] = {
    "weights": set(),
    "data": set(),
    "record": {"engine", "trainer"},
    "engine": {"weights"},
    "algo": {"engine"},
    "trainer": {"algo", "weights"},
    "reward": {"data"},
    "environments": {"data"},
    "ledger": {"engine", "record"},
    "rollout": {"data", "engine", "environments", "ledger", "record", "reward", "trainer", "weights"},
    "sim": {"data", "engine", "reward", "trainer", "weights"},
    "workers": {"algo", "data", "engine", "reward", "trainer", "weights"},
    "tinker": {"algo", "engine", "record", "trainer", "weights"},
}
"""Each room, and the rooms whose contracts it may import."""
ABOVE = ("controller", "config", "schedules", "assembly", "plan", "fit", "page", "commands", "api", "cli")
"""In this order: each may import those before it, and every room."""
INSIDES = {
    ("rollout", "ledger.ledger"): "The pool writes down the fate of every sample.",
    ("rollout", "environments.episode"): "A sample is played as an episode.",
    (
        "environments",
        "data.encoding",
    ): "Text between turns, and an agent's first request, are encoded like prompts.",
    (
        "environments",
        "engine.serve",
    ): "The endpoint of agents has the requests and guard of the engine's.",
    ("environments", "workers.process_tree"): "The program of an agent ends with the controller.",
    ("trainer", "algo"): "Losses and advantages are pure functions that the trainer applies.",
    ("reward", "data.procedural"): "A procedural prompt brings its own scorer.",
    ("sim", "reward.timeout"): "Simulated programs have the time limits of real ones.",
    ("sim", "reward.judge_memory"): "Simulated judges have the batches and resident layers of real ones.",
    (
        "sim",
        "reward.judge_settings",
    ): "Simulated judges have the batches and resident layers of real ones.",
    ("sim", "data.base"): "Simulated rows come in epochs like real ones.",
    ("environments", "data.taskset"): "The tasks of a taskset are the data of its environment.",
    ("engine", "data.encoding"): "A served engine takes text.",
    ("engine", "weights.vllm_plugin"): "A vLLM server is told the name of our transfer backend.",
    (
        "tinker",
        "engine.serve",
    ): "Tinker's API has the guard of the engine's server, and a run's trainer.",
    (
        "tinker",
        "rollout.router",
    ): "Tinker's API has the guard of the engine's server, and a run's trainer.",
    (
        "tinker",
        "trainer.batch",
    ): "Tinker's API has the guard of the engine's server, and a run's trainer.",
    (
        "tinker",
        "workers.trainer",
    ): "Tinker's API has the guard of the engine's server, and a run's trainer.",
    ("tinker", "engine.stops"): "A stop string over the border of two requests ends a completion anywhere.",
    ("tinker", "trainer.checksums"): "A state at a service is a checkpoint of the run.",
    ("workers", "data.encoding"): "A worker process is where the insides of these rooms run.",
    ("workers", "engine"): "A worker process is where the insides of these rooms run.",
    ("workers", "reward"): "A worker process is where the insides of these rooms run.",
    ("workers", "trainer"): "A worker process is where the insides of these rooms run.",
    ("workers", "weights.tensors"): "A worker process is where the insides of these rooms run.",
    ("workers", "weights.transports"): "A worker process is where the insides of these rooms run.",
}
"""A room, and a file or folder of another room that it may import: the reason."""
CONTRACTS = {"record.events", "engine.settings"}
"""Files beside `base.py` that are contracts."""

MAX_PACKAGE_LINES, MAX_ROOT_FILES, MAX_ENGINE_LINES = 42_640, 13, 1_300


def modules() -> dict[str, Path]:
    names = {
        path: ".".join(path.relative_to(PACKAGE).with_suffix("").parts) for path in PACKAGE.rglob("*.py")
    }
    return {name.removesuffix(".__init__"): path for path, name in names.items() if name != "__init__"}


MODULES = modules()
TREES = {name: ast.parse(path.read_text()) for name, path in MODULES.items()}


def names_imported(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """The full names that these statements import."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def modules_imported(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """The modules of the package that these statements import."""
    for name in names_imported(nodes):
        inside = name.removeprefix("tailrace.")
        if inside != name:
            module = inside if inside in MODULES else inside.rpartition(".")[0]
            if module:
                yield module


def room_of(module: str) -> str:
    return module.partition(".")[0]


EDGES = sorted({(name, other) for name, tree in TREES.items() for other in modules_imported(ast.walk(tree))})
"""Every import between two files, those inside functions included."""


def is_inside(module: str, allowed: str) -> bool:
    return module == allowed or module.startswith(f"{allowed}.")


def is_allowed(importer: str, other: str) -> bool:
    room, target = room_of(importer), room_of(other)
    if target in GROUND or room == target:
        return room not in GROUND or target in GROUND
    if room in ABOVE:
        return target in ROOMS or (target in ABOVE and ABOVE.index(target) < ABOVE.index(room))
    if room not in ROOMS or target not in ROOMS:
        return False
    contract = other == f"{target}.base" or other in CONTRACTS
    return (contract and target in ROOMS[room]) or any(
        room == importing and is_inside(other, inside) for importing, inside in INSIDES
    )


def test_every_file_belongs_to_the_ground_a_room_or_a_level_above() -> None:
    assert {room_of(name) for name in MODULES} <= GROUND | ROOMS.keys() | set(ABOVE)


@pytest.mark.parametrize("part", [*sorted(GROUND), *ROOMS, *ABOVE])
def test_a_room_imports_only_what_the_table_allows(part: str) -> None:
    forbidden = [
        f"{importer} imports {other}"
        for importer, other in EDGES
        if room_of(importer) == part and not is_allowed(importer, other)
    ]
    assert forbidden == []


def test_the_rooms_have_an_order() -> None:
    """Contracts do not import one another in a circle."""
    assert set(TopologicalSorter(ROOMS).static_order()) == ROOMS.keys()


def test_every_exception_is_used() -> None:
    unused = {
        (room, inside)
        for room, inside in INSIDES
        if not any(room_of(importer) == room and is_inside(other, inside) for importer, other in EDGES)
    }
    assert unused == set()


def test_no_file_imports_itself_through_others() -> None:
    """Imports inside functions count, too."""
    graph: dict[str, set[str]] = {name: set() for name in MODULES}
    for importer, other in EDGES:
        graph[importer].add(other)
    assert len(list(TopologicalSorter(graph).static_order())) == len(MODULES)


def test_the_package_root_is_small() -> None:
    assert len(list(PACKAGE.glob("*.py"))) <= MAX_ROOT_FILES


def test_the_package_is_small() -> None:
    lines = {name: len(path.read_text().splitlines()) for name, path in MODULES.items()}
    assert sum(lines.values()) <= MAX_PACKAGE_LINES
    assert sum(count for name, count in lines.items() if is_inside(name, "engine.native")) <= MAX_ENGINE_LINES


def test_pytorch_is_the_only_compiler() -> None:
    compilers = {"numba", "llvmlite", "cython", "jax", "triton"}
    found = {
        (name, top)
        for name, tree in TREES.items()
        for top in (each.partition(".")[0] for each in names_imported(ast.walk(tree)))
        if top in compilers
    }
    assert found == set()


def test_only_workers_on_a_cluster_import_ray() -> None:
    importers = {
        name
        for name, tree in TREES.items()
        if "ray" in {each.partition(".")[0] for each in names_imported(ast.walk(tree))}
    }
    assert importers == {"workers.ray"}
    assert {importer for importer, other in EDGES if other == "workers.ray"} == {"workers.hosts"}


def test_the_architecture_page_names_every_room_and_every_root_file() -> None:
    page = (REPOSITORY / "docs" / "architecture.md").read_text()
    named = set(re.findall(r"^    (\w+)(?:/|\.py)", page, flags=re.MULTILINE))
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    files = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__"}
    assert (folders | files) - named == set()
    assert named - (folders | files) == set()


@pytest.mark.parametrize(
    "module",
    ["controller.execution", "config", "schedules", "assembly.schedule", "assembly.simulation", "cli"],
)
def test_the_controller_does_not_load_torch(module: str) -> None:
    code = f"import sys, tailrace.{module}; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def types_defined(tree: ast.Module) -> Iterator[str]:
    """The names of all classes of a file, and of its type aliases: capitalised names that get a value there,
    but no type variables."""
    yield from (node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            makes_variable = isinstance(node.value, ast.Call) and "TypeVar" in ast.unparse(node.value.func)
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [target.id for target in targets if isinstance(target, ast.Name)]
            yield from (name for name in names if re.match("_?[A-Z]", name) and not makes_variable)


def test_a_class_or_type_alias_has_a_name_of_its_own_in_the_package() -> None:
    defined = Counter(name for tree in TREES.values() for name in types_defined(tree) if not name.isupper())
    assert {name for name, count in defined.items() if count > 1} == set()
