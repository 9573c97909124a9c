"""A simulated trainer whose checkpoints take time to be written."""

import asyncio
import shutil
from collections.abc import Awaitable
from pathlib import Path

from tailrace.errors import CheckpointError
from tailrace.sim.settings import SimTrainerSettings
from tailrace.sim.trainer import SimTrainer


class SlowDisk(SimTrainer):
    """A checkpoint has the state at the call of `save`. Its folder appears `write_s` seconds later, or never.

    Args:
        fails: name of the checkpoint that cannot be written.
    """

    def __init__(self, cost: SimTrainerSettings, write_s: float, fails: str = "") -> None:
        super().__init__(cost)
        self._write_s, self._fails = write_s, fails
        self.num_writing = self.most_writing = 0

    async def save(self, folder: Path) -> Awaitable[None]:
        partial = folder.with_name(folder.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        await super().save(partial)
        self.num_writing += 1
        self.most_writing = max(self.most_writing, self.num_writing)

        async def write() -> None:
            await asyncio.sleep(self._write_s)
            self.num_writing -= 1
            if folder.name == self._fails:
                raise CheckpointError(f"{folder} cannot be written (no space left)")
            shutil.rmtree(folder, ignore_errors=True)
            partial.rename(folder)

        return asyncio.ensure_future(write())
