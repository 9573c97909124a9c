"""A product is removed by its folder, and by its lines of kinds and of commands; everything else works on."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from tests.test_imports import EXTRAS

import tailrace
from helpers.small_run import write_small_run

pytestmark = pytest.mark.slow

PACKAGE = Path(tailrace.__file__).parent
WORKS = """
import importlib, sys
from pathlib import Path

import tailrace
from tailrace.cli import main

package, config = Path(tailrace.__file__).parent, sys.argv[1]
for path in sorted(package.rglob("*.py")):
    name = ".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__")
    if path.name in ("__main__.py", "preload.py"):  # they run
        continue
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as why:  # of a library that is not installed
        if why.name.partition(".")[0] == "tailrace":
            raise
try:
    main(["--help"])
except SystemExit as why:
    assert not why.code
for words in (["simulate", config], ["train", config, "--output-dir", sys.argv[2]]):
    assert main([*words, "--run.rounds", "2", "--run.eval_every", "0"]) == 0, words
print(package)
"""


def removed_with(product: str) -> set[str]:
    """The product, and those that import it, directly or not."""
    found = {product}
    for other in TopologicalSorter(EXTRAS).static_order():
        if EXTRAS[other] & found:
            found.add(other)
    return found


def without(folder: Path, products: set[str]) -> Mapping[str, str]:
    """The environment of a process that has the package without some products."""
    copy = folder / "src" / "tailrace"
    shutil.copytree(PACKAGE, copy)
    for name in ("kinds.py", "cli.py"):
        text = (copy / name).read_text()
        for product in products:
            place = rf'"(?:tailrace\.)?{re.escape(product)}\.[^"]*"'
            text = re.sub(
                rf'^    "[\w.-]+": (?:{place}|\(\s*{place},\s*"[^"]*",?\s*\)),\n', "", text, flags=re.M
            )
        (copy / name).write_text(text)
    for product in products:
        shutil.rmtree(copy.joinpath(*product.split(".")))
    return os.environ | {"PYTHONPATH": str(folder / "src"), "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize("product", EXTRAS)
def test_a_product_is_removed_by_its_folder_and_its_lines(product: str, tmp_path: Path) -> None:
    environment, config = without(tmp_path, removed_with(product)), write_small_run(tmp_path)
    command = [sys.executable, "-c", WORKS, str(config), str(tmp_path / "run")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.splitlines()[-1] == str(tmp_path / "src" / "tailrace")
