"""Judges that share the devices of the engines (RollPacker 4.3), in virtual time.

A judge scores with one forward pass, as extras/judges/local.py does live: in batches of what has arrived
meanwhile, with layers that do not fit its memory copied from the host while others compute. A layer takes
2 FLOPs a parameter and token, and 4 in attention for each dimension of a query and each pair of tokens (half
of them, since a token sees those before it), or the time to read its weights. The embedding and the head are
left out.
"""

import asyncio
from dataclasses import dataclass
from pathlib import Path

from tailrace.contracts.memory import gib
from tailrace.errors import ConfigError
from tailrace.extras.judges.memory import IN_TRANSIT, LayerBudget, batches, kept_layers
from tailrace.extras.judges.settings import LocalJudgeSettings
from tailrace.sim.cluster import model_of, multiplied_parameters
from tailrace.sim.device_profiles import device_of
from tailrace.sim.host import Host
from tailrace.sim.settings import DEFAULT_MAX_TOKENS, SimSettings

KEY = "sim.rewards.judge"


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """The time of a forward pass of a judge on one device.

    Args:
        budget: divides the judge's memory between layers and activations.
        max_tokens: of a batch, padding included.
        token_s: arithmetic of a token in a layer, without attention.
        pair_s: arithmetic of attention in a layer for the square of one token.
        read_s: in which a layer is read from the device's memory.
        copy_s: in which a layer is copied from the host's memory.
    """

    budget: LayerBudget
    max_tokens: int
    token_s: float
    pair_s: float
    read_s: float
    copy_s: float

    def layer_s(self, num_texts: int, longest: int) -> float:
        """Return the time in which a layer computes texts that are padded to the longest."""
        return max(self.read_s, num_texts * (self.token_s * longest + self.pair_s * longest**2))

    def seconds(self, num_texts: int, longest: int) -> float:
        """Return the time of a batch."""
        # The copy of a layer begins when the one before it has arrived and a place is free (local.py).
        kept = kept_layers(self.budget.resident_layers(num_texts * longest), self.budget.num_layers)
        layer_s = self.layer_s(num_texts, longest)
        end_s = arrived_s = 0.0
        freed_s = [0.0] * IN_TRANSIT  # when the places of the layers in transit become free
        for layer in range(self.budget.num_layers):
            if layer not in kept:
                arrived_s = max(arrived_s, freed_s.pop(0)) + self.copy_s
                end_s = max(end_s, arrived_s)
            end_s += layer_s
            if layer not in kept:
                freed_s.append(end_s)
        return end_s


def forward_pass(settings: SimSettings) -> ForwardPass:
    """Return the forward pass of the judge of a cluster. Raises a ConfigError if there is no such model, it
    does not fit beside the engine, or it cannot read the longest response."""
    cluster, judge, lengths = settings.cluster, settings.rewards.judge, settings.lengths
    assert cluster and judge
    device, model = device_of(cluster), model_of(f"{KEY}.model", judge.model)
    longest = lengths.prompt_tokens + (lengths.max_tokens or DEFAULT_MAX_TOKENS)
    if longest > judge.max_tokens:
        problem = f"a prompt and its longest response have {longest} tokens"
        raise ConfigError(f"{KEY}.max_tokens", judge.max_tokens, problem, f"set it to at least {longest}")
    limits = judge.model_dump(include={"memory_mib", "max_tokens"})
    local = LocalJudgeSettings(path=Path(judge.model), dtype="bfloat16", **limits)
    budget = LayerBudget.of(model, local)
    key, remedy = f"{KEY}.memory_mib", "set it, or lower sim.cluster.memory_share"
    try:
        budget.resident_layers(judge.max_tokens)
    except ValueError as why:
        remedy = f"raise it, or lower {KEY}.max_tokens"
        raise ConfigError(key, judge.memory_mib, str(why), remedy) from None
    room = device.memory_bytes * (1 - cluster.memory_share)
    if (most := budget.most_bytes(judge.max_tokens)) > room:
        problem = f"the judge takes {gib(most)} of a device on which the engine leaves {gib(room)}"
        raise ConfigError(key, judge.memory_mib, problem, remedy)
    flops, bytes_per_s = (
        device.flops * cluster.prefill_efficiency,
        device.bytes_per_s * cluster.bandwidth_efficiency,
    )
    return ForwardPass(
        budget=budget,
        max_tokens=judge.max_tokens,
        token_s=2 * multiplied_parameters(model) / flops,
        pair_s=2 * model.query_size / flops,
        read_s=budget.layer_bytes / bytes_per_s,
        copy_s=budget.layer_bytes / (device.host_bytes_per_s * cluster.link_efficiency),
    )


class SimJudge:
    """The judge on one device. Its host is shared with an engine; None: neither slows the other down."""

    def __init__(self, forward: ForwardPass, host: Host | None) -> None:
        self._forward, self._host = forward, host
        self._free = asyncio.Lock()
        self._waiting: dict[asyncio.Future[None], int] = {}  # tokens of each text that has no score yet

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    async def score(self, num_tokens: int) -> None:
        scored = asyncio.get_running_loop().create_future()
        self._waiting[scored] = num_tokens
        try:
            async with self._free:
                if not scored.done():
                    await self._score_all()
        finally:
            self._waiting.pop(scored, None)

    async def _score_all(self) -> None:
        texts = dict(self._waiting)
        lengths = list(texts.values())
        for batch in batches(range(len(lengths)), lengths, self._forward.max_tokens):
            seconds = self._forward.seconds(len(batch), lengths[batch[0]])
            await (self._host.work("judge", seconds) if self._host else asyncio.sleep(seconds))
        for scored in texts:
            if not scored.done():
                scored.set_result(None)
