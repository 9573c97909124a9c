"""Version, changelog and tags have one form; the files of the quickstart are those of the examples."""

import tomllib
from importlib import resources
from pathlib import Path

import pytest

import tailrace
from release_check import ROOT, disagreements, tags_of_commit, version_of_package

CHANGELOG = "# Changelog\n\n## unreleased\n\n### A\n\n## 0.2.0 - 2026-11-27\n\n## 0.1.0 - 2026-01-31\n"


def test_this_commit_agrees_with_its_changelog_and_its_tags() -> None:
    assert version_of_package() == tailrace.__version__
    assert disagreements((ROOT / "CHANGELOG.md").read_text(), tailrace.__version__, tags_of_commit()) == []


@pytest.mark.parametrize(
    ("changelog", "version", "tags", "problem"),
    [
        (CHANGELOG, "0.3.0", [], "the newest version is 0.2.0, the package's is 0.3.0"),
        (
            CHANGELOG.replace("2026-11-27", "soon"),
            "0.2.0",
            [],
            '"## 0.2.0 - soon" is not "## VERSION - DATE"',
        ),
        ("# Changelog\n\n## unreleased\n", "0.2.0", [], "the newest version is nothing"),
        (CHANGELOG, "0.2.0", ["v0.2.0"], 'a release has no section "## unreleased"'),
        (CHANGELOG.replace("## unreleased", ""), "0.2.0", ["0.2.0"], "the tag 0.2.0 is not v0.2.0"),
    ],
)
def test_what_does_not_agree_is_named(changelog: str, version: str, tags: list[str], problem: str) -> None:
    (found,) = disagreements(changelog, version, tags)
    assert problem in found


def test_a_release_agrees() -> None:
    assert disagreements(CHANGELOG.replace("## unreleased", ""), "0.2.0", ["v0.2.0", "latest"]) == []
    assert disagreements(CHANGELOG, "0.2.0", ["latest"]) == []


def test_the_files_of_the_quickstart_are_package_data_and_no_copies() -> None:
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    package, example = Path(str(resources.files("tailrace"))), ROOT / "examples" / "quickstart"
    for name in ("quickstart.toml", "model"):
        assert (package / "extras" / "quickstart" / name).resolve() == example / name
    packed = {
        path for pattern in tool["setuptools"]["package-data"]["tailrace"] for path in package.glob(pattern)
    }
    files = {*(package / "extras" / "quickstart" / "model").iterdir()}
    assert files and {package / "extras" / "quickstart" / "quickstart.toml", *files} <= packed
