"""Draws pictures where matplotlib is installed, and says in one line why there is none where it is not."""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from tailrace.record.timeline import Timeline


def draw(timelines: Mapping[str, Timeline], path: Path) -> str:
    """Draw runs by name below one another on one time axis. Those that finished no round are left out.

    Returns:
        One line for the user: where the picture is, or why there is none.
    """
    if find_spec("matplotlib") is None:
        return f"{path.name} not drawn: pip install 'tailrace[pictures]'"
    finished = {name: timeline for name, timeline in timelines.items() if timeline.reports}
    if not finished:
        return f"{path.name} not drawn: no round was finished"
    from tailrace.record.pictures import draw_timelines

    draw_timelines(finished, path)
    return f"timeline  {path}"
