"""GRPO in one process and one file: data -> rollout -> reward -> advantage -> loss -> step -> new weights.

tailrace does the same with processes, schedules, a ledger and recovery around it: see loop.py beside this.

python examples/nano.py    # two minutes on a core, without a GPU
"""

import random
from pathlib import Path

from transformers import AutoTokenizer

import tailrace
from tailrace.algo.base import AlgorithmSettings
from tailrace.contracts.sampling import SamplingSettings
from tailrace.contracts.trainer import TrainerSettings
from tailrace.drivers.engine.settings import NativeEngineSettings
from tailrace.types import SampleId

MODEL = Path(__file__).parent / "quickstart" / "model"
TASK = "State the final answer to the following arithmetic problem:"  # the words that the model knows
PROMPTS, GROUP = 16, 8

SAMPLING = SamplingSettings(max_completion_tokens=64)
ENGINE = NativeEngineSettings(dtype="float32", max_num_seqs=PROMPTS * GROUP)
TRAINER = TrainerSettings(dtype="float32", learning_rate=4e-4, betas=(0.9, 0.95), threads=1)
ALGORITHM = AlgorithmSettings(old_policy="recorded")  # ratios to the log-probs of the engine


def draw(rng: random.Random) -> tuple[str, str]:
    """Return a prompt and its answer."""
    terms = [rng.randrange(10) for _ in range(rng.randint(2, 6))]
    return f"{TASK} {' + '.join(map(str, terms))} =\n", str(sum(terms))


def reward(completion: str, answer: str) -> float:
    """Return 1 if the completion ends with the answer, else 0."""
    return float(completion.split()[-1:] == [answer])


def rollout(engine: tailrace.NativeEngine, prompts: list[list[int]], seed: int) -> list[list[tuple]]:
    """Return GROUP responses to each prompt: token ids, and the log-prob of each."""
    for p, ids in enumerate(prompts):
        for k in range(GROUP):
            number = (seed * len(prompts) + p) * GROUP + k
            engine.submit(tailrace.GenerationRequest(f"{p}/{k}", ids, [], seed=number))
    done = {}
    while not engine.idle:
        for output in engine.step():  # one token of each request; requests end at any step
            done[output.id] = output.ids, output.behavior_logprobs
    return [[done[f"{p}/{k}"] for k in range(GROUP)] for p in range(len(prompts))]


def main(rounds: int = 20) -> list[float]:
    """Train, and return the mean reward of each round."""
    rng, means = random.Random(0), []
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    engine = tailrace.NativeEngine(MODEL, ENGINE, SAMPLING)
    trainer = tailrace.TorchTrainer(MODEL, TRAINER, ALGORITHM, SAMPLING)
    for round in range(rounds):
        rows = [draw(rng) for _ in range(PROMPTS)]
        prompts = [tokenizer.encode(text) for text, _ in rows]
        groups, rewards = [], []
        for p, responses in enumerate(rollout(engine, prompts, round)):
            texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids, _ in responses]
            scores = [reward(text, rows[p][1]) for text in texts]
            advantages = tailrace.group_advantages(scores, scale="group")
            samples = [
                tailrace.TrainingSample(SampleId(p, round, k), prompts[p], ids, logprobs, advantages[k])
                for k, (ids, logprobs) in enumerate(responses)
            ]
            groups.append(samples)
            rewards += scores
        trainer.accumulate(groups)  # forward and backward: gradients of the loss
        stats = trainer.step()
        engine.load(dict(trainer.export_weights()), version=round + 1, kv="recompute")
        means.append(sum(rewards) / len(rewards))
        print(f"round {round} reward {means[-1]:.3f} loss {stats.loss:+.4f} tokens {stats.num_tokens}")
    return means


if __name__ == "__main__":
    main()
