"""Which tests are slow, which files begin first, and how many examples hypothesis draws.

Its presence lets the tests import the helpers that stand beside it.
"""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from helpers.small_run import write_small_run

TESTS = Path(__file__).parent
SLOW = ("benchmarks", "reproductions")
"""Folders whose tests `make test` leaves to `make test-slow`: scripts beside the package."""
LONG = (
    "drivers/commands/test_train.py",
    "extras/http/test_http_generations.py",
    "drivers/trainer/test_fsdp.py",
    "controller/test_run.py",
    "extras/serve/test_self_test.py",
    "drivers/commands/test_failing_runs.py",
    "controller/test_interruption.py",
    "drivers/commands/test_signals.py",
    "ledger/test_books_close.py",
)
"""Files that begin first, the longest at the front: pytest-xdist gives whole files to its processes, and one
that began last would leave the other core idle."""

with suppress(ModuleNotFoundError):  # `make install-check` has pytest alone
    from hypothesis import settings

    settings.register_profile("few", max_examples=60)
    settings.register_profile("many", max_examples=300)
    settings.load_profile("few")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.relative_to(TESTS).parts[0] in SLOW:
            item.add_marker(pytest.mark.slow)
    items.sort(key=place)


def place(item: pytest.Item, long: Sequence[str] = LONG) -> int:
    name = item.path.relative_to(TESTS).as_posix()
    return long.index(name) if name in long else len(long)


@pytest.fixture
def config_path(tmp_path: Path) -> Path:
    """The config of a run small enough for a test."""
    return write_small_run(tmp_path)
