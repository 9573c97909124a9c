"""From rows to a trained model in one file: own data, own reward, own schedule, and what comes back.

python examples/loop.py    # a minute on two cores, without a GPU
"""

import json
import random
from pathlib import Path

import tailrace

HERE, OUT = Path(__file__).parent, Path("runs/loop")
TASK = "State the final answer to the following arithmetic problem:"  # the words that the model knows


def write_sums(path: Path, num: int, seed: int) -> None:
    """Rows of a JSONL file: `prompt` is read by tailrace, the other columns by the reward."""
    draw = random.Random(seed)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(num):
            terms = [draw.randrange(10) for _ in range(draw.randint(2, 6))]
            row = {"prompt": f"{TASK} {' + '.join(map(str, terms))} =\n", "answer": str(sum(terms))}
            file.write(json.dumps(row) + "\n")


def exact(completion: str, answer: str) -> float:
    """1 if the completion ends with the answer. It runs in processes of its own."""
    return float(completion.split()[-1:] == [answer])


async def eager(run: tailrace.Run, groups_per_round: int) -> None:
    """One optimizer step a round. Gradients of complete groups are computed while others are generated."""
    run.declare(staleness=0)
    async for _ in run.rounds():
        run.pool.launch(run.prompts(groups_per_round))
        async for groups in run.pool.stream(groups_per_round):
            await run.accumulate(groups)
        await run.step()
        await run.publish()


def main(rounds: int = 20) -> tailrace.RunSummary:
    OUT.mkdir(parents=True, exist_ok=True)
    write_sums(OUT / "sums.jsonl", 2000, seed=0)
    config = tailrace.load_config(
        {
            "run": {"rounds": rounds, "group_size": 8, "eval_every": rounds, "eval_prompts": 128},
            "schedule": {"name": "eager", "groups_per_round": 16},
            "model": {"path": str(HERE / "quickstart" / "model")},
            "data": {"kind": "rows", "path": str(OUT / "sums.jsonl")},
            "sampling": {"max_completion_tokens": 64},
            "trainer": {"learning_rate": 4e-4, "betas": [0.9, 0.95]},
        }
    )
    return tailrace.train(config, OUT / "run", schedule=eager, reward=exact)


if __name__ == "__main__":
    summary = main()
    print(f"reward on held-out prompts: {summary.eval}; tokens: {summary.tokens}; model: {OUT}/run/model")
