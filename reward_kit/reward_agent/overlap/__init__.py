"""What a trainer would gain from asynchronous rewards: an exact simulation of its schedule, before it is changed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reward_kit.lazy import lazy_names

if TYPE_CHECKING:
    from reward_kit.reward_agent.overlap.bounds import lower_bound as lower_bound
    from reward_kit.reward_agent.overlap.latency import Latency as Latency
    from reward_kit.reward_agent.overlap.latency import parse_latency as parse_latency
    from reward_kit.reward_agent.overlap.latency import read_durations as read_durations
    from reward_kit.reward_agent.overlap.settings import PipelineSettings as PipelineSettings
    from reward_kit.reward_agent.overlap.settings import Schedule as Schedule
    from reward_kit.reward_agent.overlap.simulation import Interval as Interval
    from reward_kit.reward_agent.overlap.simulation import Overlap as Overlap
    from reward_kit.reward_agent.overlap.simulation import ScheduleResult as ScheduleResult
    from reward_kit.reward_agent.overlap.simulation import ScoredBatch as ScoredBatch
    from reward_kit.reward_agent.overlap.simulation import draw_latencies as draw_latencies
    from reward_kit.reward_agent.overlap.simulation import list_schedule as list_schedule
    from reward_kit.reward_agent.overlap.simulation import rank_correlation as rank_correlation
    from reward_kit.reward_agent.overlap.simulation import simulate_overlap as simulate_overlap
    from reward_kit.reward_agent.overlap.timeline import draw_timeline as draw_timeline

_HOMES = {
    "Interval": "simulation",
    "Latency": "latency",
    "Overlap": "simulation",
    "PipelineSettings": "settings",
    "Schedule": "settings",
    "ScheduleResult": "simulation",
    "ScoredBatch": "simulation",
    "draw_latencies": "simulation",
    "draw_timeline": "timeline",
    "list_schedule": "simulation",
    "lower_bound": "bounds",
    "parse_latency": "latency",
    "rank_correlation": "simulation",
    "read_durations": "latency",
    "simulate_overlap": "simulation",
}

__all__ = [
    "Interval",
    "Latency",
    "Overlap",
    "PipelineSettings",
    "Schedule",
    "ScheduleResult",
    "ScoredBatch",
    "draw_latencies",
    "draw_timeline",
    "list_schedule",
    "lower_bound",
    "parse_latency",
    "rank_correlation",
    "read_durations",
    "simulate_overlap",
]
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
