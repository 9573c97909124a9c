"""The agent of examples/agent.toml: a loop over OpenAI's client, which knows nothing of tailrace."""

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

import openai
from calculator import calculator

TOOLS: list[Any] = [
    {
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
]
MAX_TURNS = 3


async def agent(messages: list[Any], base_url: str, api_key: str, model: str) -> None:
    """Let the model answer, with as many calls of the calculator as it asks for."""
    client = shared_client().with_options(base_url=base_url, api_key=api_key)
    messages = list(messages)
    for _ in range(MAX_TURNS):
        reply = await client.chat.completions.create(model=model, messages=messages, tools=TOOLS)
        message = reply.choices[0].message
        if not message.tool_calls:
            return
        messages.append(message)
        for call in message.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": answer(call.function)})


def answer(function: Any) -> str:
    """What the model gets for a call."""
    arguments: Mapping[str, Any] = json.loads(function.arguments)
    try:
        return calculator(**arguments)
    except (TypeError, ValueError) as why:
        return f"error: {why}"


@cache
def shared_client() -> openai.AsyncOpenAI:
    """Making a client takes longer than an episode of this small model."""
    return openai.AsyncOpenAI(base_url="http://unused", api_key="unused")
