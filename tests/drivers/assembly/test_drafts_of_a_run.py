"""A run whose engine drafts tokens: figures, and responses of an earlier epoch."""

import json
from pathlib import Path

import pytest

from helpers.architectures import SHAPES, random_model
from helpers.small_run import train_here, write_small_run
from tailrace.drivers.engine.settings import NativeEngineSettings
from tailrace.drivers.kinds.native import check_served
from tailrace.errors import ConfigError
from tailrace.rollout.history import saved_responses


@pytest.mark.slow
def test_a_run_counts_its_drafts_and_keeps_responses_for_the_next_epoch(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = write_small_run(tmp_path)
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "{n} + 1 =\\n"}}\n' for n in range(4)))
    words = ("--engine.drafts", "auto", "--run.eval_every", "0", "--run.rounds", "3")
    assert train_here(config, *words) == 0, capfd.readouterr().err
    (metrics,) = tmp_path.rglob("metrics.jsonl")
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    checked, accepted = (
        [row[name] for row in rows if name in row] for name in ("drafts/checked", "drafts/accepted")
    )
    assert len(checked) == len(accepted) == 3 and sum(checked) > 0
    assert all(0 <= right <= num for right, num in zip(accepted, checked, strict=True))
    kept = saved_responses(max((tmp_path / "out" / "checkpoints").iterdir()))
    assert kept.keys() == {0, 1, 2} and all(kept.values())


def test_a_model_whose_cache_cannot_be_cut_back_is_refused_with_drafts(tmp_path: Path) -> None:
    random_model("lfm2", SHAPES["lfm2"]).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="checks no drafts with a model with model type 'lfm2'"):
        check_served(tmp_path, NativeEngineSettings(drafts="auto"), "engine.drafts")
