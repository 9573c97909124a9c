"""The critic of PPO: a copy of the model with a scalar head, trained beside the policy, never published.

Values are computed when samples are accumulated, and the critic learns from the same pass. Its gradient is a
sum that the step divides by the same count as the policy's.
"""

from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tailrace.algo.advantages import gae
from tailrace.algo.base import AlgorithmSettings
from tailrace.contracts.trainer import TrainerSettings
from tailrace.drivers.models.causal_lm import read_model, read_shape
from tailrace.drivers.trainer.attention import use_attention
from tailrace.drivers.trainer.distributed import DTYPES, Ranks, blocks, recompute_activations, shard
from tailrace.drivers.trainer.model import hidden_states
from tailrace.drivers.trainer.optimizer import Optimizer
from tailrace.drivers.trainer.packing import MicroBatch, Packing


class Values(nn.Module):
    """The computation from packed tokens to values: what FSDP sees as the root of the critic."""

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype) -> None:
        super().__init__()
        self.model, self.dtype = model, dtype
        self.head = nn.Linear(model.config.hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, batch: MicroBatch) -> Tensor:
        hidden = hidden_states(self.model, batch, self.dtype)
        values: Tensor = self.head(hidden.to(self.head.weight.dtype)).float()
        return values[:, 0].clone()  # FSDP's hooks would be lost with a view


class Critic:
    """Predicts the return from each token on. It begins with the weights of the policy's Hugging Face folder
    and a head of zeros, so its first predictions are 0."""

    def __init__(self, path: Path, settings: TrainerSettings, ranks: Ranks, packing: Packing) -> None:
        source = read_model(path) if ranks.rank == 0 else read_shape(path)
        model: PreTrainedModel = source.base_model
        use_attention(model, packing)
        self._values = Values(model, DTYPES[settings.dtype]).eval()
        if settings.activation_checkpointing:
            recompute_activations(blocks(model))
        if ranks.group is None:
            self._values.to(settings.device)
        else:
            shard(self._values, model, ranks, settings)
        own = settings.changed(learning_rate=settings.critic_learning_rate)
        self.optimizer = Optimizer(self.parameters(), own)

    def values(self, batch: MicroBatch) -> Tensor:
        """Predict the return before each completion token: [C] float32, differentiable. All ranks of a
        replica compute at the same time."""
        values: Tensor = self._values(batch)
        return values

    def parameters(self) -> dict[str, Tensor]:
        """Return the parameters by name. Those of a sharded critic are DTensors."""
        return dict(self._values.named_parameters())


def token_advantages(values: Tensor, batch: MicroBatch, settings: AlgorithmSettings) -> Tensor:
    """Compute generalised advantage estimates of a batch whose `advantages` are rewards: [C]."""
    advantages: list[float] = []
    parts = torch.split(values.detach(), batch.num_tokens.tolist())
    for part, reward in zip(parts, batch.advantages.tolist(), strict=True):
        advantages += gae(part.tolist(), reward, gamma=settings.gamma, gae_lambda=settings.gae_lambda)
    return torch.tensor(advantages, device=values.device)
