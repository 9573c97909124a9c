"""Looks up the names of extras/plan/peers.toml and the keys of advise.toml in the sources of the frameworks.

    make check-names              the wheels of requirements/names.txt
    make check-names NEWEST=1     the newest wheels

The wheels are downloaded without their dependencies, and read, not installed. A name is found if it is a
string of the source. Frameworks compose many names, such as f"timing_s/{key}". Such a name is found if each
of its parts between "/", ":" and "." is a word of a string or of a YAML file, a keyword, or the name of a
class or a function. A framework that renames a figure is noticed unless the old words stay in its source.

The exit code is 1 if a name is missing.
"""

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from zipfile import ZipFile

ROOT = Path(__file__).parents[1]
PLAN = ROOT / "src" / "tailrace" / "extras" / "plan"
PACKAGES = {
    "TRL": "trl",
    "TRL async": "trl",
    "verl": "verl",
    "SkyRL": "skyrl",
    "tinker-cookbook": "tinker_cookbook",
    "OpenRLHF": "openrlhf",
    "AReaL": "areal",
}
"""The package of a section. Of the others there is none to download."""
KEYS = ("source", "assumed", "dump", "prefix")
"""Keys of a section that have no names."""


def names_of(section: dict[str, Any]) -> Iterator[str]:
    """Yield the names of a section of peers.toml. Of a name with * the part before it counts."""
    for key, value in section.items():
        for term in [value] if isinstance(value, str) else value:
            if key not in KEYS:
                yield from (
                    each.rstrip("?").partition("*")[0].rstrip("_/") for each in re.split(" [-+/] ", term)
                )


def words_of(source: str) -> Iterator[str]:
    """Yield the strings, keywords, classes and functions of a Python source."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Constant(value=str(text)):
                yield text
            case ast.keyword(arg=str(name)) | ast.ClassDef(name=name) | ast.FunctionDef(name=name):
                yield name
            case ast.AnnAssign(target=ast.Name(id=name)) | ast.AsyncFunctionDef(name=name):
                yield name


def missing(names: set[str], corpus: str, strings: set[str]) -> tuple[list[str], int]:
    """Return the names that are not found, and how many are whole strings of the source."""

    def is_word(part: str) -> bool:
        return bool(re.search(rf"(?<!\w){re.escape(part)}(?!\w)", corpus))

    composed = sorted(names - strings)
    left = [name for name in composed if not all(map(is_word, re.split(r"[/:.] ?", name)))]
    return left, len(names & strings)


def downloaded(folder: Path, newest: bool) -> None:
    lines = (ROOT / "requirements" / "names.txt").read_text(encoding="utf-8").splitlines()
    pinned = [line for line in lines if line[:1].isalpha()]
    wanted = [each.partition("==")[0] if newest else each for each in pinned]
    options = [
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
        "--python-version",
        "3.12",
        "--dest",
        str(folder),
    ]
    subprocess.run([sys.executable, "-m", "pip", "download", *options, *wanted], check=True)


def main() -> int:
    sections = tomllib.loads((PLAN / "peers.toml").read_text(encoding="utf-8"))
    advice = PLAN / "advise.toml"
    modes = tomllib.loads(advice.read_text(encoding="utf-8")) if advice.exists() else {}
    failed = False
    with TemporaryDirectory() as scratch:
        downloaded(Path(scratch), bool(os.environ.get("NEWEST")))
        for name, section in sections.items():
            wheel = next(Path(scratch).glob(f"{PACKAGES.get(name, 'none')}-*.whl"), None)
            if wheel is None:
                print(f"{name}: no package to look in; its names are from {section['source']}")
                continue
            strings, texts = set[str](), list[str]()
            with ZipFile(wheel) as files:
                for each in files.namelist():
                    if each.endswith(".py"):
                        strings |= {*words_of(files.read(each).decode("utf-8", "replace"))}
                    elif each.endswith((".yaml", ".yml")):
                        texts.append(files.read(each).decode("utf-8", "replace"))
            keys = {key for mode in modes.get(name, []) for key in mode.get("keys", {})}
            names = {*names_of(section)} | {key.lstrip("-").replace("-", "_") for key in keys}
            left, whole = missing(names, "\n".join([*strings, *texts]), strings)
            print(f"{name}: {len(names)} names in {wheel.name}, {whole} of them whole, {len(left)} missing")
            for each in left:
                print(f"  missing: {each}")
            failed = failed or bool(left)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
