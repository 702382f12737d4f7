"""Rollouts that other trainers recorded, checked by the same rules: TRL's rollout dict and verifiers' traces.

They are read from plain dicts and lists, so neither package is needed. What each form cannot show stands with the
function that reads it; that part of the contract is then unproved, not kept.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from reward_kit.errors import ConfigError, boundary, did_you_mean, kind_of, why_unreadable
from reward_kit.tokens.checking.findings import EpisodeFinding, Found
from reward_kit.tokens.checking.foreign_verifiers import check_verifiers_trace
from reward_kit.tokens.checking.tokens import Array, CheckedTokens, LogprobsOf, check_tokens

ForeignFormat = Literal["trl", "verifiers"]
FORMATS: tuple[str, ...] = get_args(ForeignFormat)

_NO_PART = "inverted-mask"


def check_trl_rollout(
    rollout: Mapping[str, Any], *, what: str = "rollout", logprobs_of: LogprobsOf | None = None
) -> list[EpisodeFinding]:
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
        ConfigError: it is no such dict.
    """
    columns = {key: _column(rollout, key, what) for key in ("prompt_ids", "completion_ids", "logprobs", "env_mask")}
    if columns["prompt_ids"] is None or columns["completion_ids"] is None:
        raise ConfigError(
            f"{what}: a rollout of TRL has 'prompt_ids' and 'completion_ids'; this has {', '.join(rollout)}"
        )
    findings: list[EpisodeFinding] = []
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


_CHECKS: dict[str, Callable[..., list[EpisodeFinding]]] = {
    "trl": check_trl_rollout,
    "verifiers": check_verifiers_trace,
}


def check_foreign_file(path: Path, form: str) -> Iterator[list[EpisodeFinding]]:
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
    for what, parsed in _records(path):
        try:
            if not isinstance(record := parsed(), Mapping):
                raise ConfigError(f"{what}: a record is a mapping, this one is {kind_of(record)}")
            findings = _CHECKS[form](record, what=what)
            is_of_form = True
        except ConfigError as error:
            refused = refused or error
            findings = [EpisodeFinding("error", str(error), "unreadable")]
        yield findings
    if refused is not None and not is_of_form:
        raise refused  # the file is of another form, or of none


def _records(path: Path) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Each record's name, and what gives it or says why it is none."""
    try:
        with path.open(encoding="utf-8-sig") as lines:
            if path.suffix == ".jsonl":
                for number, line in enumerate(lines, 1):
                    if line.strip():
                        yield f"{path.name}:{number}", partial(_parsed, line, f"{path}:{number}")
                return
            whole = _parsed(lines.read(), str(path))
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"cannot read {path}: {why_unreadable(path, error)}") from error
    entries: Sequence[Any] = whole if isinstance(whole, list) else [whole]
    for number, entry in enumerate(entries):
        yield (f"{path.name}[{number}]" if isinstance(whole, list) else path.name), partial(_itself, entry)


def _itself(record: Any) -> Any:
    return record


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON: {error}") from None
