"""Tools: one shared toolset whose state belongs to the rollout, and one for each task."""

import asyncio
from collections.abc import Iterator

import verifiers.v1 as vf

CALLED: list[str] = []
"""The tools that were called, in this process."""
WORDS = ("alpha", "bravo", "charlie", "delta")


class Slot(vf.State):
    slot: str = ""


class PadConfig(vf.SharedToolsetConfig):
    pass


class Pad(vf.Toolset[PadConfig, Slot]):
    TOOL_PREFIX = "pad"

    @vf.tool
    async def write(self, word: str) -> str:
        """Write a word on the pad."""
        CALLED.append(f"write {word}")
        self.state.slot = word
        await asyncio.sleep(0)
        return "written"

    @vf.tool
    async def read(self) -> str:
        """Read the pad."""
        CALLED.append("read")
        return self.state.slot


class ClueConfig(vf.ToolsetConfig):
    pass


class Clue(vf.Toolset[ClueConfig]):
    TOOL_PREFIX = None

    async def setup_task(self, task: "Data") -> None:
        self.word = task.word

    @vf.tool
    def first_letter(self) -> str:
        """Return the first letter of the word."""
        return self.word[0]


class Data(vf.TaskData):
    word: str


class Scratchpad(vf.Task[Data, Slot]):
    @vf.stop
    async def done(self, trace: vf.Trace) -> bool:
        return trace.num_turns >= 4

    @vf.reward
    async def written(self, trace: vf.Trace) -> float:
        return float(trace.state.slot == self.data.word)

    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        return [Clue(ClueConfig())]


class Config(vf.TasksetConfig):
    tools: PadConfig = PadConfig()


class ScratchpadTaskset(vf.Taskset[Scratchpad, Config]):
    @classmethod
    def toolsets(cls, config: Config) -> list[vf.Toolset]:
        return [Pad(config.tools)]

    def load(self) -> Iterator[Scratchpad]:
        for word in WORDS:
            yield Scratchpad(
                Data(prompt=f"Write {word} on the pad, then read it.", word=word), self.config.task
            )


__all__ = ["ScratchpadTaskset"]
