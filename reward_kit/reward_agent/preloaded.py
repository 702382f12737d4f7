"""Imported once where workers are forked from: does what is slow the first time, so that every worker finds it done."""

from __future__ import annotations

from reward_kit.models import EvaluateResult, Message
from reward_kit.reward_agent import inside as inside
from reward_kit.typed_interface import reward_spec


def _reward(messages: list[Message], ground_truth: str | None = None) -> EvaluateResult:
    return EvaluateResult.model_validate({"score": float(len(messages)), "reason": ground_truth})


def _use_once() -> None:
    spec = reward_spec(_reward)
    given = [Message.model_validate({"role": "user", "content": "x"})]
    arguments = spec.arguments({"messages": given, "ground_truth": "y"})
    spec.check(spec.function(**arguments)).model_dump()


_use_once()
