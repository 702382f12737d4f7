"""How a model was taught to act, kept in its tokenizer's configuration, where its chat template is too.

A model that was trained to answer with bare commands acts badly, and says nothing of it, where it is read as if it
wrote JSON. So the options that decide what its prompts and answers look like go with it wherever its tokenizer is
saved.
"""

from __future__ import annotations

from typing import Any

from reward_kit.errors import ConfigError

_KEY = "reward_kit"
OPTIONS: dict[str, Any] = {"action_format": "auto", "tools_in_prompt": True, "tool_role": "tool"}
"""What is kept, with what counts where neither the caller nor the model says anything."""


def remember(tokenizer: Any, **options: Any) -> None:
    """Keep options with the tokenizer; `save_pretrained` writes them to `tokenizer_config.json`.

    Args:
        tokenizer: of `transformers`.
        **options: of `OPTIONS`; others that it has stay.

    Raises:
        ConfigError: there is no such option.
    """
    if unknown := sorted(options.keys() - OPTIONS.keys()):
        raise ConfigError(f"a model does not remember {', '.join(unknown)}; it does {', '.join(OPTIONS)}")
    if options:
        tokenizer.init_kwargs[_KEY] = {**remembered(tokenizer), **options}


def remembered(tokenizer: Any) -> dict[str, Any]:
    """What is kept with the tokenizer; options that no release of ours knows are left out."""
    kept = getattr(tokenizer, "init_kwargs", {}).get(_KEY)
    return {key: value for key, value in kept.items() if key in OPTIONS} if isinstance(kept, dict) else {}


def settled(tokenizer: Any, given: dict[str, Any]) -> dict[str, Any]:
    """What was given, and for what was not, what the model remembers.

    Args:
        tokenizer: the model's.
        given: options of `OPTIONS`; None is "as the model says".

    Returns:
        The options for which somebody said something; the others have their defaults.

    Raises:
        ConfigError: the model was taught otherwise.
    """
    kept = remembered(tokenizer)
    asked = {key: value for key, value in given.items() if value is not None}
    for key, value in asked.items():
        if key in kept and kept[key] != value:
            raise ConfigError(
                f"{key}: the model was trained with {_as_yaml(kept[key])}, as its tokenizer_config.json says, and here "
                f"it is {_as_yaml(value)}; leave {key} out"
            )
    return {**kept, **asked}


def _as_yaml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
