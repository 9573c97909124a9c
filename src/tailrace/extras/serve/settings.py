"""Settings of `tailrace serve`."""

from pathlib import Path

from pydantic import Field

from tailrace.settings import Settings


class ServeSettings(Settings):
    """Address and limits of `tailrace serve`."""

    host: str = "127.0.0.1"
    """The address to listen on. On one that is not loopback every route but /health needs the token."""
    port: int = Field(default=8000, ge=0, le=65_535)
    """0 to 65,535. 0: a free port."""
    served_model_name: str = ""
    """The model's name in requests and replies. Empty: its folder."""
    weights_folder: Path | None = None
    """New weights are read from files below it. None: the server takes no new weights from files."""
    max_body_bytes: int = Field(default=32 * 2**20, ge=1024, le=2**40)
    """The largest request body, in bytes; 1,024 to 2^40."""
    own_stable_reinforce: bool = False
    """With --tinker: the loss stable_reinforce is a form of this project (losses.token_loss). The formula of
    Tinker's is not public; without this option the loss is refused."""
