"""The trainer in processes of the run, one for each rank, its reference model, and teachers in folders."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import get_args

from typing_extensions import override

from tailrace.config import LiveConfig, PolicyConfig, RunConfig
from tailrace.contracts.memory import STATE_BYTES, TRANSFORMERS_BYTES, ModelShape, ProcessMemory
from tailrace.contracts.trainer import FILE_BYTES, Reference, TrainerSettings
from tailrace.drivers.data.settings import longest_sequence
from tailrace.drivers.kinds.base import Opening, TrainerKind, engine_kind
from tailrace.drivers.kinds.teacher import TeacherKind, check_context, check_vocabulary
from tailrace.drivers.reward.settings import FolderTeacherSettings
from tailrace.drivers.trainer.adapter import adapter_parameters, check_lora
from tailrace.drivers.trainer.logits import logit_bytes, reference_memory
from tailrace.drivers.trainer.plans import check_tensor_parallel
from tailrace.drivers.workers.base import Role
from tailrace.drivers.workers.calls import RemoteWorker
from tailrace.drivers.workers.reference import ReferenceJob, ReferenceWorker, RemoteReference
from tailrace.drivers.workers.trainer import (
    AdapterOff,
    RemoteTrainer,
    TrainerJob,
    TrainerWorker,
    trainer_jobs,
)
from tailrace.errors import ConfigError, say
from tailrace.kinds import class_of
from tailrace.model_folder import check_files, context_length, draft_tensors
from tailrace.types import ITEM_BYTES


class Torch(TrainerKind):
    """The trainer of this package."""

    @override
    def check(self, config: PolicyConfig) -> None:
        check_files(config.model.path)
        if drafts := draft_tensors(config.model.path):
            say(f"checkpoints have {len(drafts)} untrained weights of the base: {min(drafts)}, ...")
        if config.trainer.lora:
            check_lora(config.model.path, config.trainer.lora)
        check_tensor_parallel(config.model.path, config.trainer.tensor_parallel)
        if adapter := config.trainer.adapter:
            engine_kind(config).check_adapter(adapter, config)
        apart = not config.placement.takes_turns and not config.weights.is_streamed
        if config.trainer.restarts and not apart:
            problem = 'it needs placement.kind = "disaggregated", and no weights.transport = "process_group"'
            remedy = "change them, or set host.restarts, with which all workers start again"
            raise ConfigError("trainer.restarts", config.trainer.restarts, problem, remedy)
        if config.trainer.restarts and not config.run.checkpoint_every:
            problem = "with run.checkpoint_every = 0 it repeats the whole run, all samples of which it keeps"
            remedy = "set run.checkpoint_every (tailrace sft: sft.checkpoint_every)"
            raise ConfigError("trainer.restarts", config.trainer.restarts, problem, remedy)

    @override
    def memory(self, config: PolicyConfig, longest: int) -> Iterable[ProcessMemory]:
        trainer, host, shape = config.trainer, config.host, ModelShape.read(config.model.path)
        adapter = adapter_parameters(config.model.path, trainer.lora)
        published = 4 * adapter if trainer.adapter else ITEM_BYTES[config.engine.dtype] * shape.num_parameters
        kept, on_cpu = config.weights.kept, trainer.device == "cpu"
        copies = 4 * shape.num_parameters + published
        if host.starts("trainer"):
            yield trainer_memory(config, shape, longest, adapter, copies if on_cpu else 0)
        if host.starts("trainer") and (kept or not on_cpu):
            parts = {"model": 0 if on_cpu else copies, "publications": kept * published}
            yield ProcessMemory("copies of the weights", "cpu", {}, parts, trainer.replicas)
        if config.weights.on_devices and host.starts("trainer"):
            # the newest one, and its tensors before they are joined to messages
            yield ProcessMemory("publication", trainer.device, {"publication": 2 * published}, {})
        if config.algorithm.kl_coef and not trainer.lora and host.starts("reference"):
            yield reference_memory("reference", trainer.device, trainer, shape)

    @override
    def checkpoint_bytes(self, config: PolicyConfig) -> tuple[int, int]:
        lora, whole = config.trainer.lora, ModelShape.read(config.model.path).num_parameters
        adapter = adapter_parameters(config.model.path, lora)
        critic = whole if config.algorithm.advantage == "gae" else 0
        trained = (adapter if lora else whole) + critic
        model, weights = whole + adapter, STATE_BYTES["weights"]
        return weights * model, STATE_BYTES["optimizer"] * trained + weights * critic

    @override
    async def begin(self, opening: Opening) -> RemoteTrainer:
        config = opening.config
        engine, trainer = config.engine, config.trainer
        job = TrainerJob(
            threads=trainer.threads,
            model=opening.config.model.path,
            trainer=trainer,
            algorithm=config.algorithm,
            sampling=opening.config.sampling,
            weights=config.weights.in_run_folder(opening.folder),
            published_dtype="float32" if trainer.adapter else engine.dtype,
            checkpoints=opening.folder.absolute() if opening.life is not None else None,
            probe=opening.probe,
            probe_dtype=engine.dtype,
            seed=config.run.seed,
        )
        ranks = [*zip(trainer_jobs(job), opening.devices.trainer, strict=True)]

        async def start(*, watched: bool = False) -> list[RemoteWorker]:
            return [await opening.start(TrainerWorker, *each, on, watched=watched) for each, on in ranks]

        made: Callable[..., RemoteTrainer] = RemoteTrainer
        if trainer.restarts:
            made = partial(class_of("parts.restarting_trainer"), start=start, watches=opening.watches)
        remote = made(await start(watched=not trainer.restarts), job)
        opening.closing.append(remote.close)
        return remote

    @override
    async def reference(self, opening: Opening, trainer: RemoteTrainer) -> Reference | None:
        """With LoRA it is the trainer without its adapter."""
        settings = opening.config.trainer
        if not opening.config.algorithm.kl_coef:
            return None
        if settings.lora:
            return AdapterOff(trainer)
        job = ReferenceJob(
            threads=settings.threads,
            model=opening.config.model.path,
            trainer=settings,
            temperature=opening.config.sampling.temperature,
        )
        return RemoteReference(await opening.start(ReferenceWorker, "reference", job))


def trainer_memory(
    config: RunConfig, shape: ModelShape, longest: int, adapter: int = 0, copies: int = 0
) -> ProcessMemory:
    """Estimate the memory of one process of the trainer.

    Args:
        longest: tokens of the longest sample, which may exceed a micro-batch.
        adapter: parameters of the adapter, if one is trained.
        copies: bytes that it holds while it reads, publishes or saves the model.
    """
    settings, whole = config.trainer, shape.num_parameters
    processes, on_cpu = settings.replica_processes, settings.device == "cpu"
    critic = whole if config.algorithm.advantage == "gae" else 0
    trained = (adapter if settings.lora else whole) + critic
    numbers = dict.fromkeys(STATE_BYTES, trained) | {"weights": whole + adapter + critic}
    state = {part: STATE_BYTES[part] * num // processes for part, num in numbers.items()}
    work = {"micro-batch": pass_bytes(settings, shape, longest)}
    if config.algorithm.old_policy == "recomputed":
        work["old policy"] = 4 * (trained - critic) // processes
    copies += state["optimizer"] * settings.async_checkpoints + 2 * min(FILE_BYTES, state["optimizer"])
    if on_cpu and not (config.run.checkpoint_every and settings.async_checkpoints):
        copies = max(0, copies - work["micro-batch"])  # they do not exist during a pass
    host = {"process": TRANSFORMERS_BYTES, "copies": copies}
    asleep = {part: state[part] for part in settings.kept_asleep()}
    if settings.cpu_offload and not on_cpu:
        host, asleep = host | state, {}
    else:
        work |= state
        if config.placement.takes_turns and not on_cpu:
            places = settings.offload.places()
            host["asleep"] = sum(size for part, size in state.items() if places[part] == "host")
    return ProcessMemory("trainer", settings.device, work, host, settings.num_processes, asleep)


def pass_bytes(settings: TrainerSettings, shape: ModelShape, longest: int) -> int:
    """An upper bound of what a forward and backward pass takes: activations, logits, and the weights that are
    gathered or cast to the type of the computation, with their gradients.

    A block keeps float32 for its norms, those of the heads included, and the input of each linear layer. With
    `tensor_parallel` a process has a part of the heads, of the feed-forward layer and of the vocabulary.
    """
    size, tokens = ITEM_BYTES[settings.dtype], max(settings.max_tokens_per_microbatch, longest)
    parts = settings.tensor_parallel
    divided = 6 * (shape.query_size + shape.kv_size) + 4 * shape.mlp_size
    numbers = 5 * shape.hidden_size + divided // parts
    block, input = 16 * shape.hidden_size + size * numbers, 4 * shape.hidden_size
    attention = size * shape.query_size // parts
    kept = block * shape.num_layers
    if settings.activation_checkpointing:
        kept = block + shape.num_layers * (input + attention)
    logits = logit_bytes(tokens, shape, parts)
    weights = 4 * shape.outside_parameters + (size * shape.num_parameters if size < 4 else 0)
    if settings.ranks > 1 or settings.cpu_offload:
        weights = (2 * size + 8) * (shape.outside_parameters + shape.block_parameters)
    return tokens * kept + logits + weights // parts


class FolderTeacher(TeacherKind):
    """A folder that a process of the run loads."""

    @override
    def check(self, teacher: FolderTeacherSettings, config: LiveConfig) -> None:
        if not all(map(config.host.starts, get_args(Role))):
            problem = "a process of this host loads a teacher, and the run has workers on others"
            raise ConfigError("teacher.kind", "folder", problem, 'use a "server"')
        check_vocabulary("teacher.path", teacher.path, config.model.path)
        own, students = context_length(teacher.path), context_length(config.model.path)
        longest = longest_sequence(
            config.data, config.sampling, max_context_tokens=students, unbounded_prompt=students
        )
        check_context("teacher.path", str(teacher.path), own, longest)

    @override
    def memory(self, teacher: FolderTeacherSettings, config: PolicyConfig) -> Iterable[ProcessMemory]:
        shape, device = ModelShape.read(teacher.path), teacher.device or config.trainer.device
        yield reference_memory("teacher", device, config.trainer, shape)

    @override
    async def begin(self, teacher: FolderTeacherSettings, name: str, opening: Opening) -> Reference:
        trainer = opening.config.trainer
        changes = {"lora": None, "device": teacher.device or trainer.device}
        job = ReferenceJob(
            threads=teacher.threads,
            model=teacher.path,
            trainer=trainer.model_copy(update=changes),
            temperature=opening.config.sampling.temperature,
        )
        return RemoteReference(await opening.start(ReferenceWorker, name, job))
