"""A taskset with a harness of its own, which forgets the first turn."""

from collections.abc import Iterator
from typing import Any

import httpx
import verifiers.v1 as vf


class Forgetful(vf.Harness[vf.HarnessConfig]):
    APPENDS_SYSTEM_PROMPT = True
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any
    ) -> vf.ProgramResult:
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {secret}"}) as client:
            for said in (data.prompt, "Forget it."):
                body = {"model": ctx.model, "messages": [{"role": "user", "content": said}]}
                reply = await client.post(f"{endpoint}/chat/completions", json=body)
        return vf.ProgramResult(exit_code=0, stdout="", stderr=reply.text)


class Rewriting(vf.Task[vf.TaskData]):
    @vf.reward
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class RewritingTaskset(vf.Taskset[Rewriting]):
    def load(self) -> Iterator[Rewriting]:
        for number in range(4):
            yield Rewriting(vf.TaskData(prompt=f"Say {number}."), self.config.task)


__all__ = ["Forgetful", "RewritingTaskset"]
