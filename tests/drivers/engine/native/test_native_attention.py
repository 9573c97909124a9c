"""The kernels of attention."""

import torch
from native_cases import PROMPTS, finish, submit_all
from torch.profiler import ProfilerActivity, profile

from helpers.attention import KERNELS, WITHOUT_PLANS, AttentionCalls


def test_no_call_may_make_a_plan_for_each_shape_and_afterwards_torch_may_choose_as_before(make_engine):
    engine = make_engine(max_completion_tokens=5)
    submit_all(engine, PROMPTS)
    with AttentionCalls() as calls:
        finish(engine)
    assert len({call.key_shape for call in calls.made}) > 10
    assert all(call.kernels == WITHOUT_PLANS for call in calls.made)
    assert all(getattr(torch.backends.cuda, f"{name}_sdp_enabled")() for name in KERNELS)


def test_on_a_cpu_each_call_takes_the_fused_kernel(make_engine):
    engine = make_engine(max_completion_tokens=5)
    submit_all(engine, PROMPTS)
    with AttentionCalls() as calls, profile(activities=[ProfilerActivity.CPU]) as profiler:
        finish(engine)
    counts = {event.key: event.count for event in profiler.key_averages()}
    of_something = [call for call in calls.made if all(call.key_shape)]
    assert counts["aten::_scaled_dot_product_flash_attention_for_cpu"] == len(of_something)
