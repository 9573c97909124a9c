"""The HTTP server of a process that handles signals itself."""

from collections.abc import Generator
from contextlib import contextmanager

import uvicorn


class Server(uvicorn.Server):
    """Leaves signals to the process."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Change no handler."""
        yield
