"""The base of every section of the config: frozen, typed, no unknown keys.

A section stands in the `base.py` of the room it configures; `config.py` joins them. None of this
imports torch, so a config is checked before anything heavy is loaded.
"""

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """One section of the config."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)
