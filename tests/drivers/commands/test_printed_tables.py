"""Tables keep one row a line, and a long command says what it does."""

import io

import pytest
from rich.console import Console
from rich.table import Table

from tailrace.drivers.commands.tables import open_console, print_table, progress

NAMES = ("tailrace, 8 in flight, staleness 3 (4 + 4, TP 4)", "windowed_fifo, 6 in flight, window 3 (in turn)")
HEADS = ("s/step", "samples/s", "bound", "lag", "bias", "KV", "state", "steps")


def ranking() -> Table:
    table = Table("", "schedule (devices)", title="fastest first")
    for head in HEADS:
        table.add_column(head, justify="right")
    for number, name in enumerate(NAMES):
        table.add_row(str(number), name, *(f"{number}.{column}25" for column in range(len(HEADS))))
    table.caption = "lag: in steps"
    return table


def test_a_narrow_terminal_shows_each_candidate_on_one_line_of_each_block() -> None:
    file = io.StringIO()
    print_table(Console(file=file, width=80, force_terminal=True, color_system=None), ranking(), keep=2)
    lines = file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    blocks = [line for line in lines if "schedule (devices)" in line]
    assert len(blocks) > 1
    for number, name in enumerate(NAMES):
        rows = [line for line in lines if name in line]
        assert len(rows) == len(blocks)
        assert [f"{number}.{column}25" for column in range(len(HEADS))] == [
            word for row in rows for word in row.split() if word.endswith("25")
        ]
    assert [sum(word in line for line in lines) for word in ("fastest first", "lag: in steps")] == [1, 1]


def test_output_that_is_no_terminal_has_one_line_for_each_candidate(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    print_table(open_console(), ranking(), keep=2)
    lines = capsys.readouterr().out.splitlines()
    for number, name in enumerate(NAMES):
        (line,) = (line for line in lines if name in line)
        assert f"{number}.725" in line


@pytest.mark.parametrize(("every_s", "told"), [(0.0, ["1 measured", "2 measured"]), (3600.0, ["1 measured"])])
def test_what_a_long_command_does_is_told_line_by_line_where_there_is_no_terminal_some_seconds_apart(
    every_s: float, told: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with progress(every_s) as say:
        say("1 measured")
        say("2 measured")
    captured = capsys.readouterr()
    assert captured.err.splitlines() == told
    assert captured.out == ""
