"""What the chat template of a tokenizer writes between two turns of the policy."""

from collections.abc import Mapping, Sequence

from tailrace.data.tokenizer import Tokenizer
from tailrace.environments.base import Message
from tailrace.errors import ConfigError, EnvironmentFailed

QUESTION, ANSWER = "tailrace question", "tailrace answer"
"""The fixed conversation before the messages. The template's text for earlier turns is not used."""


class Chat:
    """Observes (episode.py: Observe) with a chat template.

    The tokens are those that the template writes, in a small conversation, from the end of the assistant's
    text to the end of the next generation prompt. So no token of the policy is rewritten, whatever the
    template does to earlier turns.

    Args:
        kind: of the environment, for messages.
        arguments: of the template, as `data.chat_template_kwargs`.

    Raises:
        ConfigError: the tokenizer has no chat template, or the template cannot render such a conversation.
    """

    def __init__(self, tokenizer: Tokenizer, kind: str, arguments: Mapping[str, object]) -> None:
        self._tokenizer, self._arguments = tokenizer, arguments
        if tokenizer.chat_template is None:
            problem = "it needs the chat template of the model's tokenizer, which has none"
            remedy = "add a chat_template.jinja to the model folder, or use a chat model"
            raise ConfigError("environment.kind", kind, problem, remedy)
        role = "tool" if kind == "tools" else "user"
        try:
            self.observe([{"role": role, "content": "."}], None)
        except EnvironmentFailed as why:
            remedy = "choose a model whose template knows it, or another template"
            problem = f"the model's chat template cannot continue a conversation with role {role!r} ({why})"
            raise ConfigError("environment.kind", kind, problem, remedy) from why

    def observe(self, messages: Sequence[Message], last_id: int | None) -> list[int]:
        """Return the tokens between a turn that ended with `last_id` and the next one.

        The end-of-turn token of the template is left out if the turn ended with it.

        Raises:
            EnvironmentFailed: the template refuses the messages, or leaves out the assistant's text.
        """
        conversation: list[Message] = [
            {"role": "user", "content": QUESTION},
            {"role": "assistant", "content": ANSWER},
            *messages,
        ]
        try:
            text = self._tokenizer.apply_chat_template(
                conversation, tokenize=False, add_generation_prompt=True, **self._arguments
            )
        except Exception as why:
            # Templates are programs: they raise errors of their own on messages they do not know.
            raise EnvironmentFailed("template", str(why)) from why
        _, found, after = text.partition(ANSWER)
        if not found:
            raise EnvironmentFailed("template", "it leaves out the text of the assistant")
        ids = self._tokenizer.encode(after, add_special_tokens=False)
        return ids[1:] if ids[:1] == [last_id] else ids
