"""Check rows: a batch of training rows against the contract of `tokens`, and the rollouts of other trainers.

`check_rows` proves masks, values at their place and versions of a batch. TRL's rollout dict and verifiers' traces are
checked by the same rules.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from reward_kit.checks.episode import Action, Array, CheckedTokens, LogprobsOf, check_prefixes, check_tokens, rows_of
from reward_kit.checks.findings import Finding, Found
from reward_kit.episodes.segments import EpisodeTokens
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.errors import ConfigError, RewardKitError, boundary, did_you_mean, kind_of, why_unreadable
from reward_kit.tokens.batch import TokenBatch

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
) -> list[Finding]:
    """Prove that rows say what `build_rows` says they do.

    Args:
        batch: the rows, each of one segment.
        episodes: those that the rows are of. Their spans tell actions apart that follow one another without an
            observation; without them each run of the action mask counts as one action.
        logprobs_of: the sampler's own log-probabilities of a sequence, to recompute them.
        current_version: the weights in training; None takes `meta_info["policy_version"]`, where it is there.
        max_staleness: how many versions behind them a token may have been sampled.

    Returns:
        The problems, [] if there are none.

    Raises:
        ConfigError: the batch has no `input_ids` or `action_mask`.
    """
    if missing := [key for key in ("input_ids", "action_mask") if key not in batch.batch and len(batch)]:
        raise ConfigError(f"rows are proved by their input_ids and action_mask; this batch has no {missing[0]!r}")
    known = {episode.id_: episode for episode in episodes or ()}
    version = batch.meta_info.get("policy_version") if current_version is None else current_version
    findings: list[Finding] = []
    rows = zip(
        *(batch.non_tensor_batch.get(key, [None] * len(batch)) for key in ("rollout_id", "segment")), strict=True
    )
    for number, (rollout_id, segment) in enumerate(rows):
        what = f"row {number}" + (f" (episode {rollout_id}, segment {segment})" if rollout_id is not None else "")
        found = Found(what, rollout_id)
        row = {key: values[number] for key, values in batch.batch.items() if np.ndim(values) > 1}
        if _has_shape(found, row):
            episode = known.get(rollout_id)
            own = rows_of(episode.tokens) if episode is not None and segment is not None else ()
            tokens = _tokens(row, next((one for index, one in enumerate(own) if index == segment), None))
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
    for outer, inner in pairwise(_MASKS):
        if inner in row and outer in row and len(stray := np.flatnonzero((row[inner] == 1) & (row[outer] == 0))):
            found.error(
                "mask-outside",
                f"{inner} is 1 where {outer} is 0 ({len(stray)} such); a mask was made on another axis, or is the "
                "other way round (a mask is named for what 1 means)",
                token=int(stray[0]),
            )
    return len(found.findings) == before


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
        found.error("unknown-version", "the weights that sampled some of its actions were not recorded")
    elif current is not None and len(sampled):
        off = sampled[(sampled > current) | (sampled < current - max_staleness)]
        if len(off):
            found.error(
                "stale-version",
                f"sampled by version {off[0]} and the trainer has version {current} (at most {max_staleness} behind)",
            )


ForeignFormat = Literal["trl", "verifiers"]
FORMATS: tuple[str, ...] = get_args(ForeignFormat)
_NO_PART = "inverted-mask"


def check_trl_rollout(
    rollout: Mapping[str, Any], *, what: str = "rollout", logprobs_of: LogprobsOf | None = None
) -> list[Finding]:
    """Check what a `rollout_func` returns to TRL's `GRPOTrainer`.

    `prompt_ids`, `completion_ids` and `logprobs` are lists of one list per prompt, `env_mask` too where it is there: 1
    on the model's tokens, 0 on those of the environment. One row alone is taken as well. The form cannot show where one
    action ends and the next begins, credit, versions, starts, or a drifted prefix: it holds one sequence for an episode
    and not what the model saw in each turn. A row whose `score` is None is unscored, and may have no part.

    Args:
        rollout: the dict.
        what: names it in messages.
        logprobs_of: the sampler's own log-probabilities of a sequence.

    Raises:
        ConfigError: it is not such a dict.
    """
    columns = {key: _column(rollout, key, what) for key in ("prompt_ids", "completion_ids", "logprobs", "env_mask")}
    if columns["prompt_ids"] is None or columns["completion_ids"] is None:
        raise ConfigError(
            f"{what}: a rollout of TRL has 'prompt_ids' and 'completion_ids'; this has {', '.join(rollout)}"
        )
    findings: list[Finding] = []
    found = Found(what)
    sizes = {key: len(column) for key, column in columns.items() if column is not None}
    if len(set(sizes.values())) > 1:
        told = ", ".join(f"{size} {key}" for key, size in sizes.items())
        found.error("length-mismatch", f"{told}; each key has one list per prompt, in the order of the prompts")
        return found.findings
    scores = rollout.get("score")
    for number in range(sizes["prompt_ids"]):
        row = Found(f"{what}, row {number}")
        _check_trl_row(row, {key: column[number] for key, column in columns.items() if column is not None}, logprobs_of)
        is_unscored = isinstance(scores, list) and scores[number : number + 1] == [None]
        findings += [one for one in row.findings if not (is_unscored and one.kind == _NO_PART)]
    return findings


def _column(rollout: Mapping[str, Any], key: str, what: str) -> list[Array] | None:
    given = rollout.get(key)
    if given is None:
        return None
    with boundary(ConfigError, f"{what}: {key!r} is a list of lists of numbers"):
        rows = [given] if len(given) and not hasattr(given[0], "__len__") else given
        kind = np.float64 if key == "logprobs" else np.int64
        arrays = [np.array([np.nan if x is None else x for x in row], dtype=kind) for row in rows]
        if any(array.ndim != 1 for array in arrays):
            raise ValueError("they are nested deeper: keep the log-probability of the sampled token alone")
        return arrays


def _check_trl_row(found: Found, row: Mapping[str, Array], logprobs_of: LogprobsOf | None) -> None:
    prompt, completion = row["prompt_ids"], row["completion_ids"]
    if not len(completion):
        found.error(
            "empty-completion", "the completion is empty; TRL takes no such row, so return at least the end token"
        )
        return
    mask = row.get("env_mask", np.ones(len(completion), dtype=np.int64))
    if joined := _joined_prompts(prompt, completion):
        found.error(
            "concatenated-prompts",
            f"the prompt begins again after {joined} tokens and goes on with the completion's: the prompts of all "
            "turns were joined, and the model never saw that sequence (OpenEnv's build_harness_rollout_func does so); "
            "give the first prompt, the rest as completion, and env_mask",
            token=joined,
        )
        return
    logprobs = row.get("logprobs")
    pad = len(prompt)
    whole = CheckedTokens(
        np.concatenate([prompt, completion]),
        np.concatenate([np.zeros(pad, dtype=np.int64), mask]),
        None if logprobs is None else np.concatenate([np.zeros(pad), logprobs]),
    )
    check_tokens(found, whole, logprobs_of=logprobs_of)
    if not found.findings and not (mask == 1).any():
        found.error(_NO_PART, "env_mask is 0 on every token, so nothing is learnt; 1 marks the model's own tokens")


def _joined_prompts(prompt: Array, completion: Array) -> int:
    """The length of the first turn's prompt where `prompt` is the prompts of all turns in a row, else 0.

    The second turn's prompt begins with the first's and goes on with the first action, with which the completion
    begins. At least four tokens have to agree, so that a prompt that repeats itself is not taken for one.
    """
    for size in range(1, len(prompt) // 2 + 1):
        if prompt[size] != prompt[0] or not np.array_equal(prompt[:size], prompt[size : 2 * size]):
            continue
        rest = prompt[2 * size :]
        same = min(len(rest), len(completion))
        differs = np.flatnonzero(rest[:same] != completion[:same])
        agreeing = int(differs[0]) if len(differs) else same
        if agreeing and size + agreeing >= 4:
            return size
    return 0


def check_verifiers_trace(
    trace: Mapping[str, Any], *, what: str = "trace", logprobs_of: LogprobsOf | None = None
) -> list[Finding]:
    """Check one trace of verifiers: a state with a `trajectory` (v0), or a trace with `nodes` (v1).

    v0 holds for each step the whole prompt and what was sampled, so a drifted prefix shows; it does not say why a
    context was rewritten, so one that was rewritten on purpose shows as drifted too. v1 holds the messages as a tree,
    each with the tokens that it adds and compact log-probabilities of the sampled ones alone. There a drifted prefix is
    one more branch, like a compaction, and looks the same; nor can a track be displaced against its mask, or
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
    for number, step in enumerate(steps):
        for key in ("reward", "advantage"):
            value = step.get(key)
            if value is not None and not np.isfinite(value):
                kind = "reward-not-finite" if key == "reward" else "credit-not-finite"
                found.error(kind, f"its {key} is {value}; leave it None", step=number)
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
        found.error("token-id", f"{strange[0]} is not a token id ({len(strange)} such)", step=number)
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


_CHECKS: dict[str, Callable[..., list[Finding]]] = {
    "trl": check_trl_rollout,
    "verifiers": check_verifiers_trace,
}


def check_foreign_file(path: Path, form: str) -> Iterator[list[Finding]]:
    """The findings of each record of a JSON or JSONL file, one after another.

    A record that is not of this form is a finding, and those behind it are read all the same.

    Args:
        path: a JSON object or a list of them, or one object a line where it ends in `.jsonl`.
        form: one of `FORMATS`.

    Raises:
        ConfigError: the file cannot be read, none of its records is of this form, or no form is called so.
    """
    if form not in _CHECKS:
        raise ConfigError(f"unknown format {form!r}{did_you_mean(form, _CHECKS)}")
    refused, is_of_form = None, False
    for what, text, value in _records(path):
        try:
            record = value if text is None else _parsed(text, f"{path.parent / what}")
            if not isinstance(record, Mapping):
                raise ConfigError(f"{what}: a record is a mapping, this one is {kind_of(record)}")
            findings = _CHECKS[form](record, what=what)
            is_of_form = True
        except ConfigError as error:
            refused = refused or error
            findings = [Finding("error", "unreadable", str(error))]
        yield findings
    if refused is not None and not is_of_form:
        raise refused  # the file is of another form, or of none


def _records(path: Path) -> Iterator[tuple[str, str | None, Any]]:
    """Yield each record as its name, its text and its value; the text is None if the value was parsed already."""
    try:
        with path.open(encoding="utf-8-sig") as lines:
            if path.suffix == ".jsonl":
                for number, line in enumerate(lines, 1):
                    if line.strip():
                        yield f"{path.name}:{number}", line, None
                return
            text = lines.read()
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"cannot read {path}: {why_unreadable(path, error)}") from error
    whole = _parsed(text, str(path))
    if not isinstance(whole, list):
        yield path.name, None, whole
        return
    for number, entry in enumerate(whole):
        yield f"{path.name}[{number}]", None, entry


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON: {error}") from None
