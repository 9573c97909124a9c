"""Settings of the engines of a service with Tinker's API."""

from typing import Annotated, Literal

from pydantic import Field

from tailrace.drivers.engine.settings import ServerEngineSettings
from tailrace.settings import Shared


class TinkerEngineSettings(ServerEngineSettings):
    """The samplers of a service with Tinker's API (extras/tinker/client.py). Its key: $TINKER_API_KEY."""

    of_service = True
    kind: Literal["tinker"] = "tinker"
    """Selects this kind of engine."""

    urls: tuple[Annotated[str, Field(pattern="^https?://")], ...] = Field(min_length=1, max_length=1)
    """The address of the service."""
    base_model: Shared[str] = Field(min_length=1)
    """The service's name of the model."""
    chunk_tokens: int = Field(default=256, ge=0)
    """Tokens that are asked for at once; 0 or greater. A response that is parked loses those of one chunk at
    most, and takes new weights between two chunks. 0: whole responses."""
