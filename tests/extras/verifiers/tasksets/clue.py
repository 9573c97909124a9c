"""The tools of one task of scratchpad. verifiers starts this file for each rollout."""

from typing import Any

import verifiers.v1 as vf


class ClueConfig(vf.ToolsetConfig):
    pass


class Clue(vf.Toolset[ClueConfig]):
    TOOL_PREFIX = None

    async def setup_task(self, task: Any) -> None:
        self.word = task.word

    @vf.tool
    def first_letter(self) -> str:
        """Return the first letter of the word."""
        return self.word[0]


if __name__ == "__main__":
    Clue.run()
