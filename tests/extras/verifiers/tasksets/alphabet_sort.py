"""Several turns: a scripted user opens with names to sort and adds names in each turn. There is no end of
tasks, and they have no prompt of their own."""

import itertools
import random
from collections.abc import Iterator
from difflib import SequenceMatcher

import verifiers.v1 as vf

NAMES = ("Ada", "Blaise", "Carl", "Dorothy", "Emmy", "Felix", "Grace", "Henri", "Ida", "John")


class Data(vf.TaskData):
    user_turns: list[str]
    truths: list[str]


class AlphabetSort(vf.Task[Data]):
    @vf.reward
    async def similarity(self, trace: vf.Trace) -> float:
        replies = [message.content or "" for message in trace.assistant_messages]
        pairs = zip(replies, self.data.truths, strict=False)
        return sum(SequenceMatcher(None, *pair).ratio() for pair in pairs) / len(self.data.truths)


class AlphabetSortEnv(vf.SingleAgentEnv):
    async def run(self, task: AlphabetSort, agents: vf.Agents) -> None:
        async with agents.agent.interaction(task) as interaction:
            for turn in task.data.user_turns:
                if (await interaction.turn(turn)).terminated:
                    break


class Config(vf.TasksetConfig):
    num_turns: int = 2


class AlphabetSortTaskset(vf.Taskset[AlphabetSort, Config]):
    INFINITE = True

    def load(self) -> Iterator[AlphabetSort]:
        random_names = random.Random(0)
        for _ in itertools.count():
            names = random_names.sample(NAMES, 2 * self.config.num_turns)
            turns = [names[place : place + 2] for place in range(0, len(names), 2)]
            said = [f"Sort: {', '.join(turn)}" for turn in turns]
            truths = [", ".join(sorted(names[: 2 * place + 2])) for place in range(len(turns))]
            yield AlphabetSort(Data(prompt=None, user_turns=said, truths=truths), self.config.task)


__all__ = ["AlphabetSortEnv", "AlphabetSortTaskset"]
