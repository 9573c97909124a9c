"""Write two files of chat messages that ask for sums of numbers with two digits, and their answers.

python examples/smollm2/make_sums.py

train.jsonl      each asks for the number only
long_tail.jsonl  one in eight asks to explain each step, which takes ten times as many tokens
"""

import json
import random
from pathlib import Path

NUM_ROWS = 2000
EXPLAINED = {"train": 0.0, "long_tail": 1 / 8}
"""The share of prompts that ask for an explanation, by file."""


def main() -> None:
    for name, explained in EXPLAINED.items():
        chance, kind = random.Random(0), random.Random(1)
        rows = []
        for _ in range(NUM_ROWS):
            a, b = chance.randrange(10, 100), chance.randrange(10, 100)
            explain = kind.random() < explained
            how = "Explain each step, then give the answer." if explain else "Answer with the number only."
            message = {"role": "user", "content": f"What is {a} + {b}? {how}"}
            rows.append(json.dumps({"prompt": [message], "answer": str(a + b)}))
        path = Path(__file__).with_name(f"{name}.jsonl")
        path.write_text("\n".join(rows) + "\n", encoding="utf-8")
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
