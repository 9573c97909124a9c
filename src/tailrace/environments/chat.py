"""What the chat template of a tokenizer writes between two turns of the policy."""

from collections.abc import Mapping, Sequence

from tailrace.data.encoding import Tokenizer, render
from tailrace.environments.base import Message
from tailrace.errors import ConfigError, EnvironmentFailed

QUESTION, ANSWER, PROBE = "tailrace question", "tailrace answer", "tailrace probe"
"""The fixed conversation before the messages, of which the template's text is not used, and a message that
tells whether the template writes messages of a role at all."""


class Chat:
    """Observes (episode.py: Observe) with a chat template.

    The tokens are those that the template writes, in a small conversation, from the end of the assistant's
    text to the end of the next generation prompt. So no token of the policy is rewritten, whatever the
    template does to earlier turns.

    Args:
        kind: of the environment, for errors.
        arguments: of the template, as `data.chat_template_kwargs`.
        role: of the environment's messages.

    Raises:
        ConfigError: the tokenizer has no chat template, or the template does not write messages of that role
            after a turn of the assistant.
    """

    def __init__(
        self, tokenizer: Tokenizer, kind: str, arguments: Mapping[str, object], role: str = "user"
    ) -> None:
        self._tokenizer, self._arguments = tokenizer, arguments
        if tokenizer.chat_template is None:
            problem = "it needs the chat template of the model's tokenizer, which has none"
            remedy = "add a chat_template.jinja to the model folder, or use a chat model"
            raise ConfigError("environment.kind", kind, problem, remedy)
        try:
            probed = self._text([{"role": role, "content": PROBE}])
            why = "" if PROBE in probed else "it leaves them out"
        except EnvironmentFailed as failed:
            why = failed.detail
        if why:
            problem = f"the model's chat template does not write messages of the role {role!r} ({why})"
            remedy = "choose a model whose template does"
            if role == "tool":
                remedy += ', or set environment.answer_role = "user"'
            raise ConfigError("environment.kind", kind, problem, remedy)

    def observe(self, messages: Sequence[Message], last_id: int | None) -> list[int]:
        """Return the tokens between a turn that ended with `last_id` and the next one.

        The end-of-turn token of the template is left out if the turn ended with it.

        Raises:
            EnvironmentFailed: the template refuses the messages, or leaves out the assistant's text.
        """
        ids = self._tokenizer.encode(self._text(messages), add_special_tokens=False)
        return ids[1:] if ids[:1] == [last_id] else ids

    def _text(self, messages: Sequence[Message]) -> str:
        conversation: list[Message] = [
            {"role": "user", "content": QUESTION},
            {"role": "assistant", "content": ANSWER},
            *messages,
        ]
        try:
            text = render(self._tokenizer, conversation, {"add_generation_prompt": True, **self._arguments})
        except ConfigError:
            raise
        except Exception as why:
            # Templates are programs: they raise errors of their own on messages they do not know.
            raise EnvironmentFailed("template", str(why)) from why
        _, found, after = text.partition(ANSWER)
        if not found:
            raise EnvironmentFailed("template", "it leaves out the text of the assistant")
        return after
