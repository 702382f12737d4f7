"""Asynchronous scoring: episodes in, scores out, while the machine goes on working."""

from reward_kit.reward_agent.agent import AsyncRewardAgent, ScoredChunk, Ticket
from reward_kit.reward_agent.scoring import Scored, ScoringRequest, score_one

__all__ = ["AsyncRewardAgent", "Scored", "ScoredChunk", "ScoringRequest", "Ticket", "score_one"]
