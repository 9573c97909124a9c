"""Write train.jsonl: chat messages that ask for sums of numbers with two digits, and their answers.

python examples/smollm2/make_sums.py
"""

import json
import random
from pathlib import Path

NUM_ROWS = 2000


def main() -> None:
    chance = random.Random(0)
    rows = []
    for _ in range(NUM_ROWS):
        a, b = chance.randrange(10, 100), chance.randrange(10, 100)
        message = {"role": "user", "content": f"What is {a} + {b}? Answer with the number only."}
        rows.append(json.dumps({"prompt": [message], "answer": str(a + b)}))
    path = Path(__file__).with_name("train.jsonl")
    path.write_text("\n".join(rows) + "\n")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
