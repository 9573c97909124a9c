"""The GPU check list: what it covers, and what it says on a machine without a GPU."""

import pytest

from gpu_check import EXAMPLE, checks, main, run_all
from tailrace.config import load_config
from tailrace.schedules import SCHEDULES
from tailrace.schedules.resolve import resolve

CHECKS = checks()


def test_it_covers_every_schedule_on_both_engines() -> None:
    names = {check.name for check in CHECKS}
    assert {
        f"{schedule}, {engine}" for schedule in SCHEDULES for engine in ("embedded engine", "vLLM")
    } <= names
    assert any("colocated" in name for name in names) and any("NCCL" in name for name in names)


def test_a_word_that_no_check_has_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["gpu_check.py", "--only", "nothing"])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert "no check has 'nothing' in its name" in capsys.readouterr().err


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_each_check_is_a_valid_run_in_bfloat16(check: object) -> None:
    config = load_config(EXAMPLE, check.overrides)  # type: ignore[attr-defined]
    resolve(config)
    assert (config.trainer.dtype, config.engine.dtype) == ("bfloat16", "bfloat16")
    assert config.trainer.device == "cuda"


def test_without_a_gpu_everything_is_skipped_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    results = run_all(CHECKS, num_gpus=0, vllm=None)
    assert not results.passed and not results.failed
    assert set(results.skipped) == {check.name for check in CHECKS}
    out = capsys.readouterr().out
    assert "skipped  serial, vLLM: needs 1 CUDA device, found 0" in out
    assert "skipped  trainer of two ranks, NCCL, embedded engine: needs 2 CUDA devices, found 0" in out
    assert f"0 passed, 0 failed, {len(CHECKS)} skipped" in out


def test_with_a_gpu_but_without_vllm_only_its_checks_are_skipped() -> None:
    skipped = {check.name: check.skipped(num_gpus=2, vllm=None) for check in CHECKS}
    assert {name for name, why in skipped.items() if why} == {n for n in skipped if "vLLM" in n}
    assert skipped["serial, vLLM"] == "needs vLLM: set $VLLM_PYTHON to the interpreter of its environment"
