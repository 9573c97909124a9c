"""The teacher in a folder, which a process of the run loads."""

from collections.abc import Iterable
from typing import get_args

from typing_extensions import override

from tailrace.config import LiveConfig, PolicyConfig
from tailrace.contracts.memory import ModelShape, ProcessMemory
from tailrace.contracts.trainer import Reference
from tailrace.drivers.data.settings import longest_sequence
from tailrace.drivers.kinds.base import Opening
from tailrace.drivers.kinds.teacher import TeacherKind, check_context, check_vocabulary
from tailrace.drivers.reward.settings import FolderTeacherSettings
from tailrace.drivers.trainer.logits import reference_memory
from tailrace.drivers.workers.base import Role
from tailrace.drivers.workers.reference import ReferenceJob, ReferenceWorker, RemoteReference
from tailrace.errors import ConfigError
from tailrace.model_folder import context_length


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
            temperature=opening.sampling.temperature,
        )
        return RemoteReference(await opening.start(ReferenceWorker, name, job))
