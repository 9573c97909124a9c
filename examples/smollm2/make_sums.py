"""Write three files of chat messages that ask for sums of numbers with two digits, and their answers.

python examples/smollm2/make_sums.py

train.jsonl      each asks for the number only
long_tail.jsonl  one in eight asks to explain each step, which takes ten times as many tokens
held_out.jsonl   the same of numbers that no other file adds up, for an evaluation
"""

import json
import random
from itertools import product
from pathlib import Path

NUM_ROWS, NUM_HELD_OUT = 2000, 1024
EXPLAINED = 1 / 8
"""The share of prompts that ask for an explanation."""
Pair = tuple[int, int]


def write(name: str, pairs: list[Pair], explained: float) -> None:
    kind, rows = random.Random(1), []
    for a, b in pairs:
        explain = kind.random() < explained
        how = "Explain each step, then give the answer." if explain else "Answer with the number only."
        message = {"role": "user", "content": f"What is {a} + {b}? {how}"}
        rows.append(json.dumps({"prompt": [message], "answer": str(a + b)}))
    path = Path(__file__).with_name(f"{name}.jsonl")
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    print(f"wrote {path}")


def main() -> None:
    chance, numbers = random.Random(0), range(10, 100)
    pairs = [(chance.choice(numbers), chance.choice(numbers)) for _ in range(NUM_ROWS)]
    others = sorted({*product(numbers, numbers)} - {*pairs})
    write("train", pairs, 0.0)
    write("long_tail", pairs, EXPLAINED)
    write("held_out", random.Random(2).sample(others, NUM_HELD_OUT), EXPLAINED)


if __name__ == "__main__":
    main()
