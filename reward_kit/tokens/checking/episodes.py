"""`check_episode`: the contract of episodes and their tokens as a program, in messages that name the likely cause.

It finds what trains a model on something it never did: a history that was tokenised again, a mask beside its tokens,
the log-probability of another token, credit on an observation, groups whose starts differ, stale weights. One fault is
one finding: what only follows from it is not reported. `check_group` compares episodes, `check_rows` proves a batch.
"""

from __future__ import annotations

from collections.abc import Sequence

from reward_kit.episodes.record import facts_of
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.tokens.checking.conversation import are_tracks_whole, check_end, check_messages, check_rewards
from reward_kit.tokens.checking.credit import Credited, check_credit
from reward_kit.tokens.checking.findings import EpisodeFinding, Found
from reward_kit.tokens.checking.groups import BatchChecks
from reward_kit.tokens.checking.segments import check_prefixes, check_versions, is_in_segments, rows_of
from reward_kit.tokens.checking.tokens import TOLERANCE, LogprobsOf, check_tokens

__all__ = ["EpisodeFinding", "check_episode", "check_group"]


def check_episode(
    episode: SingleAgentEpisode,
    steps: Sequence[Credited] | None = None,
    *,
    scored: bool | None = None,
    logprobs_of: LogprobsOf | None = None,
    tolerance: float = TOLERANCE,
    current_version: int | None = None,
    max_staleness: int = 0,
) -> list[EpisodeFinding]:
    """Prove the contract of one episode.

    Args:
        episode: the record.
        steps: its credited steps, or its lines of `credit.jsonl`; None where no credit was assigned.
        scored: whether the episode has a score; None where that is not known.
        logprobs_of: (T,) ids -> (T,) the log-probability of each id after those before it, under the weights that
            sampled. With it a shifted or permuted track is found; without it only what the zeros betray.
        tolerance: how far a recomputed log-probability may differ.
        current_version: the weights in training; None where versions are only compared with one another.
        max_staleness: how many versions behind them an action may have been sampled.

    Returns:
        What is wrong, [] where nothing was found. "error" breaks the contract.
    """
    found, tokens = Found.about_episode(episode.id_), episode.tokens
    check_end(found, episode)
    if not are_tracks_whole(found, episode):
        return found.findings
    is_part = episode.t_started > 0 or episode.rewards.lookback > 0
    check_rewards(found, episode)
    if not is_part:
        check_messages(found, episode)
    if is_in_segments(found, tokens, None if is_part else len(episode)):
        check_prefixes(found, tokens)
        check_versions(found, tokens.spans, current_version, max_staleness)
        for row in rows_of(tokens):
            check_tokens(found, row, logprobs_of=logprobs_of, tolerance=tolerance)
    if steps is not None:
        check_credit(found, episode, steps, scored)
    return found.findings


def check_group(episodes: Sequence[SingleAgentEpisode]) -> list[EpisodeFinding]:
    """Prove that episodes are one group: unique ids, one group id, one sample and policy, one start, one seed.

    Each is compared with the first. What is wrong inside an episode is `check_episode`'s to find.
    """
    checks = BatchChecks()
    findings = [finding for episode in episodes for finding in checks.add(episode)]
    first = episodes[0] if episodes else None
    for episode in episodes[1:]:
        group_id, expected = facts_of(episode).get("group_id"), facts_of(episodes[0]).get("group_id")
        if first is not None and group_id != expected:
            found = Found.about_episode(episode.id_)
            found.error(
                "mixed-groups",
                f"its group id is {group_id!r} and that of {first.id_} {expected!r}; groups were cut by position, and "
                "an episode before them is missing",
            )
            findings += found.findings
    return findings
