"""An engine of your own: a causal language model of transformers, a forward pass of the whole text a token.

    pip install ./examples/own_engine
    tailrace train run.toml --engine.kind forward

pyproject.toml registers `Forward` as the engine kind "forward".
"""

import asyncio
from typing import Literal

import torch
from transformers import AutoModelForCausalLM

from tailrace.contracts.engine import Capabilities, EngineProcess, TokenCounter, Usage
from tailrace.contracts.weights import new_link, send_and_load
from tailrace.drivers.engine.settings import ReplicaSettings
from tailrace.drivers.kinds.base import EngineKind
from tailrace.drivers.weights.transports import WeightReceiver
from tailrace.errors import VersionGone
from tailrace.kinds import INTERFACE
from tailrace.model_folder import end_of_text_ids


class ForwardSettings(ReplicaSettings):
    """The section [engine] with kind = "forward"."""

    kind: Literal["forward"] = "forward"
    dtype: Literal["float32", "bfloat16"] = "float32"


class ForwardEngine(EngineProcess):
    """The engine. It computes in the process of the controller, and ends with it."""

    def __init__(self, name, opening, send):
        config = opening.config
        path, dtype = config.model.path, getattr(torch, config.engine.dtype)
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, trust_remote_code=False)
        self.name, self.sampling, self.ends = name, config.sampling, end_of_text_ids(path)
        self.version, self.send, self.link, self.receiver = 0, send, new_link(name), WeightReceiver()
        self.capabilities, self.arrival = Capabilities(exact_versions=True), None
        self.counter, self.running, self.loading = TokenCounter(), 0, asyncio.Lock()

    async def generate(self, sample):
        async with self.loading:  # a new request waits for new weights
            self.running += 1
        try:
            while sample.finish_reason is None:
                await asyncio.sleep(0)  # here it may be cancelled, and weights may change
                if sample.pin not in (None, self.version):
                    raise VersionGone(f"{self.name} has no version {sample.pin}")
                self.draw(sample)
        finally:
            self.running -= 1

    @torch.inference_mode()
    def draw(self, sample):
        """Append a token. Its noise is a function of the sample's seed and of its number of tokens."""
        logits = self.model(torch.tensor([sample.context_ids])).logits[0, -1].float()
        logprobs = (logits / (sample.temperature or self.sampling.temperature)).log_softmax(-1)
        noise = torch.Generator().manual_seed(sample.request_seed)
        token = int(logprobs.argmax() if sample.greedy else logprobs.exp().multinomial(1, generator=noise))
        sample.extend([token], [float(logprobs[token])], self.version)
        self.counter.add(1)
        if token in self.ends or self.sampling.room(sample) <= 0:
            sample.finish_reason = "stop" if token in self.ends else "length"

    async def load(self, weights, *, kv):
        async with self.loading:
            await send_and_load(self.send(weights, self.link), self.receive(weights))

    async def receive(self, weights):
        """Receive in a thread: the sender answers on this loop."""
        loop = asyncio.get_running_loop()
        tensors = await loop.run_in_executor(None, self.receiver.receive, weights, self.link)
        self.model.load_state_dict(tensors, strict=False)  # tied weights come once
        self.version = weights.version

    def usage(self):
        return Usage(num_running=self.running, num_generated=self.counter.num)

    async def died(self):
        await asyncio.Event().wait()


class Forward(EngineKind):
    """The kind: the class of its section, and how a process of an engine begins."""

    interface, settings = INTERFACE, ForwardSettings

    def processes(self, opening, trainer):
        async def begin(name, number, width):
            return ForwardEngine(name, opening, trainer.send)

        return begin
