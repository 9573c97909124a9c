"""Reward functions that do what the completion says."""

import asyncio
import ctypes
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path


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


async def letters(completions: list[str], log_metric, log_extra, trainer_state) -> list[float]:  # type: ignore[no-untyped-def]
    """A function of TRL's signature; the reward is 3 more than the version of the policy."""
    log_metric("different", len(set(completions[0])))
    log_extra("first", [each[:1] for each in completions])
    return [3.0 + trainer_state.global_step for _ in completions]


async def score_later(completion: str) -> float:
    await asyncio.sleep(0.01)
    if completion == "hang":
        await asyncio.sleep(1000)
    return 0.5 * len(completion)


def score_by_reason(completion_ids: list[int], finish_reason: str) -> float:
    if finish_reason == "length":
        time.sleep(1000)
    return float(sum(completion_ids))


def leave_process(completion: str) -> float:
    """Start a process with a session of its own; its process id is the reward."""
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    if completion == "hang":
        Path(os.environ["LEFT_PROCESS"]).write_text(str(child.pid))
        time.sleep(1000)
    return float(child.pid)


_pool = subprocess.Popen(["sleep", "1000"]) if os.environ.get("POOL_AT_IMPORT") else None


def pool_lives() -> float:
    return float(_pool is not None and Path(f"/proc/{_pool.pid}").exists())


def flood(completion: str) -> float:
    for _ in range(60):
        print("x" * 1000)
    print("to stderr", file=sys.stderr)
    return 1.0


def first_row(completion: str, answer: str) -> float:
    match answer:
        case "first word":
            return float(completion.split()[0])
        case "table":
            return {"right": 1.0}[answer]
        case "hang":
            time.sleep(1000)
    return 1.0


_threads = ThreadPoolExecutor(1) if os.environ.get("THREADS_AT_IMPORT") else None
if _threads:
    _threads.submit(int).result()


def by_thread(completion: str) -> float:
    assert _threads
    if completion == "hang":
        time.sleep(1000)
    return float(_threads.submit(len, completion).result())


def write_everywhere(completion: str) -> float:
    """Write to every descriptor of the process what is the begin of a long message, or no message at all."""
    garbage = {"long": b"\xff" * 64, "wrong": b"\x01\0\0\0\xc1"}.get(completion, b"")
    for descriptor in range(3, 256):
        with suppress(OSError):
            os.write(descriptor, garbage)
    return 1.0


def ranks(completions: list[str], answer: list[str]) -> "list[float] | float":
    """The place of each completion by length; one number for all where the answer is "one"."""
    if "one" in answer:
        return 1.0
    return [float(sorted(completions, key=len).index(each)) for each in completions]
