"""Traces of verifiers, old and new form, against the contract of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from reward_kit.episodes.segments import EpisodeTokens
from reward_kit.errors import ConfigError, RewardKitError, boundary
from reward_kit.tokens.checking.findings import EpisodeFinding, Found
from reward_kit.tokens.checking.segments import check_prefixes, rows_of
from reward_kit.tokens.checking.tokens import Array, CheckedTokens, LogprobsOf, check_tokens


def check_verifiers_trace(
    trace: Mapping[str, Any], *, what: str = "trace", logprobs_of: LogprobsOf | None = None
) -> list[EpisodeFinding]:
    """Check one trace of verifiers: a state with a `trajectory` (v0), or a trace with `nodes` (v1).

    v0 holds for each step the whole prompt and what was sampled, so a drifted prefix shows; it does not say why a
    context was rewritten, so one that was rewritten on purpose shows as drifted too. v1 holds the messages as a tree,
    each with the tokens that it adds and compact log-probabilities of the sampled ones alone. There a drifted prefix is
    one more branch, like a compaction, and cannot be told from it; nor can a track be displaced against its mask, or
    credit stand on an observation. Neither form holds policy versions or starts.

    Args:
        trace: the dict, as JSON has it.
        what: names it in messages.
        logprobs_of: the sampler's own log-probabilities of a sequence.

    Raises:
        ConfigError: it is neither.
    """
    found = Found(what)
    try:
        with boundary(ConfigError, f"{what}: no trace of verifiers"):
            if "nodes" in trace:
                _check_nodes(found, trace["nodes"], logprobs_of)
            elif "trajectory" in trace:
                _check_trajectory(found, trace["trajectory"], logprobs_of)
            else:
                raise ConfigError(f"{what}: a trace of verifiers has 'trajectory' (v0) or 'nodes' (v1)")
    except RewardKitError as error:
        raise ConfigError(str(error)) from error
    return found.findings


# v0


def _check_trajectory(found: Found, steps: Sequence[Mapping[str, Any]], logprobs_of: LogprobsOf | None) -> None:
    """Every step on its own, then what they are together."""
    tokens, before = EpisodeTokens(), len(found.findings)
    for number, step in enumerate(steps):
        told = step.get("tokens")
        if told is None:
            found.warn("no-tokens", "the step has no tokens, so nothing about them is proved", step=number)
            continue
        if _is_step_whole(found, number, told):
            logprobs = told.get("completion_logprobs")
            tokens.add_turn(number, told["prompt_ids"], told["completion_ids"], logprobs)
    _check_rewards(found, steps)
    if any(finding.level == "error" for finding in found.findings[before:]):
        return
    check_prefixes(found, tokens)
    for row in rows_of(tokens):
        check_tokens(found, row, logprobs_of=logprobs_of)


def _is_step_whole(found: Found, number: int, told: Mapping[str, Any]) -> bool:
    """Lengths fit, ids are ids, and the masks are 0 on the prompt and 1 on what was sampled."""
    before = len(found.findings)
    for ids, track in (
        ("prompt_ids", "prompt_mask"),
        ("completion_ids", "completion_mask"),
        ("completion_ids", "completion_logprobs"),
    ):
        if told.get(track) is not None and len(told[track]) != len(told[ids]):
            found.error("length-mismatch", f"{len(told[ids])} {ids} but {len(told[track])} {track}", step=number)
    strange = [token for token in (*told["prompt_ids"], *told["completion_ids"]) if not 0 <= token < 2**31]
    if strange:
        found.error("token-id", f"{strange[0]} is no token id ({len(strange)} such)", step=number)
    masks = (told.get("prompt_mask") or (), told.get("completion_mask") or ())
    if any(value not in (0, 1) for mask in masks for value in mask):
        found.error("mask-values", "a mask is 0 or 1", step=number)
    elif any(masks[0]):
        found.error(
            "mask-on-prompt",
            "prompt_mask is 1 on tokens of the prompt, which the model did not sample in this step; earlier actions "
            "are learnt in their own steps, once",
            step=number,
        )
    elif masks[1] and not any(masks[1]):
        found.error("inverted-mask", "completion_mask is 0 on everything that was sampled", step=number)
    return len(found.findings) == before


def _check_rewards(found: Found, steps: Sequence[Mapping[str, Any]]) -> None:
    for number, step in enumerate(steps):
        for key in ("reward", "advantage"):
            value = step.get(key)
            if value is not None and not np.isfinite(value):
                kind = "reward-not-finite" if key == "reward" else "credit-not-finite"
                found.error(kind, f"its {key} is {value}; leave it None", step=number)


# v1


def _check_nodes(found: Found, nodes: Sequence[Mapping[str, Any]], logprobs_of: LogprobsOf | None) -> None:
    """Every node on its own, then every branch as the sequence that it is."""
    before = len(found.findings)
    for number, node in enumerate(nodes):
        _check_node(found, number, node)
    if len(found.findings) > before:
        return
    parents = {node.get("parent") for node in nodes}
    seen: set[tuple[str, int | None, int | None]] = set()
    for leaf in (number for number in range(len(nodes)) if number not in parents):
        branch = Found(f"{found.what}, branch to node {leaf}")
        check_tokens(branch, _branch(nodes, leaf), logprobs_of=logprobs_of)
        for finding in branch.findings:
            # Branches share their beginnings; what is wrong there is said once.
            if (key := (finding.kind, finding.step, finding.token)) not in seen:
                seen.add(key)
                found.findings.append(finding)


def _check_node(found: Found, number: int, node: Mapping[str, Any]) -> None:
    """Lengths: the mask has one entry per token, log-probabilities and advantages one per sampled token."""
    parent, ids, mask = node.get("parent"), node.get("token_ids") or [], node.get("mask") or []
    here = Found(f"{found.what}, node {number}")
    if parent is not None and not 0 <= parent < number:
        here.error("tree", f"its parent is {parent}; a message follows one that was there before it")
    if len(mask) != len(ids):
        here.error("length-mismatch", f"{len(ids)} token ids but {len(mask)} entries of mask")
    sampled = sum(map(bool, mask))
    for key in ("logprobs", "advantages"):
        values = node.get(key)
        if values and len(values) != sampled:
            here.error(
                "length-mismatch",
                f"{sampled} sampled tokens but {len(values)} {key}; they are compact, one for each true entry of mask",
            )
    if sampled and not node.get("sampled"):
        here.error(
            "mask-on-prompt",
            "its mask marks sampled tokens, and no model call produced this message; it would be learnt",
        )
    if node.get("advantages") and not np.isfinite(node["advantages"]).all():
        here.error("credit-not-finite", "an advantage is not finite; a score was NaN")
    found.findings += here.findings


def _branch(nodes: Sequence[Mapping[str, Any]], leaf: int) -> CheckedTokens:
    """The sequence from a root to a leaf, its log-probabilities at their tokens."""
    path: list[Mapping[str, Any]] = []
    place: int | None = leaf
    while place is not None:
        path.append(nodes[place])
        place = nodes[place].get("parent")
    ids: list[int] = []
    mask: list[bool] = []
    known: list[Array] = []
    for node in reversed(path):
        own = [bool(value) for value in node.get("mask") or ()]
        ids += node.get("token_ids") or []
        mask += own
        spread = np.zeros(len(own))
        logprobs = node.get("logprobs")
        spread[np.array(own, dtype=bool)] = logprobs if logprobs else np.nan
        known.append(spread)
    logprobs_T = np.concatenate(known) if known else np.zeros(0)
    return CheckedTokens(np.array(ids, dtype=np.int64), np.array(mask, dtype=np.int8), logprobs_T)
