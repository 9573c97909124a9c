"""What devices can do, and the shapes of the papers' models.

Rates are peaks of one device, in one direction for links. `SimClusterSettings` says which share of them is
reached.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tailrace.memory import ModelShape
from tailrace.model_folder import context_length, read_config

BYTES_PER_WEIGHT = 2
"""Engines hold weights and KV cache in bfloat16."""


@dataclass(frozen=True, slots=True)
class Device:
    """One device.

    Args:
        memory_bytes: of its own memory.
        bytes_per_s: bandwidth of that memory.
        flops: dense bfloat16 operations a second, accumulated in float32.
        link_bytes_per_s: to another device of the same node, in one direction.
        link_latency_s: of an all-reduce of a few kilobytes, for each doubling of the devices.
        host_bytes_per_s: to the memory of the host, in one direction.
        source: document and year of the numbers. No data sheet gives the latency: it is assumed.
    """

    memory_bytes: float
    bytes_per_s: float
    flops: float
    link_bytes_per_s: float
    link_latency_s: float
    host_bytes_per_s: float
    source: str


PROFILES: Mapping[str, Device] = {
    "A100-40G": Device(
        *(40e9, 1555e9, 312e12, 300e9, 10e-6, 32e9),
        "NVIDIA A100 Tensor Core GPU data sheet, 2021: SXM; NVLink: half of 600 GB/s; PCIe 4.0",
    ),
    "RTX 4090": Device(
        *(24e9, 1008e9, 165.2e12, 32e9, 20e-6, 32e9),
        "NVIDIA Ada GPU Architecture white paper, 2023, appendix A; no NVLink: PCIe 4.0",
    ),
    "H100": Device(
        *(80e9, 3350e9, 989.4e12, 450e9, 10e-6, 64e9),
        "NVIDIA H100 Tensor Core GPU data sheet, 2023: SXM; half of the FLOP/s with sparsity; NVLink: half"
        " of 900 GB/s; PCIe 5.0",
    ),
    "H800": Device(
        *(80e9, 3350e9, 989.4e12, 200e9, 10e-6, 64e9),
        "as H100; NVLink: half of 400 GB/s (Zhao et al., Insights into DeepSeek-V3, ISCA 2025)",
    ),
    "H200": Device(
        *(141e9, 4800e9, 989.4e12, 450e9, 10e-6, 64e9),
        "NVIDIA H200 Tensor Core GPU data sheet, 2024: SXM; half of the FLOP/s with sparsity; NVLink: half"
        " of 900 GB/s; PCIe 5.0",
    ),
    "MI300X": Device(
        *(192e9, 5300e9, 1307.4e12, 448e9, 15e-6, 64e9),
        "AMD Instinct MI300X data sheet, 2023: seven links of 64 GB/s in one direction; PCIe 5.0",
    ),
    "CPU": Device(
        *(512e9, 307.2e9, 229.4e12, 12.5e9, 50e-6, 307.2e9),
        "Intel Xeon Platinum 8480+ (Intel ARK, 2023): 8 channels of DDR5-4800; 56 cores at 2.0 GHz, with AMX"
        " 2048 FLOPs a cycle (Intel 64 and IA-32 Optimization Reference Manual, 2023); assumed: 512 GB, and a"
        " network of 100 Gbit/s",
    ),
}
"""Devices by the name that `sim.cluster.device` gives."""


@dataclass(frozen=True, slots=True)
class Model:
    """A causal language model, as the time and memory of a cluster depend on it.

    Args:
        num_parameters: a head that is tied to the embedding counts once.
        head_size: dimensions of one attention head.
        mlp_size: width of the feed-forward layer; the sum over the experts that one token reaches.
        context_tokens: the longest sequence, prompt included.
    """

    num_parameters: int
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    mlp_size: int
    vocabulary: int
    context_tokens: int

    @classmethod
    def read(cls, path: Path) -> "Model":
        """Read a Hugging Face model folder.

        Raises:
            ConfigError: a file is missing or damaged.
        """
        shape, config = ModelShape.read(path), read_config(path)
        num_heads = config["num_attention_heads"]
        head_size = shape.query_size // num_heads
        return cls(
            num_parameters=shape.num_parameters,
            num_layers=shape.num_layers,
            hidden_size=shape.hidden_size,
            num_heads=num_heads,
            num_kv_heads=shape.kv_size // head_size,
            head_size=head_size,
            mlp_size=shape.mlp_size,
            vocabulary=shape.vocabulary,
            context_tokens=context_length(path),
        )

    @property
    def weight_bytes(self) -> int:
        return BYTES_PER_WEIGHT * self.num_parameters

    @property
    def kv_bytes(self) -> int:
        """Of one position: a key and a value in each layer."""
        return BYTES_PER_WEIGHT * 2 * self.num_layers * self.num_kv_heads * self.head_size

    @property
    def block_parameters(self) -> int:
        """Of the matrices of one layer."""
        attention = 2 * self.hidden_size * self.head_size * (self.num_heads + self.num_kv_heads)
        return attention + 3 * self.hidden_size * self.mlp_size

    @property
    def multiplied_parameters(self) -> int:
        """Parameters that each token is multiplied with: all matrices but the embedding of its input."""
        return self.num_layers * self.block_parameters + self.hidden_size * self.vocabulary

    @property
    def shape(self) -> ModelShape:
        """Its shape, with a head of its own."""
        outside = 2 * self.vocabulary * self.hidden_size
        return ModelShape(
            num_parameters=self.num_parameters,
            block_parameters=self.block_parameters,
            outside_parameters=outside,
            tensor_parameters=outside // 2,
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            query_size=self.num_heads * self.head_size,
            kv_size=self.num_kv_heads * self.head_size,
            mlp_size=self.mlp_size,
            vocabulary=self.vocabulary,
            stored_bytes=self.weight_bytes,
        )


MODELS: Mapping[str, Model] = {
    "Qwen2.5-7B": Model(7_615_616_512, 28, 3584, 28, 4, 128, 18944, 152_064, 131_072),
    "Qwen2.5-14B": Model(14_770_033_664, 48, 5120, 40, 8, 128, 13824, 152_064, 131_072),
    "Qwen2.5-32B": Model(32_763_876_352, 64, 5120, 40, 8, 128, 27648, 152_064, 131_072),
    "Qwen3-1.7B": Model(1_720_574_976, 28, 2048, 16, 8, 128, 6144, 151_936, 40_960),
    "Qwen3-4B": Model(4_022_468_096, 36, 2560, 32, 8, 128, 9728, 151_936, 40_960),
    "Qwen3-8B": Model(8_190_735_360, 36, 4096, 32, 8, 128, 12288, 151_936, 40_960),
}
"""The papers' models, from their published config.json; parameters as in their weight files."""
