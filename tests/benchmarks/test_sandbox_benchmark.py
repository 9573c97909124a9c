"""The sandbox benchmark: one hostile program of each kind."""

import asyncio

from helpers.bubblewrap import needs_bubblewrap
from sandbox import attack, corpus, host, read_kinds


@needs_bubblewrap
def test_no_hostile_program_escapes_or_wedges_the_run() -> None:
    with host() as attacked:
        programs = list(corpus(20, seed=1, names=attacked.names))
        assert {program.kind for program in programs} == read_kinds().keys()
        findings = asyncio.run(attack(iter(programs), attacked, at_a_time=4))
    assert (findings.programs, findings.escaped, findings.wedged) == (20, 0, 0)
    assert findings.processes_left == 0
