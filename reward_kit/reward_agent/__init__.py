"""Asynchronous scoring: episodes in, scores out, while the machine goes on working."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reward_kit.lazy import lazy_names

if TYPE_CHECKING:
    from reward_kit.reward_agent.agent import AsyncRewardAgent as AsyncRewardAgent
    from reward_kit.reward_agent.agent import ScoredChunk as ScoredChunk
    from reward_kit.reward_agent.agent import Ticket as Ticket
    from reward_kit.reward_agent.confined import ConfinedReward as ConfinedReward
    from reward_kit.reward_agent.confined import ConfinedScorer as ConfinedScorer
    from reward_kit.reward_agent.in_process import InProcessScorer as InProcessScorer
    from reward_kit.reward_agent.in_process import score_one as score_one
    from reward_kit.reward_agent.levels import load_reward as load_reward
    from reward_kit.reward_agent.scoring import Scored as Scored
    from reward_kit.reward_agent.scoring import Scorer as Scorer
    from reward_kit.reward_agent.scoring import ScoringRequest as ScoringRequest

# The worker behind walls imports this package too, and next to nothing of it.
_HOMES = {
    "AsyncRewardAgent": "agent",
    "ConfinedReward": "confined",
    "ConfinedScorer": "confined",
    "InProcessScorer": "in_process",
    "Scored": "scoring",
    "ScoredChunk": "agent",
    "Scorer": "scoring",
    "ScoringRequest": "scoring",
    "Ticket": "agent",
    "load_reward": "levels",
    "score_one": "in_process",
}

__all__ = [
    "AsyncRewardAgent",
    "ConfinedReward",
    "ConfinedScorer",
    "InProcessScorer",
    "Scored",
    "ScoredChunk",
    "Scorer",
    "ScoringRequest",
    "Ticket",
    "load_reward",
    "score_one",
]
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
