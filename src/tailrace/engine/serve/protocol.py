"""The bodies of requests for generation, as pydantic models.

Fields that change nothing here, such as `user`, are ignored. Fields that ask for what this engine cannot do
are refused: a reply that silently lacks it would be wrong.
"""

from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from tailrace.engine.base import SamplingParams

GREEDY_BELOW = 1e-5
"""Temperatures below it mean greedy decoding; the log-probs are then those of temperature 1."""
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "functions": ([],),
    "response_format": ({"type": "text"},),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "use_beam_search": (False,),
    "structured_outputs": (),
    "prompt_logprobs": (),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "features": (),
    "content_parts": ([],),
    "chat_template": (),
    "continue_final_message": (False,),
}
"""Fields of other servers that this one does not carry out, with their values that ask for nothing."""


def _is_unicode(text: str) -> str:
    """JSON can spell halves of surrogate pairs, which no tokenizer takes and no reply can contain."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("the text is not valid Unicode") from None
    return text


TokenId = Annotated[int, Field(ge=0, lt=2**31)]
String = Annotated[str, AfterValidator(_is_unicode)]
StopString = Annotated[String, Field(min_length=1, max_length=256)]
Name = Annotated[String, Field(min_length=1, max_length=1024)]


class Body(BaseModel):
    """What all bodies have in common."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)
    carried_out: ClassVar[frozenset[str]] = frozenset()
    """Those of _NEUTRAL that a subclass carries out."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, data: Any) -> Any:
        for name, neutral in _NEUTRAL.items() if isinstance(data, dict) else ():
            if name not in cls.carried_out and (value := data.get(name)) is not None and value not in neutral:
                raise ValueError(f"{name} is not supported by this engine; leave it out")
        return data


class SamplingFields(Body):
    """How to sample."""

    n: int = Field(default=1, ge=1, le=256)
    temperature: float | None = Field(default=None, ge=0, le=1000)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, lt=2**31)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: StopString | Annotated[list[StopString], Field(max_length=16)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=1024)] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    max_tokens: int | None = Field(default=None, ge=1)

    @property
    def greedy(self) -> bool:
        """Whether each token is the most likely one."""
        return self.temperature is not None and self.temperature < GREEDY_BELOW

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def params(self, max_tokens: int) -> SamplingParams:
        """The engine's form of it."""
        return SamplingParams(
            max_tokens,
            temperature=1.0 if self.greedy or self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(self.top_k or 0, 0),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            stop=self.stops,
            ignore_end_of_text=self.ignore_eos,
        )


class StreamOptions(BaseModel):
    """Of a stream."""

    include_usage: bool = False


class ServingFields(Body):
    """How to reply. `cache_salt` and `priority` have no effect: the engine reuses no keys and values of other
    weights, and serves in the order of arrival."""

    model: str | None = None
    request_id: Name | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = False
    cache_salt: Name | None = None
    priority: int = Field(default=0, ge=-(2**63), lt=2**63)


class OpenAIFields(ServingFields, SamplingFields):
    """Of both OpenAI routes."""

    return_tokens_as_token_ids: bool | None = False
    return_weight_versions: bool | None = False


class CompletionRequest(OpenAIFields):
    """Of /v1/completions."""

    prompt: String | Annotated[list[TokenId], Field(min_length=1)]
    max_tokens: int | None = Field(default=16, ge=1)
    logprobs: int | None = Field(default=None, ge=0, le=1)
    add_special_tokens: bool = True

    @field_validator("prompt", mode="before")
    @classmethod
    def _take_one(cls, prompt: Any) -> Any:
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
            if len(prompt) > 1:
                raise ValueError("several prompts are not supported; send a request for each")
            return prompt[0]
        return prompt


class ChatCompletionRequest(OpenAIFields):
    """Of /v1/chat/completions."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = False
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None

    @field_validator("messages")
    @classmethod
    def _join_texts(cls, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [_plain(message) for message in messages]


class GenerateSampling(SamplingFields):
    """`sampling_params` of /inference/v1/generate."""

    logprobs: int | None = Field(default=None, ge=0, le=1)


class GenerateRequest(ServingFields):
    """Of /inference/v1/generate."""

    token_ids: list[TokenId] = Field(min_length=1)
    sampling_params: GenerateSampling


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its content as one string, which is what templates of text models expect."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return message
    parts = content if isinstance(content, list) else [content]
    texts: list[Any] = [part.get("text") if isinstance(part, dict) else part for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("the parts of a message's content must be text")
    return message | {"content": "".join(texts)}
