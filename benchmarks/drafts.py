"""Drafts of the embedded engine (engine.py --drafts): tokens a step, CPU seconds of a round with and without;
and those of a pass that verifies, over those of a prefill.

Groups of eight responses to explanations of sums, which end where the model ends them. An epoch has the same
prompts with other noise; in the second one requests have the responses of the first as references. Rounds
with and without drafts alternate, and which of the two is first, too. Seconds are those of the process on its
CPU, so that other programs disturb them less; that they are equal work is checked by the tokens. The tokens
of a request and step are one, and the drafts that were right: of its own text, of other members of its group,
or of its prompt's last epoch.
"""

import random
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from tailrace.contracts.engine import GenerationRequest
from tailrace.contracts.sampling import SamplingSettings
from tailrace.drivers.engine.native import engine as native
from tailrace.drivers.engine.native.cache import Sequence as Request
from tailrace.drivers.engine.native.drafts import Drafter
from tailrace.drivers.engine.native.engine import NativeEngine
from tailrace.drivers.engine.native.matches import Match, Matches
from tailrace.drivers.engine.settings import NativeEngineSettings
from tailrace.sim.cluster import model_of, multiplied_parameters
from tailrace.types import SamplingParams

MEMBERS, ROWS = 8, (1, 2, 3, 4, 6, 8, 12, 16)
BAR = 1.02
"""Seconds of a round with drafts over those without: the most that is allowed."""
NUM_VERIFIED, NUM_VERIFIED_TOKENS = 2, 256
Responses = Mapping[str, list[int]]


class SourcedMatches(Matches):
    """Remembers from which text the newest match of each request is."""

    def __init__(self, prompt: Sequence[int]) -> None:
        super().__init__(prompt)
        self._last_epoch, self.sources = set[int](), dict[int, str]()

    def refer(self, references: Sequence[Sequence[int]]) -> None:
        first = len(self._texts)
        super().refer(references)
        self._last_epoch |= {*range(first, len(self._texts))}

    def find(self, tokens: Sequence[int], num: int) -> Match | None:
        if match := super().find(tokens, num):
            number, _ = self._places[(*tokens[-match.length :],)]
            other = "last epoch" if number in self._last_epoch else "members"
            self.sources[id(tokens)] = "own text" if self._texts[number] is tokens else other
        return match


class SourcedDrafter(Drafter):
    """Counts the drafts that were right by the text that they are from."""

    def __init__(self, max_tokens: int) -> None:
        super().__init__(max_tokens)
        self.accepted = Counter[str]()

    def observe(self, request: Request, num_drafted: int, num_right: int) -> None:
        assert isinstance(request.matches, SourcedMatches)
        self.accepted[request.matches.sources[id(request.tokens)]] += num_right
        super().observe(request, num_drafted, num_right)


native.Matches = SourcedMatches  # type: ignore[attr-defined]


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
        found = NativeEngineSettings.model_validate(settings)
        self._engine = NativeEngine(model, found, limits)
        self._drafter = SourcedDrafter(found.max_draft_tokens)
        if found.drafts == "auto":
            self._engine._drafter = self._drafter
        self._max_tokens = max_tokens

    def serve(
        self, prompts: list[list[int]], temperature: float, epoch: int, references: Responses | None
    ) -> tuple[Responses, dict[str, Any]]:
        """One round: the responses by request, and its figures."""
        sampling = SamplingParams(self._max_tokens, temperature=temperature)
        self._engine._matches.clear()  # the last requests may hold texts of a round with the same responses
        for number, prompt in enumerate(prompts):
            before = [references[f"{number}/{member}"] for member in range(4)] if references else []
            for member in range(MEMBERS):
                seed = 1_000 * epoch + MEMBERS * number + member
                request = GenerationRequest(
                    f"{number}/{member}", prompt, (), seed, sampling=sampling, references=before
                )
                self._engine.submit(request)
        responses, before_sums = dict[str, list[int]](), self._engine.usage().decoded
        self._drafter.accepted.clear()
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
            "accepted_by_source": dict(self._drafter.accepted),
            "requests_of_steps": sums.running,
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


def verification(model: Path, repeats: int) -> dict[str, float]:
    """CPU seconds of a prefill of prompts with completions, and of a pass over the same tokens that verifies
    the completions and keeps them; medians, the two alternated. verify_positions: that of [sim.engines], and
    the part of it that follows from the FLOPs of the projection to the vocabulary."""
    engine = NativeEngine(model, NativeEngineSettings(), SamplingSettings())
    sampling = SamplingParams(NUM_VERIFIED_TOKENS, ignore_end_of_text=True)
    prompts = dict(enumerate(prompts_of(model, NUM_VERIFIED)))
    for seed, prompt in prompts.items():
        engine.submit(GenerationRequest(str(seed), prompt, (), seed, sampling=sampling))
    completions: dict[str, list[int]] = {}
    while not engine.idle:
        completions |= {output.id: output.ids for output in engine.step()}
    weights, fill, spent_s = dict(engine.weights()), engine._fill, defaultdict[int, float](float)

    def timed(admissions: Any) -> None:
        start_s = time.process_time()
        fill(admissions)
        spent_s[engine._version] += time.process_time() - start_s

    engine._fill = timed  # type: ignore[method-assign]
    for version in range(1, 2 * repeats + 1):
        engine.load(weights, version=version, kv="recompute")
        for seed, prompt in prompts.items():
            more = GenerationRequest(
                *(str(seed), prompt, completions[str(seed)], seed),
                sampling=sampling,
                max_completion_tokens=NUM_VERIFIED_TOKENS + 1,
                max_age=0 if version % 2 else None,
                oldest_version=0,
            )
            engine.submit(more)
        while not engine.idle:
            engine.step()
    sums = engine.usage().decoded
    num_tokens = NUM_VERIFIED * NUM_VERIFIED_TOKENS
    assert sums.verified == repeats * num_tokens, "not all were kept"
    num_positions = num_tokens + sum(map(len, prompts.values()))
    passes = ([spent_s[each] for each in range(first, 2 * repeats + 1, 2)] for first in (1, 2))
    verify_s, prefill_s = map(median, passes)
    shape = model_of("--model", str(model))
    projected = shape.hidden_size * shape.vocabulary / (shape.num_layers * multiplied_parameters(shape))
    return {
        "verify_cpu_s": verify_s,
        "prefill_cpu_s": prefill_s,
        "ratio": verify_s / prefill_s,
        "verify_positions": (verify_s / prefill_s - 1) * num_positions / num_tokens,
        "projected_positions": projected,
    }


def measure(model: Path, *, groups: int, max_tokens: int, repeats: int) -> dict[str, Any]:
    """All rounds: by temperature and epoch, `repeats` with drafts and without."""
    torch.set_num_threads(1)
    by_rows = seconds_by_rows(model)
    print("rows, CPU ms of a step:", " ".join(f"{rows}: {1e3 * s:.1f}" for rows, s in by_rows.items()))
    verified = verification(model, repeats)
    print(
        f"a pass that verifies over a prefill: {verified['ratio']:.2f} ({verified['verify_cpu_s']:.2f} and "
        f"{verified['prefill_cpu_s']:.2f} s of CPU); verify_positions {verified['verify_positions']:.2f}, "
        f"of the projection's FLOPs alone {verified['projected_positions']:.2f}",
        flush=True,
    )
    prompts, results = prompts_of(model, groups), []
    engines = {drafts: Rounds(model, max_tokens, drafts=drafts) for drafts in ("off", "auto")}
    for temperature in (1.0, 0.7):
        references: Responses | None = None
        for epoch in (1, 2):
            rows: dict[str, list[dict[str, Any]]] = {"off": [], "auto": []}
            last: dict[str, Responses] = {}
            for repeat in range(repeats):
                for drafts, engine in [*engines.items()][:: -1 if repeat % 2 else 1]:
                    last[drafts], figures = engine.serve(prompts, temperature, epoch, references)
                    rows[drafts].append(figures)
            equal = sum(last["off"][id] == ids for id, ids in last["auto"].items()) / len(last["auto"])
            off, auto = (median(each["cpu_s"] for each in rows[drafts]) for drafts in ("off", "auto"))
            gain = median(each["tokens_a_request_and_step"] for each in rows["auto"])
            num_requests = sum(each["requests_of_steps"] for each in rows["auto"])
            sources = sum((Counter(each["accepted_by_source"]) for each in rows["auto"]), Counter[str]())
            of_sources = ", ".join(f"{name} {num / num_requests:.2f}" for name, num in sources.items())
            print(
                f"temperature {temperature}, epoch {epoch}: {gain:.2f} tokens a request and step (1 + "
                f"{of_sources or 0}), round {off:.2f} -> {auto:.2f} s of CPU ({auto / off:.2f}), equal "
                f"responses {equal:.0%}",
                flush=True,
            )
            results.append(
                {"temperature": temperature, "epoch": epoch, "equal_responses": equal, "ratio": auto / off}
                | {"rounds": rows}
            )
            references = last["off"]
    slowest = max(float(each["ratio"]) for each in results)
    verdict = "held" if slowest <= BAR else "not held"
    print(f"never slower by more than {BAR - 1:.0%}: {verdict}, the slowest ratio is {slowest:.3f}")
    return {"step_cpu_s_by_rows": by_rows, "verification": verified, "rounds": results, "slowest": slowest}
