"""Credit assignment: advantage estimators, state hashes, group filters and diagnostics.

Modules are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reward_kit.lazy import lazy_modules

if TYPE_CHECKING:
    from reward_kit.credit.estimators import (
        ESTIMATORS,
        discounted_returns_credit,
        gae_credit,
        gigpo_credit,
        gpg_credit,
        grpo_credit,
        grpo_passk_credit,
        opo_credit,
        reinforce_plus_plus_baseline_credit,
        reinforce_plus_plus_credit,
        rloo_credit,
        turn_level_grpo_credit,
        vine_credit,
    )
    from reward_kit.credit.group_filter import DropReason, GroupRefill, filter_groups
    from reward_kit.credit.row_credit import TokenCredit, token_advantages
    from reward_kit.credit.state_estimators import g2po_credit, gagpo_credit, graphgpo_credit, hgpo_credit
    from reward_kit.credit.state_hashes import STATE_HASHES, anchor_numbers
    from reward_kit.credit.step_arrays import StepArrays, discounted, relative
    from reward_kit.credit.step_credit import StepCredit, with_credit

__all__ = [
    "ESTIMATORS",
    "STATE_HASHES",
    "DropReason",
    "GroupRefill",
    "StepArrays",
    "StepCredit",
    "TokenCredit",
    "anchor_numbers",
    "discounted",
    "discounted_returns_credit",
    "filter_groups",
    "g2po_credit",
    "gae_credit",
    "gagpo_credit",
    "gigpo_credit",
    "gpg_credit",
    "graphgpo_credit",
    "grpo_credit",
    "grpo_passk_credit",
    "hgpo_credit",
    "opo_credit",
    "reinforce_plus_plus_baseline_credit",
    "reinforce_plus_plus_credit",
    "relative",
    "rloo_credit",
    "token_advantages",
    "turn_level_grpo_credit",
    "vine_credit",
    "with_credit",
]
_MODULES = {
    "estimators": "ESTIMATORS discounted_returns_credit gae_credit gigpo_credit gpg_credit grpo_credit "
    "grpo_passk_credit opo_credit reinforce_plus_plus_baseline_credit reinforce_plus_plus_credit rloo_credit "
    "turn_level_grpo_credit vine_credit",
    "group_filter": "DropReason GroupRefill filter_groups",
    "row_credit": "TokenCredit token_advantages",
    "state_estimators": "g2po_credit gagpo_credit graphgpo_credit hgpo_credit",
    "state_hashes": "STATE_HASHES anchor_numbers",
    "step_arrays": "StepArrays discounted relative",
    "step_credit": "StepCredit with_credit",
}
__getattr__, __dir__ = lazy_modules(__name__, _MODULES)
