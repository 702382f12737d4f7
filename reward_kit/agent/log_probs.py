"""What a policy says of an action's tokens, written to an episode and read back as it was said.

That is `PolicyOutput.log_probs`. Its ids go to the episode's tokens, where only what is new of a prompt is kept; usage
and finish reason are facts of the step; what is not enough for a turn, such as sampled ids without their prompt, stands
in the step's outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reward_kit.episodes.segments import REWRITTEN, UNKNOWN_VERSION, Turn
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode

_IN_OUTPUTS = ("prompt_ids", "token_ids", "logprobs", "policy_version")
_IN_INFO = ("usage", "finish_reason")


def write_log_probs(
    log_probs: Mapping[str, Any] | None, episode: SingleAgentEpisode, info: dict[str, Any]
) -> dict[str, Any]:
    """Write what is said of an episode's next action.

    Args:
        log_probs: as the policy gave it.
        episode: gets the tokens.
        info: of the step; gets its facts.

    Returns:
        What belongs to the step's outputs; values may be None.
    """
    if not log_probs:
        return {}
    info |= {key: log_probs[key] for key in _IN_INFO if log_probs.get(key)}
    outputs = {key: log_probs.get(key) for key in _IN_OUTPUTS}
    prompt_ids, token_ids, logprobs, version = outputs.values()
    if prompt_ids is None or token_ids is None:
        return outputs
    version = UNKNOWN_VERSION if version is None else version
    reason = log_probs.get("segment_reason") or REWRITTEN
    allowed = log_probs.get("allowed_ids")
    episode.tokens.add_turn(len(episode), prompt_ids, token_ids, logprobs, version, reason, allowed)
    return {}


def read_log_probs(episode: SingleAgentEpisode, t: int, turn: Turn | None) -> dict[str, Any] | None:
    """What was said of the t-th action; only what is known, None where nothing is.

    Args:
        episode: its record.
        t: the action.
        turn: `episode.tokens.turns().get(t)`; taken once for all steps.
    """
    info = episode.get_infos(t + 1)
    said = {key: episode.get_extra_model_outputs(key, t) for key in _IN_OUTPUTS if key in episode.extra_model_outputs}
    if turn is not None:
        said |= turn._asdict()
    said |= {key: info.get(key) for key in _IN_INFO}
    return {key: value for key, value in said.items() if value is not None} or None
