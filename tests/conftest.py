"""Which tests are slow, which files begin first, what was imported to collect them, what garbage collection
skips, how many examples hypothesis draws, and the loop on which an async test runs.

Its presence lets the tests import the helpers that stand beside it.
"""

import asyncio
import gc
import inspect
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from helpers.processes import DEADLINE_S
from helpers.small_run import write_small_run
from tailrace import clock

TESTS = Path(__file__).parent
SLOW = (
    "benchmarks/",
    "reproductions/",
    "drivers/commands/test_failing_runs.py",
    "drivers/commands/test_pinned_live.py",
    "drivers/commands/test_restarts.py",
    "drivers/commands/test_signals.py",
    "drivers/commands/test_slow_rewards.py",
    "drivers/trainer/test_fsdp.py",
    "drivers/workers/test_resident_memory.py",
    "drivers/workers/test_trainer_group.py",
    "drivers/workers/test_transports.py",
    "extras/diagnose/test_diagnose.py",
    "extras/http/test_http_generations.py",
    "extras/plan/test_plan_from_a_run.py",
    "extras/plan/test_search.py",
    "extras/serve/test_served_contract.py",
)
"""Folders and files whose tests `make test` leaves to `make test-slow`: scripts beside the package, whole
runs with workers that fail, transfers, many ranks, the memory of processes, all candidates of the planner."""
LONG = (
    "ledger/test_books_close.py",
    "drivers/commands/test_train.py",
    "drivers/workers/test_transports.py",
    "drivers/workers/test_process.py",
    "controller/test_run.py",
    "drivers/engine/native/test_any_model.py",
    "controller/test_interruption.py",
    "extras/plan/test_search.py",
    "extras/serve/test_served_contract.py",
    "drivers/workers/test_trainer_group.py",
    "extras/hub/test_push.py",
    "extras/http/test_http_generations.py",
    "drivers/kinds/test_teacher.py",
    "drivers/workers/test_resident_memory.py",
    "drivers/commands/test_signals.py",
    "extras/plan/test_plan_from_a_run.py",
    "drivers/workers/test_engine.py",
    "drivers/trainer/test_fsdp.py",
    "drivers/trainer/test_algorithms.py",
    "drivers/commands/test_failing_runs.py",
    "extras/diagnose/test_diagnose.py",
    "rollout/test_members.py",
)
"""Files that begin first, the longest at the front: pytest-xdist gives whole files to its processes, and one
that began last would leave the other core idle."""

with suppress(ModuleNotFoundError):  # `make release-check` has pytest alone
    from hypothesis import settings

    settings.register_profile("few", max_examples=60)
    settings.load_profile("few")


IMPORTED = pytest.StashKey[frozenset[str]]()


def pytest_collection_finish(session: pytest.Session) -> None:
    session.config.stash[IMPORTED] = frozenset(sys.modules)
    gc.freeze()  # the modules and the tests live to the end: each full collection would visit them again


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    names = {path: path.relative_to(TESTS).as_posix() for path in {item.path for item in items}}
    for item in items:
        if names[item.path].startswith(SLOW):
            item.add_marker(pytest.mark.slow)
    places = {name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: places.get(names[item.path], len(LONG)))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> None:
    """Run an async test on a loop of its own: in virtual time if it has the mark, else live."""
    test = pyfuncitem.obj
    if not inspect.iscoroutinefunction(test):
        return
    virtual = pyfuncitem.get_closest_marker("virtual") is not None

    async def within_deadline(**given: object) -> None:
        async with asyncio.timeout(None if virtual else DEADLINE_S):
            await test(**given)

    pyfuncitem.obj = lambda **given: clock.run(within_deadline(**given), virtual=virtual)


@pytest.fixture
def config_path(tmp_path: Path) -> Path:
    """The config of a run small enough for a test."""
    return write_small_run(tmp_path)


@pytest.fixture
def imported(pytestconfig: pytest.Config) -> frozenset[str]:
    """The modules that the collection of the tests has imported."""
    return pytestconfig.stash[IMPORTED]
