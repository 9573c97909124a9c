"""The half of a worker that a Ray actor holds, without Ray: a real process, its frames relayed."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from stand_in import Obey, StandInJob
from worker_cases import words_of

from tailrace.workers.messages import Done, Ready
from tailrace.workers.node import Heard, NodeActor

Execute = Callable[[Any], Any]
encode, decode = msgspec.msgpack.encode, msgspec.msgpack.Decoder(Ready | Done).decode


async def started(manner: str, run: Path) -> NodeActor:
    actor = NodeActor()
    await actor.start("worker-7", "stand_in", StandInJob.model_validate({"manner": manner}), run)
    return actor


async def heard(actor: NodeActor, num: int) -> list[Ready | Done]:
    """As many messages, whichever calls bring them."""
    messages: list[Ready | Done] = []
    while len(messages) < num:
        frames, last_words = await actor.hear()
        assert last_words is None
        messages += map(decode, frames)
    return messages


def test_frames_reach_the_worker_and_come_back_in_order(tmp_path: Path, execute: Execute) -> None:
    async def main() -> None:
        actor = await started("obey", tmp_path)
        await actor.tell([encode(Obey()), encode(Obey())])
        assert await heard(actor, 3) == [Ready(), Done(), Done()]
        await actor.close()
        assert words_of(tmp_path / "logs", "worker-7").count("was asked to obey") == 2

    execute(main())


def test_the_end_of_the_log_travels_with_the_death(tmp_path: Path, execute: Execute) -> None:
    async def main() -> None:
        actor = await started("raise", tmp_path)
        await actor.tell([encode(Obey())])
        said = Heard([], None)
        while said.last_words is None:
            said = await actor.hear()
        assert "ended: exit code 1" in said.last_words
        assert "ValueError: the model melted\n(on " in said.last_words
        await actor.tell([encode(Obey())])  # has no effect

    execute(main())


def test_a_node_without_the_folder_of_the_run_keeps_its_logs_in_the_temporary_folder(
    tmp_path: Path, execute: Execute, monkeypatch: Any
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    async def main() -> None:
        actor = await started("obey", tmp_path / "elsewhere" / "run-3")
        await actor.close()
        assert (tmp_path / "tailrace" / "run-3" / "logs" / "worker-7.log").exists()
        assert not (tmp_path / "elsewhere").exists()

    execute(main())


def test_a_node_names_the_folders_that_it_lacks() -> None:
    missing = asyncio.run(NodeActor().missing([Path("/"), Path("/nowhere")]))
    assert missing == [Path("/nowhere")]
