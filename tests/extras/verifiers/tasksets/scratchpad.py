"""Tools: one shared toolset whose state belongs to the rollout, and one for each task."""

from collections.abc import Iterator

import verifiers.v1 as vf
from clue import Clue, ClueConfig
from pad import Pad, PadConfig, Slot

WORDS = ("alpha", "bravo", "charlie", "delta")


class Data(vf.TaskData):
    word: str


class ScratchpadTaskConfig(vf.TaskConfig):
    clues: bool = False


class Scratchpad(vf.Task[Data, Slot, ScratchpadTaskConfig]):
    @vf.stop
    async def done(self, trace: vf.Trace) -> bool:
        return trace.num_turns >= 4

    @vf.reward
    async def written(self, trace: vf.Trace) -> float:
        return float(trace.state.slot == self.data.word)

    @classmethod
    def toolsets(cls, config: ScratchpadTaskConfig) -> list[vf.Toolset]:
        return [Clue(ClueConfig())] if config.clues else []


class Config(vf.TasksetConfig):
    task: ScratchpadTaskConfig = ScratchpadTaskConfig()
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
