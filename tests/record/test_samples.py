import json
from pathlib import Path

from helpers.record_story import make_episode, make_group, pipelined_round, play
from tailrace.record.events import Evaluated, EvaluatedSample, Stepped
from tailrace.record.rewind import rewind_records
from tailrace.record.samples import SamplesWriter


def evaluation(round: int) -> Evaluated:
    sample = make_group(-1, [9], [1.0]).samples[0]
    scored = EvaluatedSample.of(sample, 1.0), EvaluatedSample.of(sample, 0.0, "reward timeout")
    return Evaluated(9.0, round, 2, reward=0.5, mean_tokens=9.0, samples=scored)


def test_every_trained_sample_stands_in_its_rounds_file(tmp_path: Path) -> None:
    story = pipelined_round(round=3)
    play(story.events, SamplesWriter(tmp_path))
    lines = (tmp_path / "round_000003.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert [record["id"] for record in records] == ["6.0/0", "6.0/1", "7.0/0", "7.0/1"]
    assert records[3] == {
        "id": "7.0/1",
        "step": 2,
        "prompt": "question 7",
        "asked": "question 7",
        "text": "answer 1",
        "reward": 1.0,
        "rewards": {},
        "reward_columns": {},
        "source": "",
        "advantage": 0.5,
        "finish_reason": "length",
        "num_tokens": 20,
        "spans": [[0, 20]],
        "num_masked": 0,
    }


def test_a_resume_removes_the_files_of_rounds_to_come(tmp_path: Path) -> None:
    story = pipelined_round()
    for round in (1, 2):
        pipelined_round(story, round=round, start_s=100.0 * round)
    story.tell(evaluation(0), evaluation(1))
    play(story.events, SamplesWriter(tmp_path))
    (tmp_path / "notes.txt").write_text("mine")
    rewind_records(tmp_path / "metrics.jsonl", tmp_path, round=1, step=2)
    names = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*"))
    assert names == ["eval/round_000000.jsonl", "notes.txt", "round_000000.jsonl"]


def test_the_samples_of_an_evaluation_have_a_file_of_their_own(tmp_path: Path) -> None:
    play([evaluation(4)], SamplesWriter(tmp_path))
    lines = (tmp_path / "eval" / "round_000004.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {
            "id": "-1.0/0",
            "prompt": "question -1",
            "text": "answer 0",
            "reward": reward,
            "failure": failure,
            "finish_reason": "stop",
            "num_tokens": 9,
            "source": "",
            "columns": {},
            "asked": "question -1",
        }
        for reward, failure in ((1.0, None), (0.0, "reward timeout"))
    ]


def test_an_evaluation_without_samples_leaves_no_file(tmp_path: Path) -> None:
    play([Evaluated(1.0, 4, 8, 0.5, 3.0)], SamplesWriter(tmp_path))
    assert list(tmp_path.rglob("*.jsonl")) == []


def test_the_turns_of_an_episode_are_recorded_with_what_its_environment_said(tmp_path: Path) -> None:
    story = pipelined_round()
    first = next(event for event in story.events if isinstance(event, Stepped)).samples[0]
    make_episode(first)
    play(story.events, SamplesWriter(tmp_path))
    lines = (tmp_path / "round_000000.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert ["turns" in record for record in records] == [True, False, False, False]
    tool = {"role": "tool", "content": "7"}
    assert records[0]["messages"] == [
        {"role": "assistant", "content": "3 + 4"},
        tool,
        {"role": "assistant", "content": "It is 7."},
    ]
    assert records[0]["turns"] == [
        {
            "num_tokens": 2,
            "finish_reason": "stop",
            "results": ["7"],
            "observation_ids": [30, 31, 32],
            "text": "3 + 4",
            "messages": [tool],
            "begins_branch": False,
        },
        {
            "num_tokens": 4,
            "finish_reason": "stop",
            "results": [],
            "observation_ids": [],
            "text": "It is 7.",
            "messages": [],
            "begins_branch": False,
        },
    ]


def test_a_resume_leaves_copies_that_a_user_made(tmp_path: Path) -> None:
    (copy := tmp_path / "round_000003_old.jsonl").write_text("mine\n")
    rewind_records(tmp_path / "metrics.jsonl", tmp_path, round=1, step=2)
    assert copy.read_text() == "mine\n"
