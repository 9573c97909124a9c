"""Names of figures that are looked up in a source."""

from peer_names import missing, names_of, words_of

SOURCE = """
class Trainer:
    def generate(self):
        with timer("gen"):
            log({f"timing_s/{key}": value, "perf/step_s": 1.0})
        tracker.scalar(staleness_avg=2.0)
"""


def test_a_name_is_whole_or_composed_of_words_of_the_source() -> None:
    strings = {*words_of(SOURCE)}
    names = {
        "perf/step_s",
        "timing_s/gen",
        "timing_s/staleness_avg",
        "Trainer.generate",
        "timing_s/generation",
    }
    assert missing(names, "\n".join(strings), strings) == (["timing_s/generation"], 1)


def test_the_names_of_a_section_are_those_of_its_figures_and_conditions() -> None:
    section = {
        "source": "x 1.0",
        "step_s": ["a/b + c?", "d - e / f"],
        "overlaps": ["switch_*"],
        "prefix": "train/",
    }
    assert [*names_of(section)] == ["a/b", "c", "d", "e", "f", "switch"]
