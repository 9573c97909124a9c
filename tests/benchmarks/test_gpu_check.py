"""The GPU check list: what it covers, and what it says on a machine without a GPU."""

import re

import pytest

from common import QUICKSTART
from gpu_check import Check, checks, main, run_all
from tailrace.config import load_config
from tailrace.contracts.trainer import TrainerSettings
from tailrace.drivers.assembly.schedule import resolve
from tailrace.schedules import SCHEDULES

CHECKS = checks()


def test_it_covers_every_schedule_on_both_engines() -> None:
    names = {check.name for check in CHECKS}
    assert {f"{schedule}, embedded engine" for schedule in SCHEDULES} <= names
    assert {f"{schedule}, vLLM" for schedule in SCHEDULES} - names == {"bubblespec, vLLM"}
    assert any("colocated" in name for name in names) and any("NCCL" in name for name in names)


def test_a_word_that_no_check_has_is_refused() -> None:
    with pytest.raises(SystemExit, match="no check has 'nothing' in its name"):
        main(only="nothing")


RUNS = [check for device in ("cuda", "cpu") for check in checks(device) if not check.measure]


@pytest.mark.parametrize("check", RUNS, ids=lambda check: check.name)
def test_each_run_is_valid_and_in_bfloat16(check: Check) -> None:
    config = load_config(QUICKSTART, check.overrides)
    resolve(config)
    assert (config.trainer.dtype, config.engine.dtype) == ("bfloat16", "bfloat16")


def test_the_list_says_what_each_check_would_have_caught(capsys: pytest.CaptureFixture[str]) -> None:
    main(list=True)
    lines = dict(re.split(r"  +", line) for line in capsys.readouterr().out.splitlines())
    assert len(lines) == len(CHECKS) and all(lines.values())
    woken = "an engine wakes after the trainer computed on the same GPU: cached memory"
    assert lines["colocated, real shape, embedded engine"] == woken


def test_what_needs_a_gpu_is_skipped_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    results = run_all([check for check in checks("cpu") if check.num_gpus], num_gpus=0, vllm=None)
    assert not results.passed and not results.failed
    assert {f"{schedule}, vLLM" for schedule in SCHEDULES} - {*results.skipped} == {"bubblespec, vLLM"}
    out = capsys.readouterr().out
    assert "skipped  serial, vLLM: needs 1 CUDA device, found 0" in out
    refused = "needs 2 CUDA devices, found 0: NCCL refuses two ranks on one GPU"
    assert f"skipped  weights by NCCL, embedded engine: {refused}" in out
    assert (
        "skipped  KV budget: needs 1 CUDA device, found 0: its memory is counted by CUDA's allocator" in out
    )
    assert f"0 passed, 0 failed, {len(results.skipped)} skipped" in out


def test_on_a_cpu_the_measurements_of_engine_trainer_and_publication_pass() -> None:
    chosen = [check for check in checks("cpu") if check.measure and not check.num_gpus]
    results = run_all(chosen, num_gpus=0, vllm=None)
    measured = ["decode kernels", "micro-batches", "weights from device to device", "publication"]
    assert results.passed == measured, results.failed


def test_micro_batches_that_are_not_full_fail_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrainerSettings, "least_tokens", lambda self: 1)
    (check,) = [check for check in checks("cpu") if check.name == "micro-batches"]
    results = run_all([check], num_gpus=0, vllm=None)
    assert results.failed["micro-batches"].endswith("where 8 hold the tokens")


def test_with_a_gpu_but_without_vllm_only_its_checks_are_skipped() -> None:
    skipped = {check.name: check.skipped(num_gpus=3, vllm=None) for check in CHECKS}
    assert {name for name, why in skipped.items() if why} == {n for n in skipped if "vLLM" in n}
    assert skipped["serial, vLLM"] == "needs vLLM: set $VLLM_PYTHON to the interpreter of its environment"
