import json
from pathlib import Path

from record_story import pipelined_round, play

from tailrace.record.samples import SamplesWriter


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
        "text": "answer 1",
        "reward": 1.0,
        "advantage": 0.5,
        "finish_reason": "length",
        "num_tokens": 20,
        "spans": [[0, 20]],
    }


def test_a_resume_removes_the_files_of_rounds_to_come(tmp_path: Path) -> None:
    story = pipelined_round()
    for round in (1, 2):
        pipelined_round(story, round=round, start_s=100.0 * round)
    play(story.events, SamplesWriter(tmp_path))
    (tmp_path / "notes.txt").write_text("mine")
    SamplesWriter(tmp_path, first_round=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", "round_000000.jsonl"]
