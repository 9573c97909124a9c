"""One file for each paper. A schedule is an async function over the verbs of `tailrace.controller.run.Run`.

Its parameters are the keys of the config's [schedule] section. They are checked against the types of the
signature. The function checks the rest with `require` before it starts.
"""

from collections.abc import Callable, Coroutine
from typing import Any

from tailrace.schedules.april import april, april_dapo
from tailrace.schedules.conventional import conventional
from tailrace.schedules.dora import dora
from tailrace.schedules.laminar import laminar
from tailrace.schedules.one_step_off import one_step_off
from tailrace.schedules.pipelinerl import pipelinerl
from tailrace.schedules.rolloutpipe import periodic_asynchrony, rolloutpipe, rolloutpipe_eager
from tailrace.schedules.seer import seer
from tailrace.schedules.serial import serial
from tailrace.schedules.sortedrl import sortedrl, sortedrl_on_policy
from tailrace.schedules.streamrl import streamrl, streamrl_async
from tailrace.schedules.tailbatch import rollpacker, tailbatch, tailbatch_async, tailbatch_dapo
from tailrace.schedules.tailrace import tailrace, tailrace_on_policy
from tailrace.schedules.trl_async import trl_async
from tailrace.schedules.windowed_fifo import tinker_async, windowed_fifo

Schedule = Callable[..., Coroutine[Any, Any, None]]
"""An async function of a run and its own parameters."""

RECOMPUTES_OLD_LOGPROBS = {"april", "april_dapo"}
"""The schedules whose published code recomputes the old log-probs at training."""

SCHEDULES: dict[str, Schedule] = {
    "serial": serial,
    "rolloutpipe": rolloutpipe,
    "rolloutpipe_eager": rolloutpipe_eager,
    "april": april,
    "april_dapo": april_dapo,
    "tailbatch": tailbatch,
    "tailbatch_dapo": tailbatch_dapo,
    "tailbatch_async": tailbatch_async,
    "rollpacker": rollpacker,
    "conventional": conventional,
    "pipelinerl": pipelinerl,
    "one_step_off": one_step_off,
    "periodic_asynchrony": periodic_asynchrony,
    "streamrl": streamrl,
    "streamrl_async": streamrl_async,
    "seer": seer,
    "sortedrl": sortedrl,
    "sortedrl_on_policy": sortedrl_on_policy,
    "windowed_fifo": windowed_fifo,
    "dora": dora,
    "laminar": laminar,
    "trl_async": trl_async,
    "tinker_async": tinker_async,
    "tailrace": tailrace,
    "tailrace_on_policy": tailrace_on_policy,
}
