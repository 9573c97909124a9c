"""The shared tools of scratchpad, whose state belongs to the rollout. verifiers starts this file."""

import asyncio
import os
from pathlib import Path

import verifiers.v1 as vf


class Slot(vf.State):
    slot: str = ""


class PadConfig(vf.SharedToolsetConfig):
    pass


def note(call: str) -> None:
    with Path(os.environ["SCRATCHPAD_LOG"]).open("a") as log:
        log.write(call + "\n")


class Pad(vf.Toolset[PadConfig, Slot]):
    TOOL_PREFIX = "pad"

    @vf.tool
    async def write(self, word: str) -> str:
        """Write a word on the pad."""
        note(f"write {word}")
        self.state.slot = word
        await asyncio.sleep(0)
        return "written"

    @vf.tool
    async def read(self) -> str:
        """Read the pad."""
        note("read")
        return self.state.slot


if __name__ == "__main__":
    Pad.run()
