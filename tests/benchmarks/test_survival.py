"""The page of staleness prints what benchmarks/survival.py found."""

import json

import pytest

from common import EXAMPLES


def mean(name: str, steps: list[dict[str, float]]) -> float:
    """The mean over tokens."""
    return sum(row[name] * row["tokens"] for row in steps) / sum(row["tokens"] for row in steps)


@pytest.mark.parametrize(("model", "name"), [("0.4M", "quickstart"), ("135M", "135M")])
def test_the_page_prints_the_share_of_tokens_that_a_step_changes_and_leaves(model: str, name: str) -> None:
    root = EXAMPLES.parent
    page = (root / "docs/why/staleness.md").read_text(encoding="utf-8")
    for found in json.loads((root / f"benchmarks/results/survival-{name}.json").read_text())["rates"]:
        steps = found["steps"]
        changed, kept = mean("changed", steps[1:]), mean("kept", steps)
        cells = f"{steps[0]['changed']:.1%} | {changed:.1%} | {kept:.0%}"
        assert f"| {model} | {found['rate']:.0e} | {cells} |".replace("e-0", "e-") in page
