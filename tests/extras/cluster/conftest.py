"""The tiny model and the deadline of the tests of workers."""

from tests.drivers.workers.conftest import execute, model_path, short_waits

__all__ = ["execute", "model_path", "short_waits"]
