"""`RewardFunction` of reward-kit 0.4. New code calls a decorated function directly.

Importing a module binds its name in the package, where `reward_function` is also the name of the decorator. This module
is therefore callable, and calling it decorates.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

from reward_kit.errors import ConfigError
from reward_kit.models import EvaluateResult
from reward_kit.typed_interface import reward_function

__all__ = ["RewardFunction", "reward_function"]


class RewardFunction:
    """A reward function that is passed directly or by its path, as in reward-kit 0.4.

    Args:
        func: the function. Set either `func` or `func_path`.
        func_path: the path of the function, `package.module:function` or `package.module.function`.
        mode: must be "local".
        **kwargs: fixed keyword parameters.

    Raises:
        ConfigError: If `mode` is not "local", if neither `func` nor `func_path` is set, or if both are set.
        ImportError: If `func_path` does not refer to a function.
    """

    def __init__(
        self, func: Callable[..., Any] | None = None, func_path: str | None = None, mode: str = "local", **kwargs: Any
    ) -> None:
        if mode != "local":
            raise ConfigError(
                f"RewardFunction(mode={mode!r}) is not supported; score with a RemoteReward; "
                "see docs/migrating/reward_kit.md"
            )
        if (func is None) == (func_path is None):
            raise ConfigError("RewardFunction takes either func or func_path, not both")
        self.func = func if func is not None else _import_function(str(func_path))
        self.kwargs = kwargs
        self._call = self.func if hasattr(self.func, "__reward_spec__") else reward_function(self.func)

    def __call__(self, messages: Sequence[Any], ground_truth: Any = None, **kwargs: Any) -> EvaluateResult:
        """Call the function. Without ground truth, pass the messages before the last one instead."""
        truth = list(messages[:-1]) if ground_truth is None else ground_truth
        result: EvaluateResult = self._call(messages=messages, ground_truth=truth, **{**self.kwargs, **kwargs})
        return result

    def get_trl_adapter(self) -> Callable[..., list[float]]:
        """Return a function for TRL's trainers, `(prompts, completions, **columns)`, that scores each completion.

        A completion is a string or a list of messages. The column `solution` is the ground truth. Unlike in 0.4, errors
        in the function are raised. Use `as_trl_reward` if you need a sandbox, concurrency, or other columns.
        """

        def adapter(prompts: Sequence[Any], completions: Sequence[Any] | None = None, **columns: Any) -> list[float]:
            texts = [""] * len(prompts) if completions is None else completions
            truths = columns.get("solution") or [None] * len(prompts)
            scores = []
            for prompt, text, truth in zip(prompts, texts, truths, strict=True):
                answer = text if isinstance(text, list) else [{"role": "assistant", "content": text}]
                scores.append(self([*prompt, *answer], ground_truth=truth).score)
            return scores

        return adapter


def _import_function(path: str) -> Callable[..., Any]:
    location, _, name = path.replace(":", ".").rpartition(".")
    try:
        function: Callable[..., Any] = getattr(importlib.import_module(location), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ImportError(f"RewardFunction: {path!r} cannot be imported as package.module:function: {error}") from error
    return function


class _Decorator(types.ModuleType):
    __call__ = staticmethod(reward_function)


sys.modules[__name__].__class__ = _Decorator
