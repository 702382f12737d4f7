"""`check_rows`: a batch of training rows against the contract of `tokens`: masks, values at their place, versions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.errors import ConfigError
from reward_kit.tokens.batch import TokenBatch
from reward_kit.tokens.checking.findings import EpisodeFinding, Found
from reward_kit.tokens.checking.segments import rows_of
from reward_kit.tokens.checking.tokens import Action, Array, CheckedTokens, LogprobsOf, check_tokens

_MASKS = ("attention_mask", "completion_mask", "action_mask", "loss_mask")
_VALUES = ("logprobs", "step_rewards", "advantages", "returns", "policy_versions", "position_ids")
_CREDIT = ("advantages", "returns")


def check_rows(
    batch: TokenBatch,
    episodes: Sequence[SingleAgentEpisode] | None = None,
    *,
    logprobs_of: LogprobsOf | None = None,
    current_version: int | None = None,
    max_staleness: int = 0,
) -> list[EpisodeFinding]:
    """Prove that rows say what `build_rows` says they do.

    Args:
        batch: the rows, each of one segment.
        episodes: those that the rows are of. Their spans tell actions apart that follow one another without an
            observation; without them each run of the action mask counts as one action.
        logprobs_of: the sampler's own log-probabilities of a sequence, to recompute them.
        current_version: the weights in training; None takes `meta_info["policy_version"]`, where it is there.
        max_staleness: how many versions behind them a token may have been sampled.

    Returns:
        What is wrong, [] where nothing was found.

    Raises:
        ConfigError: the batch has no `input_ids` or `action_mask`.
    """
    if missing := [key for key in ("input_ids", "action_mask") if key not in batch.batch and len(batch)]:
        raise ConfigError(f"rows are proved by their input_ids and action_mask; this batch has no {missing[0]!r}")
    known = {episode.id_: episode for episode in episodes or ()}
    version = batch.meta_info.get("policy_version") if current_version is None else current_version
    findings: list[EpisodeFinding] = []
    rows = zip(
        *(batch.non_tensor_batch.get(key, [None] * len(batch)) for key in ("rollout_id", "segment")), strict=True
    )
    for number, (rollout_id, segment) in enumerate(rows):
        what = f"row {number}" + (f" (episode {rollout_id}, segment {segment})" if rollout_id is not None else "")
        found = Found(what, rollout_id)
        row = {key: values[number] for key, values in batch.batch.items() if np.ndim(values) > 1}
        if _has_shape(found, row):
            tokens = _tokens(row, _segment(known.get(rollout_id), segment))
            _check_row(found, row, tokens, logprobs_of)
            _check_versions(found, row, tokens, version, max_staleness)
        findings += found.findings
    return findings


def _has_shape(found: Found, row: Mapping[str, Array]) -> bool:
    """Every mask and value lies on the axis of the ids, masks are 0 and 1 and lie inside one another."""
    before, size = len(found.findings), len(row["input_ids"])
    for key in (*_MASKS, *_VALUES):
        if key in row and len(row[key]) != size:
            found.error(
                "length-mismatch",
                f"{key} has {len(row[key])} entries and input_ids {size}; it lies on the axis of the completion alone",
            )
    for key in _MASKS:
        if key in row and len(strange := np.flatnonzero((row[key] != 0) & (row[key] != 1))):
            found.error("mask-values", f"{key} is {row[key][strange[0]]}; a mask is 0 or 1", token=int(strange[0]))
    if len(found.findings) > before:
        return False
    for inner, outer in (("completion_mask", "attention_mask"), ("action_mask", "completion_mask")):
        _check_inside(found, row, inner, outer)
    _check_inside(found, row, "loss_mask", "action_mask")
    return len(found.findings) == before


def _check_inside(found: Found, row: Mapping[str, Array], inner: str, outer: str) -> None:
    if inner in row and outer in row and len(stray := np.flatnonzero((row[inner] == 1) & (row[outer] == 0))):
        found.error(
            "mask-outside",
            f"{inner} is 1 where {outer} is 0 ({len(stray)} such); a mask was made on another axis, or is the other "
            "way round (a mask is named for what 1 means)",
            token=int(stray[0]),
        )


def _segment(episode: SingleAgentEpisode | None, segment: Any) -> CheckedTokens | None:
    """The segment that a row was made of, where its episode is known."""
    if episode is None or segment is None:
        return None
    return next((row for number, row in enumerate(rows_of(episode.tokens)) if number == segment), None)


def _tokens(row: Mapping[str, Array], segment: CheckedTokens | None) -> CheckedTokens:
    """The row, with its actions where its segment tells them."""
    ids = row["input_ids"]
    actions: tuple[Action, ...] = ()
    if segment is not None:
        attended = np.flatnonzero(row.get("attention_mask", np.ones(len(ids))) == 1)
        offset = int(attended[0]) if len(attended) else 0
        actions = tuple(Action(a.step, a.start + offset, a.stop + offset) for a in segment.actions)
        covered = sum(int(row["action_mask"][a.start : a.stop].sum()) for a in actions)
        if not covered == sum(a.stop - a.start for a in actions) == row["action_mask"].sum():
            actions = ()  # one row per action, or a mask that is wrong: the mask alone tells
    return CheckedTokens(ids, row["action_mask"], row.get("logprobs"), actions)


def _check_row(found: Found, row: Mapping[str, Array], tokens: CheckedTokens, logprobs_of: LogprobsOf | None) -> None:
    attended = np.flatnonzero(row.get("attention_mask", np.ones(len(tokens.ids))) == 1)
    if len(attended):
        part = slice(int(attended[0]), int(attended[-1]) + 1)
        actions = tuple(Action(a.step, a.start - part.start, a.stop - part.start) for a in tokens.actions)
        logprobs = tokens.logprobs[part] if tokens.logprobs is not None else None
        seen = CheckedTokens(tokens.ids[part], tokens.action_mask[part], logprobs, actions, part.start)
        check_tokens(found, seen, logprobs_of=logprobs_of)
    for key in _CREDIT:
        if key in row:
            _check_credit(found, key, row[key], row, tokens)
    if "step_rewards" in row:
        _check_step_rewards(found, row["step_rewards"], tokens)


def _check_credit(found: Found, key: str, values: Array, row: Mapping[str, Array], tokens: CheckedTokens) -> None:
    """On action tokens alone, finite, one number for an action, none where the action takes no part."""
    if len(stray := np.flatnonzero((values != 0) & (tokens.action_mask == 0))):
        found.error(
            "credit-off-action",
            f"{key} is {values[stray[0]]:.4g} on a token that the policy did not sample ({len(stray)} such); an "
            "observation would be learnt: the credit was spread over the completion and not over the actions",
            token=int(stray[0]),
        )
    for step, start, stop in tokens.spans():
        if start == stop:
            continue
        part = values[start:stop]
        named = {"step": step if tokens.actions else None, "token": start}
        if not np.isfinite(part).all():
            found.error("credit-not-finite", f"{key} is {part[~np.isfinite(part)][0]} on an action", **named)
        elif np.ptp(part) > 0:
            found.error(
                "credit-varies",
                f"{key} goes from {part.min():.4g} to {part.max():.4g} within one action; an action has one: it was "
                "discounted or normalised per token, or lies beside its action",
                **named,
            )
        elif "loss_mask" in row and part[0] != 0 and not row["loss_mask"][start:stop].any():
            found.error(
                "advantage-unscored",
                f"{key} is {part[0]:.4g} on an action that takes no part in the loss; a missing score counted as 0",
                **named,
            )


def _check_step_rewards(found: Found, rewards: Array, tokens: CheckedTokens) -> None:
    """Each on its action's last token, and nowhere else."""
    last = np.zeros(len(rewards), dtype=bool)
    last[[stop - 1 for _, start, stop in tokens.spans() if stop > start]] = True
    if len(stray := np.flatnonzero((rewards != 0) & ~last)):
        at = int(stray[0])
        found.error(
            "reward-misplaced",
            f"a step reward of {rewards[at]:.4g} stands on a token that is no action's last ({len(stray)} such); it "
            "was put at the end of an observation, of the padded row, or on every token",
            token=at,
        )


def _check_versions(
    found: Found, row: Mapping[str, Array], tokens: CheckedTokens, current: int | None, max_staleness: int
) -> None:
    """One version for an action, known, and not older than the trainer allows."""
    if "policy_versions" not in row:
        return
    versions, sampled = row["policy_versions"], row["policy_versions"][tokens.action_mask == 1]
    for step, start, stop in tokens.spans():
        part = versions[start:stop]
        if len(part) and part.min() != part.max():
            found.error(
                "two-versions",
                f"versions {part.min()} and {part.max()} sampled one action; weights were swapped inside a forward "
                "loop, and no policy has these probabilities",
                step=step if tokens.actions else None,
                token=start,
            )
            return
    if len(sampled) and (sampled < 0).any() and (current is not None or (sampled >= 0).any()):
        found.error("unknown-version", "nobody recorded which weights sampled some of its actions")
    elif current is not None and len(sampled):
        off = sampled[(sampled > current) | (sampled < current - max_staleness)]
        if len(off):
            found.error(
                "stale-version",
                f"sampled by version {off[0]} and the trainer has version {current} (at most {max_staleness} behind)",
            )
