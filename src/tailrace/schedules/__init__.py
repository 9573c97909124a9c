"""One file for each paper. A schedule is an async function over the verbs of `tailrace.controller.run.Run`.

Its parameters are the keys of the config's [schedule] section. They are checked against the types of the
signature. The function checks the rest with `require` before it starts.
"""

import importlib
from collections.abc import Callable, Coroutine, Iterator, Mapping
from typing import Any

Schedule = Callable[..., Coroutine[Any, Any, None]]
"""An async function of a run and its own parameters."""

RECOMPUTES_OLD_LOGPROBS = {"april", "april_dapo"}
"""The schedules whose published code recomputes the old log-probs at training."""

FILES: Mapping[str, str] = {
    "serial": "serial",
    "rolloutpipe": "rolloutpipe",
    "rolloutpipe_eager": "rolloutpipe",
    "april": "april",
    "april_dapo": "april",
    "tailbatch": "tailbatch",
    "tailbatch_dapo": "tailbatch",
    "tailbatch_async": "tailbatch",
    "rollpacker": "tailbatch",
    "conventional": "conventional",
    "pipelinerl": "pipelinerl",
    "one_step_off": "one_step_off",
    "periodic_asynchrony": "rolloutpipe",
    "streamrl": "streamrl",
    "streamrl_async": "streamrl",
    "seer": "seer",
    "sortedrl": "sortedrl",
    "sortedrl_on_policy": "sortedrl",
    "bubblespec": "bubblespec",
    "windowed_fifo": "windowed_fifo",
    "dora": "dora",
    "laminar": "laminar",
    "trl_async": "trl_async",
    "tinker_async": "windowed_fifo",
    "tailrace": "tailrace",
    "tailrace_on_policy": "tailrace",
}
"""The file of each schedule."""


class _ByName(Mapping[str, Schedule]):
    """The schedules of the package. A file is imported when one of its schedules is asked for."""

    def __getitem__(self, name: str) -> Schedule:
        schedule: Schedule = getattr(importlib.import_module(f"{__name__}.{FILES[name]}"), name)
        return schedule

    def __iter__(self) -> Iterator[str]:
        return iter(FILES)

    def __len__(self) -> int:
        return len(FILES)


SCHEDULES: Mapping[str, Schedule] = _ByName()
