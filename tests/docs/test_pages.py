"""README.md and docs/: links and anchors lead somewhere, code and configs are valid, what is named exists."""

import ast
import re
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tailrace.cli import main
from tailrace.config import RunConfig, config_of, sections_at
from tailrace.controller.run import Run
from tailrace.drivers.engine.native.support import MODEL_TYPES
from tailrace.kinds import import_all
from tailrace.schedules import SCHEDULES

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
WRITTEN = [page for page in PAGES if page.name not in ("configuration.md", "simulation.md")]
MAX_PICTURE_BYTES = 60_000
LOOKED_UP = (
    *("bias.md", "configuration.md", "simulation.md", "metrics.md", "scorecard.md", "commands.md"),
    *("python.md", "pairs.md", "fits.md"),
)
"""Pages that commands write."""
MAX_WORDS = 17_200
"""Of the other pages, which are read."""
PARTS_OF_A_RUN = ("pool", "parked", "history")
LEAST_CONFIG = {"run": {"rounds": 1, "group_size": 2}, "schedule": {"name": "serial"}}


class Block(NamedTuple):
    language: str
    text: str


def page_name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(page: Path) -> list[Block]:
    found = re.findall(r"^```(\w+).*?\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    return [Block(*each) for each in found]


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """The anchors of the headings, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.+)$", prose(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(page: Path) -> list[tuple[str, str]]:
    """The relative links of a page: file and anchor, each possibly empty."""
    targets = re.findall(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)", prose(page))
    return [(file, anchor) for file, anchor in targets if file or anchor]


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_relative_links_lead_to_files_and_headings(page: Path) -> None:
    dead = []
    for file, anchor in links(page):
        target = page.parent / file if file else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            dead.append(f"{file}#{anchor}")
    assert dead == []


@pytest.mark.parametrize("page", WRITTEN, ids=page_name)
def test_configs_on_a_page_are_valid(page: Path) -> None:
    """Parts of a config are completed with the least that a config needs."""
    for block in blocks(page):
        if block.language == "toml":
            config = config_of({**LEAST_CONFIG, **tomllib.loads(block.text)})
            assert str(config.schedule["name"]) in SCHEDULES or ":" in str(config.schedule["name"])


@pytest.mark.parametrize("page", WRITTEN, ids=page_name)
def test_python_on_a_page_compiles(page: Path) -> None:
    for block in blocks(page):
        if block.language == "python":
            compile(block.text, page_name(page), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def test_the_schedule_of_the_readme_is_the_one_that_runs() -> None:
    (shown,) = [block.text for block in blocks(ROOT / "README.md") if "async def rolloutpipe" in block.text]
    source = (ROOT / "src" / "tailrace" / "schedules" / "rolloutpipe.py").read_text()
    lines = [re.sub(r"\s+# .*", "", line) for line in shown.splitlines()[1:]]
    assert "\n".join(lines) in source


def test_the_loop_of_the_readme_is_the_one_of_the_example() -> None:
    (shown,) = [block.text for block in blocks(ROOT / "README.md") if "for round in" in block.text]
    assert len(shown.splitlines()) <= 20
    assert textwrap.indent(shown, "    ") in (ROOT / "examples" / "nano.py").read_text()


def keys_of(section: str, rest: list[str]) -> Iterator[bool]:
    """Whether each part of a dotted key exists below a section of the config."""
    import_all()
    for number, part in enumerate(rest):
        sections = sections_at([section, *rest[:number]])  # none: a table of anything, such as [schedule]
        yield not sections or any(part in each.model_fields for each in sections)


@pytest.mark.parametrize("page", WRITTEN, ids=page_name)
def test_keys_of_the_config_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text()
    if page.name.startswith("from-"):  # the first column has the keys of another framework
        text = re.sub(r"^\|[^|]*\|", "|", text, flags=re.MULTILINE)
    named = re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)(?:`| =)", text) + re.findall(r"--([a-z_]+\.[a-z_.]+)", text)
    unknown = []
    for key in named:
        section, *rest = key.split(".")
        is_verb = section == "run" and (hasattr(Run, rest[0]) or rest[0] in PARTS_OF_A_RUN)
        is_file = rest[-1] in ("py", "toml", "jsonl", "json", "sqlite", "md", "html")
        if (
            section in RunConfig.model_fields
            and not is_verb
            and not is_file
            and not all(keys_of(section, rest))
        ):
            unknown.append(key)
    assert unknown == []


@pytest.mark.parametrize("page", [*WRITTEN, ROOT / "Makefile", ROOT / ".ci" / "run"], ids=page_name)
def test_files_and_targets_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text()
    paths = re.findall(r"\b((?:examples|benchmarks|reproductions|tests)/[\w/]+\.\w+)", text)
    modules = re.findall(r"`((?!path/)(?:\w+/)+\w+\.py)\b", text)
    places = (ROOT, ROOT / "src" / "tailrace")
    assert [path for path in {*paths, *modules} if not any((place / path).exists() for place in places)] == []
    targets = set(re.findall(r"\bmake ([a-z][a-z-]+)(?=`|\s{2,}|:)", text))
    makefile = (ROOT / "Makefile").read_text()
    known = {*re.findall(r"^([a-z-]+):", makefile, re.MULTILINE), "env-dev", "env-docs"}
    known |= {f"env-{file.stem}" for file in (ROOT / "requirements").iterdir()}
    assert targets <= known


def options_of(command: str) -> set[str]:
    """The options with which the pages show a command, but for keys of the config."""
    lines = [
        line for page in WRITTEN for line in re.findall(rf"\btailrace {command} ([^#`\n]*)", page.read_text())
    ]
    return {option for line in lines for option in re.findall(r"(--[a-z][a-z-]*)(?![\w.])", line)}


@pytest.mark.parametrize(
    "name", ["train", "sft", "compare", "simulate", "plan", "fit", "eval", "view", "serve"]
)
def test_options_of_commands_that_the_pages_show_exist(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    offered = {"--help", *re.findall(r"--[a-z-]+", capsys.readouterr().out)}
    assert options_of(name) - offered == set()


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_is_in_the_table_and_has_a_section(name: str) -> None:
    page = (ROOT / "docs" / "reference" / "schedules.md").read_text()
    _, _, sections = page.partition("\n## ")
    assert re.search(rf"^\|[^|]*`{name}`[^|]*\|", page, re.MULTILINE)
    assert f"`{name}`" in sections or f"\n## {name}\n" in page


def test_the_pages_have_the_number_of_schedules_and_the_models_with_a_fast_forward_pass() -> None:
    *most, last = MODEL_TYPES
    assert f"There are {len(SCHEDULES)}: " in (ROOT / "README.md").read_text()
    page = (ROOT / "docs" / "reference" / "models.md").read_text()
    assert f"a fast forward pass for {', '.join(most)} and {last}." in page


def test_pages_that_the_source_names_exist() -> None:
    sources = sorted((ROOT / "src").rglob("*.py"))
    named = {page for file in sources for page in re.findall(r"\bdocs/[\w/-]+\.md", file.read_text())}
    assert named
    assert [page for page in sorted(named) if not (ROOT / page).exists()] == []


def pictures(page: Path) -> set[Path]:
    return {(page.parent / target).resolve() for target in re.findall(r"!\[.*?\]\((.+?)\)", page.read_text())}


def test_pictures_are_small_and_a_page_shows_each() -> None:
    files = {*(ROOT / "docs" / "images").iterdir()}
    assert files == set[Path]().union(*map(pictures, PAGES))
    assert [file for file in files if file.stat().st_size >= MAX_PICTURE_BYTES] == []


def test_the_index_lists_each_example() -> None:
    page = (ROOT / "docs" / "start" / "examples.md").read_text()
    listed = {
        name
        for line in re.findall(r"^\| (\W*`.*?) \|", page, re.MULTILINE)
        for name in re.findall("`(.+?)`", line)
    }
    assert listed == {path.name for path in (ROOT / "examples").iterdir() if path.name != "__pycache__"}


def test_the_pages_are_short() -> None:
    pages = [page for page in PAGES if page.name not in LOOKED_UP]
    words = [re.findall(r"\S*\w\S*", page.read_text()) for page in pages]  # without the bars of tables
    assert sum(map(len, words)) <= MAX_WORDS
    assert len((ROOT / "README.md").read_text().splitlines()) <= 115
