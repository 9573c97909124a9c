"""Agents as users write them: they know OpenAI's API and nothing of tailrace."""

import asyncio
import json
import math
import sys
from collections.abc import Mapping
from typing import Any

import openai

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Multiply whole numbers.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}
MAX_TURNS = 4

calls: list[str] = []
"""What the tool was asked, by all agents."""


def calculate(expression: str) -> str:
    calls.append(expression)
    return str(math.prod(int(factor) for factor in expression.split("*")))


async def calculating(
    row: Mapping[str, Any], base_url: str, api_key: str, model: str, messages: list[Any]
) -> float:
    """A loop with a tool, as in OpenAI's own documentation."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        messages = list(messages)
        for _ in range(MAX_TURNS):
            reply = await client.chat.completions.create(model=model, messages=messages, tools=[TOOL])
            message = reply.choices[0].message
            messages.append(message)
            for call in message.tool_calls or ():
                assert call.type == "function"
                content = calculate(json.loads(call.function.arguments)["expression"])
                messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
            if not message.tool_calls:
                break
        return float((message.content or "") == row["answer"])


def blocking(messages: list[Any], base_url: str, api_key: str) -> None:
    """Not async, and without a reward."""
    with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
        client.chat.completions.create(model="any", messages=messages)


def silent(base_url: str) -> float:
    return 1.0


async def hanging(base_url: str) -> None:
    await asyncio.Event().wait()


def boastful(messages: list[Any], base_url: str, api_key: str) -> Any:
    blocking(messages, base_url, api_key)
    return "very good"


def clumsy(messages: list[Any], base_url: str, api_key: str) -> None:
    blocking(messages, base_url, api_key)
    raise LookupError("no such page")


async def leaving(base_url: str) -> None:
    """It exits inside a task of its own."""
    await asyncio.wait_for(asyncio.to_thread(sys.exit, 3), 5)


def greedy(row: object) -> float:
    """It does not take the address of the policy."""
    return 1.0


def wishful(base_url: str, browser: object) -> float:
    return 1.0


async def asking_twice(messages: list[Any], base_url: str, api_key: str, model: str) -> float:
    """Two turns, and a reward of its own. Where the last number of the prompt is even, the second turn knows
    nothing of the first."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        first = await client.chat.completions.create(model=model, messages=messages)
        kept = [*messages, first.choices[0].message] if int(messages[0]["content"].split()[-1]) % 2 else []
        again = [*kept, {"role": "user", "content": "12 * 34"}]
        second = await client.chat.completions.create(model=model, messages=again, max_tokens=3)
        assert second.usage
        return float(len(first.choices[0].message.content or "") % 2)


async def cut_short(messages: list[Any], base_url: str, api_key: str, model: str) -> float:
    """It asks again after a turn that was cut off, and raises when that is refused. Where the last number of
    the prompt is even, its first turn has room."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        room = {} if int(messages[0]["content"].split()[-1]) % 2 == 0 else {"max_tokens": 1}
        first = await client.chat.completions.create(model=model, messages=messages, **room)
        if room:
            again = [*messages, first.choices[0].message, {"role": "user", "content": "12 * 34"}]
            await client.chat.completions.create(model=model, messages=again)
        return float(len(first.choices[0].message.content or "") % 2)
