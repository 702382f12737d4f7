"""Conversion of evals of OpenAI Evals (a YAML registry and JSONL samples) to task files.

The rewards of the basic classes are written to `rewards.py` and score as `evals.elsuite` does. A model-graded eval
becomes `llm_judge` with the prompt as its rubric and a grade for each choice. It is only similar: `llm_judge` adds
instructions, and the model of the judge is not stored in the eval.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import string
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from reward_kit.errors import ConfigError, did_you_mean
from reward_kit.limited_yaml import load_yaml
from reward_kit.runs.datasets import read_rows
from reward_kit.runs.files import wrap_os_errors, write_atomically
from reward_kit.runs.task_file import LocatedYaml

_PARTS = {"Match": "match", "Includes": "includes", "FuzzyMatch": "fuzzy_match", "JsonMatch": "json_match"}
_JUDGED = "ModelBasedClassify"
_FEW_SHOT = frozenset({"few_shot_jsonl", "num_few_shot"})
_ARGUMENTS = {
    "Match": frozenset({"samples_jsonl"}) | _FEW_SHOT,
    "Includes": frozenset({"samples_jsonl", "ignore_case"}),
    _JUDGED: frozenset({"samples_jsonl", "modelgraded_spec", "eval_type"}),
}
_RUBRIC = "rubric"
_SPEC_KEYS = frozenset({"prompt", "choice_strings", "choice_scores", "input_outputs", "eval_type"})
_SHOWN = ("input", "completion", "ideal")  # the judge sees them as the conversation, the answer and the reference
_MOST_GRADES = 100
_REWARDS = '''"""Rewards with the rules of OpenAI Evals (`evals.elsuite.basic`)."""

import json
import re
import string

from reward_kit import EvaluateResult, reward_function


def _result(messages, ground_truth, is_right):
    ideals = ground_truth if isinstance(ground_truth, list) else [ground_truth]
    answer = messages[-1].text if messages else ""
    found = [ideal for ideal in ideals if is_right(answer, ideal)]
    reason = f"matches {found[0]!r}" if found else "matches no ideal answer"
    return EvaluateResult(score=float(bool(found)), reason=reason)


@reward_function
def match(messages, ground_truth):
    """1 if the answer starts with an ideal answer."""
    return _result(messages, ground_truth, lambda answer, ideal: answer.startswith(str(ideal)))


@reward_function
def includes(messages, ground_truth, *, ignore_case: bool = False):
    """1 if the answer contains an ideal answer."""

    def is_right(answer, ideal):
        return str(ideal).lower() in answer.lower() if ignore_case else str(ideal) in answer

    return _result(messages, ground_truth, is_right)


def _normalize(text):
    text = "".join(character for character in str(text).lower() if character not in string.punctuation)
    return " ".join(re.sub(r"\\b(a|an|the)\\b", " ", text).split())


@reward_function
def fuzzy_match(messages, ground_truth):
    """1 if the answer contains an ideal answer, or the reverse, without case, punctuation and articles."""

    def is_right(answer, ideal):
        one, other = _normalize(answer), _normalize(ideal)
        return one == other if not one or not other else one in other or other in one

    return _result(messages, ground_truth, is_right)


@reward_function
def json_match(messages, ground_truth):
    """1 if the answer is JSON that equals an ideal answer."""

    def is_right(answer, ideal):
        try:
            return json.loads(answer) == (json.loads(ideal) if isinstance(ideal, str) else ideal)
        except ValueError:
            return False

    return _result(messages, ground_truth, is_right)
'''


class ConvertedEval(NamedTuple):
    """A task file that was made from an eval.

    Attributes:
        path: the task file.
        samples: the number of its samples.
        dropped: the fields that it does not contain, each with the number of its occurrences.
        is_judged: whether its reward is a judge, whose model must be set.
    """

    path: Path
    samples: int
    dropped: Counter[str]
    is_judged: bool


def is_eval(path: Path) -> bool:
    """Return True if a path has the suffix of a registry file."""
    return path.suffix in (".yaml", ".yml")


def convert_evals(path: Path, folder: Path) -> list[ConvertedEval]:
    """Convert the evals of a registry file to tasks.

    Args:
        path: the registry file.
        folder: the new directory. If the file has multiple evals, each gets a directory in it.

    Raises:
        ConfigError: the file or its samples are invalid, or the directory exists.
    """
    located = LocatedYaml(path)
    entries = located.data if isinstance(located.data, dict) else {}
    evals = {name: entry for name, entry in entries.items() if isinstance(entry, dict) and "class" in entry}
    if not evals:
        raise ConfigError(f"{path}: has no entry with a class; pass a file of evals/registry/evals")
    if folder.exists():
        raise ConfigError(f"-o {folder} exists; pass a new directory")
    try:
        return [
            _convert(path, located, str(name), entry, folder / _slug(str(name)) if len(evals) > 1 else folder)
            for name, entry in evals.items()
        ]
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-") or "eval"


def _convert(path: Path, located: LocatedYaml, name: str, entry: Mapping[str, Any], folder: Path) -> ConvertedEval:
    kind = str(entry["class"]).rpartition(":")[2]
    given = entry.get("args")
    arguments: dict[str, Any] = given if isinstance(given, dict) else {}
    where = located.where((name,))
    classes = [*_PARTS, _JUDGED]
    if kind not in classes:
        near = did_you_mean(kind, classes)
        problem = f"{name}.class: {entry['class']!r:.100} cannot be converted"
        raise ConfigError(f"{where}: {problem}; write a task with your own reward{near}")
    read = _ARGUMENTS.get(kind, frozenset({"samples_jsonl"}))
    dropped = Counter(f"args.{key}" for key in arguments if key not in read)
    where = f"{where}: {name}.args"
    for key in arguments.keys() - read:
        if (near := did_you_mean(str(key), read)).endswith("?"):
            raise ConfigError(f"{where}.{key}: unknown argument{near}")
    samples = _find(path, "data", arguments, "samples_jsonl", where)
    examples = _examples(path, arguments, where) if kind == "Match" and arguments.get("num_few_shot") else []
    task: dict[str, Any] = {"name": name.partition(".")[0], "dataset_path": "rows.jsonl", "on_text": "end"}
    spec = None
    if kind == _JUDGED:
        spec = _read_spec(path, arguments, where, dropped)
        task["reward_function_path"] = "reward_kit.rewards:llm_judge"
        rubric = {"rubric_key": _RUBRIC} if spec.fields else {"rubric": {"quality": spec.rubric({}, "")}}
        task["reward_options"] = {**rubric, "scale": [0, spec.highest]}
    else:
        task["reward_function_path"] = f"rewards.py:{_PARTS[kind]}"
        if kind == "Includes" and arguments.get("ignore_case"):
            task["reward_options"] = {"ignore_case": True}
    with wrap_os_errors("write", folder):
        folder.mkdir(parents=True)
    converted = list(_rows(samples, spec, examples, dropped))
    if not converted:
        raise ConfigError(f"{samples}: has no samples; fix {name}.args.samples_jsonl")
    text = "".join(json.dumps(row) + "\n" for row in converted)
    write_atomically(folder / "rows.jsonl", text.encode(), is_private=False)
    if spec is None:
        write_atomically(folder / "rewards.py", _REWARDS.encode(), is_private=False)
    content = yaml.safe_dump(task, sort_keys=False, allow_unicode=True)
    write_atomically(folder / "task.yaml", content.encode(), is_private=False)
    return ConvertedEval(folder / "task.yaml", len(converted), dropped, spec is not None)


def _find(path: Path, kind: str, arguments: Mapping[str, Any], key: str, where: str, suffix: str = "") -> Path:
    """Return a file of the registry, which is relative to `registry/KIND` or to the registry file."""
    if not isinstance(arguments.get(key), str):
        raise ConfigError(f"{where}.{key}: expected the name of a file, got {arguments.get(key)!r:.60}; set it")
    name = f"{arguments[key]}{suffix}"
    roots = [path.parent.parent / kind, path.parent / kind, path.parent]
    found = next((root / name for root in roots if (root / name).is_file()), None)
    if found is None or not any(found.resolve().is_relative_to(root.resolve()) for root in roots):
        raise ConfigError(f"{where}.{key}: {name!r} is not a file below {roots[0]} or {roots[2]}; copy it there")
    return found


def _examples(path: Path, arguments: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """Return the messages of the few-shot examples, which `Match` inserts before the last message."""
    count = arguments["num_few_shot"]
    if not isinstance(count, int) or count < 0:
        raise ConfigError(f"{where}.num_few_shot: expected a whole number, got {count!r:.60}; fix it")
    file = _find(path, "data", arguments, "few_shot_jsonl", where)
    rows = list(read_rows(file))[:count]
    return [message for at, row in rows for message in _messages(row.get("sample"), f"{at}: sample")]


def _messages(given: Any, where: str) -> list[dict[str, Any]]:
    messages = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ConfigError(f"{where}: expected a string or a list of messages, got {given!r:.60}; fix it")
    for at, message in enumerate(messages):
        for key in ("role", "content"):
            if message.get(key) is None:
                near = did_you_mean(key, message)
                raise ConfigError(f"{where}[{at}].{key}: is missing{near if near.endswith('?') else ''}")
    return messages


def _rows(
    path: Path, spec: _Spec | None, examples: Sequence[dict[str, Any]], dropped: Counter[str]
) -> Iterator[dict[str, Any]]:
    for number, (where, row) in enumerate(read_rows(path)):
        given = _messages(row.get("input"), f"{where}: input")
        if "ideal" not in row and spec is None:
            raise ConfigError(f"{where}: ideal: is missing; add the ideal answer")
        rest = {key: value for key, value in row.items() if key not in ("input", "ideal", "id", "messages")}
        if spec is not None and spec.fields:
            rest[_RUBRIC] = {"quality": spec.rubric(row, where)}
        messages = [_message(message, dropped) for message in (*given[:-1], *examples, *given[-1:])]
        yield {"id": str(row.get("id", number)), "messages": messages, "ground_truth": row.get("ideal"), **rest}


def _message(message: Mapping[str, Any], dropped: Counter[str]) -> dict[str, Any]:
    """Return a message. `name` marks examples: `example_user` and `example_assistant`."""
    dropped.update(f"input.{key}" for key in message if key not in ("role", "content", "name"))
    return {key: message[key] for key in ("role", "content", "name") if key in message}


# Model-graded evals


class _Spec(NamedTuple):
    """A specification of a model-graded eval.

    Attributes:
        prompt: the prompt, a format string.
        fields: the fields of a sample that the prompt contains, except those that the judge sees anyway.
        grades: the grade of each choice.
        highest: the highest grade; the lowest is 0.
    """

    prompt: str
    fields: Sequence[str]
    grades: Mapping[str, int]
    highest: int

    def rubric(self, row: Mapping[str, Any], where: str) -> str:
        """Return the description of the rubric's only dimension."""
        if missing := next((name for name in self.fields if name not in row), None):
            raise ConfigError(f"{where}: {missing}: is missing, but the prompt contains it; add the field")
        values = {name: f"[{name}]" for name in _SHOWN} | {name: row[name] for name in self.fields}
        grades = ", ".join(f"{grade} for {choice!r}" for choice, grade in self.grades.items())
        return f"{self.prompt.format(**values)}\n\nThe grade is {grades}."


def _read_spec(path: Path, arguments: Mapping[str, Any], where: str, dropped: Counter[str]) -> _Spec:
    """Read a specification. Each choice gets a grade, which `llm_judge` maps to [0, 1]."""
    file = _find(path, "modelgraded", arguments, "modelgraded_spec", where, ".yaml")
    name = arguments["modelgraded_spec"]
    spec = (load_yaml(file.read_text(encoding="utf-8")) or {}).get(name)
    where = f"{file}: {name}"
    if not isinstance(spec, dict) or not isinstance(spec.get("prompt"), str):
        raise ConfigError(f"{where}.prompt: expected a string; fix the file")
    if spec.get("input_outputs", {"input": "completion"}) != {"input": "completion"}:
        raise ConfigError(f"{where}.input_outputs: only {{input: completion}} can be converted; compare runs instead")
    dropped.update(f"modelgraded_spec.{key}" for key in spec if key not in _SPEC_KEYS)
    try:
        fields = [rest for _, *rest in string.Formatter().parse(spec["prompt"]) if rest[0] is not None]
        parts = [str(field) for field, _, _ in fields]
        if any(not str(field).isidentifier() or form or conversion for field, form, conversion in fields):
            raise ValueError("a field must be a name without a format")
    except ValueError as error:
        raise ConfigError(f"{where}.prompt: is not a valid template ({error}); write {{{{ for a brace") from None
    grades, highest = _grades(spec, where)
    return _Spec(spec["prompt"], [part for part in dict.fromkeys(parts) if part not in _SHOWN], grades, highest)


def _grades(spec: Mapping[str, Any], where: str) -> tuple[dict[str, int], int]:
    """Return whole numbers from 0 for the choices, in proportion to their scores."""
    scores = spec.get("choice_scores")
    if scores == "from_strings":
        scores = {str(choice): choice for choice in spec.get("choice_strings") or ()}
    try:
        exact = {str(choice): Fraction(str(float(score))) for choice, score in scores.items()}  # type: ignore[union-attr]
    except (AttributeError, TypeError, ValueError):
        raise ConfigError(
            f"{where}.choice_scores: expected a score for each choice; without scores, the eval only counts choices. "
            "Add them, such as {Y: 1.0, N: 0.0}"
        ) from None
    strings = spec.get("choice_strings")
    if isinstance(strings, str | list) and (unknown := [one for one in exact if one not in map(str, strings)]):
        raise ConfigError(f"{where}.choice_scores: {unknown[0]!r} is not one of the choice_strings; fix the file")
    lowest = min(exact.values(), default=Fraction(0))
    steps = [score - lowest for score in exact.values() if score != lowest]
    if not steps:
        raise ConfigError(f"{where}.choice_scores: all choices have the same score; fix the file")
    unit = Fraction(math.gcd(*(step.numerator for step in steps)), math.lcm(*(step.denominator for step in steps)))
    if max(steps) / unit > _MOST_GRADES:
        raise ConfigError(f"{where}.choice_scores: need more than {_MOST_GRADES} grades; round the scores")
    return {choice: int((score - lowest) / unit) for choice, score in exact.items()}, int(max(steps) / unit)
