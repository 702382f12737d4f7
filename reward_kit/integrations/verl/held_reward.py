"""A reward that stays open while verl asks for one score after another; rows of a `DataProto` as scoring requests."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from reward_kit.credit.options import check_choice
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.errors import ConfigError, RewardError, did_you_mean
from reward_kit.integrations.verl.data_proto import EPISODE
from reward_kit.reward_agent import AsyncRewardAgent, Scored, Scorer, ScoringRequest
from reward_kit.reward_agent.agent import KeptOpenAgent
from reward_kit.reward_agent.levels import SandboxChoice, reward_given, scorer_of
from reward_kit.rl.reward_batches import RewardBatch
from reward_kit.rl.reward_manager import NaiveRewardManager, RewardManager, Tokenizer, check_tokenizer
from reward_kit.task_parts import SandboxLevel
from reward_kit.typed_interface import RewardSpec

SECTION = "reward.reward_kit"
"""The section of verl's configuration that names a reward and how it is called."""
OnUnscored = Literal["raise", "mask"]


@dataclass(frozen=True, slots=True)
class RewardOptions:
    """How a reward is called for verl.

    Attributes:
        level: of the sandbox, for a reward that is named; by default as the command line chooses.
        options: the reward's own keyword parameters.
        max_concurrency: calls at a time in each of verl's processes.
        deadline_s: for one call; what exceeds it is unscored.
        on_unscored: "raise": the call raises, and verl's trainer goes on without the rollout, or without its group;
            "mask": the score is NaN, and reward_kit's trainers, and they alone, take the row out of the loss.
        metrics: names of metrics that verl is told besides, NaN where a result has no valid one. verl takes the
            names of a batch from its first row, so that they have to be the same for all.

    Raises:
        ConfigError: an option is out of its range.
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
        """Those that a section of a configuration holds.

        Raises:
            ConfigError: a key is unknown; `where` names the section.
        """
        known = [each.name for each in fields(cls)]
        for key in section:
            if key not in known:
                raise ConfigError(f"{where}.{key}: unknown key{did_you_mean(str(key), known)}")
        given = dict(section)
        if "metrics" in given:
            given["metrics"] = tuple(given["metrics"])
        return cls(**given)


class HeldReward:
    """Scores in event loops, through an `AsyncRewardAgent` that each one's first call opens and that stays open.

    Args:
        reward: `file.py:function`, for which the sandbox is chosen as on the command line; or a reward function, a
            class or a `Scorer`, which is called in this process.
        options: how it is called.
        folder: what a file is relative to, by default the working directory.

    Raises:
        ConfigError: it cannot be loaded, or scores groups: verl asks for one row at a time.
    """

    def __init__(self, reward: Any, options: RewardOptions, folder: Path | None = None) -> None:
        self.options = options
        self.make = scorer_maker(reward, options, folder)
        self.name = reward if isinstance(reward, str) else getattr(reward, "__name__", type(reward).__name__)
        if self.make().mode == "batch":
            raise ConfigError(
                f"reward {self.name!r} scores groups, and verl asks here for one row at a time; use RewardPipeline "
                "of integrations.verl.reward_pipeline for it"
            )
        self._agent = KeptOpenAgent(self._opened)

    async def score(self, request: ScoringRequest) -> Scored:
        """The score of one rollout, or why there is none; where the caller is cancelled, so is the call."""
        return await self._agent.score(request)

    async def close(self) -> None:
        """Ends what the reward has opened in this loop. Whoever forgets it leaves that to the end of the loop."""
        await self._agent.close()

    def _opened(self) -> AsyncRewardAgent:
        options = self.options
        return AsyncRewardAgent(self.make(), max_concurrency=options.max_concurrency, deadline_s=options.deadline_s)


def scorer_maker(reward: Any, options: RewardOptions, folder: Path | None = None) -> Callable[[], RewardSpec | Scorer]:
    """Makes what an `AsyncRewardAgent` takes, of a reward that is loaded once; a `Scorer` is taken as it is.

    Raises:
        ConfigError: it cannot be loaded.
    """
    if hasattr(reward, "score_group"):
        for name, value in (("level", options.level), ("folder", folder), ("options", options.options or None)):
            if value is not None:
                raise ConfigError(f"{name} has no effect on {type(reward).__name__}, which scores by itself")
        scorer: Scorer = reward
        return lambda: scorer
    found = reward_given(reward, folder, SandboxChoice(level=options.level), options.options, choice_is="level")
    return lambda: found if isinstance(found, RewardSpec) else scorer_of(found)


def told(scored: Scored, options: RewardOptions, what: str) -> dict[str, float]:
    """A score as verl takes it: `score`, and the metrics that it is to be told.

    Raises:
        RewardError: there is none, and `on_unscored` is "raise". `recorded` is the failure.
    """
    if scored.score is None and options.on_unscored == "raise":
        failure = scored.failure
        error = RewardError(f"{what} is unscored: {failure.message if failure else 'its score is None'}")
        error.recorded = failure
        raise error
    metrics = scored.result.metrics if scored.result is not None and scored.failure is None else {}
    valid = {name: metric.score for name, metric in metrics.items() if metric.is_score_valid}
    named = {name: valid.get(name, math.nan) for name in options.metrics}
    return {"score": math.nan if scored.score is None else scored.score, **named}


class RowRequests(NaiveRewardManager):
    """The whole episode where a row brings it along; else the chat of the prompt and the decoded answer.

    The latter as our manager of single answers reads them.

    Args:
        tokenizer: decodes prompts and answers.

    Raises:
        ConfigError: it cannot decode.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        RewardManager.__init__(self, tokenizer, 0)
        check_tokenizer(tokenizer)

    def of(self, data: Any) -> list[ScoringRequest]:
        """The request of each row.

        Raises:
            ConfigError: a row lacks something, or has it in another form.
        """
        carried = [carried_episode(data.non_tensor_batch, row) for row in range(len(data))]
        if all(episode is not None for episode in carried):
            return [ScoringRequest.of(episode) for episode in carried if episode is not None]
        requests = self._requests(RewardBatch.of(data))
        return [
            request if episode is None else ScoringRequest.of(episode)
            for request, episode in zip(requests, carried, strict=True)
        ]


def carried_episode(columns: Mapping[str, Any], row: int) -> SingleAgentEpisode | None:
    """The episode that a row brings along, itself or in the `extra_fields` of its agent loop; None where it does not.

    In verl's reward loop those fields are called `tool_extra_fields`.
    """
    carried = columns[EPISODE][row] if EPISODE in columns else None
    for name in ("extra_fields", "tool_extra_fields"):
        if carried is None and name in columns:
            carried = (columns[name][row] or {}).get(EPISODE)
    return None if carried is None else SingleAgentEpisode.from_state(carried["state"])
