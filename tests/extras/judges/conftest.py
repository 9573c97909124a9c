"""The tiny model of the tests of workers."""

from tests.drivers.workers.conftest import model_path

__all__ = ["model_path"]
