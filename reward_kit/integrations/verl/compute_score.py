"""`compute_score` for verl, of any reward: put it into the file of verl's `reward.custom_reward_function`.

from reward_kit.integrations.verl.compute_score import as_compute_score
compute_score = as_compute_score("rewards.py:graded")
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from reward_kit.blocking import LoopThread
from reward_kit.integrations.verl.held_reward import HeldReward, RewardOptions
from reward_kit.models import Message
from reward_kit.reward_agent import ScoringRequest

_numbers = itertools.count()
_NAME = "reward-kit compute_score"
_threads: dict[str, LoopThread] = {}
os.register_at_fork(after_in_child=_threads.clear)  # a fork has none of its parent's threads


def as_compute_score(
    reward: Any, *, asynchronous: bool = True, folder: str | Path | None = None, **options: Any
) -> Callable[..., Any]:
    """Return a `compute_score(data_source, solution_str, ground_truth, extra_info)` that calls a reward.

    The reward sees one message of the assistant, the answer, since verl passes no more; `RewardKitManager` shows it the
    whole conversation. verl's row is its `sample`. It returns `{"score": …}` with the requested `metrics`. For an
    unscored answer it raises, or returns NaN with `on_unscored="mask"`; never 0.0.

    Args:
        reward: `file.py:function`, sandboxed as on the command line, or a reward function or class.
        asynchronous: return a coroutine function, whose calls verl makes concurrently; else a plain one, for threads.
        folder: what a file is relative to, by default the working directory.
        **options: those of `RewardOptions`.

    Raises:
        ConfigError: the reward cannot be loaded, or an option is unknown.
    """
    held = HeldReward(reward, RewardOptions.of(options, "as_compute_score"), Path(folder) if folder else None)

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
            # One thread for all callers of this process that have no loop; it ends with the process.
            made = LoopThread(_NAME)
            if _threads.setdefault(_NAME, made) is not made:  # two began at once
                made.close()
        return _threads[_NAME].run(compute_score(*args, **kwargs))

    return compute_score if asynchronous else compute_score_here
