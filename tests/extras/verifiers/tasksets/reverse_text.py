"""One turn: reverse the text. The reward is the similarity to the reversed text."""

import re
from collections.abc import Iterator
from difflib import SequenceMatcher

import verifiers.v1 as vf

WORDS = ("amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heron")
TAG = re.compile(r"<reversed_text>(.*?)</reversed_text>", re.DOTALL)


class Data(vf.TaskData):
    answer: str


class ReverseText(vf.Task[Data]):
    @vf.stop
    async def single_turn(self, trace: vf.Trace) -> bool:
        return trace.num_turns >= 1

    @vf.reward(weight=1.0)
    async def similarity(self, trace: vf.Trace) -> float:
        found = TAG.search(trace.last_reply)
        return SequenceMatcher(None, found.group(1) if found else "", self.data.answer).ratio()

    @vf.metric
    async def num_characters(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class Config(vf.TasksetConfig):
    num_words: int = len(WORDS)


class ReverseTextTaskset(vf.Taskset[ReverseText, Config]):
    def load(self) -> Iterator[ReverseText]:
        for word in WORDS[: self.config.num_words]:
            system = "Put the answer in <reversed_text> tags."
            yield ReverseText(Data(prompt=word, system_prompt=system, answer=word[::-1]), self.config.task)


__all__ = ["ReverseTextTaskset"]
