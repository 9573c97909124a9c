"""PipelineRL (Piché et al. 2025): the case study of Appendix A, and its runs in virtual time."""

from reproductions import appendix_a
from reproductions.appendix_a import Cluster, Lengths, PowerLaw
from reproductions.base import Figure, Paper, Table, parameters
from reproductions.pipelinerl_runs import earlier_version, generation, lags, max_lags, throughput

PRINTED_H, PRINTED_I, PRINTED_R_GEN = 192, 44, 16.9
R_CONV_GEN, R_CONV_TRAIN = 18.3, 26.02
EXPONENT = 0.947
"""Of U(h), which Fig. 8 shows as a curve only. Fitted to r_conv_gen = 18.3."""
SATURATION = 200.0
"""A.4: U grows "almost linearly up to h ~ 200"."""
STEPS = 133
"""Optimizer steps of Conventional RL (G). Its maximum lag is 132; the printed H and I have that lag, too."""
CLUSTER = Cluster(
    devices=128,
    batch=128,
    train_flashes=128 / R_CONV_TRAIN,
    utilization=PowerLaw(PRINTED_R_GEN / PRINTED_I / PRINTED_H**EXPONENT, EXPONENT, SATURATION),
)
LENGTHS = Lengths(2048)
"""Uniform (A.4). L cancels but for rounding."""


def case_study(seed: int = 0) -> Table:
    """A.4: throughputs in tokens a flash, and the best H and I at the same maximum lag."""
    conventional = appendix_a.conventional(CLUSTER, LENGTHS, STEPS)
    pipeline = appendix_a.fastest_pipeline(CLUSTER, LENGTHS, STEPS - 1)
    lag = appendix_a.best_lag(CLUSTER, LENGTHS, range(8, 257))
    large = Cluster(CLUSTER.devices, 2048, CLUSTER.train_flashes, CLUSTER.utilization)
    large_lag = appendix_a.max_lag(large, LENGTHS, PRINTED_H, PRINTED_I)
    speedup = appendix_a.speedup(CLUSTER, LENGTHS, lag)
    pipe, turn, same, unit = "PipelineRL", "Conventional RL", "same maximum lag", "tokens/flash"
    figures = (
        Figure(pipe, "H", "", PRINTED_H, pipeline.H, "fitted", 0.02 * PRINTED_H),
        Figure(pipe, "I", "", PRINTED_I, pipeline.I, "fitted", 0.02 * PRINTED_I),
        Figure(pipe, "r_gen", unit, PRINTED_R_GEN, pipeline.r_gen, "fitted", 0.02 * PRINTED_R_GEN),
        Figure(pipe, "r_train", unit, 17.08, pipeline.r_train, "determined", 0.02 * 17.08),
        Figure(pipe, "r", unit, 16.9, pipeline.r, "fitted", 0.02 * 16.9),
        Figure(turn, "r_gen", unit, R_CONV_GEN, conventional.r_gen, "fitted", 0.02 * R_CONV_GEN),
        Figure(turn, "r_train", unit, R_CONV_TRAIN, conventional.r_train, "fitted", 0.02 * R_CONV_TRAIN),
        Figure(turn, "r", unit, 10.7, conventional.r, "determined", 0.02 * 10.7),
        Figure(same, "largest speed-up", "x", 1.57, speedup, "determined", 0.02 * 1.57),
        Figure(same, "g_max of it", "steps", 133, lag, "determined", 0.02 * 133),
        Figure("B = 2048", "g_max of H and I", "steps", 8, large_lag, "determined"),
    )
    notes = (
        "H, I and r of PipelineRL are circular: U(h) is that of the printed r_gen, I and H, the lag that of H"
        " and I. Any exponent of U from 0.85 to 1 gives the same three.",
    )
    return Table("Appendix A.4", "speed-up at the same maximum lag", figures, notes)


PARAMETERS = """
printed 3 | appendix A: N = 128, B = 128, U grows up to h = 200 | A.4
fitted 2 | u and the exponent p = 0.947 of U(h), which Fig. 8 shows as a curve | r_gen = 16.9 and 18.3
fitted 1 | tau | r_train = 26.02
fitted 1 | the maximum lag at which both systems are compared, 132 (G = 133) | H = 192 and I = 44
printed 7 | section 5: Qwen2.5-7B, 128 H100, 48 of them generate, B = 1024, H = 64, at most 32,768 tokens, G =
    32 | section 5
assumed 3 | lengths are lognormal with a mean of 2,000 tokens and sigma 1; a mean of 1,500 in the earlier
    version, which names 1K to 2K |
assumed 3 | a ring of two batches, 256 slots of vLLM, responses of 512 tokens in Fig. 2a |
"""
PAPER = Paper(
    name="pipelinerl",
    citation="Piché et al., 2025: PipelineRL: Faster On-policy Reinforcement Learning for Long Sequence"
    " Generation",
    set_up=(
        "Appendix A: uniform lengths; nothing is simulated. U(h) = u h^p up to h = 200, and constant beyond.",
        "Section 5: all costs follow from the devices and the model; none is fitted.",
    ),
    parameters=parameters(PARAMETERS),
    tables={
        "Appendix A.4": case_study,
        "Fig. 2": generation,
        "Fig. 3a": lags,
        "Fig. 5c": throughput,
        "Fig. 6a": max_lags,
        "Earlier version, Fig. 5b": earlier_version,
    },
    not_attempted="Figs. 5a, 5b, 6b and 10 (learning), Fig. 9 but for its maximum, Table 1.",
    contradictions=(
        "A.2 gives Conventional RL a maximum lag of S - 1, and S counts sequences; by section 2.2 and"
        " Algorithm 1 it is G - 1 optimizer steps, and with those the printed r_conv has a lag of about 133.",
        "The printed H = 192 and I = 44 have a g_max of 132 by A.3, not 133.",
        "16.9 over 10.7 is a speed-up of 1.58, not 1.57.",
        "At B = 2048 A.3 gives a g_max of ceil(8.25) = 9, not about 8.",
        "Section 1 reports the runs on 4 DGX-H100 nodes; section 5 on 16, and the abstract on 128 GPUs. The"
        " earlier version ran on 4 nodes.",
        "Section 5 attributes the low throughput of G = 32 to 256 sequences a GPU, but its estimate was made"
        " with 64 sequences at once.",
    ),
)
