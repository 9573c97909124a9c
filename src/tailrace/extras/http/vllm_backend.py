"""The receiving half of a weight transfer, inside a worker process of vLLM.

All tensors are received before the model is touched: a transfer that fails leaves the old weights.
"""

from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from tailrace.contracts.weights import Link, Weights
from tailrace.drivers.weights.transports import WeightReceiver


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]  # vLLM is not installed where mypy runs
    """Empty: the two ends need not agree on anything."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """One transfer.

    Args:
        weights: the fields of `Weights`.
        link: those of `Link`, in order.
    """

    weights: dict[str, Any]
    link: list[Any]


class TailraceTransfer(WeightTransferEngine):  # type: ignore[misc]
    """Loads published versions into the model."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    _receiver: WeightReceiver | None = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Do nothing: there is nothing to prepare."""

    def start_weight_update(self) -> None:
        """The model is prepared once the tensors are here."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive one version. Unlike the method of the base class, this works without an accelerator."""
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Receive a version and load it."""
        if self._receiver is None:
            device = str(next(self.model.parameters()).device)
            self._receiver = WeightReceiver(rank=1 + self.parallel_config.rank, device=device)
        weights = msgspec.convert(update_info.weights, Weights)
        tensors = self._receiver.receive(weights, msgspec.convert(update_info.link, Link))
        initialize_layerwise_reload(self.model)
        self.model.load_weights(tensors.items())
        finalize_layerwise_reload(self.model, self.model_config)
        _process_tied(self.model)

    def finish_weight_update(self) -> None:
        """The version was finished when it was received."""

    def shutdown(self) -> None:
        """Let the trainer go."""
        self._receiver = None


def _process_tied(model: torch.nn.Module) -> None:
    """Let layers that share another layer's weight see the new one.

    vLLM processes a tied weight for the layer under whose name it was loaded. The others, such as an output
    layer that is tied to the embedding, may hold a packed copy of the old weight.
    """
    first: dict[int, torch.nn.Module] = {}
    for layer in model.modules():
        weight, method = getattr(layer, "weight", None), getattr(layer, "quant_method", None)
        if weight is None or not weight.numel() or not isinstance(method, QuantizeMethodBase):
            continue
        if first.setdefault(weight.data_ptr(), layer) is not layer:
            method.process_weights_after_loading(layer)
