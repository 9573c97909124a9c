"""The [sim] section: what a simulated set-up costs in seconds.

A field whose default is None is taken from the other sections of the config
(`drivers/assembly/simulation.py`). A value in [sim] wins. Without a config the DEFAULT_ constants hold, and
one engine.
"""

from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from tailrace.contracts.reward import TimeoutSettings
from tailrace.contracts.trainer import OffloadSettings
from tailrace.settings import FolderOrName, RunPath, Settings, Shared

DEFAULT_SLOTS = 256
DEFAULT_MEDIAN_TOKENS = 1230.0
DEFAULT_MAX_TOKENS = 16_384


class SimEngineSettings(Settings):
    """Continuous batching in whole decode steps of overhead_s + max(base_s, compute_s * running) +
    (slope_s + overhead_per_request_s) * running + context_s * positions in the KV cache."""

    count: int | None = Field(default=None, ge=1)
    """Engines. None: engine.replicas of the config."""
    slots: int | None = Field(default=None, ge=1)
    """Requests that decode together on one engine. None: engine.max_num_seqs of the config."""
    versions: int | None = Field(default=None, ge=1)
    """Versions of the weights that one engine can serve at the same time, as adapters of LoRA. None:
    trainer.lora.versions of the config, or 1."""
    base_s: float = Field(default=6e-3, gt=0)
    """Seconds of a decode step, without the part that grows with the requests."""
    slope_s: float = Field(default=0.06e-3, ge=0)
    """Seconds that each running request adds to a decode step."""
    context_s: float = Field(default=0.0, ge=0)
    """Seconds that each position in the KV cache adds to a decode step."""
    compute_s: float = Field(default=0.0, ge=0)
    """Seconds of arithmetic of each running request. A step takes at least their sum."""
    overhead_s: float = Field(default=0.0, ge=0)
    """Seconds of a decode step that neither more devices nor a smaller model make shorter."""
    overhead_per_request_s: float = Field(default=0.0, ge=0)
    """Seconds of that kind for each running request."""
    kv_tokens: int = Field(default=10_000_000, ge=1)
    """Positions of the KV cache of one engine."""
    prefill_tokens_per_s: float = Field(default=100_000.0, gt=0)
    """Positions of a prefill in a second."""
    verify_positions: float = Field(default=0.13, ge=0)
    """Positions of a prefill that take as long as the projection to the vocabulary and the draw of one token
    that is verified. Default: Qwen2.5-7B on an H100; projection 0.083 (FLOPs), draw 0.049 (memory)."""
    abort_s: float = Field(default=0.05, ge=0)
    """Seconds from cancelling a request until the engine stops working on it."""
    load_s: float = Field(default=1.0, ge=0)
    """Seconds in which an engine loads new weights and does not decode."""
    sleep_s: float = Field(default=0.5, ge=0)
    """Seconds in which an engine gives the memory of its devices free."""
    wake_s: float = Field(default=1.0, ge=0)
    """Seconds in which an engine takes the memory back and loads the newest weights."""
    weight_tokens: int = Field(default=0, ge=0)
    """Positions of the KV cache that the weights of one engine have the size of. Engines that share their
    weights by tensor parallelism gain as many for each engine that joins."""
    communication_s: float = Field(default=0.5e-3, ge=0)
    """Seconds that each doubling of the tensor-parallel size adds to a decode step."""
    reduce_s: float = Field(default=0.0, ge=0)
    """Seconds that a running request adds to a decode step for all-reduces over very many devices. Of it w
    joined engines add 1 - 1/w."""
    survival: float = Field(default=1.0, ge=0, le=1)
    """Share of tokens that new weights draw again with the same noise, after the same tokens before, when a
    schedule verifies them; the others change. Values: results/survival-*.json (benchmarks)."""
    regroup_s: float = Field(default=10.0, ge=0)
    """Seconds in which engines are restarted with another tensor-parallel size."""
    acceptance: tuple[Annotated[float, Field(ge=0, le=1)], ...] = ()
    """Shares of drafts that are right up to each depth, from 1 on. Each step checks as deep as gives the most
    tokens a second; a drafted token costs compute_s and slope_s. Empty: nothing is drafted."""
    draft_share: float = Field(default=1.0, ge=0, le=1)
    """Share of the running requests for which a step has drafts."""

    @model_validator(mode="after")
    def _check_acceptance(self) -> "SimEngineSettings":
        if any(deep > before for before, deep in pairwise(self.acceptance)):
            raise ValueError("acceptance rises: a draft that is right up to a depth was right before it")
        return self

    def gained(self, depth: int) -> float:
        """Return the mean tokens of a request and step that checks so many drafted ones."""
        return 1 + self.draft_share * sum(self.acceptance[:depth])


class SimTrainerSettings(Settings):
    """A trainer of fixed speed."""

    tokens_per_s: float = Field(default=60_000.0, gt=0)
    """Tokens of forward and backward, prompts included, of all replicas together."""
    attention_s: float = Field(default=0.0, ge=0)
    """Seconds of attention for the square of a sequence's tokens, of all replicas together."""
    pass_s: float = Field(default=0.0, ge=0)
    """Seconds of each pass of forward and backward, whatever its tokens."""
    step_s: float = Field(default=0.5, ge=0)
    """Seconds of an optimizer step, without forward and backward."""
    publish_s: float = Field(default=0.0, ge=0)
    """Seconds in which the trainer writes new weights."""
    swap_s: float = Field(default=0.0, ge=0)
    """Seconds in which the trainer's state leaves its devices, or comes back (`[trainer.offload]`)."""
    early_swap_s: float = Field(default=0.0, ge=0)
    """Seconds of the part that training during the rollout needs: at most swap_s."""
    drift: float = Field(default=0.02, ge=0)
    """Standard deviation that the log importance weight of a token gains with each version: a model of ess
    and mismatch_kl. Default: measured at mean lags of 3 to 15 steps, 0.018 to 0.025 (docs/why/results.md)."""


class SimReferenceSettings(Settings):
    """A reference model on its own device. It computes one sample at a time."""

    tokens_per_s: float = Field(default=180_000.0, gt=0)
    """Tokens of a forward pass, prompts included; by default three times the trainer's rate."""


class UniformSettings(Settings):
    """Lengths between two limits, all equally frequent."""

    kind: Literal["uniform"] = "uniform"
    """Selects this distribution."""
    min_tokens: int = Field(default=1, ge=1)
    """Length of the shortest response."""
    max_tokens: int = Field(ge=1)
    """Length of the longest response."""

    @model_validator(mode="after")
    def _check_order(self) -> "UniformSettings":
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens = {self.min_tokens} is more than max_tokens = {self.max_tokens}")
        return self


class TableSettings(Settings):
    """Some lengths, each with its share of the responses."""

    kind: Literal["table"] = "table"
    """Selects this distribution."""
    tokens: tuple[Annotated[int, Field(ge=1)], ...] = Field(min_length=1)
    """The lengths, in ascending order."""
    shares: tuple[Annotated[float, Field(ge=0)], ...]
    """The share of each length; only their ratios count."""

    @model_validator(mode="after")
    def _check_table(self) -> "TableSettings":
        if len(self.shares) != len(self.tokens):
            raise ValueError(f"there are {len(self.tokens)} tokens, but {len(self.shares)} shares")
        if list(self.tokens) != sorted(self.tokens):
            raise ValueError("tokens are not in ascending order")
        if not sum(self.shares):
            raise ValueError("all shares are 0")
        return self


class EmpiricalSettings(Settings):
    """The lengths of responses that were generated before."""

    kind: Literal["empirical"] = "empirical"
    """Selects this distribution."""
    path: RunPath
    """The folder of a run's samples, one of its files, or a file with one length in each line."""


class RecordedSettings(Settings):
    """The lengths of a run's samples. A response to one of its prompts has the recorded length. Any other has
    one of all recorded lengths at random."""

    kind: Literal["recorded"] = "recorded"
    """Selects this distribution."""
    path: RunPath
    """The folder of the run's samples."""


Distribution = Annotated[
    UniformSettings | TableSettings | EmpiricalSettings | RecordedSettings, Field(discriminator="kind")
]


class SimLengthSettings(Settings):
    """Response lengths: lognormal or another distribution, correlated within a group, clipped at a limit."""

    distribution: Distribution | None = None
    """Set: median_tokens and sigma are not used."""

    median_tokens: float | None = Field(default=None, gt=0)
    """Median before clipping. None: 1230, or the same share of a limit that is taken from [sampling]."""
    sigma: float = Field(default=1.3, ge=0)
    """Standard deviation of the logarithm of a length."""
    correlation: float = Field(default=0.7, ge=0, le=1)
    """Correlation of two responses to one prompt: of their log-lengths, or of the normal numbers whose
    quantiles they are."""
    drift: float = Field(default=1.0, gt=0)
    """Factor by which responses change in 100 versions of the weights."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Length limit. None: sampling.max_completion_tokens of the config, or 16,384 without [sampling]."""
    prompt_tokens: int = Field(default=100, ge=1)
    """Tokens of each prompt."""
    rows: int | None = Field(default=None, ge=1)
    """Prompts of the data set, repeated every epoch. None: each prompt occurs once."""


class SimCodeSettings(Settings):
    """Programs with test cases. The times of a test case are alike in all responses to its prompt."""

    cases: int = Field(default=10, ge=1)
    """Test cases of a prompt."""
    median_s: float = Field(default=0.1, gt=0)
    """Median over prompts of the seconds of a test case."""
    sigma: float = Field(default=1.0, ge=0)
    """Standard deviation of the logarithm of these seconds over prompts."""
    case_sigma: float = Field(default=0.0, ge=0)
    """Standard deviation over the test cases of one prompt."""
    own_sigma: float = Field(default=0.1, ge=0)
    """Standard deviation over the responses to one prompt, for each test case."""
    endless: float = Field(default=0.05, ge=0, le=1)
    """Share of the responses that never end in one of their test cases. They are incorrect."""
    timeout: TimeoutSettings = TimeoutSettings()
    """The time limit."""


class SimJudgeSettings(Settings):
    """A model that scores a response in one forward pass, as a local judge does. One is on each
    device of the engines (RollPacker 4.3). Its times follow from [sim.cluster]."""

    model: FolderOrName = "Qwen2.5-7B"
    """Model of the judge, as in sim.cluster.model. Its weights are bfloat16."""
    memory_mib: int | None = Field(default=None, ge=1)
    """Memory on a device for layers and activations together, in MiB, beside the share of the engine. Other
    layers are copied from the host's memory. None: all layers stay on the device."""
    max_tokens: int = Field(default=4096, ge=1)
    """Tokens of a batch, padding included."""


class SimRewardSettings(Settings):
    """Rewards of lognormal duration on a fixed number of workers."""

    workers: int = Field(default=64, ge=1)
    """Samples that are scored at the same time."""
    median_s: float = Field(default=0.3, ge=0)
    """Median of the seconds for one sample."""
    sigma: float = Field(default=0.8, ge=0)
    """Standard deviation of the logarithm of these seconds."""
    timeout_s: float = Field(default=10.0, gt=0)
    """Seconds after which a reward is zero."""
    failing: float = Field(default=0.0, ge=0, le=1)
    """Share of the samples whose reward function raises."""
    hanging: float = Field(default=0.0, ge=0, le=1)
    """Share of the samples whose reward function never returns."""
    synchronous: bool = False
    """Whether rewards are synchronous; reward.synchronous holds, too."""
    code: SimCodeSettings | None = None
    """Set: responses are programs, and the fields median_s, sigma, timeout_s and hanging are not used."""
    judge: SimJudgeSettings | None = None
    """Set: a judge on the devices of the engines. The fields workers, median_s, sigma, timeout_s, failing and
    hanging are not used. [sim.host] says how much judge and engine slow each other down."""
    solvable: tuple[float, float] = (0.6, 0.6)
    """Parameters of the beta distribution of the prompts' solve rates."""


class SimClusterSettings(Settings):
    """Devices and a model. All rates of [sim.engines] and [sim.trainer] that the config does not set follow
    from them (sim/cluster.py), so that schedules are compared on equal hardware. Efficiencies are shares of
    the device's peak."""

    device: Shared[str] = "H100"
    """Name of a profile: A100-40G, RTX 4090, L40S, H100, H800, H200, H20, B200, GB200, MI300X or CPU."""
    devices: int = Field(default=8, ge=1)
    """Devices that generate and train."""
    model: FolderOrName | None = None
    """A model of sim/cluster.toml, such as Qwen2.5-7B or Qwen3-30B-A3B, or a Hugging Face model folder. None:
    that of [model]."""
    rollout_devices: int | None = Field(default=None, ge=1)
    """Devices that generate; the others train. None: all generate and train in turn, which needs
    placement.kind = "colocated" or "elastic"."""
    tensor_parallel: int = Field(default=1, ge=1)
    """Devices of one engine."""
    devices_per_node: int = Field(default=8, ge=1)
    """Devices with links to one another. More of them communicate over the network."""
    network_bytes_per_s: float = Field(default=50e9, gt=0)
    """Network of one device. Default: NDR InfiniBand (NVIDIA ConnectX-7 data sheet, 2022)."""
    memory_share: float = Field(default=0.9, gt=0, le=1)
    """Memory that an engine uses for weights and KV cache. Default: vLLM's gpu_memory_utilization."""
    bandwidth_efficiency: float = Field(default=0.7, gt=0, le=1)
    """Share of the memory bandwidth that decoding reaches. Default: assumed."""
    decode_efficiency: float = Field(default=0.5, gt=0, le=1)
    """Share of the FLOP/s that a large batch reaches in decoding. Default: assumed."""
    prefill_efficiency: float = Field(default=0.5, gt=0, le=1)
    """Share of the FLOP/s that a prefill reaches. Default: assumed."""
    training_efficiency: float = Field(default=0.4, gt=0, le=1)
    """Share of the FLOP/s that forward and backward reach (MFU). Default: The Llama 3 Herd of Models, 2024,
    table 4 (38 to 43%)."""
    link_efficiency: float = Field(default=0.8, gt=0, le=1)
    """Share of the bandwidth that links, network and host memory reach. Default: assumed."""
    overhead_s: float = Field(default=2e-3, ge=0)
    """Seconds of a decode step for scheduling, launches and sampling. Default: assumed."""
    overhead_per_request_s: float = Field(default=14e-6, ge=0)
    """Seconds that the host adds to a decode step for each running request. Default: scheduling in Vidur's
    profile of an A100 (Agrawal et al., 2024): 0.165 ms with 8 requests, 0.952 ms with 64."""
    update_s: float | None = Field(default=None, ge=0)
    """Seconds that each optimizer step takes beside its passes, Adam and its communication. None: 0.19 s for
    each 1e9 parameters. DORA (Hu et al., 2026, Fig. 8) prints training times of 32.8e9 parameters on n H800
    that are a / n + 11.2 s an optimizer step; links take 4.9 s of these. That it grows with the parameters
    is assumed."""
    recompute_activations: bool = True
    """Whether the trainer computes the forward pass twice to save memory: 8 instead of 6 FLOPs a parameter
    and token."""
    trainer_bytes_per_parameter: float = Field(default=16.0, gt=0)
    """Memory of weights, gradients and optimizer state, a quarter, a quarter and a half of it. Default:
    mixed-precision Adam (Rajbhandari et al., ZeRO, 2020, section 3.1)."""
    trainer_replicas: int | None = Field(default=None, ge=1)
    """Replicas of the trainer; each has all of that memory. None: trainer.replicas, or 1 without a config."""
    trainer_tensor_parallel: int | None = Field(default=None, ge=1)
    """Devices that divide each layer of the trainer, and all-reduce its activations. None:
    trainer.tensor_parallel, or 1 without a config."""
    offload: OffloadSettings | None = None
    """Places of the trainer's state while engines generate on its devices. None: [trainer.offload]."""
    transport: Literal["process_group", "filesystem"] = "process_group"
    """How weights reach engines on other devices."""
    weight_groups: Literal["one", "each"] | None = None
    """one: a pipelined broadcast to all engines. each: a transfer to each, over one link. None: [weights]
    `groups`."""
    filesystem_bytes_per_s: float = Field(default=2e9, gt=0)
    """Rate at which a shared file system, or the disk of a node, is written and read. Default: assumed."""

    @property
    def devices_by_use(self) -> tuple[int, int]:
        """Devices that generate, and devices that only train."""
        generating = self.rollout_devices or self.devices
        return generating, self.devices - generating


class SimHostSettings(Settings):
    """Slowdown of engines, trainer and judge while they work at the same time on one host."""

    engine_slowdown: float = Field(default=1.0, ge=1)
    """Factor on the time of a decode step while the trainer works."""
    trainer_slowdown: float = Field(default=1.0, ge=1)
    """Factor on the time of the trainer while an engine decodes."""
    judge_slowdown: float = Field(default=1.0, ge=1)
    """Factor on the time of a decode step while a sample is scored: the rewards are a judge on the devices of
    the engines."""
    judged_slowdown: float = Field(default=1.0, ge=1)
    """Factor on the time of a judge of [sim.rewards.judge] while the engine on its device decodes."""


class SimFaultSettings(Settings):
    """Engines and the trainer die at random and are started again. Requests go on from their tokens."""

    mean_life_s: float | None = Field(default=None, gt=0)
    """Mean seconds until an engine dies; the times are exponential. None: it lives."""
    restart_s: float = Field(default=60.0, ge=0)
    """Seconds from its death until it serves again."""
    trainer_mean_life_s: float | None = Field(default=None, gt=0)
    """Mean seconds until the trainer dies. None: it lives."""
    trainer_restart_s: float = Field(default=120.0, ge=0)
    """Seconds from its death until it begins to compute again what its newest checkpoint lacks."""
    trainer_checkpoint_steps: int = Field(default=1, ge=1)
    """Optimizer steps between two checkpoints."""
    trainer_alone: bool = True
    """Whether engines generate meanwhile (`trainer.restarts`), or restart with it (`host.restarts`)."""


class SimSettings(Settings):
    """The [sim] section."""

    cluster: SimClusterSettings | None = None
    engines: SimEngineSettings = SimEngineSettings()
    trainer: SimTrainerSettings = SimTrainerSettings()
    lengths: SimLengthSettings = SimLengthSettings()
    rewards: SimRewardSettings = SimRewardSettings()
    reference: SimReferenceSettings = SimReferenceSettings()
    host: SimHostSettings | None = None
    faults: SimFaultSettings | None = None

    @model_validator(mode="after")
    def _check_judge(self) -> "SimSettings":
        if self.rewards.judge is None:
            return self
        if self.rewards.code:
            raise ValueError("rewards.judge and rewards.code are both set; keep one of them")
        if self.cluster is None:
            raise ValueError("the times of rewards.judge follow from [sim.cluster]; set it")
        if self.host and (self.host.engine_slowdown, self.host.trainer_slowdown) != (1.0, 1.0):
            problem = "host.engine_slowdown and host.trainer_slowdown are those of one host that all share"
            raise ValueError(f"{problem}, and rewards.judge is on each device; remove them")
        return self

    @model_serializer(mode="wrap")
    def _keep_open_rates(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """A resolved config leaves open what follows from the cluster."""
        tree: dict[str, Any] = handler(self)
        if self.cluster:
            for name in tree.keys() & {"engines", "trainer"}:
                given = getattr(self, name).model_fields_set
                tree[name] = {key: value for key, value in tree[name].items() if key in given}
        return tree
