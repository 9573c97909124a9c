"""`tailrace serve --tinker`, used through the released SDK as it is."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tinker_cases import BASE, QUICKSTART, Server, clients_of, serving

pytestmark = [pytest.mark.tinker, pytest.mark.filterwarnings("ignore")]
SMOLLM2 = os.environ.get("TAILRACE_SMOLLM2", "")


def datum(prompt: list[int], completion: list[int], **inputs: list[float]) -> Any:
    """A sequence whose completion is trained; `inputs` are of the completion's tokens."""
    from tinker import types

    ids, skipped = [*prompt, *completion], [0.0] * (len(prompt) - 1)
    given = {key: [*skipped, *values] for key, values in inputs.items()}
    return types.Datum(
        model_input=types.ModelInput.from_ints(ids[:-1]),
        loss_fn_inputs={"target_tokens": ids[1:], **given},
    )


def example(tokenizer: Any, question: str, answer: str) -> Any:
    completion = tokenizer.encode(answer)
    return datum(tokenizer.encode(question), completion, weights=[1.0] * len(completion))


def train(client: Any, data: list[Any], loss: str, rate: float) -> dict[str, float]:
    """One pass and one step. Returns the metrics of the pass."""
    from tinker import types

    passed = client.forward_backward(data, loss)
    stepped = client.optim_step(types.AdamParams(learning_rate=rate))
    stepped.result()
    return passed.result().metrics


def test_a_supervised_loop_learns(connect: Callable[[], Any]) -> None:
    training = connect().create_lora_training_client(base_model=BASE).result()
    data = [example(training.get_tokenizer(), f"{a}+{b}\n", f"{a - b}") for a in range(5) for b in range(5)]
    losses = [train(training, data, "cross_entropy", 3e-3)["loss:sum"] for _ in range(25)]
    assert losses[-1] < losses[0] / 3


def score(text: str, answer: str) -> float:
    """1 if the text ends with the answer, as in the quickstart."""
    found = re.search(r"(-?\d+)$", text.strip())
    return float(found is not None and found[1] == answer)


def test_a_loop_of_reinforcement_learning_raises_the_reward(connect: Callable[[], Any]) -> None:
    import reasoning_gym
    from tinker import types

    training = connect().create_lora_training_client(base_model=BASE).result()
    tokenizer, rewards = training.get_tokenizer(), []
    sizes = {"min_terms": 2, "max_terms": 6, "min_digits": 1, "max_digits": 1, "size": 16}
    for step in range(10):
        sampling = training.save_weights_and_get_sampling_client().result()
        rows = list(reasoning_gym.create_dataset("chain_sum", seed=step, **sizes))
        prompts = [tokenizer.encode(f"{row['question']}\n") for row in rows]
        replies = [
            sampling.sample(
                types.ModelInput.from_ints(ids),
                num_samples=8,
                sampling_params=types.SamplingParams(max_tokens=100, seed=100 * step + number),
            )
            for number, ids in enumerate(prompts)
        ]
        data, total = [], 0.0
        for ids, reply, row in zip(prompts, replies, rows, strict=True):
            samples = reply.result().sequences
            texts = [tokenizer.decode(each.tokens, skip_special_tokens=True) for each in samples]
            scores = [score(text, row["answer"]) for text in texts]
            mean = sum(scores) / len(scores)
            total += mean
            for sample, reward in zip(samples, scores, strict=True):
                advantages = [(reward - mean) / 128] * len(sample.tokens)
                data.append(datum(ids, sample.tokens, advantages=advantages, logprobs=sample.logprobs))
        rewards.append(total / len(rows))
        train(training, data, "importance_sampling", 1e-3)
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.6, rewards


@pytest.mark.parametrize("loss", ["gspo", "stable_reinforce"])
def test_a_loop_names_the_sequences_that_it_trains(loss: str, tmp_path: Path) -> None:
    """As rl_loop.py of tinker-cookbook: zeros are the targets of the prompt."""
    from tinker import types

    options = ("--own-stable-reinforce", "--dtype", "float32", "--trainer.dtype", "float32")
    with serving(QUICKSTART, tmp_path, *options) as server, clients_of(server) as connect:
        training = connect().create_lora_training_client(base_model=BASE).result()
        prompt = types.ModelInput.from_ints(training.get_tokenizer().encode("1 + 2 = ?\n"))
        sampling = training.save_weights_and_get_sampling_client(record_stability_info=True).result()
        params = types.SamplingParams(max_tokens=8, seed=3)
        samples = sampling.sample(prompt, num_samples=2, sampling_params=params).result().sequences
        assert len({each.sequence_id for each in samples}) == 2
        data, skipped = [], prompt.length - 1
        for advantage, sample in zip((1.0, -1.0), samples, strict=True):
            id, num = sample.sequence_id, len(sample.tokens)
            marks = {"sequence_ratio_mask": [0.0] * skipped + [1.0] * num} if loss == "gspo" else {}
            made = types.Datum(
                prompt.append(types.EncodedTextChunk(tokens=sample.tokens[:-1])),
                {
                    "target_tokens": [0] * skipped + sample.tokens,
                    "advantages": [0.0] * skipped + [advantage] * num,
                    "logprobs": [0.0] * skipped + sample.logprobs,
                    **marks,
                },
            )
            spans = {
                "model_input": [
                    types.PromptProvenanceSpan(sequence_id=id, length=prompt.length),
                    types.SampledProvenanceSpan(sequence_id=id, length=num - 1),
                ],
                "loss_fn_inputs": [
                    types.PromptProvenanceSpan(sequence_id=id, offset=1, length=skipped),
                    types.SampledProvenanceSpan(sequence_id=id, length=num),
                ],
            }
            data.append(made.with_provenance(**spans))

        def difference() -> float:
            """Of the log-probs of the two samples."""
            outputs = training.forward(data, loss).result().loss_fn_outputs
            first, second = (sum(each["logprobs"].data[skipped:]) for each in outputs)
            return float(first - second)

        before = difference()
        train(training, data, loss, 1e-3)
        assert difference() > before + 0.01


def test_64_requests_for_samples_are_served_while_the_trainer_works(connect: Callable[[], Any]) -> None:
    from tinker import types

    training = connect().create_lora_training_client(base_model=BASE).result()
    tokenizer = training.get_tokenizer()
    sampling = training.save_weights_and_get_sampling_client().result()
    prompt = types.ModelInput.from_ints(tokenizer.encode("1 + 2 + 3 = ?\n"))
    scores = sampling.compute_logprobs(prompt).result()
    params = types.SamplingParams(max_tokens=60, seed=5)
    first = sampling.sample(prompt, num_samples=1, sampling_params=params).result().sequences[0]
    replies = [sampling.sample(prompt, num_samples=1, sampling_params=params) for _ in range(64)]
    data = [example(tokenizer, "1 + 1 = ?\n", "3") for _ in range(8)]
    for _ in range(4):
        train(training, data, "cross_entropy", 1e-3)
    found = [reply.result().sequences[0] for reply in replies]
    assert [each.tokens for each in found] == [first.tokens] * 64  # of the snapshot, not of newer weights
    assert len(scores) == prompt.length and scores[0] is None and all(each < 0 for each in scores[1:])


def test_a_client_in_flight_gets_newer_weights_and_a_snapshot_is_refused(connect: Callable[[], Any]) -> None:
    from tinker import types

    training = connect().create_lora_training_client(base_model=BASE).result()
    tokenizer = training.get_tokenizer()
    prompt = types.ModelInput.from_ints(tokenizer.encode("7 + 1 = ?\n"))
    params = types.SamplingParams(max_tokens=4, temperature=0)

    def client(kind: str) -> Any:
        return training.save_weights_and_get_sampling_client(kind=kind).result()

    def text(sampling: Any) -> str:
        (sequence,) = sampling.sample(prompt, num_samples=1, sampling_params=params).result().sequences
        return tokenizer.decode(sequence.tokens)

    snapshot = client("snapshot")
    text(snapshot)
    in_flight = client("inflight")
    for _ in range(12):
        train(training, [example(tokenizer, "7 + 1 = ?\n", "5555")], "cross_entropy", 3e-3)
    client("inflight")
    assert text(in_flight).startswith("5555")
    with pytest.raises(Exception, match="make a new sampling client"):
        text(snapshot)


def test_a_client_goes_on_from_its_saved_state_after_the_server_was_killed(tmp_path: Path) -> None:
    server = Server(QUICKSTART, tmp_path)
    server.start()

    def losses(training: Any, num: int) -> list[float]:
        data = [example(training.get_tokenizer(), f"{a} + 1 = ?\n", f"{a + 2}") for a in range(8)]
        return [train(training, data, "cross_entropy", 1e-3)["loss:sum"] for _ in range(num)]

    try:
        with clients_of(server) as connect:
            undisturbed = losses(connect().create_lora_training_client(base_model=BASE).result(), 5)
            server.kill()
            server.start()
            training = connect().create_lora_training_client(base_model=BASE).result()
            assert losses(training, 3) == pytest.approx(undisturbed[:3], rel=1e-5)
            path = training.save_state("third").result().path
            losses(training, 1)  # lost with the server
            server.kill()
            server.start()
            resumed = connect().create_training_client_from_state_with_optimizer(path).result()
            assert losses(resumed, 2) == pytest.approx(undisturbed[3:], rel=1e-5)
    finally:
        server.stop()


@pytest.mark.skipif(not SMOLLM2, reason="$TAILRACE_SMOLLM2 names no model")
def test_a_real_model_is_trained_with_an_adapter_and_sampled(tmp_path: Path) -> None:
    from tinker import types

    with (
        serving(Path(SMOLLM2), tmp_path, "--trainer.lora.rank", "8") as server,
        clients_of(server) as connect,
    ):
        training = connect().create_lora_training_client(base_model=BASE, rank=8).result()
        tokenizer = training.get_tokenizer()
        assert training.get_info().lora_rank == 8
        data = [example(tokenizer, "The password is", " swordfish.")] * 4
        losses = [train(training, data, "cross_entropy", 1e-3)["loss:sum"] for _ in range(8)]
        assert losses[-1] < losses[0] / 4
        sampling = training.save_weights_and_get_sampling_client().result()
        prompt = types.ModelInput.from_ints(tokenizer.encode("The password is"))
        params = types.SamplingParams(max_tokens=4, temperature=0)
        (sequence,) = sampling.sample(prompt, num_samples=1, sampling_params=params).result().sequences
        assert tokenizer.decode(sequence.tokens).startswith(" swordfish")
