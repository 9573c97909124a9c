"""Drafts of the embedded engine (engine.py --drafts): tokens a step, CPU seconds of a round with and without.

Groups of eight responses to explanations of sums, which end where the model ends them. An epoch has the same
prompts with other noise; in the second one requests have the responses of the first as references. Rounds
with and without drafts alternate. Seconds are those of the process on its CPU, so that other programs
disturb them less; that they are equal work is checked by the tokens.
"""

import random
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch

from tailrace.contracts.engine import GenerationRequest
from tailrace.contracts.sampling import SamplingSettings
from tailrace.drivers.engine.native.engine import NativeEngine
from tailrace.drivers.engine.settings import NativeEngineSettings
from tailrace.types import SamplingParams

MEMBERS, ROWS = 8, (1, 2, 3, 4, 6, 8, 12, 16)
Responses = Mapping[str, list[int]]


def prompts_of(model: Path, num: int) -> list[list[int]]:
    """Questions with the model's chat template."""
    from transformers import AutoTokenizer

    tokenizer, chance = AutoTokenizer.from_pretrained(model), random.Random(1)
    sums = [f"{chance.randrange(10, 99)} + {chance.randrange(10, 99)}" for _ in range(num)]
    texts = [f"What is {each}? Explain each step, then say the answer." for each in sums]
    chats = [[{"role": "user", "content": text}] for text in texts]
    return [
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
        for chat in chats
    ]


class Rounds:
    """An engine, and rounds of all prompts."""

    def __init__(self, model: Path, max_tokens: int, **settings: object) -> None:
        limits = SamplingSettings(max_completion_tokens=max_tokens)
        self._engine = NativeEngine(model, NativeEngineSettings.model_validate(settings), limits)
        self._max_tokens = max_tokens

    def serve(
        self, prompts: list[list[int]], temperature: float, epoch: int, references: Responses | None
    ) -> tuple[Responses, dict[str, float]]:
        """One round: the responses by request, and its figures."""
        sampling = SamplingParams(self._max_tokens, temperature=temperature)
        for number, prompt in enumerate(prompts):
            before = [references[f"{number}/{member}"] for member in range(4)] if references else []
            for member in range(MEMBERS):
                seed = 1_000 * epoch + MEMBERS * number + member
                request = GenerationRequest(
                    f"{number}/{member}", prompt, (), seed, sampling=sampling, references=before
                )
                self._engine.submit(request)
        responses, before_sums = dict[str, list[int]](), self._engine.usage().decoded
        start_s = time.process_time()
        while not self._engine.idle:
            responses |= {output.id: output.ids for output in self._engine.step()}
        seconds, sums = time.process_time() - start_s, self._engine.usage().decoded - before_sums
        return responses, {
            "cpu_s": seconds,
            "tokens": sums.generated,
            "steps": sums.steps,
            "tokens_a_request_and_step": sums.generated / sums.running,
            "checked": sums.checked,
            "accepted": sums.accepted,
        }


def seconds_by_rows(model: Path) -> dict[int, float]:
    """CPU seconds of a forward pass with the head over so many rows of one sequence after 128 tokens: median
    of five, the numbers of rows alternated."""
    engine = NativeEngine(model, NativeEngineSettings(), SamplingSettings())
    ids, seconds = [*range(1000, 1000 + 128 + ROWS[-1])], dict[int, list[float]]()
    with torch.inference_mode():
        pieces = engine._pieces_of(ids, 128)
        for _ in range(5):
            for rows in ROWS:
                start_s = time.process_time()
                engine._model.logits(engine._read(pieces, ids, range(127, 127 + rows)))
                seconds.setdefault(rows, []).append(time.process_time() - start_s)
    return {rows: median(each) for rows, each in seconds.items()}


def measure(model: Path, *, groups: int, max_tokens: int, repeats: int) -> dict[str, Any]:
    """All rounds: by temperature and epoch, `repeats` with drafts and without."""
    torch.set_num_threads(1)
    by_rows = seconds_by_rows(model)
    print("rows, CPU ms of a step:", " ".join(f"{rows}: {1e3 * s:.1f}" for rows, s in by_rows.items()))
    prompts, results = prompts_of(model, groups), []
    engines = {drafts: Rounds(model, max_tokens, drafts=drafts) for drafts in ("off", "auto")}
    for temperature in (1.0, 0.7):
        references: Responses | None = None
        for epoch in (1, 2):
            rows: dict[str, list[dict[str, float]]] = {"off": [], "auto": []}
            last: dict[str, Responses] = {}
            for _ in range(repeats):
                for drafts, engine in engines.items():
                    last[drafts], figures = engine.serve(prompts, temperature, epoch, references)
                    rows[drafts].append(figures)
            equal = sum(last["off"][id] == ids for id, ids in last["auto"].items()) / len(last["auto"])
            off, auto = (median(each["cpu_s"] for each in rows[drafts]) for drafts in ("off", "auto"))
            gain = median(each["tokens_a_request_and_step"] for each in rows["auto"])
            print(
                f"temperature {temperature}, epoch {epoch}: {gain:.2f} tokens a request and step, round "
                f"{off:.2f} -> {auto:.2f} s of CPU ({auto / off:.2f}), equal responses {equal:.0%}",
                flush=True,
            )
            results.append(
                {"temperature": temperature, "epoch": epoch, "equal_responses": equal, "ratio": auto / off}
                | {"rounds": rows}
            )
            references = last["off"]
    return {"step_cpu_s_by_rows": by_rows, "rounds": results}
