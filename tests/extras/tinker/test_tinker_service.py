"""The service behind Tinker's API: what is executed once, what ends with its client, what a failure leaves.
Its trainer computes nothing, in virtual time."""

import asyncio
import os
import shutil
from collections.abc import Awaitable, Callable
from math import nan
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tinker.types")  # a folder of the tests is named tinker, too

from tailrace import clock
from tailrace.contracts.weights import Weights
from tailrace.drivers.trainer.batch import AdamStep
from tailrace.errors import CheckpointError
from tailrace.extras.serve.generation import ServedModel
from tailrace.extras.tinker.service import (
    KEPT_S,
    MAX_OPEN,
    MAX_SESSIONS,
    SILENT_S,
    Busy,
    Failed,
    TinkerService,
    Unknown,
)
from tailrace.extras.tinker.wire import NotOffered

pytestmark = [pytest.mark.tinker]
ADAM = AdamStep(1e-3, (0.9, 0.95), 1e-12, 0.0, 0.0)
RESTORE_S = 20.0


class Trainer:
    """Executes calls in the order in which they are made, as a trainer does. `weights`: a word for them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.weights, self.num_steps, self.norm = folder, "initial", 0, 1.0
        self.turn = asyncio.Lock()
        self.why: Exception | None = None

    async def _called(self, seconds: float = 0.0) -> None:
        async with self.turn:
            await asyncio.sleep(seconds)

    async def save(self, folder: Path) -> Awaitable[None]:
        await self._called()
        folder.mkdir(parents=True, exist_ok=True)
        return asyncio.sleep(0)

    async def restore(self, folder: Path, *, optimizer: bool = True) -> None:
        await self._called(RESTORE_S)
        self.weights = "half of them"
        if self.why:
            raise self.why
        self.weights = folder.name

    async def publish(self, version: int) -> Weights:
        await self._called()
        if self.why:
            raise self.why
        published = self.folder / f"version-{version}"
        published.mkdir()
        for name in ("a", "b"):
            (published / name).write_text(self.weights)
        return Weights(version, str(published))

    async def step_sum(self, adam: AdamStep) -> float:
        await self._called()
        self.num_steps, self.weights = self.num_steps + 1, f"step {self.num_steps + 1}"
        return self.norm

    async def run_tokens(self, *args: Any, **given: Any) -> list[Any]:
        await self._called()
        return [type("Output", (), {"logprobs": self.weights})]


def played(tmp_path: Path, play: Callable[[TinkerService, Trainer, str, str], Awaitable[None]]) -> None:
    """Run `play` with a service whose first session has the trainer: its id, and that of its model."""
    (tmp_path / "state").mkdir()

    async def run() -> None:
        trainer = Trainer(tmp_path)
        policy = ServedModel("m", tmp_path, 10, 10)
        service = TinkerService(trainer, [], policy, tmp_path / "state")  # type: ignore[arg-type]
        await service.open()
        session = service.create_session()
        model = f"{session}:train:0"
        await service.create_model(model, session, "m", None)
        await play(service, trainer, session, model)

    clock.run(run(), virtual=True)


def stepping(service: TinkerService, model: str, seq_id: int | None, body: bytes = b"step") -> str:
    return service.begin(model, seq_id, body, lambda: service.optim_step(model, ADAM))


def test_a_request_is_executed_once_as_long_as_its_client_lives(tmp_path: Path) -> None:
    async def play(service: TinkerService, trainer: Trainer, session: str, model: str) -> None:
        first = stepping(service, model, 1)
        for seq_id in range(2, 400):
            await service.result(stepping(service, model, seq_id), 1)
        assert stepping(service, model, 1) == first
        assert (await service.result(first, 1))["metrics"]["grad_norm"] == 1.0
        for _ in range(100):  # its client goes on, and its result is dropped
            await asyncio.sleep(KEPT_S / 50)
            service.session(session)
        with pytest.raises(Unknown):
            await service.result(first, 1)
        with pytest.raises(NotOffered, match="seq_id = 1"):
            stepping(service, model, 1)
        assert trainer.num_steps == 399

    played(tmp_path, play)


def test_a_number_used_twice_is_refused_and_not_answered_with_another_result(tmp_path: Path) -> None:
    async def play(service: TinkerService, trainer: Trainer, session: str, model: str) -> None:
        await service.result(stepping(service, model, 5), 1)
        for seq_id, body in ((5, b"another"), (4, b"step"), (None, b"step")):
            with pytest.raises(NotOffered, match=f"seq_id = {seq_id}"):
                stepping(service, model, seq_id, body)
        assert trainer.num_steps == 1

    played(tmp_path, play)


def test_only_requests_for_samples_can_be_cancelled(tmp_path: Path) -> None:
    async def play(service: TinkerService, trainer: Trainer, session: str, model: str) -> None:
        step = stepping(service, model, 1)
        with pytest.raises(NotOffered, match="only requests for samples"):
            service.cancel(step)
        samples = service.begin(f"{session}:sample:0", 1, b"", lambda: asyncio.sleep(1e6), 4)
        service.cancel(samples)
        assert await service.result(samples, 1) == Failed("it was cancelled", True)
        assert trainer.num_steps == 1

    played(tmp_path, play)


@pytest.mark.parametrize("how", ["finish", "silence"])
def test_work_for_samples_ends_with_its_client(tmp_path: Path, how: str) -> None:
    async def play(service: TinkerService, trainer: Trainer, session: str, model: str) -> None:
        ended: list[bool] = []

        async def work() -> None:
            try:
                await asyncio.sleep(1e6)
            finally:
                ended.append(True)

        service.begin(f"{session}:sample:0", 1, b"", work, 1024)
        await asyncio.sleep(SILENT_S / 2)
        assert ended == []
        if how == "finish":
            service.finish(session)
        await asyncio.sleep(SILENT_S if how == "silence" else 0.1)
        assert ended == [True]
        other = service.create_session()
        await service.create_model(f"{other}:train:0", other, "m", None)
        if how == "finish":
            with pytest.raises(Unknown, match="no such session"):
                service.sampler(f"{session}:sample:0")

    played(tmp_path, play)


def test_a_session_has_a_limit_of_open_requests(tmp_path: Path) -> None:
    async def play(service: TinkerService, trainer: Trainer, session: str, model: str) -> None:
        service.begin(f"{session}:sample:0", 0, b"", lambda: asyncio.sleep(1e6), MAX_OPEN)
        with pytest.raises(Busy):
            service.begin(f"{session}:sample:0", 1, b"", lambda: asyncio.sleep(1e6), 1)

    played(tmp_path, play)


def test_of_too_many_sessions_one_without_a_client_ends_then_the_longest_silent_without_a_request(
    tmp_path: Path,
) -> None:
    """The first one has the trainer, the second one a request under way, the others are never used."""

    async def play(service: TinkerService, trainer: Trainer, session: str, model: str) -> None:
        await service.result(stepping(service, model, 1), 60)
        busy = service.create_session()
        service.begin(f"{busy}:sample:0", 0, b"", lambda: asyncio.sleep(1e6), 1)
        unused = [service.create_session() for _ in range(MAX_SESSIONS)]
        await asyncio.sleep(1)
        newest = service.create_session()
        assert [each in service._sessions for each in (session, busy, newest)] == [True] * 3
        assert sum(each in service._sessions for each in unused) == MAX_SESSIONS - 3
        others = [each for each in service._sessions if each not in (session, busy)]
        for each in others:
            service.begin(f"{each}:sample:0", 0, b"", lambda: asyncio.sleep(1e6), 1)
        service.create_session()
        with pytest.raises(Unknown, match="it does not have the trainer any more"):
            service.check_model(model)
        service.begin(f"{list(service._sessions)[-1]}:sample:0", 0, b"", lambda: asyncio.sleep(1e6), 1)
        with pytest.raises(Busy, match="have requests under way; close one"):
            service.create_session()

    played(tmp_path, play)


def test_prompt_logprobs_come_from_no_other_weights_while_the_trainer_restores(tmp_path: Path) -> None:
    """The weights are those of a checkpoint, until another client begins to restore."""

    async def play(service: TinkerService, trainer: Trainer, session: str, model: str) -> None:
        await service.optim_step(model, ADAM)
        path = (await service.save_for_sampler(model, "x", sampler_id="", in_flight=False))["path"]
        service._served = path
        await service.create_sampler(id := f"{session}:sample:0", None, path)
        assert await service._scores(service.sampler(id), [1, 2]) == "step 1"  # type: ignore[comparison-overlap]
        restoring = asyncio.ensure_future(service.load_state(model, _saved(service, model), optimizer=True))
        for _ in range(3):
            await asyncio.sleep(RESTORE_S / 4)
            asked = asyncio.ensure_future(service._scores(service.sampler(id), [1, 2]))
        await restoring
        with pytest.raises(NotOffered, match="its weights are not those of this sampling client"):
            await asked

    played(tmp_path, play)


def _saved(service: TinkerService, model: str) -> str:
    (service.folder / model / "weights" / "saved").mkdir(parents=True)
    return f"tinker://{model}/weights/saved"


def test_a_restore_that_fails_leaves_the_trainer_to_nobody(tmp_path: Path) -> None:
    async def play(service: TinkerService, trainer: Trainer, session: str, model: str) -> None:
        trainer.why = CheckpointError("damaged")
        with pytest.raises(CheckpointError):
            path, other = _saved(service, model), f"{session}:train:1"
            await service.load_state(other, path, optimizer=True, session_id=session)
        for id in (model, other):
            with pytest.raises(Unknown):
                await service.optim_step(id, ADAM)
        trainer.why = None
        await service.create_model(f"{session}:train:2", session, "m", None)
        await service.optim_step(f"{session}:train:2", ADAM)

    played(tmp_path, play)


def test_an_error_of_a_library_is_a_final_answer(tmp_path: Path) -> None:
    async def play(service: TinkerService, trainer: Trainer, session: str, model: str) -> None:
        trainer.why = OSError(28, "No space left on device")
        work = lambda: service.save_for_sampler(model, "x", sampler_id="", in_flight=False)  # noqa: E731
        saving = service.begin(model, 1, b"save", work)
        failed = Failed("OSError: [Errno 28] No space left on device", False)
        assert [await service.result(saving, 1) for _ in range(300)] == [failed] * 300

    played(tmp_path, play)


def test_of_two_checkpoints_of_one_name_the_second_is_refused(tmp_path: Path) -> None:
    async def play(service: TinkerService, trainer: Trainer, session: str, model: str) -> None:
        saving = [service.save_for_sampler(model, "x", sampler_id="", in_flight=False) for _ in range(2)]
        first, second = await asyncio.gather(*saving, return_exceptions=True)
        assert first == {"path": f"tinker://{model}/sampler_weights/x"}
        assert isinstance(second, NotOffered) and "there is such a checkpoint" in str(second)

    played(tmp_path, play)


def test_a_part_of_a_checkpoint_is_never_taken_for_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play(service: TinkerService, trainer: Trainer, session: str, model: str) -> None:
        links: list[object] = []

        def link(*args: Any, **given: Any) -> None:
            links.append(args)
            if len(links) > 1:
                raise KeyboardInterrupt  # as a kill
            shutil.copy2(*args)

        monkeypatch.setattr(os, "link", link)
        with pytest.raises(KeyboardInterrupt):
            await service.save_for_sampler(model, "x", sampler_id="", in_flight=False)
        monkeypatch.undo()
        for name in ("x", "x.partial"):
            with pytest.raises(NotOffered, match="no such checkpoint"):
                await service.create_sampler(
                    f"{session}:sample:1", None, f"tinker://{model}/sampler_weights/{name}"
                )
        await service.save_for_sampler(model, "x", sampler_id="", in_flight=False)
        assert sorted(os.listdir(service.folder / model / "sampler_weights")) == ["x"]

    played(tmp_path, play)


def test_a_step_whose_gradient_is_not_finite_is_told_to_the_client(tmp_path: Path) -> None:
    from tinker import types

    async def play(service: TinkerService, trainer: Trainer, session: str, model: str) -> None:
        trainer.norm = nan
        found = types.OptimStepResponse.model_validate(await service.optim_step(model, ADAM))
        assert found.metrics == {"learning_rate": 1e-3, "skipped": 1.0}

    played(tmp_path, play)


def test_a_model_that_does_not_have_the_trainer_makes_no_folder(tmp_path: Path) -> None:
    async def play(service: TinkerService, trainer: Trainer, session: str, model: str) -> None:
        before = sorted(tmp_path.rglob("*"))
        for id in ("../../evil", f"{tmp_path}/evil", "a\0b", f"{session}:train:0/../../evil"):
            for saving in (
                service.save_state(id, "x", overwrite=True),
                service.save_for_sampler(id, "x", sampler_id="", in_flight=False),
            ):
                with pytest.raises(Unknown, match="it does not have the trainer"):
                    await saving
        assert sorted(tmp_path.rglob("*")) == before

    played(tmp_path, play)
