"""What else two runs differ in than what is compared: where that is so, a difference of scores may come from there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from reward_kit.runs.comparison.sides import Side

_COMPARED = {"name", "policy", "reward_function_path", "reward_options", "dataset_path", "pass_threshold"}
_HARMLESS = {"description", "run_limits", "sandbox", "credit", "redact"}  # which change no score that is given
_OWN_LINES = {"task file", "dataset", "reward", "policy"}
_SHORT = 12
_SEED_TELLS = (
    "models drew other chances, and where worlds are drawn from it, samples of one name are other problems, and the "
    "pairing says less"
)


class Mismatch(NamedTuple):
    """One thing that differs; `told` is a sentence for people.

    `what` is dataset, reward, pass_threshold, task, task_keys, files, seed, starts or version.
    """

    what: str
    baseline: Any
    run: Any
    told: str


def mismatches(baseline: Side, side: Side) -> list[Mismatch]:
    """What the runs of two sides differ in besides their policies, the gravest first; nothing for one run's own."""
    if baseline.path == side.path:
        return []
    return [*_dataset(baseline, side), *_scoring(baseline, side), *_task(baseline, side), *_chance(baseline, side)]


def _dataset(baseline: Side, side: Side) -> Iterator[Mismatch]:
    one, other = (each.header.digests.get("dataset") for each in (baseline, side))
    if one is not None and other is not None and one != other:
        told = f"the dataset differs (SHA-256 {one[:_SHORT]}… and {other[:_SHORT]}…)"
        yield Mismatch("dataset", one, other, f"{told}: samples of one name may be different questions")


def _scoring(baseline: Side, side: Side) -> Iterator[Mismatch]:
    one, other = (sorted(each.scorers) for each in (baseline, side))
    if one != other and one and other:
        told = f"the reward differs ({', '.join(one)} and {', '.join(other)})"
        yield Mismatch("reward", one, other, f"{told}: scores may not mean the same")
    if baseline.pass_threshold != side.pass_threshold:
        thresholds = f"{baseline.pass_threshold:g} and {side.pass_threshold:g}"
        told = f"the pass_threshold differs ({thresholds}): who passes is told by each run's own"
        yield Mismatch("pass_threshold", baseline.pass_threshold, side.pass_threshold, told)


def _task(baseline: Side, side: Side) -> Iterator[Mismatch]:
    one, other = baseline.header, side.header
    if one.task_name != other.task_name:
        told = f"the task differs ({one.task_name} and {other.task_name})"
        yield Mismatch("task", one.task_name, other.task_name, told)
    if one.task_path is None or other.task_path is None:
        return  # transcripts that were scored do not tell what they were collected by
    if keys := _differing(one.task, other.task, _COMPARED | _HARMLESS):
        told = f"the task files differ in {', '.join(keys)}"
        yield Mismatch("task_keys", _only(one.task, keys), _only(other.task, keys), told)
    if names := _differing(one.digests, other.digests, _OWN_LINES):
        told = f"files of the tasks differ: {', '.join(names)}"
        yield Mismatch("files", _only(one.digests, names), _only(other.digests, names), told)


def _chance(baseline: Side, side: Side) -> Iterator[Mismatch]:
    one, other = baseline.header, side.header
    if one.task_path is not None and other.task_path is not None and one.seed != other.seed:
        told = f"the seed differs ({one.seed} and {other.seed})"
        yield Mismatch("seed", one.seed, other.seed, f"{told}: {_SEED_TELLS}")
    yield from _starts(baseline, side)
    before, now = (header.versions.get("reward_kit") for header in (one, other))
    if before != now:
        yield Mismatch("version", before, now, f"the version of reward-kit differs ({before} and {now})")


def _starts(baseline: Side, side: Side) -> Iterator[Mismatch]:
    """Samples of one name whose environment began in another state, as far as environments tell theirs."""
    known = baseline.starts.keys() & side.starts.keys()
    if others := sorted(name for name in known if not baseline.starts[name] & side.starts[name]):
        of = f"{len(others):,} of {len(known):,} samples began in another state than in the baseline"
        told = f"{of}, such as {others[0]}: these are other problems of one name, and the pairing says less"
        one, other = ({name: sorted(each.starts[name]) for name in others} for each in (baseline, side))
        yield Mismatch("starts", one, other, told)


def _differing(one: Mapping[str, Any], other: Mapping[str, Any], without: set[str]) -> list[str]:
    return sorted(key for key in (one.keys() | other.keys()) - without if one.get(key) != other.get(key))


def _only(given: Mapping[str, Any], keys: list[str]) -> dict[str, Any]:
    return {key: given.get(key) for key in keys}
