"""The questions of docs/why/results.md about learning. Two runs of a study answer each; the report adds the
difference, the verdict and the conditions."""

from typing import NamedTuple


class Claim(NamedTuple):
    """A question, and the figure of a run less that of another one which answers it."""

    question: str
    study: str
    schedule: str
    against: str
    figure: str = "accuracy"
    """A column of the summary of a run: accuracy, all (mean reward), second half, ESS."""


CLAIMS = (
    Claim("PipelineRL, Fig. 5b: in-flight updates less G = 8", "lag", "pipelinerl", "G=8", "all"),
    Claim("the same: G = 32 less G = 8", "lag", "G=32", "G=8", "all"),
    Claim("Fig. 6: in flight less G = 16, equal mean lag", "lag", "pipelinerl", "G=16", "ESS"),
    Claim("the same two, what they learn", "lag", "pipelinerl", "G=16"),
    Claim("in flight less one step a round", "lag", "pipelinerl", "G=1"),
    Claim("Fig. 10: G = 64 less G = 1", "diverge", "G=64", "G=1"),
    Claim("the same at twice the rate", "diverge", "G=64 4e-4", "G=1 4e-4"),
    Claim("G = 1 at twice the rate less G = 1", "diverge", "G=1 4e-4", "G=1"),
    Claim("eq. 4: a value function less the group's mean", "critic", "pipelinerl value", "pipelinerl mean"),
    Claim("APRIL, Table 2 (+2.1%): `april` less `serial`", "april", "april", "serial"),
    Claim("`april` with our bound of 1, which APRIL has not", "april", "april age 1", "serial", "all"),
    Claim("RolloutPipe, 5.3: `rolloutpipe` less `serial`", "order", "rolloutpipe", "serial"),
    Claim("RollPacker, Fig. 8, as printed (both raced)", "rollpacker", "rollpacker both", "serial"),
    Claim("the same, prompts raced only", "rollpacker", "rollpacker", "serial"),
    Claim("`tailrace`, bound 1: masked less waiting", "masked", "tailrace 1 masked", "tailrace 1", "all"),
    Claim("`tailrace`, bound 4: masked less waiting", "masked", "tailrace 4 masked", "tailrace 4", "all"),
    Claim(
        "`pipelinerl` H=32, bound 4: masked less none",
        "masked",
        "pipelinerl H=32, 4 masked",
        "pipelinerl H=32",
        "all",
    ),
    Claim("`pipelinerl`, bound 8: masked less none", "masked", "pipelinerl, 8 masked", "pipelinerl", "all"),
    Claim("distillation less GRPO", "distillation", "distillation", "GRPO", "all"),
    Claim("`rollpacker` less `serial`", "real", "rollpacker", "serial"),
    Claim("`tailrace` less `serial`", "real", "tailrace", "serial"),
)
