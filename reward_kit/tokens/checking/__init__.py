"""The contract of episodes, tokens, credit and rows, proved on our own records and on those of others."""

from reward_kit.tokens.checking.episodes import EpisodeFinding, check_episode, check_group
from reward_kit.tokens.checking.foreign import check_trl_rollout
from reward_kit.tokens.checking.foreign_verifiers import check_verifiers_trace
from reward_kit.tokens.checking.rows import check_rows

__all__ = [
    "EpisodeFinding",
    "check_episode",
    "check_group",
    "check_rows",
    "check_trl_rollout",
    "check_verifiers_trace",
]
