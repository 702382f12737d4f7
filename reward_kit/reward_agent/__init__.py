"""Asynchronous scoring of episodes. It runs concurrently with other work."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reward_kit.lazy import lazy_modules

if TYPE_CHECKING:
    from reward_kit.reward_agent.agent import AsyncRewardAgent as AsyncRewardAgent
    from reward_kit.reward_agent.agent import SyncRewardAgent as SyncRewardAgent
    from reward_kit.reward_agent.agent import score_all as score_all
    from reward_kit.reward_agent.call_scheduler import Retries as Retries
    from reward_kit.reward_agent.in_process import InProcessScorer as InProcessScorer
    from reward_kit.reward_agent.in_process import score_one as score_one
    from reward_kit.reward_agent.loading import SandboxChoice as SandboxChoice
    from reward_kit.reward_agent.loading import load_custom_reward as load_custom_reward
    from reward_kit.reward_agent.loading import load_reward as load_reward
    from reward_kit.reward_agent.loading import make_scorer as make_scorer
    from reward_kit.reward_agent.remote import RemoteReward as RemoteReward
    from reward_kit.reward_agent.sandboxed import SandboxedReward as SandboxedReward
    from reward_kit.reward_agent.sandboxed import SandboxedScorer as SandboxedScorer
    from reward_kit.reward_agent.score_cache import ScoreCache as ScoreCache
    from reward_kit.reward_agent.scoring import Scored as Scored
    from reward_kit.reward_agent.scoring import Scorer as Scorer
    from reward_kit.reward_agent.scoring import ScoringRequest as ScoringRequest
    from reward_kit.reward_agent.stats import AgentStats as AgentStats
    from reward_kit.reward_agent.tickets import ScoredChunk as ScoredChunk
    from reward_kit.reward_agent.tickets import Ticket as Ticket

_MODULES = {
    "agent": "AsyncRewardAgent SyncRewardAgent score_all",
    "call_scheduler": "Retries",
    "sandboxed": "SandboxedReward SandboxedScorer",
    "in_process": "InProcessScorer score_one",
    "loading": "SandboxChoice load_custom_reward load_reward make_scorer",
    "remote": "RemoteReward",
    "score_cache": "ScoreCache",
    "scoring": "Scored Scorer ScoringRequest",
    "stats": "AgentStats",
    "tickets": "ScoredChunk Ticket",
}
__all__ = sorted(" ".join(_MODULES.values()).split())
__getattr__, __dir__ = lazy_modules(__name__, _MODULES)
