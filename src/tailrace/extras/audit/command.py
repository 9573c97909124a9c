"""`tailrace check-reward`: what the reward of a config pays for.

The scorers of the run score the data's own answers, and responses that deserve nothing: empty, the prompt,
constants, another row's answer, the right one cut off. All are scored twice.

A response is paid if it gets what the right answer gets; an empty one, from half of that on. That is a fault.
What other responses get in part is a warning. Without a known right answer any reward above 0 is a fault.
"""

import asyncio
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import NamedTuple

from rich.table import Column, Table
from typing_extensions import override

from tailrace import clock
from tailrace.config import LiveConfig, load_config
from tailrace.contracts.reward import Rewards
from tailrace.drivers.assembly.check import begin_start, check_scorers
from tailrace.drivers.assembly.environments import calls_reward_functions, training_prompts
from tailrace.drivers.assembly.open import open_scorers
from tailrace.drivers.commands.tables import open_console, print_table
from tailrace.drivers.data.encoding import Tokenizer, load_tokenizer, text_of
from tailrace.drivers.data.open import CHECKED_ROWS, usable_prompts
from tailrace.drivers.kinds.hooks import RewardAudit
from tailrace.drivers.reward.calls import OWN_ARGUMENTS, column_of
from tailrace.drivers.reward.checkers import TRUTH_COLUMNS
from tailrace.drivers.reward.functions import Scorer
from tailrace.drivers.reward.kinds import NOT_APPLICABLE
from tailrace.drivers.workers.base import LocalHostSettings
from tailrace.errors import ConfigError, RewardFailed, TailraceError
from tailrace.types import Group, Prompt, Sample, SampleId

SOLUTION_COLUMNS = ("solution", "canonical_solution", "code")
"""Columns of programs, where the ground truth of a row are test cases."""
TAGGED = "<answer>\n{answer}\n</answer>"
FORMS = (
    "{answer}",
    "\\boxed{{answer}}",
    TAGGED,
    f"<think>\n\n</think>\n{TAGGED}",
    "```python\n{answer}\n```",
)
"""Forms of a right response. A reward needs to know one."""
RIGHT, EMPTY, CUT_OFF = "the right answer", "an empty response", "the right answer cut off"
UNDESERVING = {EMPTY: "", "the constant '0'": "0", "the constant 'yes'": "yes", "a long response": "0" * 200}
MAX_TIMEOUTS = 3
"""Calls that take too long after which no more are made."""
SHORT_ROWS, SHORT_S = 4, 10.0
"""Rows and seconds of the short form."""


class RewardUnsound(TailraceError):
    """The reward pays for nothing, not for the right answer, not the same twice, or fails."""


class AuditedResponse(NamedTuple):
    """A response to the prompt of this place among those that are scored. `what` it is, for messages."""

    place: int
    what: str
    text: str


@dataclass(slots=True)
class Audit:
    """The rewards of responses to these prompts. `answers`: the right ones of each; the first is used."""

    rewards: Rewards
    prompts: Sequence[Prompt]
    answers: Sequence[Sequence[str]]
    tokenizer: Tokenizer
    found: dict[AuditedResponse, float] = field(default_factory=dict)
    changed: list[str] = field(default_factory=list)
    """Responses that got another reward the second time."""
    failures: dict[AuditedResponse, str] = field(default_factory=dict)
    slowest: tuple[float, str] = (0.0, "nothing")
    num_timeouts: int = 0

    async def score_all(self, forms: Sequence[str]) -> None:
        """Score the right answers in all forms, what follows from the best form, and all a second time."""
        totals = dict.fromkeys(forms, 0.0)
        for place, answers in enumerate(self.answers):
            for form in forms if answers else ():
                response = AuditedResponse(place, RIGHT, _filled(form, answers[0]))
                totals[form] += await self._score(response) or 0
        for response in self._undeserving(max(forms, key=totals.__getitem__)):
            await self._score(response)
        for response, first in [*self.found.items()]:
            second = await self._score(response)
            if second not in (None, first):
                self.changed.append(f"{self._named(response)}: {first:.3g}, then {second:.3g}")

    def _undeserving(self, form: str) -> Iterator[AuditedResponse]:
        """Return responses without a right answer of their row."""
        for place, (prompt, answers) in enumerate(zip(self.prompts, self.answers, strict=True)):
            texts = UNDESERVING | {"the prompt": _question(prompt)}
            if answers:
                whole, others = _filled(form, answers[0]), (*self.answers[place:], *self.answers[:place])
                texts[CUT_OFF] = whole[: len(whole) // 2].strip()
                other = next((each[0] for each in others if each and not _is_one_of(each[0], answers)), None)
                texts["another row's answer"] = _filled(form, other) if other else ""
            for what, text in texts.items():
                if not _is_one_of(text, answers) and (text or what == EMPTY):
                    yield AuditedResponse(place, what, text)

    async def _score(self, response: AuditedResponse) -> float | None:
        """Return the reward; None where there is none, or the model cannot write such a response."""
        ids = self.tokenizer.encode(response.text, add_special_tokens=False)
        is_same = text_of(self.tokenizer)(ids).strip() == response.text.strip()
        if not is_same or self.num_timeouts >= MAX_TIMEOUTS:
            return None
        sample = Sample(SampleId(response.place, 0, 0), Group(self.prompts[response.place], 1, []))
        sample.extend(ids, [0.0] * len(ids), 0)
        sample.finish_reason = "length" if response.what == CUT_OFF else "stop"
        begun_s = clock.now()
        try:
            self.found[response] = float(await self.rewards.score(sample))
        except RewardFailed as why:
            if why.reason == NOT_APPLICABLE:
                return None
            self.failures[response] = ": ".join([why.reason, *why.detail.splitlines()[-1:]])
            sample.timed_out = why.reason == "timeout"
        self.slowest = max(self.slowest, (clock.now() - begun_s, self._named(response)))
        if sample.timed_out:
            self.num_timeouts += 1
            self.failures[response] = "a call takes longer than its time limit"
        return self.found.get(response)

    def faults(self) -> Iterator[str]:
        """Say what is wrong, one sentence each."""
        whys = defaultdict[str, dict[int, str]](dict)
        for response, why in self.failures.items():
            whys[response.what][response.place] = why
        for what, failed in whys.items():
            yield f"{what} has no reward on {self._rows(failed)}: {next(iter(failed.values()))}"
        if self.num_timeouts >= MAX_TIMEOUTS:
            yield f"no more was scored after {MAX_TIMEOUTS} calls that took too long"
        right, low = self._rewards().get(RIGHT, {}), self._least()
        if unpaid := {place: top for place, top in right.items() if top <= min(low.get(place, 0), 0)}:
            problem = "no more than a wrong one; if a response needs another form, give it with --answer"
            yield f"{RIGHT} gets {_range(unpaid)} on {self._share(unpaid, right)}, {problem}"
        yield from self._paid(in_full=True)
        if self.changed:
            many = f"{len(self.changed)} of {len(self.found)} responses get another reward the second time"
            yield f"not deterministic: {many}: {self.changed[0]}"

    def warnings(self) -> Iterator[str]:
        """Say which responses get a part of what the right answer gets, one sentence each."""
        yield from self._paid(in_full=False)

    def _paid(self, *, in_full: bool) -> Iterator[str]:
        rewards, low = self._rewards(), self._least()
        right = rewards.pop(RIGHT, {})
        than = f"; {RIGHT} gets {_range(right)}" if right else ""
        for what, of in rewards.items():
            paid = {
                place: reward
                for place, reward in of.items()
                if self._is_paid(what, place, reward) == in_full and (in_full or reward > low[place])
            }
            if paid:
                yield f"{what} gets {_range(paid)} on {self._share(paid, of)}{than}"

    def table(self) -> Table:
        """The mean reward of each response over the rows, and the share that is above 0."""
        columns = (Column(name, justify="right") for name in ("mean", "above 0", "rows"))
        table = Table("response", *columns)
        for what, of in self._rewards().items():
            above = sum(reward > 0 for reward in of.values()) / len(of)
            table.add_row(what, f"{fmean(of.values()):.3g}", f"{above:.0%}", str(len(of)))
        return table

    def _rewards(self) -> dict[str, dict[int, float]]:
        """The rewards of each response by place; of the right answer that of its best form."""
        rewards = defaultdict[str, dict[int, float]](dict)
        for response, reward in self.found.items():
            of = rewards[response.what]
            of[response.place] = max(reward, of.get(response.place, reward))
        return dict(rewards)

    def _least(self) -> dict[int, float]:
        """The least reward of a response to each prompt that is not the right answer."""
        others = [of for what, of in self._rewards().items() if what != RIGHT]
        places = {place for of in others for place in of}
        return {place: min(of[place] for of in others if place in of) for place in places}

    def _is_paid(self, what: str, place: int, reward: float) -> bool:
        """Whether a reward is that of the right answer, where another response to the prompt gets less."""
        top, low = self._rewards().get(RIGHT, {}).get(place), self._least()[place]
        if top is None or top <= low:
            return reward > 0
        return reward >= ((top + low) / 2 if what == EMPTY else top)

    def _share(self, places: Collection[int], of: Collection[int]) -> str:
        return f"{len(places)} of {len(of)} rows ({self._rows(places)})"

    def _named(self, response: AuditedResponse) -> str:
        return f"{response.what}, {self._rows([response.place])}"

    def _rows(self, places: Collection[int]) -> str:
        chosen = [self.prompts[place] for place in places]
        numbers = sorted(each.index if each.row_number is None else each.row_number for each in chosen)
        return f"row{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"


def _filled(form: str, answer: str) -> str:
    """Return a response. The first form takes a whole solution; the others what follows "####" in it."""
    return form.replace("{answer}", answer if form == FORMS[0] else answer.rpartition("####")[2].strip())


def _question(prompt: Prompt) -> str:
    given = prompt.given
    if isinstance(given, list):
        given = next((each["content"] for each in reversed(given) if each["role"] == "user"), None)
    return given if isinstance(given, str) else prompt.text


def _is_one_of(text: str, answers: Sequence[str]) -> bool:
    with suppress(ValueError):
        if float(text) in map(float, answers):
            return True
    return text.strip().lower() in (answer.strip().lower() for answer in answers)


def _range(rewards: Mapping[int, float]) -> str:
    ends = f"{min(rewards.values()):.3g}", f"{max(rewards.values()):.3g}"
    return " to ".join(dict.fromkeys(ends))


def _answers_of(config: LiveConfig, row: Mapping[str, object], column: str | None) -> list[str]:
    """Return the right answers of a row; none where they are unknown. Their column is a usual one, or else
    the only one, besides the prompt's, that a parameter of a reward function names."""
    code = config.reward.code
    usual: Sequence[str] = TRUTH_COLUMNS
    if code and column_of(row, code.column) is not None:
        usual = SOLUTION_COLUMNS
    if calls_reward_functions(config):
        prompts = {getattr(source, "prompt_column", "") for source in config.data.sources}
        columns = {*Scorer.load(config.reward, config.data).columns(row)} - prompts
        columns -= {*OWN_ARGUMENTS, "data_source"}
        usual = (*usual, *columns) if len(columns) == 1 else usual
    given = [column, *(str(each.arguments.get("column", "")) for each in config.reward.functions)]
    named = [column_of(row, name) for name in [name for name in given if name] or usual]
    truth = next((each for each in named if each not in (None, "", [])), None)
    truths = truth if isinstance(truth, list) else [truth]
    return [str(each) for each in truths if isinstance(each, str | float | int)]


def _scoring(config: LiveConfig, judges: bool) -> LiveConfig:
    """Return the config of what scores, on this host. Raises a ConfigError if nothing does."""
    if not (calls_reward_functions(config) or config.reward.code or (judges and config.reward.judges)):
        problem, remedy = "the environment gives the rewards itself", "test the environment"
        if config.reward.judges:
            problem, remedy = "only judges score, whose answers cost", "ask for them with --judges"
        raise ConfigError("reward.function", None, problem, remedy)
    return config.changed(reward={} if judges else {"judges": ()}, host=LocalHostSettings())


async def _audited(
    config: LiveConfig,
    prompts: Sequence[Prompt],
    forms: Sequence[str] = FORMS,
    column: str | None = None,
    limit_s: float | None = None,
) -> Audit:
    answers = [_answers_of(config, prompt.row, column) for prompt in prompts]
    with TemporaryDirectory() as scratch:
        async with open_scorers(config, Path(scratch)) as rewards:
            audit = Audit(rewards, prompts, answers, load_tokenizer(config.model.path))
            with suppress(TimeoutError):
                async with asyncio.timeout(limit_s):
                    await audit.score_all(forms)
    return audit


class ShortAudit(RewardAudit):
    """The short form, for a dry run."""

    @override
    def right_answers(self, config: LiveConfig, row: Mapping[str, object]) -> list[str]:
        return _answers_of(config, row, None)

    @override
    def faults(self, config: LiveConfig) -> list[str]:
        try:
            config = _scoring(config, judges=False)
        except ConfigError:
            return []
        prompts = usable_prompts(training_prompts(config), SHORT_ROWS)
        try:
            audit = clock.run(_audited(config, prompts, limit_s=SHORT_S), virtual=False)
        except TailraceError as why:
            return [str(why)]
        return [f"reward: {fault}" for fault in audit.faults()]


def check_reward(
    config: Path,
    /,
    *,
    rows: int = CHECKED_ROWS,
    answer: str | None = None,
    column: str | None = None,
    judges: bool = False,
    overrides: Mapping[str, str],
) -> None:
    """Score right answers and responses that deserve nothing, and say what pays; exit code 1 at a fault.

    Args:
        config: a TOML file.
        rows: of the data, from the first of the run's order.
        answer: the form of a right response, such as '<answer>{answer}</answer>', besides the usual ones.
        column: of the right answer; by default that of the checkers.
        judges: ask the judges, too.
    """
    if rows < 1:
        raise ConfigError("--rows", rows, "no row is scored", "choose at least 1")
    if answer is not None and "{answer}" not in answer:
        raise ConfigError("--answer", answer, "the answer is not in it", "write {answer} where it belongs")
    loaded = _scoring(LiveConfig.of(load_config(config, overrides)), judges)
    begin_start(loaded)
    prompts = usable_prompts(training_prompts(loaded), rows)
    check_scorers(loaded, prompts)
    forms = [*FORMS, answer] if answer else FORMS
    audit = clock.run(_audited(loaded, prompts, forms, column), virtual=False)
    console, faults, warnings = open_console(), [*audit.faults()], [*audit.warnings()]
    print_table(console, audit.table())
    for kind, said in {"fault": faults, "warning": warnings}.items():
        for each in said:
            console.print(f"{kind:10}{each}")
    if not any(audit.answers):
        columns = ", ".join({name: None for prompt in prompts for name in prompt.row}) or "none"
        console.print(f"unknown   the right answers (columns: {columns}); name theirs with --column")
    console.print(f"scored    {len(audit.found)} responses to {len(prompts)} rows, twice")
    seconds, where = audit.slowest
    console.print(
        f"slowest   {seconds:.3g} s ({where}); the limit of a call is {loaded.reward.timeout_s:g} s"
    )
    if not faults:
        partly = ", ".join(each.partition(" gets ")[0] for each in warnings)
        full = f"only {RIGHT} gets the full reward" if any(audit.answers) else "no constant is paid"
        console.print(f"verdict   {full}{f'; a part of it gets {partly}' if partly else ''}")
    if faults:
        raise RewardUnsound(f"faults of the reward: {len(faults)}; a policy learns what is paid")
