"""`tailrace join`: a process that does the work of one stage for runs on other hosts (broker.py)."""

import traceback
from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec

from tailrace.workers import reference_child, trainer_child
from tailrace.workers.broker import BrokerChannel, Invitation, connect, reachable
from tailrace.workers.messages import Job, Refer, ReferenceJob, ToTrainer, TrainerJob

Stage = Literal["trainer", "reference"]

_STAGES: Mapping[Stage, tuple[type[Job], Any, Callable[[Any, Any], None]]] = {
    "trainer": (TrainerJob, msgspec.msgpack.Decoder(ToTrainer), trainer_child.serve),
    "reference": (ReferenceJob, msgspec.msgpack.Decoder(Refer), reference_child.serve),
}


def join(stage: Stage, /, *, broker: str, run: str) -> None:
    """Wait for the run's invitation, and work until its controller is gone.

    Args:
        broker: its address, redis://HOST:PORT/0, as broker.url.
        run: name of the run's output directory.

    Raises:
        ConfigError: the broker's client is not installed, or its server cannot be reached.
    """
    redis, base = connect(broker, is_async=False), f"tailrace:{run}:{stage}"
    with reachable(broker):
        _, record = redis.blpop(f"{base}:invitations")
    invitation = msgspec.msgpack.decode(record, type=Invitation)
    kind, decoder, serve = _STAGES[stage]
    channel = BrokerChannel(redis, f"{base}:{invitation.life}", decoder, invitation.max_records)
    words = ""
    try:
        serve(kind.model_validate_json(invitation.job), channel)
    except BaseException:
        words = traceback.format_exc()
        raise
    finally:
        channel.close(words)
