"""Which action format a model has, by its tokenizer and chat template."""

from __future__ import annotations

from typing import Any

from reward_kit.agent.policies.hf.action_formats import (
    ActionFormat,
    Bare,
    Hermes,
    Llama,
    Mistral,
    Plain,
    ResponseTemplate,
)
from reward_kit.errors import ConfigError, PolicyError, did_you_mean

FORMATS: dict[str, type[ActionFormat]] = {kind.name: kind for kind in (Hermes, Llama, Mistral, Plain, Bare)}
_CHOOSE = "set action_format to hermes, llama, mistral, plain or bare"


def action_format(name: str, tokenizer: Any, template: str | None, opening: str = "") -> ActionFormat | PolicyError:
    """The format of this name, or for "auto" the model's own.

    "auto" takes the first that fits: the tokenizer's `response_template`; hermes where the chat template has
    `<tool_call>` and its calls are JSON; mistral where it has `[TOOL_CALLS]`; llama where it has `<|python_tag|>`, or
    `"parameters"` beside `<|start_header_id|>`.

    Args:
        name: of the format, "auto" or "template".
        tokenizer: of the model.
        template: its chat template; None where it has none.
        opening: what the template writes between the last message and an answer.

    Returns:
        The format; or why there is none, to be raised once there are tools.

    Raises:
        ConfigError: there is no such format, or "template" and the tokenizer has no `response_template`.
    """
    if name in FORMATS:
        return FORMATS[name]()
    if name not in ("auto", "template"):
        raise ConfigError(f"action_format: {name!r}{did_you_mean(name, [*FORMATS, 'auto', 'template'])}")
    if getattr(tokenizer, "response_template", None) is not None:
        return ResponseTemplate(tokenizer, opening)
    if name == "template":
        raise ConfigError(f"action_format: the tokenizer has no response_template; {_CHOOSE}")
    return _by_template(template or "")


def _by_template(template: str) -> ActionFormat | PolicyError:
    if "<tool_call>" in template:
        if "<function=" in template or "<arg_key>" in template:
            return PolicyError(
                f"action_format auto: this model writes its tool calls as XML, which is not read; {_CHOOSE}"
            )
        return Hermes()
    if "[TOOL_CALLS]" in template:
        return Mistral()
    if "<|python_tag|>" in template or ("<|start_header_id|>" in template and '"parameters"' in template):
        return Llama()
    return PolicyError(f"action_format auto: the chat template does not say how tools are called; {_CHOOSE}")
