"""The critic of PPO: a copy of the model with a scalar head. It is trained beside the policy and never
published.

Values are computed when samples are accumulated, and the critic learns from the same pass. Its gradient is a
sum that the step divides by the same count as the policy's.
"""

from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Linear
from transformers import PreTrainedModel

from tailrace.algo.advantages import gae
from tailrace.algo.base import AlgorithmSettings
from tailrace.trainer.attention import PACKED
from tailrace.trainer.base import TrainerSettings
from tailrace.trainer.checkpoint import SavedState
from tailrace.trainer.model import DTYPES, hidden_states, read_model
from tailrace.trainer.optimizer import Optimizer
from tailrace.trainer.packing import MicroBatch


class Critic:
    """Predicts the return from each token on. It begins with the weights of the policy's Hugging Face folder
    and a head of zeros, so its first predictions are 0."""

    def __init__(self, path: Path, settings: TrainerSettings) -> None:
        model: PreTrainedModel = read_model(path).base_model
        device = torch.device(settings.device)
        model.set_attn_implementation(PACKED)
        self._model = model.to(device).eval()
        self._head = Linear(model.config.hidden_size, 1, device=device)
        torch.nn.init.zeros_(self._head.weight)
        torch.nn.init.zeros_(self._head.bias)
        self._dtype = DTYPES[settings.dtype]
        own = settings.model_copy(update={"learning_rate": settings.critic_learning_rate})
        self.optimizer = Optimizer(self.parameters(), own)

    def values(self, batch: MicroBatch) -> Tensor:
        """Predict the return before each completion token: [C] float32, differentiable."""
        values: Tensor = self._head(hidden_states(self._model, batch, self._dtype).float())
        return values[:, 0]

    def parameters(self) -> dict[str, Tensor]:
        model = {f"model.{name}": parameter for name, parameter in self._model.named_parameters()}
        return model | {f"head.{name}": parameter for name, parameter in self._head.named_parameters()}

    def state(self) -> SavedState:
        """Weights and optimizer state, for a checkpoint."""
        weights = {name: parameter.detach() for name, parameter in self.parameters().items()}
        return SavedState(self.optimizer.state(), weights)


def token_advantages(values: Tensor, batch: MicroBatch, settings: AlgorithmSettings) -> Tensor:
    """Compute generalised advantage estimates of a batch whose `advantages` are rewards: [C]."""
    advantages: list[float] = []
    parts = torch.split(values.detach(), batch.num_tokens.tolist())
    for part, reward in zip(parts, batch.advantages.tolist(), strict=True):
        advantages += gae(part.tolist(), reward, gamma=settings.gamma, gae_lambda=settings.gae_lambda)
    return torch.tensor(advantages, device=values.device)
