"""Settings of an answer that are looked up in a framework's config, and the committed result."""

import json

from first_answer import keys_of, lacking
from peer_names import ROOT

CONFIG = {"trainer": {"v1": {"trainer_mode": "sync"}, "nnodes": 1}}


def test_the_settings_of_an_answer_are_dotted_keys_of_a_config() -> None:
    known = {*keys_of(CONFIG)}
    assert known == {"trainer", "trainer.v1", "trainer.v1.trainer_mode", "trainer.nnodes"}
    settings = ["trainer.v1.trainer_mode=colocate_async", "trainer.mode=x", "trainer.nnodes=2"]
    assert lacking({"orders": [{"settings": settings}]}, known) == ["trainer.mode"]


def test_the_committed_result_is_an_answer_without_torch_in_keys_that_verl_has() -> None:
    result = json.loads((ROOT / "benchmarks" / "results" / "first_answer.json").read_text())
    assert [*result["lacking_in"].values()] == [[]] and result["settings"] > 0
    assert not result["torch_installed"] and len(result["commands"]) == 3
    assert result["seconds"] == round(sum(step["seconds"] for step in result["commands"]), 1)
