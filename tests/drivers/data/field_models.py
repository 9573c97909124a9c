"""Chat templates as their models have them, each with a small tokenizer of the same build as its model's.

The templates are in chat_templates.json, as a tokenizer_config.json holds them.
"""

import json
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

HERE = Path(__file__).parent
TEMPLATES = json.loads((HERE / "chat_templates.json").read_text(encoding="utf-8"))
TEMPLATES["qwen3"] = (HERE.parents[1] / "helpers" / "qwen3_chat_template.jinja").read_text(encoding="utf-8")
# Before its generation prompt opened <think>.
TEMPLATES["r1 of january"] = TEMPLATES["r1"].replace("<think>\\n", "")

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN = LLAMA3.replace("{1,3}", "")
"""How byte-level tokenizers divide a text into words. Qwen's and GLM's take single digits."""
WORDS = (
    "What is the sum of 16 and 26 ? The answer is 42 . add a b arguments name parameters Be brief . so it is "
    "user assistant system tool model USER: ASSISTANT: You are a helpful , detailed and polite answers think "
)


@dataclass(frozen=True)
class FieldModel:
    """A chat template, and how its tokenizer is built.

    Args:
        build: a pattern of words, for bytes; or the way in which a SentencePiece tokenizer marks the
            beginning of a text: "prepend" (Llama 2), or a scheme of Metaspace.
        end: the token that ends a turn of the assistant.
        special: tokens of the template, which no text is divided within.
        adds: what the post-processor puts around a text: "" for nothing, "bos", "bos eos".
        refused: cells whose row `tailrace sft` refuses, because the template does not write the response
            as given, or not after the prompt.
        has_system: whether the template writes a system message.
        calls: whether it writes tools, calls and their answers. Else they are described and written as text.
        ends_turn: whether it writes the end of a turn.
    """

    name: str
    build: str
    end: str
    special: tuple[str, ...] = ()
    adds: str = ""
    refused: tuple[str, ...] = ()
    has_system: bool = True
    calls: bool = False
    ends_turn: bool = True

    @property
    def bos(self) -> str:
        return {"llama3": "<|begin_of_text|>", "gemma": "<bos>"}.get(self.name, "<s>")

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        return PreTrainedTokenizerFast(
            tokenizer_object=self._inner(),
            bos_token=self.bos,
            eos_token="</s>",
            chat_template=TEMPLATES.get(self.name),
        )

    def save(self, folder: Path) -> Path:
        """Save the tokenizer, and of the model what says how long its texts are and what ends them."""
        folder.mkdir()
        self.tokenizer.save_pretrained(folder)
        ends = {self.tokenizer.convert_tokens_to_ids(token) for token in ("</s>", self.end)}
        config = {"model_type": "llama", "max_position_embeddings": 4096, "eos_token_id": sorted(ends)}
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    def _inner(self) -> Tokenizer:
        inner = _trained(self.build)
        inner.add_special_tokens([self.bos, "</s>", *sorted({self.end, *self.special} - {"</s>"})])
        bos, eos = (self.bos, inner.token_to_id(self.bos)), ("</s>", inner.token_to_id("</s>"))
        if self.adds:
            single = f"{self.bos} $A" + " </s>" * ("eos" in self.adds)
            inner.post_processor = processors.TemplateProcessing(single, special_tokens=[bos, eos])
        return inner


def _trained(build: str) -> Tokenizer:
    inner = Tokenizer.from_str(_words(build))
    if build == "prepend":
        inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        inner.pre_tokenizer = None
    elif build in ("first", "always", "never"):
        inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=build, split=False)
    return inner


@cache
def _words(build: str) -> str:
    inner, alphabet = Tokenizer(models.BPE()), [chr(code) for code in range(32, 127)]
    if build in ("prepend", "first", "always", "never"):
        inner.pre_tokenizer = pre_tokenizers.Metaspace()  # SentencePiece joins nothing over a blank, either
        inner.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        alphabet.append("\n")
    else:
        split = pre_tokenizers.Split(Regex(build), "isolated")
        bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        inner.pre_tokenizer, inner.decoder = pre_tokenizers.Sequence([split, bytes_]), decoders.ByteLevel()
        inner.normalizer, alphabet = normalizers.NFC(), pre_tokenizers.ByteLevel.alphabet()
    lines = [WORDS, *(WORDS.replace(" ", "\n\n") for _ in range(alphabet[0] != " "))] * 20
    inner.train_from_iterator(lines, trainers.BpeTrainer(vocab_size=480, initial_alphabet=alphabet))
    return str(inner.to_str())


CHATML = ("<|im_start|>", "<|im_end|>")
HEADERS = ("<|start_header_id|>", "<|end_header_id|>")
MISTRAL = ("[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]")
GLM = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
R1 = ("<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>", "<\uff5cend▁of▁sentence\uff5c>")
PHI3 = ("<|system|>", "<|user|>", "<|assistant|>")
CHAT_CELLS = ("messages", "tools", "thinking", "turns")

FIELD_MODELS = [
    FieldModel("chatml", GPT2, "<|im_end|>", CHATML),
    FieldModel("llama3", LLAMA3, "<|eot_id|>", HEADERS, "bos", calls=True),
    FieldModel("qwen2.5", QWEN, "<|im_end|>", CHATML, calls=True),
    FieldModel("qwen3", QWEN, "<|im_end|>", CHATML, calls=True),
    # It writes the system message into the last user's message, and leaves it out once that is answered.
    FieldModel("mistral", "first", "</s>", MISTRAL, "bos", ("messages",), calls=True),
    FieldModel("gemma", "never", "<end_of_turn>", ("<start_of_turn>",), "bos", ("tools",), False),
    FieldModel("phi3", "prepend", "<|end|>", PHI3),
    FieldModel("r1 of january", LLAMA3, R1[2], R1, "bos", ("thinking",)),
    FieldModel("r1", LLAMA3, R1[2], R1, "bos", ("plain", *CHAT_CELLS)),
    FieldModel("vicuna", "prepend", "</s>", (), "bos"),
    FieldModel("glm4", QWEN, "</s>", GLM, calls=True, ends_turn=False),
    FieldModel("zephyr", "always", "</s>", (), "bos eos"),
    FieldModel("base", "prepend", "</s>", (), "bos eos", CHAT_CELLS),
]
