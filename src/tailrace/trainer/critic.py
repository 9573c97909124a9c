"""The critic of PPO: a copy of the model with a number for a head, trained beside the policy, never
published.

It values a sample's tokens when they are accumulated, with the weights it then has, and learns from the
same pass. Its gradients, too, are a sum, divided once a step by the policy's own count.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Linear
from transformers import AutoModelForCausalLM, PreTrainedModel

from tailrace.algo.advantages import gae
from tailrace.algo.base import AlgorithmSettings
from tailrace.trainer.attention import PACKED
from tailrace.trainer.base import TrainerSettings
from tailrace.trainer.checkpoint import CriticState
from tailrace.trainer.optimizer import Optimizer
from tailrace.trainer.packing import MicroBatch
from tailrace.trainer.policy import hidden_states


class Critic:
    """Expects a reward from each token on. At first it expects 0."""

    def __init__(self, model: PreTrainedModel, settings: TrainerSettings, dtype: torch.dtype) -> None:
        """model: without a head."""
        device = torch.device(settings.device)
        model.set_attn_implementation(PACKED)
        self._model = model.to(device).eval()
        self._head = Linear(model.config.hidden_size, 1, device=device)
        torch.nn.init.zeros_(self._head.weight)
        torch.nn.init.zeros_(self._head.bias)
        self._dtype = dtype
        own = settings.model_copy(update={"learning_rate": settings.critic_learning_rate})
        self.optimizer = Optimizer(self.parameters(), own)

    @classmethod
    def load(cls, path: Path, settings: TrainerSettings, dtype: torch.dtype) -> "Critic":
        """A critic that begins as the model in a Hugging Face folder, which a Policy was loaded from."""
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).base_model
        return cls(model, settings, dtype)

    def values(self, batch: MicroBatch) -> Tensor:
        """[C] float32, differentiable: what is expected before each completion token."""
        values: Tensor = self._head(hidden_states(self._model, batch, self._dtype).float())
        return values[:, 0]

    def parameters(self) -> dict[str, Tensor]:
        model = {f"model.{name}": parameter for name, parameter in self._model.named_parameters()}
        return model | {f"head.{name}": parameter for name, parameter in self._head.named_parameters()}

    def state(self) -> CriticState:
        weights = {name: parameter.detach() for name, parameter in self.parameters().items()}
        return CriticState(weights, self.optimizer.state())


def token_advantages(values: Tensor, batch: MicroBatch, settings: AlgorithmSettings) -> Tensor:
    """[C]: generalised advantage estimates of a batch whose `advantages` are rewards."""
    rewards: Sequence[float] = batch.advantages.tolist()
    parts = torch.split(values.detach(), batch.num_tokens.tolist())
    advantages = [
        advantage
        for part, reward in zip(parts, rewards, strict=True)
        for advantage in gae(part.tolist(), reward, gamma=settings.gamma, gae_lambda=settings.gae_lambda)
    ]
    return torch.tensor(advantages, device=values.device)
