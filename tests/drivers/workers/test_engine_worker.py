"""What the engine's loop reports, and when."""

import threading
from pathlib import Path

import torch
from safetensors.torch import save_file

from helpers.tiny_models import save_tiny_model, tiny_model
from helpers.wire import connected
from tailrace.contracts.engine import GenerationRequest
from tailrace.contracts.sampling import SamplingSettings
from tailrace.contracts.weights import Weights, new_link
from tailrace.drivers.engine.native.engine import NativeEngine
from tailrace.drivers.engine.settings import NativeEngineSettings
from tailrace.drivers.workers.engine import Alive, EngineJob, EngineWorker, Report
from tailrace.errors import TransferFailed, WeightsRefused

LIMIT = 40


def job_of(model: Path, report_every_s: float) -> EngineJob:
    sampling = SamplingSettings(max_completion_tokens=LIMIT)
    return EngineJob(
        model=model, engine=NativeEngineSettings(), sampling=sampling, report_every_s=report_every_s
    )


def reports_of(folder: Path, requests: list[GenerationRequest], report_every_s: float) -> list[Report]:
    """All that the loop reports until every request has ended."""
    torch.set_num_threads(1)
    save_tiny_model(folder / "model")
    sampling = SamplingSettings(max_completion_tokens=LIMIT)
    engine = NativeEngine(folder / "model", NativeEngineSettings(), sampling)
    with connected(EngineWorker) as (controller, connection):
        for request in requests:
            controller.call(EngineWorker.submit, request, answered=False)
        worker = EngineWorker(engine, connection, job_of(folder / "model", report_every_s))
        thread = threading.Thread(target=worker.serve, args=(connection,))
        thread.start()
        reports: list[Report] = []
        num_ended = 0
        while num_ended < len(requests):
            new = [message for message in controller.heard() if isinstance(message, Report)]
            num_ended += sum(output.finish_reason is not None for report in new for output in report.outputs)
            reports += new
        controller.finish()
        thread.join()
    return reports


def staggered(num: int) -> list[GenerationRequest]:
    """Requests of which each has one token more left than the one before."""
    return [GenerationRequest(str(n), [5, 6, 7], [9] * (LIMIT - 1 - n), n) for n in range(num)]


def test_a_request_is_reported_in_the_step_in_which_it_ends(tmp_path: Path) -> None:
    reports = reports_of(tmp_path, staggered(8), report_every_s=1e9)
    assert [[output.id for output in report.outputs] for report in reports] == [[str(n)] for n in range(8)]
    assert [len(report.outputs[0].ids) for report in reports] == list(range(1, 9))
    assert [report.usage.num_running for report in reports] == list(range(7, -1, -1))


def test_unfinished_requests_are_reported_in_intervals_and_every_token_once(tmp_path: Path) -> None:
    reports = reports_of(tmp_path, staggered(3), report_every_s=0.0)
    ids = [[output.id for output in report.outputs] for report in reports]
    assert ids == [["0", "1", "2"], ["1", "2"], ["2"]]
    assert all(len(output.ids) == 1 for report in reports for output in report.outputs)


def test_the_engine_s_own_count_is_what_was_reported(tmp_path: Path) -> None:
    reports = reports_of(tmp_path, staggered(8), report_every_s=1e9)
    num_reported = sum(len(output.ids) for report in reports for output in report.outputs)
    assert reports[-1].usage.num_counted == num_reported == sum(range(1, 9))


def test_a_file_that_is_read_while_an_engine_wakes_is_a_sign_of_life(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    tiny_model().save_pretrained(tmp_path, max_shard_size="8KB")
    engine = NativeEngine(tmp_path, NativeEngineSettings(), SamplingSettings(max_completion_tokens=LIMIT))
    num_files = len(list(tmp_path.glob("*.safetensors")))
    with connected(EngineWorker) as (controller, connection):
        thread = threading.Thread(
            target=EngineWorker(engine, connection, job_of(tmp_path, 0.0)).serve, args=(connection,)
        )
        thread.start()
        for method in (EngineWorker.sleep, EngineWorker.wake):
            controller.call(method)
        answers = controller.until(2)
        controller.finish()
        thread.join()
    assert num_files > 1
    assert answers == [None, *[Alive()] * num_files, None]


def test_between_two_steps_the_loop_answers_pings_and_refuses_weights_that_it_cannot_read(
    tmp_path: Path,
) -> None:
    torch.set_num_threads(1)
    save_tiny_model(tmp_path / "model")
    sampling = SamplingSettings(max_completion_tokens=LIMIT)
    engine = NativeEngine(tmp_path / "model", NativeEngineSettings(), sampling)
    (tmp_path / "torn").write_bytes(b"12345678{")
    save_file({"lm_head.weight": torch.zeros(1)}, tmp_path / "wrong")
    with connected(EngineWorker) as (controller, connection):
        thread = threading.Thread(
            target=EngineWorker(engine, connection, job_of(tmp_path, 0.0)).serve, args=(connection,)
        )
        thread.start()
        link = new_link("engine-0")
        controller.call(EngineWorker.ping, answered=False)
        for name in ("nowhere", "torn", "wrong"):
            controller.call(EngineWorker.load, Weights(1, str(tmp_path / name)), link, "keep")
        controller.call(EngineWorker.ping)
        answers = controller.until(4)
        controller.finish()
        thread.join()
    kinds = [type(answer) for answer in answers]
    assert kinds == [Alive, TransferFailed, TransferFailed, Alive, WeightsRefused, Alive, type(None)]
    errors = [
        str(answer).lower() for answer in answers if isinstance(answer, TransferFailed | WeightsRefused)
    ]
    for error, words in zip(errors, ("nowhere", "header", "weights are missing"), strict=True):
        assert words in error


def test_a_paused_engine_reports_the_end_of_a_request_before_or_with_its_abort(tmp_path: Path) -> None:
    """Also where the last token is read late, and where a request comes without room for a token."""
    torch.set_num_threads(1)
    save_tiny_model(tmp_path / "model")
    sampling = SamplingSettings(max_completion_tokens=LIMIT)
    engine = NativeEngine(tmp_path / "model", NativeEngineSettings(), sampling)
    engine._reads_late = True
    reports: list[object] = []
    with connected(EngineWorker) as (controller, connection):
        worker = EngineWorker(engine, connection, job_of(tmp_path, 1e9))
        worker.submit(GenerationRequest("late", [5, 6, 7], [9] * (LIMIT - 1), 0))
        assert engine.step() == []
        worker.pause()
        worker.submit(GenerationRequest("full", [5, 6, 7], [9] * LIMIT, 0))
        worker.abort("full")
        worker.resume()
        while len(reports) < 2:
            reports += controller.heard()
    found = [
        ([(output.id, len(output.ids), output.finish_reason) for output in report.outputs], report.aborted)
        for report in reports
        if isinstance(report, Report)
    ]
    assert found == [([("late", 1, "length")], []), ([("full", 0, "length")], ["full"])]
