"""Kinds of figures and parameters, and figures over several seeds."""

from reproductions.base import Figure, Parameter, Table, count, over_seeds, parameters


def table(seed: int) -> Table:
    return Table("Table 1", "numbers", (Figure("a", "b", "s", 2.0, float(seed * seed), tolerance=1.0),))


def test_a_figure_over_seeds_is_their_mean_with_the_smallest_and_the_largest() -> None:
    (alone,) = over_seeds(table, [3]).figures
    assert (alone.ours, alone.spread, alone.holds) == (9.0, None, False)
    (figure,) = over_seeds(table, range(3)).figures
    assert (figure.ours, figure.spread, figure.holds) == (5 / 3, (0.0, 4.0), True)


def test_a_range_holds_within_the_tolerance_on_both_sides() -> None:
    held = [Figure("", "", "", (2.0, 3.0), ours, tolerance=0.5).holds for ours in (1.4, 1.5, 2.5, 3.5, 3.6)]
    assert held == [False, True, True, True, False]
    assert Figure("", "", "", None, 1.0, tolerance=1.0).holds is None


def test_each_kind_of_figure_is_counted_and_what_is_not_printed_apart() -> None:
    figures = [
        Figure("", "", "", 1.0, 1.0, "fitted"),
        Figure("", "", "", 1.0, 1.0, "determined"),
        Figure("", "", "", 1.0, 1.0),
        Figure("", "", "", (1.0, 2.0), 1.0),
        Figure("", "", "", None, 1.0, "definition"),
    ]
    assert count(figures) == {
        "printed": 4,
        "fitted": 1,
        "determined": 1,
        "definition": 0,
        "predicted": 2,
        "predicted_ranges": 1,
        "not_printed": 1,
    }


def test_parameters_are_read_from_lines_and_say_their_source() -> None:
    text = """
printed 2 | N = 32,
    K = 8 | Table 3
fitted 1 | a rate | Table 1
assumed 1 | prompts of 150 tokens |
"""
    assert parameters(text)[0] == Parameter("printed", 2, "N = 32, K = 8", "Table 3")
    assert [str(each) for each in parameters(text)] == [
        "Printed (Table 3): N = 32, K = 8.",
        "Fitted to Table 1: a rate.",
        "Assumed: prompts of 150 tokens.",
    ]
