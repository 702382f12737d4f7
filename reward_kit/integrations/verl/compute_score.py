"""A `compute_score` for verl that can call any reward. As in the reward manager, the reward stays open between calls.

    from reward_kit.integrations.verl.compute_score import as_compute_score
    compute_score = as_compute_score("rewards.py:graded")

verl loads a file that contains these lines as `reward.custom_reward_function`.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from reward_kit.blocking import LoopThread
from reward_kit.errors import ConfigError, RewardError, did_you_mean
from reward_kit.models import Message
from reward_kit.reward_agent import AsyncRewardAgent, Scored, Scorer, ScoringRequest
from reward_kit.reward_agent.agent import PersistentAgent
from reward_kit.reward_agent.loading import SandboxChoice, make_scorer, resolve_reward
from reward_kit.task_parts import SandboxLevel
from reward_kit.typed_interface import RewardSpec
from reward_kit.validation import check_choice

SECTION = "reward.reward_kit"
"""The section of verl's configuration that sets a reward and the options for its calls."""
OnUnscored = Literal["raise", "mask"]


@dataclass(frozen=True, slots=True)
class RewardOptions:
    """Options for the calls that verl makes to a reward.

    Attributes:
        level: the sandbox level of a reward that is passed by name. The default is the level that the command line
            would choose.
        options: keyword arguments that are always passed to the reward.
        max_concurrency: the maximum number of concurrent calls in each process of verl.
        deadline_s: the time limit of a call in seconds. If a call takes longer, its rollout is unscored.
        on_unscored: "raise" raises an error, and verl's trainer continues without the rollout or its group. "mask" sets
            the score to NaN, and reward-kit's trainers (but not others) exclude the row from the loss.
        metrics: the names of the metrics to report to verl. A metric is NaN if a result has no valid value. verl takes
            a batch's metric names from its first row, so all rows must have the same names.

    Raises:
        ConfigError: If an option is out of range.
    """

    level: SandboxLevel | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    max_concurrency: int = 64
    deadline_s: float | None = None
    on_unscored: OnUnscored = "raise"
    metrics: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_choice("on_unscored", self.on_unscored, get_args(OnUnscored))
        if self.level is not None:
            check_choice("level", self.level, get_args(SandboxLevel))

    @classmethod
    def of(cls, section: Mapping[str, Any], where: str) -> RewardOptions:
        """Parse a section of a configuration. `where` is its name in messages.

        Raises:
            ConfigError: If a key is unknown.
        """
        known = [each.name for each in fields(cls)]
        for key in section:
            if key not in known:
                raise ConfigError(f"{where}.{key}: unknown key{did_you_mean(str(key), known)}")
        given = dict(section)
        if "metrics" in given:
            given["metrics"] = tuple(given["metrics"])
        return cls(**given)


class PersistentReward:
    """A reward whose agent is opened by the first call in each event loop and stays open.

    Raises:
        ConfigError: If the reward cannot be loaded, or if it scores groups. verl requests one row at a time.
    """

    def __init__(self, reward: Any, options: RewardOptions, folder: Path | None = None) -> None:
        self.options = options
        make = scorer_factory(reward, options, folder)
        self.name = reward if isinstance(reward, str) else getattr(reward, "__name__", type(reward).__name__)
        if make().mode == "batch":
            raise ConfigError(
                f"reward {self.name!r} scores groups, but verl requests one row at a time here; use "
                "RewardPipeline from reward_kit.integrations.verl"
            )
        self._agent = PersistentAgent(
            lambda: AsyncRewardAgent(make(), max_concurrency=options.max_concurrency, deadline_s=options.deadline_s)
        )

    async def score(self, request: ScoringRequest) -> dict[str, float]:
        """Return the score of a rollout as `score`, along with the requested metrics.

        If the caller is cancelled, the call is cancelled too.

        Raises:
            RewardError: If the rollout is unscored and `on_unscored` is "raise". `recorded` is the failure.
        """
        scored: Scored = await self._agent.score(request)
        failure = scored.failure
        if scored.score is None and self.options.on_unscored == "raise":
            reason = failure.message if failure else "its score is None"
            error = RewardError(f"reward {self.name!r}: the rollout is unscored: {reason}")
            error.recorded = failure
            raise error
        metrics = scored.result.metrics if scored.result is not None and failure is None else {}
        valid = {name: metric.score for name, metric in metrics.items() if metric.is_score_valid}
        named = {name: valid.get(name, math.nan) for name in self.options.metrics}
        return {"score": math.nan if scored.score is None else scored.score, **named}

    async def close(self) -> None:
        """Close the agent of this event loop. Otherwise, it is closed when the loop ends."""
        await self._agent.close()


def scorer_factory(
    reward: Any, options: RewardOptions, folder: Path | None = None
) -> Callable[[], RewardSpec | Scorer]:
    """Return a function that creates scorers for a reward. The reward is loaded only once.

    If the reward is already a `Scorer`, it is used unchanged.
    """
    if hasattr(reward, "score_group"):
        for name, value in (("level", options.level), ("folder", folder), ("options", options.options or None)):
            if value is not None:
                raise ConfigError(f"{name} has no effect on a {type(reward).__name__}; remove it")
        scorer: Scorer = reward
        return lambda: scorer
    loaded = resolve_reward(reward, folder, SandboxChoice(level=options.level), options.options, choice_is="level")
    return lambda: loaded if isinstance(loaded, RewardSpec) else make_scorer(loaded)


_numbers = itertools.count()
_NAME = "reward-kit compute_score"
_threads: dict[str, LoopThread] = {}
os.register_at_fork(after_in_child=_threads.clear)  # A forked process does not have the threads of its parent.


def as_compute_score(
    reward: Any, *, asynchronous: bool = True, folder: str | Path | None = None, **options: Any
) -> Callable[..., Any]:
    """Return a `compute_score(data_source, solution_str, ground_truth, extra_info)` that calls a reward.

    The reward receives the assistant's answer as the only message, because verl passes nothing else. With
    `RewardKitManager`, the reward receives the whole conversation. verl's row is passed as `sample`. The result is
    `{"score": …}` with the requested `metrics`. For an unscored answer, the function raises an error or, if
    `on_unscored="mask"` is set, returns NaN. It never returns 0.0.

    Args:
        reward: `file.py:function`, which runs in a sandbox as on the command line, or a reward function or class.
        asynchronous: whether to return a coroutine function, which verl calls concurrently, or an ordinary function,
            which verl calls in threads.
        folder: the directory for relative file paths. The default is the working directory.
        **options: the options of `RewardOptions`.

    Raises:
        ConfigError: If the reward cannot be loaded, or if an option is unknown.
    """
    held = PersistentReward(reward, RewardOptions.of(options, "as_compute_score"), Path(folder) if folder else None)

    async def compute_score(
        data_source: Any,
        solution_str: str,
        ground_truth: Any = None,
        extra_info: Any = None,
        *,
        reward_router_address: str | None = None,
        reward_model_tokenizer: Any = None,
    ) -> dict[str, float]:
        request = ScoringRequest(
            rollout_id=f"answer-{next(_numbers)}",
            messages=[Message(role="assistant", content=solution_str)],
            ground_truth=ground_truth,
            assistant_turns=[0],
            sample=extra_info if isinstance(extra_info, Mapping) else {},
            extra={"data_source": data_source, "solution_str": solution_str, "extra_info": extra_info},
        )
        return await held.score(request)

    @functools.wraps(compute_score)
    def compute_score_here(*args: Any, **kwargs: Any) -> dict[str, float]:
        if _NAME not in _threads:
            # All callers of this process that have no loop share one thread. It ends with the process.
            made = LoopThread(_NAME)
            if _threads.setdefault(_NAME, made) is not made:  # Two calls started at the same time.
                made.close()
        return _threads[_NAME].run(compute_score(*args, **kwargs))

    return compute_score if asynchronous else compute_score_here
