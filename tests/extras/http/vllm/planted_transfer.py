"""The receiving half of a transfer inside vLLM, with the fault that planted.py names."""

from collections.abc import Mapping
from contextlib import ExitStack
from unittest.mock import patch

import torch
from planted import fault
from torch import Tensor

from tailrace.drivers.weights.transports import WeightReceiver
from tailrace.extras.http import vllm_backend
from tailrace.extras.http.vllm_backend import TailraceTransfer, UpdateInfo

TENSOR = "model.layers.1.mlp.down_proj.weight"


class PlantedTransfer(TailraceTransfer):
    """Loads published versions, spoiled."""

    _received: list[Mapping[str, Tensor]]
    """Of each publication."""

    def receive_weights(self, update_info: UpdateInfo) -> None:
        self._received = getattr(self, "_received", [])
        receive, what = WeightReceiver.receive, fault()

        def spoiled(*arguments: object) -> Mapping[str, Tensor]:
            new = {name: tensor.clone() for name, tensor in receive(*arguments).items()}
            self._received.append(dict(new))
            match what:
                case "a dropped tensor":
                    new[TENSOR] = self._received[-2][TENSOR]
                case "a changed tensor":
                    new[TENSOR] = 1.5 * new[TENSOR]
                case "a skipped load":
                    return dict(self._received[-2])
                case "an older version":
                    return dict(self._received[-4])
                case "a value that is not finite":
                    new[TENSOR][0, 0] = torch.nan
            return new

        with patch.object(WeightReceiver, "receive", spoiled), ExitStack() as stack:
            if what == "old copies":  # of the embedding, in the layout of the output layer
                stack.enter_context(patch.object(vllm_backend, "_process_tied", lambda model: None))
            super().receive_weights(update_info)
