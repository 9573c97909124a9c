"""Runs inside the sandbox, before and around the program. The text of this file is its `python -c`.

It may import the standard library only. From the end of `limit` on, nothing in this process can be trusted.
"""

import json
import os
import resource
import sys
from types import ModuleType
from typing import Any

STARTED = b"started\n"
"""Written to the socket before the program runs. Without it the sandbox has failed, not the program."""
ASKED = b"next\n"
"""Written when the next line is wanted: of an assertion, and of the secret once the assertion has held."""


def limit(limits: dict[str, int]) -> None:
    """Set resource limits, by the names of the module `resource`. They cannot be raised again."""
    for name, value in limits.items():
        resource.setrlimit(getattr(resource, name), (value, value))


STARTER = (
    *("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics"),
    *("itertools", "functools", "operator", "io", "sys", "json", "builtins", "typing"),
)
"""Modules whose names the starter code of a function may use, as LiveCodeBench and APPS import them."""


def call(namespace: dict[str, Any], name: str, arguments: list[Any]) -> Any:
    """Call a method of the program's class `Solution`, or a function."""
    if hasattr(namespace.get("Solution"), name):
        return getattr(namespace["Solution"](), name)(*arguments)
    return namespace[name](*arguments)


def main(fd: int) -> None:
    # Bound before the program runs, which may put functions of its own in their places.
    write, run, translate, from_hex = os.write, exec, compile, bytes.fromhex
    channel = os.fdopen(fd, "rb")

    def next_line() -> str:
        write(fd, ASKED)
        return from_hex(channel.readline().decode()).decode()

    job = json.loads(channel.readline())
    write(fd, STARTED)
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    reports = "function" in job or job["asserts"]
    if reports:
        os.dup2(nothing, 1)
    else:
        channel.close()
    limit(job["limits"])
    sys.argv = ["program.py"]
    sys.modules["solution"] = program = ModuleType("__main__")  # tests of KodCode import from it
    namespace = vars(program)
    namespace["__builtins__"] = __builtins__
    if "function" in job:
        for form in ("from {0} import *", "import {0}"):
            run("\n".join(map(form.format, STARTER)), namespace)
        namespace.pop(job["function"], None)  # a function of Python's is not the program's
    run(translate(job["program"], "program.py", "exec"), namespace)
    if not reports:
        return
    if "function" in job:
        answer = json.dumps(call(namespace, job["function"], job["arguments"]))
    else:
        run(translate(next_line(), "test.py", "exec"), namespace)
        answer = next_line()
    data = answer.encode()
    while data:
        data = data[write(fd, data) :]
    os._exit(0)  # threads that the program left do not keep the test case alive


if __name__ == "__main__":
    main(int(sys.argv[1]))
