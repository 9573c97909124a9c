"""The structure of the package: three rings, an order of rooms in each, and limits on what a part reaches.

    ground <- heart <- drivers of one machine <- extras

A room is a folder of the heart, or of `drivers/` or `extras/`. It may import the ground, and the rooms in its
row of a table. What a part reaches are the files that it imports, directly or not, in functions, too.
"""

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import tailrace
from tailrace.kinds import BUILT_IN

PACKAGE = Path(tailrace.__file__).parent
REPOSITORY = Path(__file__).parent.parent

GROUND = {"types", "turns", "errors", "clock", "settings", "importing", "devices", "model_folder", "kinds"}
HEART: Mapping[str, set[str]] = {
    "contracts": set(),
    "algo": {"contracts"},
    "record": {"contracts"},
    "ledger": {"contracts", "record"},
    "rollout": {"algo", "contracts", "ledger", "record"},
    "sim": {"contracts", "rollout"},
    "controller": {"algo", "contracts", "ledger", "record", "rollout"},
    "schedules": {"contracts", "controller", "rollout"},
}
"""Each room of the heart, and the rooms that it may import."""
WHOLE_HEART = set(HEART)
KINDS_IMPORT = ("data", "engine", "reward", "trainer", "weights", "workers")
DRIVERS: Mapping[str, set[str]] = {
    "drivers.models": set(),
    "drivers.engine": {"contracts", "drivers.models"},
    "drivers.weights": {"contracts"},
    "drivers.trainer": {"contracts", "algo", "drivers.models"},
    "drivers.data": {"contracts"},
    "drivers.environments": {"contracts", "rollout", "drivers.data"},
    "drivers.reward": {"contracts", "rollout", "drivers.data"},
    "drivers.workers": {"contracts", "algo"}
    | {f"drivers.{room}" for room in ("data", "engine", "reward", "trainer", "weights")},
    "config": WHOLE_HEART
    | {f"drivers.{room}" for room in ("data", "engine", "environments", "reward", "weights", "workers")},
    "drivers.kinds": WHOLE_HEART | {"config"} | {f"drivers.{room}" for room in KINDS_IMPORT},
}
"""The same of the drivers, and of the config."""
PARTS = WHOLE_HEART | set(DRIVERS)
ABOVE: Mapping[str, set[str]] = {
    "drivers.assembly": PARTS,
    "drivers.commands": PARTS | {"drivers.assembly"},
    "api": PARTS | {"drivers.assembly"},
    "cli": {"drivers.assembly", "config"},
}
"""The same of what makes a run out of the parts."""
EXTRAS: Mapping[str, set[str]] = {
    "extras.http": set(),
    "extras.sandbox": set(),
    "extras.judges": {"extras.sandbox"},
    "extras.cluster": set(),
    "extras.serve": {"extras.http"},
    "extras.tinker": {"extras.serve"},
    "extras.agents": {"extras.serve"},
    "extras.openenv": set(),
    "extras.verifiers": {"extras.agents"},
    "extras.plan": {"extras.http"},
    "extras.playground": {"extras.view"},
    "extras.view": {"extras.serve"},
    "extras.audit": set(),
    "extras.diagnose": set(),
    "extras.hub": set(),
    "extras.init": {"extras.plan"},
    "extras.quickstart": set(),
    "extras.trackers": set(),
    "extras.sft": set(),
}
"""Each product, and the other products that it may import. It may import the heart and all drivers."""
ROOMS = HEART | DRIVERS | ABOVE | {room: others | PARTS | set(ABOVE) for room, others in EXTRAS.items()}
KNOWN_PRODUCTS: set[tuple[str, str]] = set()
"""Imports of a product by the heart or a driver. None may come."""

MAX_QUESTIONS = 10
"""Questions after the class of a section: `isinstance(x, ...Settings)` and `case ...Settings(...)`."""
MAX_ROOT_FILES, MAX_ENGINE_LINES = 13, 2_250
DEFAULT_KINDS = (
    *("data.rows", "engine.native", "environment.single_turn", "host.local", "trainer.torch"),
    "weights.shared_memory",
)
"""The kinds that a default run of `tailrace train` names."""
MAX_REACH = {"heart": 11_450, "nano": 8_900, "train": 23_550, "train with kinds": 30_850, "whole": 55_750}
"""Lines that a part reaches: the schedules in virtual time; examples/nano.py; `tailrace train`, without and
with the kinds that a default run names by a string; the package. Ceilings are round and fall. A commit that
raises one names the reason in its message."""
PLANNED: Mapping[str, Mapping[str, int]] = {}
"""What a feature may add to these ceilings, once: the commit that brings it takes its row out."""
MAX_PRODUCT_LINES = {
    "extras.audit": 400,
    "extras.agents": 750,
    "extras.cluster": 650,
    "extras.diagnose": 300,
    "extras.http": 2_550,
    "extras.hub": 250,
    "extras.init": 200,
    "extras.judges": 1_250,
    "extras.openenv": 250,
    "extras.plan": 3_600,
    "extras.playground": 300,
    "extras.quickstart": 50,
    "extras.sandbox": 850,
    "extras.serve": 1_850,
    "extras.sft": 350,
    "extras.tinker": 1_700,
    "extras.trackers": 150,
    "extras.verifiers": 450,
    "extras.view": 2_000,
}
"""Lines of each product, to the next 50."""


def modules() -> dict[str, Path]:
    names = {
        path: ".".join(path.relative_to(PACKAGE).with_suffix("").parts) for path in PACKAGE.rglob("*.py")
    }
    return {name.removesuffix(".__init__"): path for path, name in names.items() if name != "__init__"}


MODULES = modules()
LINES = {name: len(path.read_text().splitlines()) for name, path in MODULES.items()}


@cache
def trees() -> dict[str, ast.Module]:
    """The syntax of every module. They are not parsed to collect the tests."""
    return {name: ast.parse(path.read_text()) for name, path in MODULES.items()}


@cache
def nodes() -> dict[str, list[ast.AST]]:
    """All nodes of every module: a walk takes longer than a search."""
    return {name: [*ast.walk(tree)] for name, tree in trees().items()}


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
    first, _, rest = module.partition(".")
    return f"{first}.{rest.partition('.')[0]}" if first in ("drivers", "extras") else first


@cache
def edges() -> list[tuple[str, str]]:
    """Every import between two files, those inside functions included."""
    return sorted({(name, other) for name, all in nodes().items() for other in modules_imported(all)})


def is_inside(module: str, allowed: str) -> bool:
    return module == allowed or module.startswith(f"{allowed}.")


def lines_reached(roots: Iterable[str]) -> int:
    """The lines of all files that these import, directly or not."""
    reached, left = set[str](), list(roots)
    while left:
        name = left.pop()
        if name not in reached:
            reached.add(name)
            left += [other for importer, other in edges() if importer == name]
    return sum(LINES[name] for name in reached)


def test_every_file_belongs_to_the_ground_or_a_room() -> None:
    assert {room_of(name) for name in MODULES if name not in ("drivers", "extras")} == GROUND | set(ROOMS)


@pytest.mark.parametrize("room", [*sorted(GROUND), *ROOMS])
def test_a_room_imports_only_what_its_table_allows(room: str) -> None:
    allowed = GROUND | ROOMS.get(room, set()) | {room}
    forbidden = {
        (importer, other)
        for importer, other in edges()
        if room_of(importer) == room and room_of(other) not in allowed
    }
    assert forbidden - KNOWN_PRODUCTS == set()


def test_the_heart_and_the_drivers_import_no_product_but_the_known_ones() -> None:
    found = {(importer, other) for importer, other in edges() if room_of(other) in EXTRAS}
    assert {edge for edge in found if room_of(edge[0]) not in EXTRAS} == KNOWN_PRODUCTS


@pytest.mark.parametrize("kind", BUILT_IN)
def test_a_kind_of_this_package_is_a_class_of_it(kind: str) -> None:
    """Kinds are named by strings, which no type checker reads."""
    module, _, name = BUILT_IN[kind].partition(":")
    assert name in set(types_defined(module.removeprefix("tailrace.")))


@pytest.mark.parametrize("rooms", [HEART | DRIVERS | ABOVE, EXTRAS])
def test_the_rooms_have_an_order(rooms: Mapping[str, set[str]]) -> None:
    assert set(TopologicalSorter(rooms).static_order()) == set(rooms)


def test_no_file_imports_itself_through_others() -> None:
    """Imports inside functions count, too."""
    graph: dict[str, set[str]] = {name: set() for name in MODULES}
    for importer, other in edges():
        graph[importer].add(other)
    assert len(list(TopologicalSorter(graph).static_order())) == len(MODULES)


def test_the_package_root_is_small() -> None:
    assert len(list(PACKAGE.glob("*.py"))) <= MAX_ROOT_FILES


def modules_of(script: Path) -> list[str]:
    """The modules that a script imports, those of names of `tailrace` among them."""
    tree = ast.parse(script.read_text())
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    lazy = [tailrace._MODULES[name] for name in names & set(tailrace._MODULES)]
    return [*lazy, *(module for module in modules_imported(ast.walk(tree)) if module in MODULES)]


def test_ceilings_are_round_and_planned_features_raise_no_others() -> None:
    ceilings = [*MAX_REACH.values(), *MAX_PRODUCT_LINES.values()]
    assert [lines for lines in ceilings if lines % 50] == []
    assert {part for parts in PLANNED.values() for part in parts} <= set(MAX_REACH)


def test_what_a_part_reaches_is_bounded() -> None:
    schedules = [name for name in MODULES if room_of(name) == "schedules"]
    simulated = ["sim.engine", "sim.trainer", "sim.reward", "sim.world"]
    kinds = [BUILT_IN[kind].partition(":")[0].removeprefix("tailrace.") for kind in DEFAULT_KINDS]
    reach = {
        "heart": lines_reached([*schedules, "controller.execution", *simulated]),
        "nano": lines_reached(modules_of(REPOSITORY / "examples" / "nano.py")),
        "train": lines_reached(["drivers.commands.train"]),
        "train with kinds": lines_reached(["drivers.commands.train", *kinds]),
        "whole": sum(LINES.values()),
    }
    assert {part: lines for part, lines in reach.items() if lines > MAX_REACH[part]} == {}


@pytest.mark.parametrize("room", EXTRAS)
def test_a_product_has_a_limit_of_its_own(room: str) -> None:
    assert sum(LINES[name] for name in MODULES if room_of(name) == room) <= MAX_PRODUCT_LINES[room]


def questions_after_a_kind(nodes: Iterable[ast.AST]) -> Iterator[int]:
    """The lines that ask of which class a section is."""
    for node in nodes:
        match node:
            case ast.Call(func=ast.Name(id="isinstance"), args=[_, kind]):
                asked = ast.unparse(kind)
            case ast.MatchClass(cls=kind):
                asked = ast.unparse(kind)
            case _:
                continue
        if re.search(r"\w+Settings\b", asked):
            yield node.lineno if isinstance(node, ast.Call) else kind.lineno


def test_what_a_kind_knows_is_asked_of_the_kind_and_not_of_its_class() -> None:
    found = {name: lines for name, all in nodes().items() if (lines := [*questions_after_a_kind(all)])}
    assert sum(map(len, found.values())) <= MAX_QUESTIONS, found


TAGS = {"kind", "transport"}
NO_SECTIONS: Mapping[str, str] = {
    "drivers.reward.functions": "parameters of functions",
    "drivers.trainer.lora": "parts of the names of tensors",
    "extras.agents.agents": "parameters of functions",
    "extras.plan.logs": "records of a log of wandb",
    "extras.tinker.app": "requests of Tinker's API",
    "extras.tinker.wire": "events of the record of a completion",
    "extras.view.run": "lists of samples, and states of a run",
    "extras.view.status": "states of a run",
    "record.advisories": "advisories",
    "sim.cluster": "a parameter of the rates of a cluster, which selects no class",
}
"""Modules with other things that have a `kind` or a `transport`."""
ASKED_OUTSIDE: Mapping[str, tuple[int, str]] = {
    "extras.sandbox.sandbox": (1, "an isolation, bubblewrap or none, is one setting of the sandbox"),
    "sim.world": (4, "a distribution is a table of numbers or a file, and one function draws from all"),
}
"""Questions after a kind by its name outside of the kind: how many, and why. At most 5."""


def kinds_named(nodes: Iterable[ast.AST]) -> Iterator[int]:
    """The lines that compare a kind with names, or look one up in a table, outside of its own class."""

    def is_tag(node: ast.AST) -> bool:
        name = getattr(node, "attr", getattr(node, "id", ""))
        return name in TAGS and ast.unparse(node) != f"self.{name}"

    def has_names(node: ast.AST) -> bool:
        return any(
            (isinstance(each, ast.Constant) and isinstance(each.value, str))
            or (isinstance(each, ast.Name) and each.id.isupper())
            for each in ast.walk(node)
        )

    for node in nodes:
        match node:
            case ast.Compare(left=left, comparators=others):
                sides = [left, *others]
                if any(map(is_tag, sides)) and any(has_names(side) for side in sides if not is_tag(side)):
                    yield node.lineno
            case ast.Match(subject=asked) if is_tag(asked):
                yield node.lineno
            case ast.Subscript(value=table, slice=asked) if is_tag(asked) and has_names(table):
                yield node.lineno


def test_nothing_outside_a_kind_asks_which_kind_a_section_is() -> None:
    found = {name: [*kinds_named(all)] for name, all in nodes().items()}
    counts = {name: len(lines) for name, lines in found.items() if lines}
    assert NO_SECTIONS.keys() <= counts.keys(), "a module that asks nothing needs no entry"
    assert {name: found[name] for name in counts.keys() - NO_SECTIONS.keys() - ASKED_OUTSIDE.keys()} == {}
    assert {name: counts[name] for name in ASKED_OUTSIDE} == {n: num for n, (num, _) in ASKED_OUTSIDE.items()}
    assert sum(num for num, _ in ASKED_OUTSIDE.values()) <= 5


def test_the_embedded_engine_is_small() -> None:
    lines = [count for name, count in LINES.items() if is_inside(name, "drivers.engine.native")]
    assert sum(lines) <= MAX_ENGINE_LINES


def test_pytorch_is_the_only_compiler() -> None:
    compilers = {"numba", "llvmlite", "cython", "jax", "triton"}
    found = {
        (name, top)
        for name, all in nodes().items()
        for top in (each.partition(".")[0] for each in names_imported(all))
        if top in compilers
    }
    assert found == set()


def test_only_workers_on_a_cluster_import_ray() -> None:
    importers = {
        name
        for name, all in nodes().items()
        if "ray" in {each.partition(".")[0] for each in names_imported(all)}
    }
    assert importers == {"extras.cluster.ray"}
    assert {importer for importer, other in edges() if other == "extras.cluster.ray"} == {
        "extras.cluster.kind"
    }


def test_the_architecture_page_names_every_room_and_every_root_file_and_the_reach_of_the_example() -> None:
    page = (REPOSITORY / "docs" / "why" / "architecture.md").read_text()
    assert f"{MAX_REACH['nano']:,} of the package's lines" in page
    named = set(re.findall(r"^    (\w+)(?:/|\.py)", page, flags=re.MULTILINE))
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    files = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__"}
    assert (folders | files) - named == set()
    assert named - (folders | files) == set()


def test_the_controller_does_not_load_torch() -> None:
    modules = ["controller.execution", "config", "schedules", "cli"]
    modules += ["drivers.assembly.schedule", "drivers.assembly.simulation"]
    code = f"""import sys
for name in {modules}:
    __import__(f"tailrace.{{name}}")
    assert not {{"torch", "transformers"}} & {{*sys.modules}}, name"""
    subprocess.run([sys.executable, "-c", code], check=True)


def types_defined(module: str) -> Iterator[str]:
    """The names of all classes of a file, and of its type aliases: capitalised names that get a value there,
    but no type variables."""
    yield from (node.name for node in nodes()[module] if isinstance(node, ast.ClassDef))
    for node in trees()[module].body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            makes_variable = isinstance(node.value, ast.Call) and "TypeVar" in ast.unparse(node.value.func)
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [target.id for target in targets if isinstance(target, ast.Name)]
            yield from (name for name in names if re.match("_?[A-Z]", name) and not makes_variable)


def test_a_class_or_type_alias_has_a_name_of_its_own_in_the_package() -> None:
    defined = Counter(name for module in MODULES for name in types_defined(module) if not name.isupper())
    assert {name for name, count in defined.items() if count > 1} == set()
