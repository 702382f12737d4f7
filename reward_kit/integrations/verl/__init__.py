"""Conversion between episodes and verl's batches, and rewards and advantages for verl's trainer.

Names are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reward_kit.lazy import lazy_modules

if TYPE_CHECKING:
    from reward_kit.integrations.verl.compute_score import as_compute_score
    from reward_kit.integrations.verl.data_proto import from_data_proto, to_data_proto, verl_rows
    from reward_kit.integrations.verl.estimators import compute_advantage, row_credit
    from reward_kit.integrations.verl.row_format import DataProtoFormat
    from reward_kit.integrations.verl.trainer_loss import verl_loss
    from reward_kit.integrations.verl.trainer_rewards import RewardPipeline

__all__ = [
    "DataProtoFormat",
    "RewardPipeline",
    "as_compute_score",
    "compute_advantage",
    "from_data_proto",
    "row_credit",
    "to_data_proto",
    "verl_loss",
    "verl_rows",
]
_MODULES = {
    "compute_score": "as_compute_score",
    "data_proto": "from_data_proto to_data_proto verl_rows",
    "estimators": "compute_advantage row_credit",
    "row_format": "DataProtoFormat",
    "trainer_loss": "verl_loss",
    "trainer_rewards": "RewardPipeline",
}
__getattr__, __dir__ = lazy_modules(__name__, _MODULES)
