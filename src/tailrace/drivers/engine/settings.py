"""Settings of the rollout engines."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator
from typing_extensions import override

from tailrace.devices import Device
from tailrace.kinds import OneOf
from tailrace.settings import CHOSEN, Settings, Shared


class ReplicaSettings(Settings):
    """Settings that all kinds of engines have."""

    can_join: ClassVar[bool] = False
    """Whether a worker of another host can be one (`tailrace join`)."""
    can_regroup: ClassVar[bool] = False
    """Whether those that the run starts can be started again over the devices of several."""
    of_service: ClassVar[bool] = False
    """Whether they are of a service that trains, too."""
    own_sampling: ClassVar[bool] = False
    """Whether each request may have sampling of its own."""
    sleep_args: ClassVar[tuple[str, ...]] = ()
    """Arguments without which those that the run starts cannot sleep."""
    kind: Shared[str]
    """Selects a kind of engine."""
    replicas: int = Field(default=1, ge=1, le=1024)
    """Engines; 1 to 1024. Each is a process, or a server."""
    dtype: Literal["float32", "bfloat16"] = Field(default="float32", json_schema_extra=CHOSEN)
    """The type of weights and KV cache. Not set: as trainer.dtype, for the engine's device."""
    max_num_seqs: int = Field(default=128, ge=1, le=65_536)
    """Requests that one engine decodes together; 1 to 65,536."""
    health_timeout_s: float = Field(default=60.0, gt=0, allow_inf_nan=False)
    """Seconds without an answer after which an engine counts as dead; above 0. Longer than the longest decode
    step and load."""
    recovery_timeout_s: float = Field(default=600.0, gt=0, allow_inf_nan=False)
    """Seconds for which a run waits for an engine when all are dead; above 0. Then it ends. A restart that
    takes longer is begun again."""

    @property
    def num_engines(self) -> int:
        """Engines of the run."""
        return self.replicas

    @property
    def num_devices(self) -> int:
        """Devices of one engine."""
        return 1

    @property
    def torch_device(self) -> str:
        """The torch device of each; empty: it chooses one."""
        return ""

    @property
    def resources(self) -> Mapping[str, float]:
        """The resources that Ray reserves for each; empty: the run starts no process for it."""
        return {}


class NativeEngineSettings(ReplicaSettings):
    """The embedded engine."""

    can_join, own_sampling = True, True
    kind: Literal["native"] = "native"
    """Selects this kind of engine."""
    threads: int = Field(default=1, ge=1, le=1024, json_schema_extra=CHOSEN)
    """Torch threads of each process; 1 to 1024. Not set: as trainer.threads."""
    device: Device = "cpu"
    """The torch device: "cpu", "cuda" or "cuda:N"."""
    kv_cache_tokens: int = Field(default=262_144, ge=1, le=2**40, json_schema_extra=CHOSEN)
    """Size of one engine's KV cache, in token positions; 1 to 2^40. When it is full, the most recently
    admitted request is preempted and recomputed later. Not set: 262,144, or what fits the memory."""
    max_prefill_tokens: int = Field(default=8192, ge=1, le=2**31)
    """The most context tokens between two decode steps; 1 to 2^31. A longer context is computed in parts."""
    drafts: Literal["off", "auto"] = "off"
    """auto: a step checks tokens that followed the same tokens before, in the response, or in others to the
    same prompt; as many as make it faster. No token changes but by rounding."""
    max_draft_tokens: int = Field(default=8, ge=1, le=64)
    """The most tokens of a request that a step checks; 1 to 64."""

    @property
    @override
    def torch_device(self) -> str:
        return self.device

    @property
    @override
    def resources(self) -> Mapping[str, float]:
        return {"CPU": float(self.threads)} | ({} if self.device == "cpu" else {"GPU": 1.0})


class ServerEngineSettings(ReplicaSettings):
    """An inference server that is reached over HTTP: started and supervised by the run, or joined."""

    server: ClassVar[str] = ""
    """Its name, where the run can start it."""
    urls: tuple[Annotated[str, Field(pattern="^https?://")], ...] = ()
    """Addresses of running servers to join, for example `http://10.0.0.7:8000`; one engine each. Without them
    the run starts `replicas` servers itself. They may also be of `tailrace serve`. Where they need a bearer
    token: $TAILRACE_TOKEN."""
    python: str | None = None
    """The Python interpreter whose environment has the server. Without it: $VLLM_PYTHON or $SGLANG_PYTHON."""
    tensor_parallel_size: int = Field(default=1, ge=1, le=1024)
    """Devices of one server that was started by the run; 1 to 1024."""
    args: tuple[str, ...] = ()
    """Further command-line arguments of a server that the run starts, passed on as they are."""
    env: dict[str, str] = {}
    """Further environment variables of a server that the run starts."""
    start_timeout_s: float = Field(default=600.0, gt=0, allow_inf_nan=False)
    """Seconds that a server may take to start; above 0."""
    max_logprob_difference: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """The self-test at the start fails if a log-prob of the server and the trainer's differ by more; above 0,
    in nats. Without it: 0.05, or 3 where server or trainer computes in bfloat16."""
    max_mean_logprob_difference: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Limit of their mean difference, above 0, in nats. None: 0.01, or 0.15 where server or trainer computes
    in bfloat16."""

    @property
    @override
    def num_engines(self) -> int:
        return len(self.urls) or self.replicas

    @property
    @override
    def num_devices(self) -> int:
        return self.tensor_parallel_size

    @property
    @override
    def resources(self) -> Mapping[str, float]:
        return {} if self.urls else {"CPU": 1.0, "GPU": float(self.tensor_parallel_size)}

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.urls and "replicas" in self.model_fields_set and self.replicas != len(self.urls):
            raise ValueError(f"replicas = {self.replicas}, but {len(self.urls)} urls are one engine each")
        return self


EngineSettings = Annotated[
    ReplicaSettings, OneOf("engine", NativeEngineSettings, default="native", is_open=True)
]
