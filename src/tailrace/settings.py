"""The base class of all config sections: frozen, typed, no unknown keys.

A section is defined in the `base.py` of the room that it configures; `config.py` joins the sections. None of
these modules imports torch, so a config is checked before torch is loaded.
"""

from pydantic import BaseModel, ConfigDict
from pydantic.config import JsonDict

CHOSEN: JsonDict = {"chosen": True}
"""Of a field that a live run on this host chooses from the machine where the config does not set it
(commands/machine.py). Its default holds elsewhere."""


class Settings(BaseModel):
    """One section of the config. Numbers are finite."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)
