"""The figures of a vLLM server's metrics page."""

from tailrace.contracts.engine import DecodeSums, Usage
from tailrace.extras.http.engine import read_figures

PAGE = """\
# HELP vllm:num_preemptions_total Cumulative number of preemption from the engine.
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{engine="0",model_name="/models/qwen"} 12.0
vllm:num_preemptions_created{engine="0",model_name="/models/qwen"} 1.7e+09
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",engine="0",mamba_block_size="512",num_gpu_blocks="1000"} 1.0
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="/models/qwen"} 40.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="/models/qwen"} 230.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="/models/qwen"} 1.2e+02
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="/models/qwen",position="0"} 50.0
"""


def test_preemptions_the_size_of_the_cache_and_drafts_are_read() -> None:
    decoded = DecodeSums(checked=230, accepted=120, drafted=40)
    assert read_figures(PAGE) == Usage(num_preempted=12, kv_capacity=16_000, decoded=decoded)


def test_a_page_without_them_leaves_the_size_unknown() -> None:
    none = 'vllm:cache_config_info{block_size="16",num_gpu_blocks="None"} 1.0\n'
    assert read_figures(none) == read_figures("not found") == Usage()
