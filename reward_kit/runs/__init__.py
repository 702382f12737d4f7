"""Run directories, task files, summaries and statistics of scores. The submodules are imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reward_kit.lazy import lazy_modules

if TYPE_CHECKING:
    from reward_kit.runs.display import summary_table
    from reward_kit.runs.evaluation import Task, evaluate, evaluate_async, score_transcripts
    from reward_kit.runs.finished import FinishedRun
    from reward_kit.runs.run_folder import read_episodes, read_scores
    from reward_kit.runs.statistics import (
        bounded_interval,
        mean_interval,
        mean_pass_at_k,
        mean_pass_hat_k,
        paired_figures,
        pass_at_k,
        pass_hat_k,
        t_quantile,
    )
    from reward_kit.runs.summary import summary_from_json
    from reward_kit.runs.tasks import load_task

__all__ = [
    "FinishedRun",
    "Task",
    "bounded_interval",
    "evaluate",
    "evaluate_async",
    "load_task",
    "mean_interval",
    "mean_pass_at_k",
    "mean_pass_hat_k",
    "paired_figures",
    "pass_at_k",
    "pass_hat_k",
    "read_episodes",
    "read_scores",
    "score_transcripts",
    "summary_from_json",
    "summary_table",
    "t_quantile",
]
_MODULES = {
    "display": "summary_table",
    "finished": "FinishedRun",
    "evaluation": "Task evaluate evaluate_async score_transcripts",
    "run_folder": "read_episodes read_scores",
    "statistics": (
        "bounded_interval mean_interval mean_pass_at_k mean_pass_hat_k paired_figures pass_at_k pass_hat_k t_quantile"
    ),
    "summary": "summary_from_json",
    "tasks": "load_task",
}
__getattr__, __dir__ = lazy_modules(__name__, _MODULES)
