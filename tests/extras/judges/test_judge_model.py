"""Judge models: the same scores whether layers are resident or streamed."""

import json
from pathlib import Path

import pytest
import torch
from tokenizers import processors
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from helpers.attention import WITHOUT_PLANS, AttentionCalls
from helpers.tiny_models import LETTERS, letter_tokenizer, save_tiny_model, tiny_config
from tailrace.contracts.memory import TRANSFORMERS_BYTES, ModelShape
from tailrace.errors import ConfigError, RewardFailed
from tailrace.extras.judges.local import ModelJudge, StreamedLayers
from tailrace.extras.judges.memory import LayerBudget, batches, check_folder, judge_memory
from tailrace.extras.judges.settings import LocalJudgeSettings

LAYERS = 5
TEXTS = ["ABC", "ABCDEFGHIJ", "Z", "ABD", "XYZXYZ"]


def settings(path: Path, **changes: object) -> LocalJudgeSettings:
    given = {"kind": "local", "path": path, "labels": ("B", "C"), "template": "{completion}", **changes}
    return LocalJudgeSettings.model_validate(given)


def writing(path: Path, **changes: object) -> LocalJudgeSettings:
    return settings(path, labels=(), **changes)


def asked(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@pytest.fixture(scope="module")
def language_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("judge")
    return folder, save_tiny_model(folder, num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("reward")
    torch.manual_seed(0)
    config = tiny_config("llama", num_hidden_layers=LAYERS, num_labels=1)
    model = AutoModelForSequenceClassification.from_config(config).eval()
    model.save_pretrained(folder)
    letter_tokenizer().save_pretrained(folder)
    return folder, model


def with_resident(judge: ModelJudge, num: int, monkeypatch: pytest.MonkeyPatch) -> ModelJudge:
    monkeypatch.setattr(LayerBudget, "resident_layers", lambda self, num_tokens: num)
    return judge


@pytest.mark.parametrize("num", range(LAYERS + 1))
def test_a_language_model_gives_the_probability_of_a_label_however_many_layers_are_resident(
    language_model: tuple[Path, PreTrainedModel], num: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, model = language_model
    judge = with_resident(ModelJudge.load(settings(folder)), num, monkeypatch)
    ids = [[ord(letter) - ord("A") for letter in text] for text in TEXTS]
    with torch.no_grad():
        logits = torch.stack([model(torch.tensor([each])).logits[0, -1, [1, 2]] for each in ids])
    expected = logits.softmax(-1)[:, 0]
    for _ in range(2):
        found = judge.scores([asked(text) for text in TEXTS])
        torch.testing.assert_close(torch.tensor(found), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("num", [0, 2, LAYERS])
def test_a_language_model_writes_the_likeliest_token_however_many_layers_are_resident(
    language_model: tuple[Path, PreTrainedModel], num: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, model = language_model
    judge = with_resident(ModelJudge.load(writing(folder)), num, monkeypatch)
    ids = [torch.tensor([[LETTERS.index(letter) for letter in text]]) for text in TEXTS]
    with torch.no_grad():
        expected = [LETTERS[int(model(each).logits[0, -1].argmax())] for each in ids]
    assert len(set(expected)) > 1
    assert judge.answers([asked(text) for text in TEXTS]) == expected


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"labels": ["Yes"]}, "one label is always the answer; name two, or none"),
        ({"pattern": "(.)"}, r"pattern reads an answer, and the labels are the answers; set labels = \[\]"),
        ({"labels": [], "pattern": "."}, "it has 0 groups"),
        ({"labels": [], "scale": (1, 1)}, "the scale .* has no width"),
    ],
)
def test_an_answer_that_can_never_be_read_is_refused(changes: dict[str, object], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        LocalJudgeSettings.model_validate({"path": "judge", **changes})


def test_a_reward_model_that_shall_write_is_refused(reward_model: tuple[Path, PreTrainedModel]) -> None:
    with pytest.raises(ConfigError, match=r"reward.judges.labels = \[\]: a reward model writes no answer"):
        check_folder(writing(reward_model[0]))


def test_a_reward_model_gives_its_output_while_the_number_of_resident_layers_changes(
    reward_model: tuple[Path, PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, model = reward_model
    judge = ModelJudge.load(settings(folder, template=None))
    with torch.no_grad():
        expected = [model(torch.tensor([[0, 1, 2]])).logits.item()] * 6
    found = [with_resident(judge, num, monkeypatch).scores([asked("ABC")])[0] for num in (5, 0, 3, 1, 4, 5)]
    assert found == pytest.approx(expected, rel=1e-4)


def test_no_kernel_of_a_judge_may_make_a_plan_for_each_shape(
    language_model: tuple[Path, PreTrainedModel],
) -> None:
    judge = ModelJudge.load(settings(language_model[0]))
    with AttentionCalls() as calls:
        judge.scores([asked(text) for text in TEXTS])
    assert [call.kernels for call in calls.made] == [WITHOUT_PLANS] * LAYERS


def test_streamed_layers_leave_only_two_layers_on_the_device(
    language_model: tuple[Path, PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = with_resident(ModelJudge.load(settings(language_model[0])), 0, monkeypatch)
    judge.scores([asked("ABC")])
    layers = judge._layers
    assert isinstance(layers, StreamedLayers)
    assert all(p.numel() == 0 for block in judge._model.model.layers for p in block.parameters())
    assert (len(layers._slots), layers._kept) == (2, {})


def test_the_number_of_resident_layers_follows_the_length_of_the_batch() -> None:
    budget = LayerBudget(total_bytes=1000, num_layers=8, layer_bytes=100, outside_bytes=200, token_bytes=1)
    lengths = (0, 1, 100, 199, 201, 600)
    assert [budget.resident_layers(n) for n in lengths] == [8, 5, 5, 4, 3, 0]
    assert budget.most_bytes(600) == 1000
    with pytest.raises(ValueError, match="601 tokens need 0 MiB"):
        budget.resident_layers(601)


def test_a_text_that_is_too_long_fails_alone(language_model: tuple[Path, PreTrainedModel]) -> None:
    judge = ModelJudge.load(settings(language_model[0], max_tokens=4))
    first, second = judge.scores([asked("ABCDE"), asked("AB")])
    assert isinstance(first, RewardFailed)
    assert str(first) == "judge length: 5 tokens, and 1 to 4 fit (reward.judges.max_tokens)"
    assert isinstance(second, float)


def test_a_text_that_the_chat_template_refuses_fails_alone(
    language_model: tuple[Path, PreTrainedModel],
) -> None:
    judge = ModelJudge.load(settings(language_model[0]))
    judge._tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{{ m.content }}{% endfor %}"
    )
    first, second = judge.scores([[{"role": "system", "content": "A"}, *asked("B")], asked("AB")])
    assert isinstance(first, RewardFailed)
    assert str(first) == "judge template: messages that the chat template refuses: no system"
    assert isinstance(second, float)


def test_a_judge_tells_the_day_on_which_it_was_loaded_in_all_texts(
    language_model: tuple[Path, PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tailrace.clock.wall_time", lambda: 12 * 3600.0)  # in 1970
    dated, plain = (ModelJudge.load(settings(language_model[0])) for _ in range(2))
    dated._tokenizer.chat_template = "{{ 'E' * (strftime_now('%Y') | int - 1968) }}"
    assert dated.scores([asked("Z")]) == plain.scores([asked("EE")])


def test_a_judge_reads_no_added_end_of_text(language_model: tuple[Path, PreTrainedModel]) -> None:
    ending, plain = (ModelJudge.load(settings(language_model[0])) for _ in range(2))
    added = processors.TemplateProcessing(single="$A Z", special_tokens=[("Z", LETTERS.index("Z"))])
    ending._tokenizer.backend_tokenizer.post_processor = added
    assert ending.scores([asked("AB")]) == plain.scores([asked("AB")])


def test_batches_have_similar_lengths_and_a_bound() -> None:
    assert batches([0, 1, 2, 3], [2, 9, 3, 10], 20) == [[3, 1], [2, 0]]
    assert batches([0, 1, 2], [5, 5, 5], 4) == [[0], [1], [2]]


def test_labels_with_the_same_first_token_are_refused(language_model: tuple[Path, PreTrainedModel]) -> None:
    with pytest.raises(ConfigError, match="begin with the same token"):
        ModelJudge.load(settings(language_model[0], labels=("BA", "BC")))


@pytest.mark.parametrize(
    ("config", "changes", "said"),
    [
        ({"architectures": ["BertModel"]}, {}, "a BertModel cannot judge"),
        ({"architectures": ["LlamaForSequenceClassification"]}, {}, "it has several outputs"),
        ({}, {"template": None}, "a language model needs a question"),
        ({}, {"memory_mib": 1, "max_tokens": 8000}, "8000 tokens need .* MiB; raise it, or lower"),
    ],
)
def test_a_folder_that_cannot_judge_is_refused(
    tmp_path: Path, config: dict[str, object], changes: dict[str, object], said: str
) -> None:
    save_tiny_model(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    with pytest.raises(ConfigError, match=said):
        check_folder(settings(tmp_path, **changes))


def test_the_memory_of_the_layers_is_that_of_the_files(language_model: tuple[Path, PreTrainedModel]) -> None:
    folder, model = language_model
    budget = LayerBudget.of(ModelShape.read(folder), settings(folder))
    of_layers = sum(p.numel() for p in model.model.layers.parameters()) * 4
    assert budget.layer_bytes * LAYERS == of_layers
    least = budget.outside_bytes + 4096 * budget.token_bytes + 2 * budget.layer_bytes
    process = judge_memory(settings(folder, device="cuda", memory_mib=-(-least // 2**20)))
    assert sum(process.host_parts.values()) == TRANSFORMERS_BYTES + of_layers
    assert least <= process.device_bytes <= least + 2**20
    assert budget.outside_bytes == sum(p.numel() for p in model.parameters()) * 4 - of_layers
