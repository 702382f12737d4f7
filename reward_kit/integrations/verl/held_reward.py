"""A reward that stays open while verl asks for one score after the other, and what it says where there is none."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from reward_kit.credit.options import check_choice
from reward_kit.errors import ConfigError, RewardError, did_you_mean
from reward_kit.reward_agent import AsyncRewardAgent, Scored, Scorer, ScoringRequest, load_reward
from reward_kit.reward_agent.custom.specs import spec_of
from reward_kit.reward_agent.levels import SandboxChoice, scorer_of
from reward_kit.reward_options import fixed
from reward_kit.task_parts import SandboxLevel
from reward_kit.typed_interface import RewardSpec

logger = logging.getLogger("reward_kit.integrations.verl")

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
        metrics: names of metrics that verl is told besides, NaN where a result has none of that name. verl takes the
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
    """Scores in an event loop, through an `AsyncRewardAgent` that is opened by the first call and stays open.

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
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready: asyncio.Future[AsyncRewardAgent]
        self._holding: asyncio.Task[None] | None = None

    async def score(self, request: ScoringRequest) -> Scored:
        """The score of one rollout, or why there is none."""
        agent = await self._opened()
        return (await agent.score_all([request]))[0]

    async def close(self) -> None:
        """Ends what the reward has opened. Whoever forgets it leaves that to the end of the process."""
        holding, self._holding = self._holding, None
        if holding is not None and self._loop is asyncio.get_running_loop():
            self._leave.set()
            await holding

    async def _opened(self) -> AsyncRewardAgent:
        """The agent of the running loop. A task of its own holds it, since calls come from tasks that end."""
        loop = asyncio.get_running_loop()
        if self._holding is None or self._holding.done() or self._loop is not loop:
            self._loop, self._leave, self._ready = loop, asyncio.Event(), loop.create_future()
            self._holding = loop.create_task(self._hold(self._ready, self._leave))
        either: set[asyncio.Future[Any]] = {self._ready, self._holding}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not self._ready.done():
            self._holding.result()  # raises what kept it from being opened
        return self._ready.result()

    async def _hold(self, ready: asyncio.Future[AsyncRewardAgent], leave: asyncio.Event) -> None:
        options = self.options
        async with AsyncRewardAgent(
            self.make(), max_concurrency=options.max_concurrency, deadline_s=options.deadline_s
        ) as agent:
            ready.set_result(agent)
            await leave.wait()


def scorer_maker(reward: Any, options: RewardOptions, folder: Path | None = None) -> Callable[[], RewardSpec | Scorer]:
    """Makes what an `AsyncRewardAgent` takes, of a reward that is loaded once.

    Raises:
        ConfigError: it cannot be loaded.
    """
    if isinstance(reward, str):
        loaded = load_reward(reward, folder, SandboxChoice(level=options.level), options.options)
        for note in loaded.notes:
            logger.warning("%s", note)
        found = loaded.reward
        return lambda: found if isinstance(found, RewardSpec) else scorer_of(found)
    if options.level is not None or folder is not None:
        raise ConfigError("level and folder are for a reward that is named ('file.py:function'); a function runs here")
    if hasattr(reward, "score_group"):
        scorer: Scorer = reward
        return lambda: scorer
    spec = fixed(reward if isinstance(reward, RewardSpec) else spec_of(reward), options.options)
    return lambda: spec


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
    named = {name: metrics[name].score if name in metrics else math.nan for name in options.metrics}
    return {"score": math.nan if scored.score is None else scored.score, **named}
