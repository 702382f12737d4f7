"""Checks for training rows and for rollouts from TRL and verifiers.

They apply the same rules as the checks of episodes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from reward_kit.checks.episode import (
    LARGEST_ID,
    ActionRange,
    Array,
    CheckedTokens,
    LogprobsOf,
    check_prefixes,
    check_tokens,
    first_mismatch,
    segment_rows,
)
from reward_kit.checks.findings import Finding, Findings
from reward_kit.episodes.segments import EpisodeTokens
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.errors import ConfigError, RewardKitError, boundary, describe_read_error, did_you_mean, type_name
from reward_kit.tokens.batch import TokenBatch

_MASKS = ("attention_mask", "completion_mask", "action_mask", "loss_mask")
_VALUES = ("logprobs", "step_rewards", "advantages", "returns", "policy_versions", "position_ids")


def check_rows(
    batch: TokenBatch,
    episodes: Sequence[SingleAgentEpisode] | None = None,
    *,
    token_logprobs: LogprobsOf | None = None,
    current_version: int | None = None,
    max_staleness: int = 0,
) -> list[Finding]:
    """Check that a batch of rows fulfills the contract of `build_rows`.

    Args:
        batch: the rows, one per segment.
        episodes: the rows' episodes. They are required to separate consecutive actions that have no observation between
            them. Without the episodes, each run of ones in the action mask counts as one action.
        token_logprobs: a function that maps a (T,) array of token ids to a (T,) array of their log-probabilities under
            the weights that sampled the tokens.
        current_version: the version of the model's current weights. By default, the version is read from
            `meta_info["policy_version"]`, if present.
        max_staleness: the maximum number of versions by which an action's weights may lag behind `current_version`.

    Returns:
        The problems found.

    Raises:
        ConfigError: If the batch has no `input_ids` or no `action_mask`.
    """
    if missing := [key for key in ("input_ids", "action_mask") if key not in batch.batch and len(batch)]:
        raise ConfigError(f"the batch has no {missing[0]!r}; rows must have input_ids and action_mask")
    known = {episode.id_: episode for episode in episodes or ()}
    version = batch.meta_info.get("policy_version") if current_version is None else current_version
    findings: list[Finding] = []
    names = [batch.non_tensor_batch.get(key, [None] * len(batch)) for key in ("rollout_id", "segment")]
    for number, (rollout_id, segment) in enumerate(zip(*names, strict=True)):
        subject = f"row {number}" + (f" (episode {rollout_id}, segment {segment})" if rollout_id is not None else "")
        own = Findings(subject, rollout_id)
        row = {key: values[number] for key, values in batch.batch.items() if np.ndim(values) > 1}
        _check_masks(own, row)
        if not own:
            episode = known.get(rollout_id)
            segments = list(segment_rows(episode.tokens)) if episode is not None and segment is not None else []
            is_known = segment is not None and 0 <= segment < len(segments)
            tokens = _row_tokens(row, segments[segment].actions if is_known else ())
            _check_row(own, row, tokens, token_logprobs)
            if "policy_versions" in row:
                _check_versions(own, row["policy_versions"], tokens, version, max_staleness)
        findings += own
    return findings


def _check_masks(findings: Findings, row: Mapping[str, Array]) -> None:
    """Check that masks and values are as long as the ids, and that the masks are nested and contain only 0 and 1."""
    size = len(row["input_ids"])
    for key in (*_MASKS, *_VALUES):
        if key in row and len(row[key]) != size:
            sizes = f"{key} has {len(row[key])} entries, but input_ids has {size}"
            findings.error("length-mismatch", f"{sizes}; perhaps the array covers only the completion")
    for key in _MASKS:
        if key in row and len(wrong := np.flatnonzero((row[key] != 0) & (row[key] != 1))):
            findings.error("mask-values", f"{key} is {row[key][wrong[0]]}", token=int(wrong[0]))
    if findings:
        return
    for outer, inner in pairwise(_MASKS):
        if inner in row and outer in row and len(stray := np.flatnonzero((row[inner] == 1) & (row[outer] == 0))):
            text = f"{inner} is 1 where {outer} is 0 ({len(stray)} such tokens)"
            findings.error("mask-outside", text, token=int(stray[0]))


def _attended(row: Mapping[str, Array]) -> slice:
    """Return the slice of a row that is not padding. The slice is empty if the attention mask is all zeros."""
    attended = np.flatnonzero(row.get("attention_mask", np.ones(len(row["input_ids"]))) == 1)
    return slice(int(attended[0]), int(attended[-1]) + 1) if len(attended) else slice(0, 0)


def _row_tokens(row: Mapping[str, Array], segment: Sequence[ActionRange]) -> CheckedTokens:
    """Return the tokens of a row. The actions of its segment are included if they agree with the mask."""
    offset, mask = _attended(row).start, row["action_mask"]
    actions = tuple(ActionRange(a.step, a.start + offset, a.stop + offset) for a in segment)
    covered = sum(int(mask[a.start : a.stop].sum()) for a in actions)
    if not covered == sum(a.stop - a.start for a in actions) == mask.sum():
        actions = ()  # There is one row per action, or the mask is invalid, so only the mask is known
    return CheckedTokens(row["input_ids"], mask, row.get("logprobs"), actions)


def _check_row(
    findings: Findings, row: Mapping[str, Array], tokens: CheckedTokens, token_logprobs: LogprobsOf | None
) -> None:
    part = _attended(row)
    if part.stop:
        actions = tuple(ActionRange(a.step, a.start - part.start, a.stop - part.start) for a in tokens.actions)
        logprobs = tokens.logprobs[part] if tokens.logprobs is not None else None
        seen = CheckedTokens(tokens.ids[part], tokens.action_mask[part], logprobs, actions, part.start)
        check_tokens(findings, seen, token_logprobs=token_logprobs)
    spans = [action for action in tokens.spans() if action.start < action.stop]
    for key in ("advantages", "returns"):
        if key not in row:
            continue
        values = row[key]
        if len(stray := np.flatnonzero((values != 0) & (tokens.action_mask == 0))):
            text = f"{key} is {values[stray[0]]:.4g} on a token that was not sampled ({len(stray)} such tokens)"
            findings.error("credit-off-action", text, token=int(stray[0]))
        for step, start, stop in spans:
            credit, kind = values[start:stop], ""
            if not np.isfinite(credit).all():
                kind, text = "credit-not-finite", f"{key} is {credit[~np.isfinite(credit)][0]} on an action"
            elif np.ptp(credit) > 0:
                kind = "credit-varies"
                text = f"{key} varies from {credit.min():.4g} to {credit.max():.4g} within one action"
            elif "loss_mask" in row and credit[0] != 0 and not row["loss_mask"][start:stop].any():
                kind = "advantage-unscored"
                text = f"{key} is {credit[0]:.4g} on an action that is not in the loss mask"
            if kind:
                findings.error(kind, text, step=step if tokens.actions else None, token=start)
    if (rewards := row.get("step_rewards")) is not None:
        last = np.zeros(len(rewards), dtype=bool)
        last[[action.stop - 1 for action in spans]] = True
        if len(stray := np.flatnonzero((rewards != 0) & ~last)):
            text = (
                f"a step reward of {rewards[stray[0]]:.4g} is not on the last token of an action ({len(stray)} such "
                "tokens)"
            )
            findings.error("reward-misplaced", text, token=int(stray[0]))


def _check_versions(
    findings: Findings, versions: Array, tokens: CheckedTokens, current: int | None, max_staleness: int
) -> None:
    """Check that each action was sampled by a single known version within `max_staleness`."""
    for step, start, stop in tokens.spans():
        part = versions[start:stop]
        if len(part) and part.min() != part.max():
            text = f"an action was sampled by two versions, {part.min()} and {part.max()}"
            findings.error("two-versions", text, step=step if tokens.actions else None, token=start)
            return
    sampled = versions[tokens.action_mask == 1]
    if (sampled < 0).any() and (current is not None or (sampled >= 0).any()):
        findings.error("unknown-version", "the policy version of some actions was not recorded")
    elif current is not None and len(off := sampled[(sampled > current) | (sampled < current - max_staleness)]):
        text = (
            f"an action was sampled by version {off[0]}, but the trainer has version {current} (maximum staleness "
            f"{max_staleness})"
        )
        findings.error("stale-version", text)


ForeignFormat = Literal["trl", "verifiers"]
FORMATS: tuple[str, ...] = get_args(ForeignFormat)


def check_trl_rollout(
    rollout: Mapping[str, Any], *, what: str = "rollout", token_logprobs: LogprobsOf | None = None
) -> list[Finding]:
    """Check the dict that a `rollout_func` returns to TRL's `GRPOTrainer`.

    `prompt_ids`, `completion_ids`, `logprobs` and the optional `env_mask` contain one list per prompt. A single row is
    also accepted. `env_mask` is 1 for the model's tokens and 0 for the environment's tokens. The format stores one
    sequence per episode rather than each turn's input. Adjacent actions, credit, versions, initial states and drifted
    prefixes therefore cannot be checked. A row whose `score` is `None` is unscored, and all its tokens may be masked.

    Args:
        rollout: the dict to check.
        what: the name of the record in messages.
        token_logprobs: a function that maps a (T,) array of token ids to a (T,) array of their log-probabilities under
            the weights that sampled the tokens.

    Returns:
        The problems found.

    Raises:
        ConfigError: If the dict has a different format.
    """
    columns: dict[str, list[Array]] = {}
    for key in ("prompt_ids", "completion_ids", "logprobs", "env_mask"):
        if (given := rollout.get(key)) is None:
            continue
        with boundary(ConfigError, f"{what}: {key!r} must be a list of lists of numbers"):
            rows = [given] if len(given) and not hasattr(given[0], "__len__") else given
            kind = np.float64 if key == "logprobs" else np.int64
            columns[key] = [np.array([np.nan if x is None else x for x in row], dtype=kind) for row in rows]
            if any(array.ndim != 1 for array in columns[key]):
                raise ValueError("the lists are nested; keep only the log-probability of each sampled token")
    if not {"prompt_ids", "completion_ids"} <= columns.keys():
        raise ConfigError(
            f"{what}: a TRL rollout must have 'prompt_ids' and 'completion_ids', got {', '.join(rollout)}"
        )
    findings = Findings(what)
    if len({len(column) for column in columns.values()}) > 1:
        sizes = ", ".join(f"{len(column)} {key}" for key, column in columns.items())
        findings.error("length-mismatch", f"{sizes}; each key must have one list per prompt, in the same order")
        return findings
    scores = rollout.get("score")
    for number in range(len(columns["prompt_ids"])):
        own = Findings(f"{what}, row {number}")
        _check_trl_row(own, {key: column[number] for key, column in columns.items()}, token_logprobs)
        is_unscored = isinstance(scores, list) and scores[number : number + 1] == [None]
        findings += [one for one in own if not (is_unscored and one.kind == "inverted-mask")]
    return findings


def _check_trl_row(findings: Findings, row: Mapping[str, Array], token_logprobs: LogprobsOf | None) -> None:
    prompt, completion, logprobs = row["prompt_ids"], row["completion_ids"], row.get("logprobs")
    if not len(completion):
        text = "the completion is empty, and TRL rejects empty completions; return at least the end-of-sequence token"
        findings.error("empty-completion", text)
        return
    # Concatenated prompts: the second repeats the first and continues with the first action, which also begins the
    # completion. Require four equal tokens, because a prompt may repeat itself.
    for size in range(1, len(prompt) // 2 + 1):
        if prompt[size] != prompt[0] or not np.array_equal(prompt[:size], prompt[size : 2 * size]):
            continue
        agreeing = first_mismatch(prompt[2 * size :], completion)
        if agreeing and size + agreeing >= 4:
            text = (
                f"the prompt repeats after {size} tokens and continues like the completion; the prompts of all turns "
                "were concatenated (as in build_harness_rollout_func of OpenEnv), but the model never saw that sequence"
            )
            findings.error("concatenated-prompts", text, token=size)
            return
    mask = row.get("env_mask", np.ones(len(completion), dtype=np.int64))
    pad = np.zeros(len(prompt), dtype=np.int64)
    joined = None if logprobs is None else np.concatenate([pad, logprobs])
    sequence = CheckedTokens(np.concatenate([prompt, completion]), np.concatenate([pad, mask]), joined)
    check_tokens(findings, sequence, token_logprobs=token_logprobs)
    if not findings and not (mask == 1).any():
        findings.error("inverted-mask", "env_mask is 0 on all tokens, so no token would be trained on")


def check_verifiers_trace(
    trace: Mapping[str, Any], *, what: str = "trace", token_logprobs: LogprobsOf | None = None
) -> list[Finding]:
    """Check a verifiers trace: a state with a `trajectory` (v0), or a trace with `nodes` (v1) or an episode of traces.

    v0 stores the whole prompt and the sampled tokens of each step. Drifted prefixes are therefore detected. Contexts
    that were rewritten intentionally are reported too, because v0 cannot record a reason.

    v1 stores the messages as a tree. Each node contains the tokens that it adds, and has log-probabilities only for
    sampled tokens. In v1, a drifted prefix is a separate branch and cannot be distinguished from a compacted context.
    Shifted log-probabilities and credit on observations cannot occur. Neither format stores policy versions or initial
    states.

    Args:
        trace: the dict, as parsed from JSON.
        what: the name of the record in messages.
        token_logprobs: a function that maps a (T,) array of token ids to a (T,) array of their log-probabilities under
            the weights that sampled the tokens.

    Returns:
        The problems found.

    Raises:
        ConfigError: If the trace is in neither format.
    """
    findings = Findings(what)
    try:
        with boundary(ConfigError, f"{what}: not a verifiers trace"):
            if "nodes" in trace:
                _check_nodes(findings, trace["nodes"], token_logprobs)
            elif "trajectory" in trace:
                _check_trajectory(findings, trace["trajectory"], token_logprobs)
            elif "traces" in trace:
                for number, one in enumerate(trace["traces"]):
                    name = f"{what}: traces[{number}]"
                    findings += check_verifiers_trace(one, what=name, token_logprobs=token_logprobs)
            else:
                raise ConfigError(f"{what}: a verifiers trace must have 'trajectory' (v0), 'nodes' or 'traces' (v1)")
    except RewardKitError as error:
        raise ConfigError(str(error)) from error
    return findings


def _check_trajectory(
    findings: Findings, steps: Sequence[Mapping[str, Any]], token_logprobs: LogprobsOf | None
) -> None:
    """Check the tokens of each step, then the token sequences of the episode."""
    tokens = EpisodeTokens()
    for number, step in enumerate(steps):
        if (own := step.get("tokens")) is None:
            text = "the step has no tokens to check"
            findings.error("no-tokens", text, step=number, level="warning")
            continue
        before = len(findings)
        _check_turn(findings, number, own)
        if len(findings) == before:
            tokens.add_turn(number, own["prompt_ids"], own["completion_ids"], own.get("completion_logprobs"))
    for number, step in enumerate(steps):
        for key, kind in (("reward", "reward-not-finite"), ("advantage", "credit-not-finite")):
            if (value := step.get(key)) is not None and not np.isfinite(value):
                findings.error(kind, f"the {key} is {value}", step=number)
    if any(finding.level == "error" for finding in findings):
        return
    check_prefixes(findings, tokens)
    for row in segment_rows(tokens):
        check_tokens(findings, row, token_logprobs=token_logprobs)


def _check_turn(findings: Findings, number: int, turn: Mapping[str, Any]) -> None:
    """Check the lengths and ids, and that the masks are 0 on the prompt and 1 on sampled tokens."""
    prompt, completion = turn["prompt_ids"], turn["completion_ids"]
    for key, ids in (("prompt_mask", prompt), ("completion_mask", completion), ("completion_logprobs", completion)):
        if turn.get(key) is not None and len(turn[key]) != len(ids):
            text = f"{len(ids)} {key.partition('_')[0]}_ids, but {len(turn[key])} entries in {key}"
            findings.error("length-mismatch", text, step=number)
    if wrong := [token for token in (*prompt, *completion) if not 0 <= token <= LARGEST_ID]:
        findings.error("token-id", f"{wrong[0]} is not a valid token id ({len(wrong)} such tokens)", step=number)
    on_prompt, on_completion = turn.get("prompt_mask") or (), turn.get("completion_mask") or ()
    if any(value not in (0, 1) for value in (*on_prompt, *on_completion)):
        findings.error("mask-values", "a mask contains values other than 0 and 1", step=number)
    elif any(on_prompt):
        text = "prompt_mask is 1 on prompt tokens; earlier actions must be trained on only in their own steps"
        findings.error("mask-on-prompt", text, step=number)
    elif on_completion and not any(on_completion):
        findings.error("inverted-mask", "completion_mask is 0 on all sampled tokens", step=number)


def _check_nodes(findings: Findings, nodes: Sequence[Mapping[str, Any]], token_logprobs: LogprobsOf | None) -> None:
    """Check each node, then the token sequence of each branch."""
    for number, node in enumerate(nodes):
        findings += _node_findings(f"{findings.subject}, node {number}", number, node)
    if findings:
        return
    parents = {node.get("parent") for node in nodes}
    seen: set[tuple[str, int | None, int | None]] = set()
    for leaf in (number for number in range(len(nodes)) if number not in parents):
        branch = Findings(f"{findings.subject}, branch to node {leaf}")
        check_tokens(branch, _branch(nodes, leaf), token_logprobs=token_logprobs)
        for finding in branch:
            # Branches share prefixes, so report each fault only once.
            if (key := (finding.kind, finding.step, finding.token)) not in seen:
                seen.add(key)
                findings.append(finding)


def _node_findings(subject: str, number: int, node: Mapping[str, Any]) -> Findings:
    findings = Findings(subject)
    parent, ids, mask = node.get("parent"), node.get("token_ids") or [], node.get("mask") or []
    if parent is not None and not 0 <= parent < number:
        findings.error("tree", f"the parent is {parent}; a parent must come before its children")
    if len(mask) != len(ids):
        findings.error("length-mismatch", f"got {len(ids)} token ids but {len(mask)} entries in the mask")
    sampled = sum(map(bool, mask))
    for key in ("logprobs", "advantages"):
        if (values := node.get(key)) and len(values) != sampled:
            text = (
                f"got {sampled} sampled tokens but {len(values)} {key}; expected one value for each true entry "
                "in the mask"
            )
            findings.error("length-mismatch", text)
    if sampled and not node.get("sampled"):
        findings.error("mask-on-prompt", "the mask marks sampled tokens, but the message was not sampled")
    if node.get("advantages") and not np.isfinite(node["advantages"]).all():
        findings.error("credit-not-finite", "an advantage is not finite")
    return findings


def _branch(nodes: Sequence[Mapping[str, Any]], leaf: int) -> CheckedTokens:
    """Return the token sequence from a root to a leaf, with the log-probabilities of sampled tokens."""
    path: list[Mapping[str, Any]] = []
    index: int | None = leaf
    while index is not None:
        path.append(nodes[index])
        index = nodes[index].get("parent")
    path.reverse()
    ids = [token for node in path for token in node.get("token_ids") or ()]
    masks = [np.array(node.get("mask") or (), dtype=bool) for node in path]
    logprobs = [np.zeros(len(mask)) for mask in masks]
    for node, mask, own in zip(path, masks, logprobs, strict=True):
        own[mask] = node.get("logprobs") or np.nan
    return CheckedTokens(np.array(ids, dtype=np.int64), np.concatenate(masks).astype(np.int8), np.concatenate(logprobs))


_CHECKS: dict[str, Callable[..., list[Finding]]] = {"trl": check_trl_rollout, "verifiers": check_verifiers_trace}


def check_foreign_file(path: Path, form: str) -> Iterator[list[Finding]]:
    """Check each record of a file, and yield its findings.

    Args:
        path: a `.jsonl` file with one record per line, or a JSON file that contains a record or a list of records.
        form: one of `FORMATS`. A record in a different format is reported as a finding.

    Raises:
        ConfigError: If the file cannot be read, or if none of its records is in the format.
    """
    if form not in _CHECKS:
        raise ConfigError(f"unknown format {form!r}{did_you_mean(form, _CHECKS)}")
    refused, is_of_form = None, False
    for what, text, value in _records(path):
        try:
            record = value if text is None else _parsed(text, f"{path.parent / what}")
            if not isinstance(record, Mapping):
                raise ConfigError(f"{what}: a record must be a mapping, got {type_name(record)}")
            findings = _CHECKS[form](record, what=what)
            is_of_form = True
        except ConfigError as error:
            refused = refused or error
            findings = [Finding("error", "unreadable", str(error))]
        yield findings
    if refused is not None and not is_of_form:
        raise refused  # The whole file is in a different format


def _records(path: Path) -> Iterator[tuple[str, str | None, Any]]:
    """Yield the name, the text and the value of each record. If the value is already parsed, the text is `None`."""
    try:
        with path.open(encoding="utf-8-sig") as lines:
            if path.suffix == ".jsonl":
                for number, line in enumerate(lines, 1):
                    if line.strip():
                        yield f"{path.name}:{number}", line, None
                return
            text = lines.read()
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"cannot read {path}: {describe_read_error(path, error)}") from error
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
