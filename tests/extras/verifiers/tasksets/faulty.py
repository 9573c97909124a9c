"""Tasks that cannot be played, or whose reward fails."""

from collections.abc import Iterator

import verifiers.v1 as vf


class Config(vf.TasksetConfig):
    image: str | None = None


class Faulty(vf.Task[vf.TaskData]):
    @vf.reward
    async def broken(self, trace: vf.Trace) -> float:
        raise ZeroDivisionError("no")


class FaultyTaskset(vf.Taskset[Faulty, Config]):
    def load(self) -> Iterator[Faulty]:
        for number in range(4):
            yield Faulty(vf.TaskData(prompt=f"Say {number}.", image=self.config.image), self.config.task)


__all__ = ["FaultyTaskset"]
