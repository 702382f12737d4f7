"""The least time that any schedule needs, for the overlap simulator."""

from __future__ import annotations

import numpy as np

from reward_kit.reward_agent.overlap.latency import Floats
from reward_kit.reward_agent.overlap.settings import PipelineSettings


def lower_bound(settings: PipelineSettings, latencies_SC: Floats) -> float:
    """No schedule whose rollouts use weights at most one version old is over sooner, however it orders its calls.

    It is the largest of: the work of each machine; and for each run of batches s..t, the work that must come before the
    first of their calls, the calls themselves spread evenly over the slots (and the longest of them whole), and the
    work that must come after the last of them.
    """
    steps = range(settings.steps)
    rollouts = 1 if settings.separate_rollouts else settings.steps  # the trainer's machine waits for the first at least
    work_s = settings.steps * settings.train_s + rollouts * settings.rollout_s
    heads_S = np.array([_before(settings, step) for step in steps])
    tails_S = np.array([_after(settings, settings.steps - 1 - step) for step in steps])
    loads_S = latencies_SC.sum(axis=1) / settings.max_concurrency
    longest_S = latencies_SC.max(axis=1)
    up_to_S = np.cumsum(loads_S)
    bound = max(work_s, float((heads_S + longest_S + tails_S).max()))
    # The best first batch for each last one: heads - loads before it, accumulated.
    first_S = np.maximum.accumulate(heads_S - (up_to_S - loads_S))
    return max(bound, float((first_S + up_to_S + tails_S).max()))


def _before(settings: PipelineSettings, step: int) -> float:
    """The work before the first call of a step: rollouts up to its own, and every update but those of two steps."""
    updated = max(0, step - 1)
    if not settings.separate_rollouts:
        return (step + 1) * settings.rollout_s + updated * settings.train_s + settings.handling_s
    generating = (step + 1) * settings.rollout_s + updated * settings.publish_s
    training = settings.rollout_s + updated * settings.train_s + (settings.rollout_s if step else 0.0)
    return max(generating, training) + settings.handling_s


def _after(settings: PipelineSettings, left: int) -> float:
    """The work after the last call of a step with `left` more to come: one update, and theirs but for what is ahead."""
    update_s = settings.minibatches * settings.update_s
    rollouts = max(0, left - 1)  # the next batch may be rolled out already, and have its log-probabilities
    training = left * (update_s + settings.publish_s) + rollouts * settings.log_probs_s
    last_s = settings.update_s + settings.publish_s
    if not settings.separate_rollouts:
        return last_s + training + rollouts * settings.rollout_s
    generating = rollouts * (settings.rollout_s + settings.publish_s) + settings.log_probs_s + update_s
    return last_s + (max(training, generating) if rollouts else training)
