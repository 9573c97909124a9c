"""The sums that Gemma 3 learns."""

import importlib.util
import json
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "gemma3"


def test_each_prompt_has_four_solved_sums_and_held_out_numbers_are_not_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = importlib.util.spec_from_file_location("gemma_sums", FOLDER / "make_sums.py")
    assert spec and spec.loader
    sums = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sums)
    monkeypatch.setattr(sums, "__file__", str(tmp_path / "make_sums.py"))
    sums.main()
    train, held_out = (
        [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "held_out")
    )
    assert (len(train), len(held_out)) == (610, 200)
    for row in (train[0], held_out[0]):
        *solved, asked = row["prompt"].removeprefix("<bos>").split("\n")
        for line in [*solved, f"{asked} {row['answer']}"]:
            sides = line.split(" = ")
            assert sum(map(int, sides[0].split(" + "))) == int(sides[1])
        assert len(solved) == 4
    assert {row["prompt"] for row in train}.isdisjoint(row["prompt"] for row in held_out)
