"""What a vLLM server says about its KV cache in its Prometheus metrics."""

import re
from dataclasses import dataclass

_PREEMPTIONS = re.compile(r"^vllm:num_preemptions_total(?:\{[^}]*\})? ([0-9.e+]+)$", re.MULTILINE)
_CACHE = re.compile(r"^vllm:cache_config_info\{([^}]*)\}", re.MULTILINE)
_LABEL = re.compile(r'\b(block_size|num_gpu_blocks)="(\d+)"')


@dataclass(frozen=True, slots=True)
class CacheFigures:
    """As of `Usage`."""

    num_preempted: int = 0
    kv_capacity: int | None = None


def read_figures(page: str) -> CacheFigures:
    """The figures of a metrics page; what it does not say stays as it is by default."""
    num_preempted = sum(int(float(count)) for count in _PREEMPTIONS.findall(page))
    capacities = [dict(_LABEL.findall(labels)) for labels in _CACHE.findall(page)]
    known = [int(each["block_size"]) * int(each["num_gpu_blocks"]) for each in capacities if len(each) == 2]
    return CacheFigures(num_preempted, sum(known) if known else None)
