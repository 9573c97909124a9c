"""On-policy distillation from teachers that processes of the run load."""

import json
import re
from contextlib import closing
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from helpers.small_run import EXAMPLES, num_steps, train_here, write_small_run
from helpers.tiny_models import letter_tokenizer, save_tiny_model
from tailrace.contracts.engine import counted_tokens
from tailrace.contracts.trainer import TrainerSettings
from tailrace.drivers.trainer.batch import TrainingSample
from tailrace.drivers.trainer.model import PolicyModel
from tailrace.ledger.recovery import stored_sample, totals_of
from tailrace.ledger.store import Store, read_ledger
from tailrace.types import Group, Prompt

STUDENT = EXAMPLES / "quickstart" / "model"
ITSELF = f'path = "{STUDENT}"'
SHORT = ["--run.rounds", "1", "--run.eval_every", "0"]
SCHEDULES = {
    "serial": "groups_per_round = 4, groups_per_step = 2",
    "rolloutpipe": "groups_per_round = 4, groups_per_step = 2",
    "april": "groups_per_round = 2, groups_launched = 4",
    "tailrace": "groups_per_step = 2, groups_in_flight = 6, staleness = 2",
}


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with the student's vocabulary and a token more."""
    folder = tmp_path_factory.mktemp("teacher")
    vocabulary = json.loads((STUDENT / "config.json").read_text())["vocab_size"]
    save_tiny_model(folder, vocab_size=vocabulary + 1, max_position_embeddings=1024)
    tokenizer = AutoTokenizer.from_pretrained(STUDENT)
    tokenizer.add_tokens(["<|more|>"])
    tokenizer.save_pretrained(folder)
    return folder


def run_with(folder: Path, *teachers: str, name: str = "distillation") -> Path:
    """The small run with these teachers; its rows have the topics 0 and 1."""
    path = write_small_run(folder)
    rows = [{"prompt": f"{n % 10} + {n % 7} =\n", "topic": n % 2} for n in range(60)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    tables = [f"[[teacher]]\n{teacher}\n" for teacher in teachers]
    path.write_text("\n".join([path.read_text(), f'[algorithm]\nname = "{name}"\n', *tables]))
    return path


def first_step(folder: Path) -> dict[str, float]:
    """The first object of metrics.jsonl that has a loss."""
    rows = map(json.loads, (folder / "out" / "metrics.jsonl").read_text().splitlines())
    return next(row for row in rows if "loss" in row)


def test_a_model_that_teaches_itself_has_nothing_to_learn(tmp_path: Path) -> None:
    """Its advantages are zero up to rounding, though the rewards of its samples differ."""
    assert train_here(run_with(tmp_path, ITSELF), *SHORT) == 0
    step = first_step(tmp_path)
    assert step["kl"] < 1e-6 and abs(step["loss"]) < 1e-4
    assert step["reward_std"] > 0


def test_another_model_gives_advantages_and_rewards_may_stand_beside_it(tmp_path: Path, other: Path) -> None:
    losses = []
    for number, coef in enumerate(("0.0", "10.0")):
        folder = tmp_path / str(number)
        folder.mkdir()
        words = ["--algorithm.reward_coef", coef, "--run.group_size", "4"]
        assert train_here(run_with(folder, f'path = "{other}"'), *SHORT, *words) == 0
        step = first_step(folder)
        assert step["kl"] > 0.1 and step["grad_norm"] > 0
        losses.append(step["loss"])
    assert abs(losses[0] - losses[1]) > 1e-3


@pytest.mark.parametrize(
    "schedule",
    [  # tests/rollout/test_reference_stage.py has every schedule in virtual time
        pytest.param(name, marks=() if name in ("serial", "tailrace") else pytest.mark.slow)
        for name in SCHEDULES
    ],
)
def test_a_schedule_trains_on_the_log_probs_of_the_teacher_and_its_ledger_balances(
    schedule: str, tmp_path: Path, other: Path
) -> None:
    """The teacher scored the whole of each trained sample; the first step's loss, in which all weights are 1,
    has the difference of log-probs as the advantage of each token."""
    path = run_with(tmp_path, f'path = "{other}"')
    before, after = re.split(r"\[schedule\][^\[]*", path.read_text())
    path.write_text(f'schedule = {{ name = "{schedule}", {SCHEDULES[schedule]} }}\n{before}{after}')
    words = ["--run.rounds", "4", "--run.eval_every", "0", "--ledger.keep_tokens", "true"]
    assert train_here(path, *words) == 0
    out = tmp_path / "out"
    with closing(Store.open(out / "ledger.sqlite", only_read=True)) as store:
        books = read_ledger(store)
    totals = totals_of(books)
    assert set(books.groups) == set(range(books.run.num_drawn))
    assert totals.num_known_tokens + books.held_tokens == counted_tokens(out / "counts")
    assert len({training.id for training in books.trainings.values()}) == len(books.trainings)
    assert len(books.trainings) == 2 * totals.groups["trained"] == 4 * num_steps(out) >= 4 * 4

    teacher = PolicyModel.load(other, TrainerSettings(threads=1, dtype="float32"), temperature=1.0)
    tokenizer = AutoTokenizer.from_pretrained(STUDENT)
    lines = [line for path in (out / "samples").glob("*.jsonl") for line in path.read_text().splitlines()]
    prompts = {record["id"]: tokenizer.encode(record["prompt"]) for record in map(json.loads, lines)}
    losses = []
    for training in books.trainings.values():
        group = Group(Prompt(training.prompt, prompts[str(training.id)]), 2, [])
        sample = stored_sample(books, books.samples[training.id], group, seed=0)
        (scored,) = teacher.logprobs_of([TrainingSample.of(sample)])
        assert sample.reference_logprobs == pytest.approx(scored, abs=1e-4)
        if training.step == 1:
            pairs = zip(scored, sample.behavior_logprobs, strict=True)
            losses += [-(theirs - mine) * mine for theirs, mine in pairs]
    assert first_step(tmp_path)["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-3)


def test_each_row_has_the_teacher_that_its_columns_name(tmp_path: Path, other: Path) -> None:
    """Of the model itself, and of another model: the KL lies between those of both."""
    kls = []
    for number, teachers in enumerate(
        ([f'path = "{other}"\nrows = {{ topic = 1 }}', ITSELF], [f'path = "{other}"'])
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert train_here(run_with(folder, *teachers), *SHORT, "--schedule.groups_per_step", "4") == 0
        kls.append(first_step(folder)["kl"])
    assert 0 < kls[0] < kls[1]


@pytest.mark.parametrize(
    ("name", "teachers", "problem"),
    [
        ("distillation", [], "algorithm.distill_coef = 1.0: there is no teacher"),
        ("grpo", [ITSELF], "algorithm.distill_coef = 0.0: a teacher needs a factor"),
        (
            "distillation",
            ['path = "letters"'],
            "is '<pad>', whose id is None there; name a model with",
        ),
        ("distillation", [f"{ITSELF}\nrows = {{ topic = 1 }}"], "no teacher has a row of the data"),
        ("distillation", [f'{ITSELF}\ndevice = "cuda:0"\nkind = "serve"'], "teacher"),
    ],
)
def test_what_cannot_teach_is_refused_before_the_start(
    tmp_path: Path, name: str, teachers: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    save_tiny_model(tmp_path / "letters")
    letter_tokenizer().save_pretrained(tmp_path / "letters")
    assert train_here(run_with(tmp_path, *teachers, name=name)) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert problem in said and not (tmp_path / "out" / "logs").exists()


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"kl_coef": "0.1"}, "algorithm.kl_coef"),
        ({"loss": "gspo", "correction": "none", "normalize": "sample_mean"}, "algorithm.loss"),
        ({"advantage": "gae"}, "algorithm.advantage"),
    ],
)
def test_settings_that_contradict_a_teacher_are_refused(
    tmp_path: Path, given: dict[str, str], key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [word for name, value in given.items() for word in (f"--algorithm.{name}", value)]
    assert train_here(run_with(tmp_path, ITSELF), *words) == 2
    assert key in capsys.readouterr().err
