"""A worker that behaves as its job says."""

import time
from typing import Literal

from tailrace.drivers.workers.worker import Job, Worker, WorkerConnection, beside


class StandInJob(Job):
    manner: Literal["start for ever", "obey", "raise", "work for ever", "stay", "babble"]


class StandIn(Worker):
    job_type = StandInJob

    def __init__(self, job: StandInJob, connection: WorkerConnection) -> None:
        self._job, self._connection = job, connection

    @classmethod
    def load_job(cls, job: StandInJob, connection: WorkerConnection) -> "StandIn":
        while job.manner == "start for ever":
            time.sleep(1)
        return cls(job, connection)

    def serve(self, connection: WorkerConnection) -> None:
        for call in connection:
            if not connection.execute_beside(self, call):
                connection.execute(self, call)
        while self._job.manner == "stay":
            time.sleep(1)

    @beside
    def help(self) -> None:
        raise RuntimeError("the helper melted")

    def obey(self) -> None:
        print("was asked to obey")
        if self._job.manner == "raise":
            raise ValueError("the model melted")
        if self._job.manner == "babble":
            self._connection.socket.sendall(b"\x01\x00\x00\x00\xc1")
        while self._job.manner == "work for ever":
            sum(range(1000))
