"""The tiny model and the deadline of the tests of workers."""

from tests.drivers.workers.conftest import model_path, short_waits

__all__ = ["model_path", "short_waits"]
