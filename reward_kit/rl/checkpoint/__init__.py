"""Checkpoints of a training run, and batches kept for study: folders that are whole or not there, without pickle."""

from typing import TYPE_CHECKING

from reward_kit.lazy import lazy_names

if TYPE_CHECKING:
    from reward_kit.rl.checkpoint.folders import (
        Checkpoint,
        Latest,
        Torn,
        best,
        check_whole,
        checkpoints,
        latest,
        load_checkpoint,
        prune,
        save_checkpoint,
    )
    from reward_kit.rl.checkpoint.generators import random_states, restore_random_states
    from reward_kit.rl.checkpoint.study import StudyBatch, load_batch_for_study, save_batch_for_study

__all__ = [
    "Checkpoint",
    "Latest",
    "StudyBatch",
    "Torn",
    "best",
    "check_whole",
    "checkpoints",
    "latest",
    "load_batch_for_study",
    "load_checkpoint",
    "prune",
    "random_states",
    "restore_random_states",
    "save_batch_for_study",
    "save_checkpoint",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        **dict.fromkeys(["Checkpoint", "Latest", "Torn", "best", "check_whole", "checkpoints", "latest"], "folders"),
        **dict.fromkeys(["load_checkpoint", "prune", "save_checkpoint"], "folders"),
        **dict.fromkeys(["random_states", "restore_random_states"], "generators"),
        **dict.fromkeys(["StudyBatch", "load_batch_for_study", "save_batch_for_study"], "study"),
    },
)
