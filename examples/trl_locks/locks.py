"""Combination locks that open by tool calls, and an untrained model with a few thousand weights.

Environment, reward, tokenizer and weights are created here, without downloads. `rollouts` is what TRL and Axolotl use.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from reward_kit import (
    CreditAssigner,
    EvaluateResult,
    ForkableResource,
    Message,
    Sample,
    StepOutcome,
    TaskDefinitionModel,
    reward_function,
)
from reward_kit.agent import HFAgentPolicy
from reward_kit.environments import ToolSpec, hash_key, tool_spec
from reward_kit.integrations.trl import Rollouts, as_rollout_func
from reward_kit.rl import TERSE_TEMPLATE, build_decoder, build_tokenizer

COLORS = ("red", "green", "blue", "white")
COMBINATIONS = (
    ("red", "blue", "green"),
    ("white", "red", "red"),
    ("blue", "white", "green"),
    ("green", "green", "blue"),
)


class CombinationLock(ForkableResource):
    """A lock with three colors to dial in order. Observations are the lock and the number of correct colors."""

    fork_kind = "native"
    per_sample_keys = frozenset({"lock"})

    def __init__(self) -> None:
        self._lock, self._place = 0, 0

    async def setup(self, config: Mapping[str, Any]) -> None:
        self._lock = int(config["lock"])

    async def reset(self, seed: int | None = None) -> None:
        self._place = 0

    async def fork(self) -> CombinationLock:
        copy = type(self)()
        copy._lock, copy._place = self._lock, self._place
        return copy

    async def step(self, action_name: str, action_params: Mapping[str, Any]) -> StepOutcome:
        is_right = action_params.get("colour") == COMBINATIONS[self._lock][self._place]
        self._place += is_right
        is_open = self._place == len(COMBINATIONS[0])
        return StepOutcome("open" if is_open else self._shown(), reward=float(is_right), terminated=is_open)

    async def get_observation(self) -> str:
        return self._shown()

    def _shown(self) -> str:
        return f"lock{self._lock} place{self._place}"

    async def get_tools_spec(self) -> list[ToolSpec]:
        colour = {"type": "string", "enum": list(COLORS), "description": "What to dial."}
        schema = {"type": "object", "properties": {"colour": colour}, "required": ["colour"]}
        return [tool_spec("dial", "Dial a colour.", schema)]

    async def state_key(self) -> str:
        return hash_key(str(self._lock), str(self._place))


@reward_function
def opened(messages: list[Message], environment_return: float | None) -> EvaluateResult:
    """Return the share of correct colors."""
    return EvaluateResult(score=(environment_return or 0.0) / len(COMBINATIONS[0]))


def task() -> TaskDefinitionModel:
    """Return the task, with at most five attempts."""
    return TaskDefinitionModel(
        name="locks",
        resource_type=f"{Path(__file__).resolve()}:CombinationLock",
        base_resource_config={"lock": 0},
        messages=[Message(role="user", content="{{ observation }}")],
        max_episode_steps=5,
    )


def samples() -> list[Sample]:
    """Return a sample for each lock."""
    return [Sample(f"lock-{lock}", resource_config={"lock": lock}) for lock in range(len(COMBINATIONS))]


def tokenizer() -> PreTrainedTokenizerBase:
    """Return a tokenizer with one token per word."""
    observations = [f"lock{lock} place{place}" for lock in range(len(COMBINATIONS)) for place in range(3)]
    return build_tokenizer(
        [*observations, "open"], words=COLORS, spaces="none", chat_template=TERSE_TEMPLATE, context=128
    )


def model(seed: int, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Return an untrained model."""
    return build_decoder(tokenizer, layers=2, width=32, heads=2, context=128, seed=seed)


def policy(model: Any, tokenizer: Any = None, **options: Any) -> HFAgentPolicy:
    """Return a policy whose completions are a single token, the color."""
    defaults = {"action_format": "bare", "tools_in_prompt": False, "max_new_tokens": 1, "max_sessions": 256}
    return HFAgentPolicy(model, tokenizer, **{**defaults, **options})


def rollouts(policy: HFAgentPolicy, *, reward: Any = opened, seed: int = 0) -> Rollouts:
    """Return a rollout function with GiGPO's advantages; states are equal for the same lock and progress."""
    credit = CreditAssigner("gigpo", step_rewards="environment")
    return as_rollout_func(task(), policy, reward=reward, credit=credit, samples=samples(), run_seed=seed)
