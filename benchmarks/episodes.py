"""Runs of episodes with a tool that are killed, and what was done twice. For crash.py."""

import json
import math
import os
import random
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from tailrace.environments.tools import CALLER
from tailrace.errors import LedgerError
from victims import REQUESTS, Victim

CALLS_VARIABLE, CALLS = "TAILRACE_CALLS", "calls.jsonl"
CALL_S = 0.2

Key = tuple[str, int, int]
"""Sample, turn and number of a call."""


def calculator(expression: str) -> str:
    """Multiply whole numbers.

    Args:
        expression: The product, for example "12 * 34".
    """
    time.sleep(CALL_S)  # so that kills come while it works
    answer = str(math.prod(int(factor) for factor in expression.split("*")))
    caller = CALLER.get()
    line = json.dumps([str(caller.sample), caller.turn, caller.number]) + "\n"
    with Path(os.environ[CALLS_VARIABLE]).open("a") as file:
        file.write(line)
    return answer


class EpisodeVictim(Victim):
    """A run with tools. After each life, what it did is compared with what the ledger had before it."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        os.environ[CALLS_VARIABLE] = str(self.folder / CALLS)
        self.turns_regenerated = self.calls_repeated = self.calls_lost = self.num_calls = 0
        self._calls: set[Key] = set()
        """Calls that had answered in earlier lives."""
        self._recorded: set[Key] = set()
        """Calls whose answer the ledger had at the end of the last life."""
        self._ended: dict[str, int] = {}
        """Tokens of the ended turns of each sample that the ledger had at the end of the last life."""
        self._lines = {CALLS: 0, REQUESTS: 0}

    def live_and_die(self, chance: random.Random) -> None:
        super().live_and_die(chance)
        self._audit_life()

    def live_to_the_end(self) -> None:
        super().live_to_the_end()
        self._audit_life()

    def _audit_life(self) -> None:
        for event in self._new_lines(REQUESTS):
            if "sample" in event and "outcome" not in event:
                self.turns_regenerated += event["tokens"] < self._ended.get(event["sample"], 0)
        for sample, turn, number in self._new_lines(CALLS):
            key = (sample, turn, number)
            self.num_calls += 1
            self.calls_repeated += key in self._recorded
            self.calls_lost += key in self._calls - self._recorded
            self._calls.add(key)
        with suppress(LedgerError):
            for id, row in self.books().samples.items():
                turns = row.ended_turns
                self._ended[str(id)] = turns[-1].num_tokens if turns else 0
                self._recorded |= {
                    (str(id), number, place)
                    for number, turn in enumerate(turns)
                    for place, result in enumerate(turn.results)
                    if result is not None
                }

    def _new_lines(self, name: str) -> list[Any]:
        path = self.folder / name
        lines = path.read_text().splitlines() if path.exists() else []
        new, self._lines[name] = lines[self._lines[name] :], len(lines)
        return [json.loads(line) for line in new]
