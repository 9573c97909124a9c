"""How the tests themselves are run."""

from tests.conftest import LONG, TESTS


def test_files_that_begin_first_exist() -> None:
    assert [name for name in LONG if not (TESTS / name).exists()] == []


def test_packages_that_only_slow_tests_use_are_not_imported_to_collect_them(
    imported: frozenset[str],
) -> None:
    """Every process of the tests collects all of them."""
    assert {"playwright", "reasoning_gym", "schemathesis"} & imported == set()
