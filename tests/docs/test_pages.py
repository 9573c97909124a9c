"""README.md and docs/: links lead somewhere, configs are valid, every schedule and parameter is described."""

import inspect
import re
import tomllib
from pathlib import Path

import pytest

from tailrace.config import RunConfig
from tailrace.schedules import SCHEDULES

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MAX_PICTURE_BYTES = 60_000


def page_name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_relative_links_lead_to_files(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())
    assert [target for target in targets if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_whole_configs_on_a_page_are_valid(page: Path) -> None:
    for text in re.findall(r"^```toml.*?\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE):
        config = tomllib.loads(text)
        if "run" in config:
            RunConfig.model_validate(config)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_has_a_page_that_names_its_parameters(name: str) -> None:
    (page,) = [
        text
        for text in (path.read_text() for path in (ROOT / "docs" / "schedules").glob("*.md"))
        if re.search(rf"^# .*\b{name}\b", text, flags=re.MULTILINE)
    ]
    _, *parameters = inspect.signature(SCHEDULES[name]).parameters
    assert [parameter for parameter in parameters if f"`{parameter}`" not in page] == []


@pytest.mark.parametrize("page", ["README.md", "docs/choosing-a-schedule.md"])
def test_the_tables_name_every_schedule(page: str) -> None:
    text = (ROOT / page).read_text()
    assert [name for name in SCHEDULES if f"`{name}`" not in text] == []


@pytest.mark.parametrize("name", [path.name for path in (ROOT / "docs" / "schedules").glob("*.md")])
def test_the_pictures_of_a_schedule_are_small(name: str) -> None:
    page = ROOT / "docs" / "schedules" / name
    pictures = [page.parent / target for target in re.findall(r"!\[.*?\]\((.+?)\)", page.read_text())]
    assert pictures
    assert [picture for picture in pictures if picture.stat().st_size >= MAX_PICTURE_BYTES] == []


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200
