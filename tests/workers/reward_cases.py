"""Reward functions that do what the completion says."""

import asyncio
import ctypes
import os
import re
import sys
import time


def score(prompt: str, completion: str, answer: str = "") -> object:
    match completion:
        case "hang":
            time.sleep(1000)
        case "lock":  # a regular expression that backtracks for ages, with the interpreter's lock held
            re.match(r"(a+)+$", "a" * 64 + "b")
        case "raise":
            raise KeyError("no such answer")
        case "exit":
            os._exit(3)
        case "quit":
            sys.exit("done")
        case "crash":
            ctypes.string_at(0)
        case "nan":
            return float("nan")
        case "text":
            return "good"
        case "pid":
            return os.getpid()
    return len(completion) + len(prompt) / 8 + (completion == answer)


async def score_later(completion: str) -> float:
    await asyncio.sleep(0.01)
    if completion == "hang":
        await asyncio.sleep(1000)
    return 0.5 * len(completion)
