"""How the tests themselves are run."""

from tests.conftest import EVERY, FEW, LONG, SLOW, TESTS


def test_what_is_slow_or_begins_first_exists() -> None:
    for name in (*LONG, *SLOW, *EVERY, *FEW):
        file, _, test = name.partition("::")
        assert (TESTS / file).exists(), name
        assert not test or f"def {test}" in (TESTS / file).read_text(encoding="utf-8"), name


def test_packages_that_only_slow_tests_use_are_not_imported_to_collect_them(
    imported: frozenset[str],
) -> None:
    """Every process of the tests collects all of them."""
    assert {"playwright", "reasoning_gym", "schemathesis"} & imported == set()
