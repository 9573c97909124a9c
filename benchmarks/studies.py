"""The studies of learning.py: what is compared, with which settings, and which claim is asked about.

Each run of a study trains the same model on as many samples as the others. Runs of another study that have
equal settings are named in `shared`, and are not repeated.
"""

from pathlib import Path
from typing import Any, Literal, NamedTuple

from common import EXAMPLES, QUICKSTART

Runner = Literal["tailrace", "kl", "trl"]
Parameters = dict[str, Any]


class Study(NamedTuple):
    """What is compared: settings of all runs, and the schedule of each."""

    claim: str
    """What the source says of learning."""
    settings: dict[str, str]
    schedules: dict[str, Parameters]
    samples: int = 8192
    """Trained samples of a run."""
    evaluations: int = 4
    """Evaluations of a run after the one at its start."""
    config: Path = QUICKSTART
    own: dict[str, dict[str, str]] = {}
    """Settings of single runs."""
    shared: dict[str, tuple[str, ...]] = {}
    """Runs of other studies that are shown, too, by study."""
    checkpoints: int = 0
    """Checkpoints of a run, from which it goes on after a stop. 0: only a signal that ends it makes one."""
    figure: bool = False
    """Whether a page of docs/ shows its figure."""
    teacher: str = ""
    """The run whose model teaches those that distil; empty: none does."""
    runner: Runner = "tailrace"
    """Who measures: tailrace, kl_study.py or TRL (trl_grpo.py)."""
    against: dict[str, str] = {}
    """Runs that are compared with another run than the first one of their settings, too."""
    margin: float = 0.02
    """Difference of accuracy or mean reward within which two runs agree. The default is the smallest effect
    on accuracy that a source claims: APRIL's +2.1 points."""
    margin_named: Literal["before the runs", "after the runs"] = "before the runs"

    def settings_of(self, name: str) -> dict[str, str]:
        return {**self.settings, **self.own.get(name, {})}


IN_FLIGHT = {"name": "pipelinerl", "groups_per_step": 2, "in_flight_per_engine": 128}
BLOCK = {"ring_groups": 2, "ring_full": "block"}
REINFORCE = {"algorithm.name": "reinforce", "trainer.learning_rate": "2e-4"}
MORE_SLOTS = {"engine.max_num_seqs": "1024"}
EQUAL_LAGS = {8: 40, 16: 120, 32: 352, 64: 744}
"""Steps a round of conventional RL, and the requests in flight of the same mean lag (3.5, 7.5, 15, 31)."""
FASTER = {"trainer.learning_rate": "4e-4"}
WHOLE = {"groups_per_round": 32, "groups_per_step": 16}
STEP, ROUND = {"groups_per_step": 8}, {"groups_per_round": 8}
RACE = {**ROUND, "prompt_speculation": 1.25, "response_speculation": 1.0}
SIXTEEN = {**RACE, "groups_per_round": 16}
BOTH = {"response_speculation": 1.25}
APRIL = {"name": "april", "groups_per_round": 32, "groups_launched": 64}
LONG_TAIL = {"data.eval_path": str(EXAMPLES / "smollm2" / "held_out.jsonl")}
RING = {"groups_per_step": 4, "in_flight_per_engine": 64, "ring_groups": 8}


def conventional(*steps: int, label: str = "G={}") -> dict[str, Parameters]:
    """Conventional RL with G steps a round."""
    return {
        label.format(n): {"name": "conventional", "groups_per_step": 2, "steps_per_round": n} for n in steps
    }


def at_rates(*rates: str) -> tuple[dict[str, Parameters], dict[str, dict[str, str]]]:
    """On-policy RL, and conventional RL and in-flight updates at equal mean lags, at each learning rate: the
    schedules, and the settings of single runs. A mean lag of 15 or 31 takes more requests than the engine of
    the quickstart has slots."""
    schedules: dict[str, Parameters] = {}
    own: dict[str, dict[str, str]] = {}
    for rate in rates:
        kinds = conventional(1, *EQUAL_LAGS, label=f"G={{}} {rate}")
        kinds |= {
            f"pipelinerl H={n} {rate}": {**IN_FLIGHT, **BLOCK, "in_flight_per_engine": n}
            for n in EQUAL_LAGS.values()
        }
        schedules |= kinds
        own |= {name: {"trainer.learning_rate": rate} for name in kinds}
    return schedules, own


def window(name: str, staleness: int, times: int = 1) -> Parameters:
    """A schedule with a bound on staleness, and as many groups in flight as it allows without masks; or so
    many times as many."""
    in_flight = {"groups_in_flight": 2 * (staleness + 1) * times, "staleness": staleness}
    return {"name": name, "groups_per_step": 2, **in_flight}


def masked(staleness: int, times: int = 1) -> Parameters:
    """tailrace that masks what is too old."""
    return {**window("tailrace", staleness, times), "stale": "mask"}


def verified(staleness: int) -> Parameters:
    """pipelinerl that verifies what is too old."""
    return {**IN_FLIGHT, **BLOCK, "kv": "recompute", "staleness": staleness, "stale": "verify"}


AT_RATES, OWN_RATES = at_rates("5e-5", "1e-4", "2e-4")

STUDIES = {
    "lag": Study(
        "PipelineRL, Figs. 5b, 6a, 6b: with a largest lag above that of G = 32, in-flight updates learn from "
        "as many samples as much as G = 8, and have its effective sample size; G = 32 is slower",
        REINFORCE,
        conventional(8)
        | {"pipelinerl": {**IN_FLIGHT, **BLOCK}}
        | conventional(32, 16, 64, 1)
        | {"pipelinerl H=256": {**IN_FLIGHT, **BLOCK, "in_flight_per_engine": 256}},
        samples=20_480,
        evaluations=10,
        figure=True,
        against=dict.fromkeys(("G=8", "G=16", "G=32", "G=64", "pipelinerl", "pipelinerl H=256"), "G=1"),
        margin_named="after the runs",
    ),
    "diverge": Study(
        "PipelineRL, Fig. 10: G = 64 diverges",
        REINFORCE | FASTER,
        conventional(1, 64, 32, label="G={} 4e-4") | {"pipelinerl 4e-4": {**IN_FLIGHT, **BLOCK}},
        samples=20_480,
        shared={"lag": ("G=1", "G=32", "G=64", "pipelinerl")},
        margin_named="after the runs",
    ),
    "rates": Study(
        "PipelineRL, Figs. 5b and 6, at three learning rates: at equal mean lag, in-flight updates learn as "
        "much as conventional RL or more; each schedule is judged at its best rate",
        {"algorithm.name": "reinforce", **MORE_SLOTS},
        AT_RATES,
        evaluations=8,
        own=OWN_RATES,
    ),
    "kl": Study(
        "PipelineRL, Fig. 7: sequences of mixed policies stay close to on-policy, those of a lag g do "
        "not, and a stale cache adds little",
        REINFORCE,
        {"L=200": {"length": 200}, "L=2048": {"length": 2048}},
        samples=7104,
        evaluations=0,
        figure=True,
        runner="kl",
        margin_named="after the runs",
    ),
    "april": Study(
        "APRIL, Tables 2 and 5 to 7: accuracy +2.1% on average",
        {},
        {"serial": {"name": "serial", **WHOLE, "groups_per_step": 32}, "april": APRIL}  # one step a round
        | {f"april age {age}": {**APRIL, "staleness": age} for age in (1, 2, 5)},
        margin_named="after the runs",
    ),
    "order": Study(
        "RolloutPipe, 5.3: converges as serial does, although short groups are trained first",
        {"trainer.learning_rate": "2e-4"},
        {name: {"name": name, **WHOLE, "groups_per_step": 4} for name in ("serial", "rolloutpipe")},
        margin_named="after the runs",
    ),
    "rollpacker": Study(
        "RollPacker, Fig. 8: validation as without tail batching",
        {},
        {
            "serial": {"name": "serial", "groups_per_round": 16, "groups_per_step": 16},
            "tailbatch": {"name": "tailbatch", **SIXTEEN},
            "rollpacker": {"name": "rollpacker", **SIXTEEN},
            "tailbatch both": {"name": "tailbatch", **SIXTEEN, **BOTH},
            "rollpacker both": {"name": "rollpacker", **SIXTEEN, **BOTH},
        },
        margin_named="after the runs",
    ),
    "lagcurve": Study(
        "What a step of lag costs in samples",
        REINFORCE,
        {
            "rolloutpipe": {"name": "rolloutpipe", "groups_per_round": 8, "groups_per_step": 2},
            "one_step_off": {"name": "one_step_off", "groups_per_round": 2, "groups_per_step": 2},
            "april": {"name": "april", "groups_per_round": 2, "groups_launched": 6},
            "windowed_fifo": {
                "name": "windowed_fifo",
                "groups_per_step": 2,
                "groups_in_flight": 10,
                "window": 10,
            },
            "tailrace 1": window("tailrace", 1),
            "tailrace 4": window("tailrace", 4),
            "tailrace 16": window("tailrace", 16),
            "pipelinerl H=32": {**IN_FLIGHT, **BLOCK, "in_flight_per_engine": 32},
        },
        samples=4096,
        evaluations=2,
        figure=True,
        shared={"lag": ("G=1", "G=8", "G=16", "G=32", "G=64", "pipelinerl", "pipelinerl H=256")},
        margin_named="after the runs",
    ),
    "masked": Study(
        "A bound on lag that masks stale tokens, and waits for none, learns as much from as many samples",
        REINFORCE,
        {
            "tailrace 1 masked": masked(1),
            "tailrace 1 masked, twice in flight": masked(1, times=2),
            "tailrace 4 masked": masked(4),
            "tailrace 4 masked, twice in flight": masked(4, times=2),
            "pipelinerl H=32, 4 masked": {**IN_FLIGHT, **BLOCK, "in_flight_per_engine": 32, "staleness": 4},
            "pipelinerl, 8 masked": {**IN_FLIGHT, **BLOCK, "staleness": 8},
        },
        samples=4096,
        evaluations=2,
        shared={
            "lag": ("G=1", "pipelinerl"),
            "lagcurve": ("tailrace 1", "tailrace 4", "pipelinerl H=32"),
        },
        against={
            "tailrace 1 masked": "tailrace 1",
            "tailrace 1 masked, twice in flight": "tailrace 1",
            "tailrace 4 masked": "tailrace 4",
            "tailrace 4 masked, twice in flight": "tailrace 4",
            "pipelinerl H=32, 4 masked": "pipelinerl H=32",
            "pipelinerl, 8 masked": "pipelinerl",
        },
        margin_named="after the runs",
    ),
    "verified": Study(
        "Updates in flight whose stale tokens are verified learn as much from as many samples as training on "
        "policy does",
        REINFORCE,
        {
            "serial": {"name": "serial", "groups_per_round": 2, "groups_per_step": 2},
            "pipelinerl": {**IN_FLIGHT, **BLOCK},
        }
        | {f"pipelinerl, {k} verified": verified(k) for k in (0, 1, 4)},
        samples=4096,
        evaluations=2,
        against={f"pipelinerl, {k} verified": "pipelinerl" for k in (0, 1, 4)},
    ),
    "kv": Study(
        "PipelineRL, 5.1: a stale cache does no harm",
        REINFORCE,
        {f"kv={kv}": {"name": "pipelinerl", **RING, "kv": kv} for kv in ("keep", "recompute", 0.01)},
        samples=4096,
    ),
    "critic": Study(
        "PipelineRL, eq. 4: a learned value function as the baseline (later version), in place of the mean "
        "of the group (earlier version)",
        REINFORCE,
        {f"pipelinerl {baseline}": {**IN_FLIGHT, **BLOCK} for baseline in ("mean", "value")},
        own={"pipelinerl value": {"algorithm.advantage": "gae", "trainer.critic_learning_rate": "1e-3"}},
        margin_named="after the runs",
    ),
    "distillation": Study(
        "On-policy distillation (2306.13649; 2606.22600): a trained model teaches a fresh one in fewer "
        "samples than rewards do",
        {},
        {name: {"name": "rolloutpipe", **WHOLE} for name in ("GRPO", "distillation")},
        evaluations=32,
        own={"distillation": {"algorithm.name": "distillation"}},
        teacher="GRPO",
        margin_named="after the runs",
    ),
    "episodes": Study(
        "PipelineRL, 7: agents may gain most",
        {"trainer.learning_rate": "2e-4"},
        {
            "serial": {"name": "serial", "groups_per_round": 8, "groups_per_step": 8},
            "pipelinerl": {"name": "pipelinerl", **RING, "groups_per_step": 8, "ring_groups": 16},
        },
        samples=3072,
        config=EXAMPLES / "tools.toml",
    ),
    "groups": Study(
        "2606.17250: one sample a prompt learns as much from as many samples",
        {},
        {
            "GRPO": {"name": "serial", **WHOLE},
            "4 of 8": {"name": "serial", "groups_per_round": 64, "groups_per_step": 32},
            "one sample": {"name": "serial", "groups_per_round": 256, "groups_per_step": 128},
        },
        own={
            "4 of 8": {"run.groups.keep": "4"},
            "one sample": {"run.group_size": "1", "algorithm.name": "one_sample"},
        },
    ),
    "real": Study(
        "PipelineRL, Fig. 5a; APRIL, Table 2; RollPacker, Fig. 8, on a model of 135M parameters",
        LONG_TAIL,
        {
            "serial": {"name": "serial", **STEP, **ROUND},
            "pipelinerl": {
                "name": "pipelinerl",
                **STEP,
                "in_flight_per_engine": 96,
                "ring_groups": 16,
                "ring_full": "block",
            },
            "april": {"name": "april", **ROUND, "groups_launched": 12},
            "rollpacker": {"name": "rollpacker", **RACE},
            "tailrace": {"name": "tailrace", **STEP, "groups_in_flight": 12, "staleness": 2},
            "tailrace_on_policy": {
                "name": "tailrace_on_policy",
                **ROUND,
                "prompt_speculation": 1.0,
                "rounds_sorted": 4,  # of 32 rounds: a batch that the run's end cuts is trained to its end
            },
            "rolloutpipe": {"name": "rolloutpipe", **STEP, "groups_per_round": 16},
            "conventional": {"name": "conventional", **STEP, "steps_per_round": 2},
            "one_step_off": {"name": "one_step_off", **STEP, **ROUND},
            "tailbatch": {"name": "tailbatch", **RACE},
        },
        samples=2048,
        evaluations=2,
        config=EXAMPLES / "smollm2" / "long_tail.toml",
        checkpoints=8,
        margin_named="after the runs",
    ),
    "trl": Study(
        "The same model, task and samples in TRL's GRPOTrainer",
        LONG_TAIL,
        {"TRL": {"groups_per_step": 8, "learning_rate": 3e-5, "max_tokens": 256}},
        samples=2048,
        evaluations=1,
        config=EXAMPLES / "smollm2" / "long_tail.toml",
        shared={"real": ("serial",)},  # one device in turn: no other schedule can be faster than serial there
        runner="trl",
        margin_named="after the runs",
    ),
}
