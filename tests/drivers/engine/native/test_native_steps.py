"""Decode steps that do not wait for the host: tokens that are read late, and inputs that graphs read."""

from types import SimpleNamespace

import pytest
import torch
from msgspec.structs import replace
from native_cases import PROMPTS, finish, submit_all
from replayed_graphs import Replayed
from torch.nn import functional as F

import tailrace.drivers.engine.native.engine as engine_module
import tailrace.drivers.engine.native.graphs as graphs_module
import tailrace.drivers.engine.native.model as model_module
from helpers.tiny_models import tiny_model
from tailrace.contracts.engine import GenerationRequest
from tailrace.contracts.sampling import SamplingSettings
from tailrace.drivers.engine.native.graphs import Graphs
from tailrace.drivers.engine.native.model import GatheredAttention
from tailrace.drivers.engine.native.support import GRAPH_ROWS
from tailrace.drivers.engine.settings import NativeEngineSettings
from tailrace.types import SamplingParams


def run(engine, late):
    """The outputs by id, and the tokens that were drawn."""
    engine._reads_late = late
    submit_all(engine, PROMPTS)
    ended, num_drawn = {}, 0
    while not engine.idle:
        before = engine.usage().num_generated
        ended |= {output.id: output for output in engine.step()}
        step = engine._in_flight
        num_drawn += len(step.sequences) if step else 0 if late else engine.usage().num_generated - before
    return ended, num_drawn


def assert_same(found, expected):
    """The same outputs. Log-probs are rounded by who is computed together."""
    assert found.keys() == expected.keys()
    for id, output in found.items():
        assert (output.ids, output.finish_reason) == (expected[id].ids, expected[id].finish_reason)
        assert output.behavior_logprobs == pytest.approx(expected[id].behavior_logprobs, abs=1e-4)


@pytest.mark.parametrize("stop", ["length", "token", "string"])
def test_a_sequence_that_ends_has_at_most_one_token_too_many_which_is_cut(make_engine, stop):
    """One that ends by its length has none: the host knows the length before it reads."""
    words = {"token": {"stop_token_ids": (3, 9)}, "string": {"stop": ("B", "Cd")}}.get(stop, {})
    sampling = SamplingSettings(max_completion_tokens=60, temperature=0.8, **words)
    expected, num_expected = run(make_engine(sampling=sampling), False)
    engine = make_engine(sampling=sampling)
    found, num_drawn = run(engine, True)
    assert_same(found, expected)
    num_stopped = sum(output.finish_reason == "stop" for output in found.values())
    assert num_drawn - num_expected == num_stopped
    assert (num_stopped > 3) == (stop != "length")
    usage = engine.usage()
    assert usage.num_generated == num_expected == usage.decoded.running


def test_what_is_not_read_is_read_before_anything_else_is_asked(make_engine):
    """After n steps every request has n tokens, whoever asks."""
    for ask in ("report", "abort", "load"):
        engine = make_engine()
        engine._reads_late = True
        submit_all(engine, PROMPTS)
        for _ in range(5):
            engine.step()
        if ask == "report":
            outputs = engine.report()
        elif ask == "abort":
            outputs = [engine.abort(id) for id in PROMPTS]
        else:
            outputs = engine.load(tiny_model(seed=1).state_dict(), version=1, kv="recompute")
        assert [len(output.ids) for output in outputs] == [5] * len(PROMPTS)


@pytest.mark.parametrize("ask", ["report", "load"])
def test_a_request_whose_last_token_is_read_late_is_in_the_report(make_engine, ask):
    """Nothing of it is left for a step that may never come: the engine may sleep."""
    engine = make_engine(max_completion_tokens=5)
    engine._reads_late = True
    submit_all(engine, PROMPTS)
    for _ in range(5):
        assert engine.step() == []
    weights = tiny_model(seed=1).state_dict()
    outputs = engine.report() if ask == "report" else engine.load(weights, version=1, kv="keep")
    ended = {output.id: (len(output.ids), output.version, output.finish_reason) for output in outputs}
    assert ended == dict.fromkeys(PROMPTS, (5, 0, "length"))
    engine.sleep()


def test_the_seconds_of_decode_steps_have_no_time_in_which_the_engine_was_idle(make_engine, monkeypatch):
    """An abort or a report may end the last request between two steps."""
    clock = SimpleNamespace(now_s=100.0)
    clock.monotonic = lambda: clock.now_s
    monkeypatch.setattr(engine_module, "time", clock)
    engine = make_engine()
    for id in ("a", "b"):
        submit_all(engine, {id: [1, 2, 3]})
        engine.step()
        engine.abort(id)
        assert engine.idle
        clock.now_s += 50.0
    assert engine.usage().decoded.seconds == 0.0


def test_the_seconds_of_a_prefill_are_read_with_the_next_step(make_engine, monkeypatch):
    """A GPU may not have done the work when the step returns. Here its prefill takes 2 s."""
    engine = make_engine()
    engine._reads_late = True
    moments = iter([100.0, 102.0])
    monkeypatch.setattr(engine, "_moment", lambda: next(moments))
    submit_all(engine, {"a": [1, 2, 3]})
    engine.step()
    first = engine.usage().decoded
    assert (first.prefilled, first.prefill_s) == (2, 0.0) and first.seconds > 0
    engine.step()
    second = engine.usage().decoded
    assert (second.prefilled, second.prefill_s) == (2, 2.0) and second.seconds < first.seconds


def test_in_bfloat16_a_late_read_changes_no_token_of_a_request_alone(make_engine):
    """Together with others it may: one that has ended is a row of one more step, and rounding in bfloat16
    depends on the rows of a step, as it does without late reads."""
    tokens = []
    for late in (False, True):
        engine = make_engine(settings=NativeEngineSettings(dtype="bfloat16"))
        engine._reads_late = late
        for id, prompt in PROMPTS.items():
            submit_all(engine, {id: prompt})
            tokens.append(finish(engine)[id])
    assert tokens[: len(PROMPTS)] == tokens[len(PROMPTS) :]


def flash(q, keys, values, first_rows, starts, *most, seqused_k, window_size_right, is_causal, **others):
    """The operator that `varlen_attn` of torch calls, as its documentation says, for a CPU."""
    assert others == {"window_size_left": -1, "dropout_p": 0.0, "return_debug_mask": False}
    assert len(first_rows) == len(starts) == len(seqused_k) + 1 and is_causal == (window_size_right == 0)
    assert {each.dtype for each in (first_rows, starts, seqused_k)} == {torch.int32}
    assert torch.equal(starts, starts.sort().values)
    outs = []
    rows = q.split_with_sizes(first_rows.diff().tolist())
    for query, start, num in zip(rows, starts.tolist(), seqused_k.tolist(), strict=False):
        assert len(query) <= most[0] and 0 < num <= most[1]
        own = (x[start : start + num].transpose(0, 1)[None] for x in (keys, values))
        mask = torch.ones(len(query), num, dtype=torch.bool)
        mask = mask.tril(num - len(query)) if is_causal else mask
        out = F.scaled_dot_product_attention(query.transpose(0, 1)[None], *own, mask, enable_gqa=True)
        outs.append(out[0].transpose(0, 1))
    return torch.cat(outs), None


@pytest.mark.parametrize("kernel", ["flash", "copies"])
def test_a_step_that_reads_lengths_on_the_device_in_graphs_draws_the_same_tokens(
    make_engine, monkeypatch, kernel
):
    """Its rows are rounded up to those of a graph. One is captured again only when the cache has grown."""
    settings = NativeEngineSettings(max_prefill_tokens=64, max_num_seqs=100)
    expected, _ = run(make_engine(settings=settings), False)
    if kernel == "flash":
        monkeypatch.setattr(model_module, "FLASH", flash)
    engine = make_engine(settings=settings)
    assert bool(engine._model.why_no_varlen) == (kernel == "copies")
    graphs = engine._graphs = Replayed(engine._model, engine._cache, 100)
    assert graphs._sizes == [*(size for size in GRAPH_ROWS if size < 100), 100]
    found, _ = run(engine, True)
    assert_same(found, expected)
    assert graphs.num_replayed >= 60 and graphs.num_captured < 12
    assert {key[1:] for key in graphs._captured} == {(256, True)}
    before, size = graphs.num_captured, engine._cache.size
    run(engine, True)
    assert engine._cache.size == size and graphs.num_captured == before
    engine.sleep()
    assert not graphs._captured


def test_a_graph_is_of_the_smallest_length_that_holds_the_longest_sequence(make_engine, monkeypatch):
    monkeypatch.setattr(graphs_module, "GRAPH_LENGTHS", (16, 64))
    expected, _ = run(make_engine(), False)
    engine = make_engine()
    graphs = engine._graphs = Replayed(engine._model, engine._cache, 100)
    assert graphs._lengths == [16, 64, engine._model.max_tokens]
    lengths = []
    monkeypatch.setattr(graphs, "_work", lambda key: lengths.append(key[1]) or Graphs._work(graphs, key))
    assert_same(run(engine, True)[0], expected)
    assert {*lengths} == {engine._model.max_tokens}, "one prompt has 130 tokens"
    lengths.clear()
    submit_all(engine, {"short": [1, 2, 3]})
    finish(engine)
    assert (lengths.count(16), lengths.count(64)) == (1 + 14, 1 + 46), (
        "a capture, and a replay for each token"
    )


def test_where_graphs_copy_keys_and_values_a_large_step_launches_its_kernels(make_engine, monkeypatch):
    """Eight rows of 256 positions are too many, four are not."""
    monkeypatch.setattr(graphs_module, "MAX_GATHERED", 1024)
    engine = make_engine()
    graphs = engine._graphs = Replayed(engine._model, engine._cache, 100)
    assert_same(run(engine, True)[0], run(make_engine(), False)[0])
    assert graphs.num_replayed == 0
    few = dict([*PROMPTS.items()][:4])
    submit_all(engine, few)
    found = finish(engine)
    assert graphs.num_replayed == 60 and {key[0] for key in graphs._captured} == {4}
    plain = make_engine()
    submit_all(plain, few)
    assert_same(found, finish(plain))


@pytest.mark.parametrize("own", ["greedy", "top_p", "top_k", "temperature"])
def test_a_graph_draws_the_tokens_unless_one_is_greedy_or_truncated(make_engine, own):
    """Of two requests one has sampling of its own. A graph has the temperatures as inputs."""
    sampling = SamplingParams(max_completion_tokens=20, temperature=0.8)
    others = {
        "greedy": {},
        "top_p": {"top_p": 0.5},
        "top_k": {"top_k": 3},
        "temperature": {"temperature": 1.7},
    }
    requests = [
        GenerationRequest("a", PROMPTS["17"], (), 1, sampling=sampling),
        GenerationRequest(
            "b", PROMPTS["5"], (), 2, greedy=own == "greedy", sampling=replace(sampling, **others[own])
        ),
    ]
    ended, captured = [], set()
    for in_graphs in (True, False):
        engine = make_engine()
        if in_graphs:
            engine._graphs = Replayed(engine._model, engine._cache, 4)
        for request in requests:
            engine.submit(request)
        ended.append(finish(engine))
        captured |= {*(engine._graphs._captured if in_graphs else ())}
    assert_same(*ended)
    assert {draws for _, _, draws in captured} == {own == "temperature"}


def test_attention_by_copies_is_that_of_each_sequence_and_reads_nothing_behind_its_tokens():
    """Behind them is not a number. Two query heads for each key; slots in any order."""
    torch.manual_seed(0)
    lengths, starts, size = [1, 7, 20, 12], [60, 0, 40, 20], 64
    keys, values = torch.full((2, size, 3, 8), torch.nan)
    for start, length in zip(starts, lengths, strict=True):
        keys[start : start + length], values[start : start + length] = torch.randn(2, length, 3, 8)
    q, k, v = torch.randn(4, 6, 8), *torch.randn(2, 4, 3, 8)
    slots = torch.tensor([[*starts, size], [*lengths, 0], [*range(5)]], dtype=torch.int32)
    places = torch.tensor(starts) + torch.tensor(lengths) - 1
    found = GatheredAttention([keys, values], places, slots, (1, 32))(0, q, k, v).view(4, 6, 8)
    for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        assert torch.equal(keys[start + length - 1], k[row])
        own = (x[start : start + length].repeat_interleave(2, 1).transpose(0, 1) for x in (keys, values))
        expected = F.scaled_dot_product_attention(q[row, :, None], *own)[:, 0]
        torch.testing.assert_close(found[row], expected, atol=1e-5, rtol=0)


def test_without_the_kernel_or_graphs_the_engine_decodes_and_says_so_once(make_engine, capsys):
    """This machine has neither. A CPU needs none of them, and nothing is said."""
    engine = make_engine()
    assert "flash" in engine._model.why_no_varlen
    assert engine._graphs is None and capsys.readouterr().err == ""
    engine._graphs = Graphs(engine._model, engine._cache, 128)
    found, _ = run(engine, True)
    said = capsys.readouterr().err
    assert said.count("the engine decodes without CUDA graphs: that of 8 rows was not captured: ") == 1
    assert said.count("without CUDA graphs") == 1
    assert_same(found, run(make_engine(), True)[0])
