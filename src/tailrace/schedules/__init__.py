"""One file for each paper. A schedule is an async function over the verbs of `tailrace.controller.run.Run`.

Its parameters are the keys of the config's [schedule] section. They are checked against the types of the
signature. The function checks the rest with `require` before it starts.
"""

from collections.abc import Callable, Coroutine
from typing import Any

from tailrace.schedules.april import april
from tailrace.schedules.conventional import conventional
from tailrace.schedules.pipelinerl import pipelinerl
from tailrace.schedules.rolloutpipe import rolloutpipe, rolloutpipe_eager
from tailrace.schedules.serial import serial
from tailrace.schedules.tailbatch import rollpacker, tailbatch, tailbatch_async, tailbatch_dapo
from tailrace.schedules.tailrace import tailrace, tailrace_on_policy

Schedule = Callable[..., Coroutine[Any, Any, None]]
"""An async function of a run and its own parameters."""

RECOMPUTES_OLD_LOGPROBS = {"april"}
"""The schedules whose published code recomputes the old log-probs at training."""

SCHEDULES: dict[str, Schedule] = {
    "serial": serial,
    "rolloutpipe": rolloutpipe,
    "rolloutpipe_eager": rolloutpipe_eager,
    "april": april,
    "tailbatch": tailbatch,
    "tailbatch_dapo": tailbatch_dapo,
    "tailbatch_async": tailbatch_async,
    "rollpacker": rollpacker,
    "conventional": conventional,
    "pipelinerl": pipelinerl,
    "tailrace": tailrace,
    "tailrace_on_policy": tailrace_on_policy,
}
