"""Whether the gradient of old tokens points where that of new ones does, and whether a weight by lag helps.

    python benchmarks/lag_gradient.py [--seeds 3] [--lr 2e-4] [--every 16] [--passes 2]

PipelineRL (section 7) asks when the lag of early tokens hurts. The quickstart's model makes on-policy steps;
then its last weights are loaded while sequences are in flight, each after `every` decode steps, with the KV
cache kept. Printed: cosines of the REINFORCE gradient of what ends under the newest weights with that of 4
times as many on-policy groups: of each tenth of the response, and of all tokens weighted by decay ** lag.
"""

from itertools import count, islice, takewhile
from statistics import fmean

import torch
from torch.nn.utils import clip_grad_norm_, parameters_to_vector

from common import QUICKSTART, run
from learning_report import interval
from tailrace.algo.advantages import ComputeAdvantages
from tailrace.algo.base import AlgorithmSettings
from tailrace.api import load_config
from tailrace.config import LiveConfig
from tailrace.contracts.engine import GenerationRequest
from tailrace.contracts.sampling import SamplingSettings
from tailrace.drivers.assembly.environments import training_prompts
from tailrace.drivers.data.encoding import load_tokenizer
from tailrace.drivers.engine.native.engine import NativeEngine
from tailrace.drivers.engine.settings import NativeEngineSettings
from tailrace.drivers.reward.calls import Call
from tailrace.drivers.reward.functions import Scorer
from tailrace.drivers.trainer.batch import TrainingSample
from tailrace.drivers.trainer.model import PolicyModel
from tailrace.record.lags import TENTHS, Lags
from tailrace.types import Group, Sample, SampleId, noise_seed

K, WARM_STEPS, UPDATES, SLOTS, DECAYS = 8, 24, 24, 2048, (1.0, 0.95, 0.9, 0.8, 0.5, 0.0)
ADVANTAGES = ComputeAdvantages(
    AlgorithmSettings(name="reinforce"), SamplingSettings(max_completion_tokens=200)
)


class Study:
    def __init__(self, seed: int, lr: float) -> None:
        room = {"engine.max_num_seqs": SLOTS, "engine.kv_cache_tokens": 256 * SLOTS}
        config = LiveConfig.of(load_config(QUICKSTART, room))
        assert isinstance(config.engine, NativeEngineSettings)
        self.seed, path = seed, config.model.path
        self.prompts = map(training_prompts(config.changed(run={"seed": seed})).__getitem__, count())
        self.tokenizer, self.scorer = load_tokenizer(path), Scorer.load(config.reward, config.data)
        self.engine = NativeEngine(path, config.engine, config.sampling)
        trainer = config.trainer.changed(max_tokens_per_microbatch=4_096)
        self.policy = PolicyModel.load(path, trainer, temperature=1.0)
        self.parameters = list(self.policy.parameters().values())
        self.sizes = [parameter.numel() for parameter in self.parameters]
        self.optimizer = torch.optim.AdamW(self.parameters, lr, config.trainer.betas, weight_decay=0.0)

    def step(self) -> dict[str, torch.Tensor]:
        gradient = self.gradients(self.generate(4, [dict(self.policy.weights())]), whole=True)[0] / (4 * K)
        for parameter, part in zip(self.parameters, torch.split(gradient, self.sizes), strict=True):
            parameter.grad = part.view_as(parameter)
        clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        return {name: weight.detach().clone() for name, weight in self.policy.weights()}

    def generate(
        self, n: int, in_turn: list[dict[str, torch.Tensor]], every: int = 200 * SLOTS
    ) -> list[Group]:
        """The next n prompts under each of the weights in turn, for a number of decode steps at most. The
        groups whose last sample ends under the newest of them, which are version 0, with advantages."""
        groups = [Group(prompt, K, [], K) for prompt in islice(self.prompts, n)]
        samples: dict[str, Sample] = {}
        for group in groups:
            ids = [SampleId(group.prompt.index, 0, number) for number in range(K)]
            group.samples = group.kept = [Sample(id, group, noise_seed(self.seed, id)) for id in ids]
            samples |= {str(sample.id): sample for sample in group.samples}
        for name, sample in samples.items():
            self.engine.submit(GenerationRequest(name, sample.prompt.ids, [], sample.seed))
        for version, weights in enumerate(in_turn, 1 - len(in_turn)):
            outputs = self.engine.load(weights, version=version, kv="keep")
            for _ in takewhile(lambda _: not self.engine.idle, range(every)):
                outputs += self.engine.step()
            for output in outputs:
                samples[output.id].extend(output.ids, output.behavior_logprobs, output.version)
                samples[output.id].finish_reason = output.finish_reason
        list(map(self.engine.abort, samples))
        ended = dict.fromkeys(samples[output.id].group for output in outputs if output.finish_reason)
        complete = [group for group in ended if all(sample.ended for sample in group.samples)]
        for group in complete:
            for sample in group.samples:
                sample.text = self.tokenizer.decode(sample.completion_ids, skip_special_tokens=True)
                sample.reward = self.scorer(Call.of(sample)).reward
            ADVANTAGES(group)
        return complete

    def gradients(self, groups: list[Group], *, whole: bool = False) -> torch.Tensor:
        """Of each tenth, then with each decay, [16, parameters]. `whole`: of all tokens, [1, parameters]."""
        samples = {sample.id: sample for group in groups for sample in group.samples if sample.advantage}
        total = torch.zeros(1, sum(self.sizes))
        for batch in self.policy.micro_batches(list(map(TrainingSample.of, samples.values()))):
            lags = [-version for id in batch.ids for version, size in samples[id].spans for _ in range(size)]
            tenth = torch.cat([torch.arange(n) * TENTHS // n for n in batch.num_tokens.tolist()])
            decayed = torch.tensor(DECAYS)[:, None] ** torch.tensor(lags)
            parts = torch.cat([torch.eye(TENTHS)[:, tenth], decayed])
            each = []
            for part in torch.ones(1, len(lags)) if whole else parts:  # a forward pass has one backward pass
                logprobs = self.policy.logprobs(batch).logprobs
                weights = (logprobs.detach() - batch.behavior_logprobs).exp().clamp(max=5.0)
                losses = -weights * batch.advantages.repeat_interleave(batch.num_tokens) * logprobs
                each.append(torch.autograd.grad(part @ losses, self.parameters))
            total = total + torch.stack(list(map(parameters_to_vector, each)))
        return total


def measure(seed: int, lr: float, every: int, passes: int) -> dict[str, float]:
    study, lags = Study(seed, lr), Lags()
    in_turn = [study.step() for _ in range(WARM_STEPS + UPDATES)][WARM_STEPS - 1 :]
    enough = SLOTS // K * (2 + every * UPDATES // 16)
    flight = [group for _ in range(passes) for group in study.generate(enough, in_turn, every)]
    fresh, other = (study.generate(n * len(flight), in_turn[-1:]) for n in (1, 4))
    reference, both = study.gradients(other, whole=True), map(study.gradients, (flight, fresh))
    found, ideal = (torch.cosine_similarity(each, reference).tolist() for each in both)
    for sample in (sample for group in flight for sample in group.samples):
        lags.add(sample, 0, lambda version: -version)
    row = {"samples": float(K * len(flight)), "lag": lags.mean, "lag/max": float(max(lags.steps))}
    for tenth, lag in enumerate(lags.profile):
        row |= {f"lag/{tenth}": lag, f"flight/{tenth}": found[tenth], f"on_policy/{tenth}": ideal[tenth]}
    row |= {f"decay {decay}": each for decay, each in zip(DECAYS, found[TENTHS:], strict=True)}
    return row | {"on_policy": ideal[TENTHS]}


def main(seeds: int = 3, lr: float = 2e-4, every: int = 16, passes: int = 2) -> None:
    torch.set_num_threads(1)
    rows = [measure(seed, lr, every, passes) for seed in range(seeds)]
    for name in rows[0]:
        values = [row[name] for row in rows]
        print(f"{name:12} {fmean(values):.3f} ±{interval(values):.3f}")


if __name__ == "__main__":
    run(main)
