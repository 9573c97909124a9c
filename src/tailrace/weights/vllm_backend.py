"""The receiving half of a weight transfer, inside a worker process of vLLM.

All tensors are read before the model is touched: a version that cannot be read leaves the old weights.
"""

from dataclasses import dataclass
from typing import Any

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from tailrace.weights.base import Weights
from tailrace.weights.shared_memory import read_weights


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]  # vLLM is untyped here
    """Nothing has to be agreed on."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """One published version; the fields are those of `Weights`."""

    version: int
    location: str


class TailraceTransfer(WeightTransferEngine):  # type: ignore[misc]
    """Loads published versions into the model."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Nothing to prepare."""

    def start_weight_update(self) -> None:
        """The model is prepared once the tensors are here."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive one version. Unlike the method of the base class, this works without an accelerator."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Read a version and load it."""
        tensors = read_weights(Weights(update_info.version, update_info.location))
        initialize_layerwise_reload(self.model)
        self.model.load_weights(tensors.items())
        finalize_layerwise_reload(self.model, self.model_config)

    def finish_weight_update(self) -> None:
        """The version was finished when it was received."""

    def shutdown(self) -> None:
        """Nothing to release."""
