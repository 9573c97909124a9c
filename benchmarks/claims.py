"""The questions of docs/why/results.md about learning. Two runs of a study answer each; the report adds the
difference, the verdict and the conditions of each study."""

from typing import NamedTuple


class Claim(NamedTuple):
    """A claim, and the figure of a run less that of another one which decides on it."""

    words: str
    study: str
    schedule: str
    against: str
    figure: str = "accuracy"
    """A column of the summary of a run; "all" is the mean reward."""


CLAIMS = (
    Claim("PipelineRL, Fig. 5b: in-flight updates learn as much as G = 8", "lag", "pipelinerl", "G=8", "all"),
    Claim("PipelineRL, Fig. 5b: G = 32 learns less than G = 8", "lag", "G=32", "G=8", "all"),
    Claim("PipelineRL, Fig. 6: in-flight updates, at an equal mean lag", "lag", "pipelinerl", "G=16", "ESS"),
    Claim("PipelineRL, Fig. 6: the same runs", "lag", "pipelinerl", "G=16"),
    Claim("PipelineRL: in-flight updates learn as much as one step a round", "lag", "pipelinerl", "G=1"),
    Claim("PipelineRL, Fig. 10: G = 64 diverges", "diverge", "G=64", "G=1"),
    Claim("PipelineRL, eq. 4: a learned value function", "critic", "pipelinerl value", "pipelinerl mean"),
    Claim("APRIL, Table 2: accuracy +2.1%", "april", "april", "serial"),
    Claim("APRIL with a bound of 1 (ours, not the paper's)", "april", "april age 1", "serial", "all"),
    Claim("RolloutPipe, 5.3: it converges as `serial`", "order", "rolloutpipe", "serial"),
    Claim("RollPacker, Fig. 8: prompts and responses are raced", "rollpacker", "rollpacker both", "serial"),
    Claim("RollPacker, Fig. 8: only prompts are raced", "rollpacker", "rollpacker", "serial"),
    Claim(
        "Ours: at a bound of 1 masking learns as much as waiting",
        "masked",
        "tailrace 1 masked",
        "tailrace 1",
        "all",
    ),
    Claim(
        "Ours: at a bound of 4 masking learns as much as waiting",
        "masked",
        "tailrace 4 masked",
        "tailrace 4",
        "all",
    ),
    Claim(
        "Ours: a bound of 4 by masking learns as much as no bound",
        "masked",
        "pipelinerl H=32, 4 masked",
        "pipelinerl H=32",
        "all",
    ),
    Claim(
        "Ours: a bound of 8 by masking learns as much as no bound",
        "masked",
        "pipelinerl, 8 masked",
        "pipelinerl",
        "all",
    ),
    Claim(
        "Ours: at a bound of 0 verification learns as much as training on policy",
        "verified",
        "pipelinerl, 0 verified",
        "serial",
        "all",
    ),
    Claim(
        "Ours: a bound of 1 by verification learns as much as no bound",
        "verified",
        "pipelinerl, 1 verified",
        "pipelinerl",
        "all",
    ),
    Claim(
        "Ours: a bound of 4 by verification learns as much as no bound",
        "verified",
        "pipelinerl, 4 verified",
        "pipelinerl",
        "all",
    ),
    Claim("Distillation learns faster", "distillation", "distillation", "GRPO", "all"),
)
