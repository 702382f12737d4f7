"""Conversion of evals of OpenAI Evals (a YAML registry and JSONL samples) to task files.

The rewards of the basic classes are written to `rewards.py` and score as `evals.elsuite` does. A model-graded eval
becomes `llm_judge`, which is only similar: its grades are numbers, and its model is not stored in the eval.
"""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
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
_ARGUMENTS = frozenset({"samples_jsonl", "ignore_case", "modelgraded_spec", "eval_type"})
_TEMPLATE = re.compile(r"\{+\s*(\w+)\s*\}+")
_REWARDS = '''"""Rewards with the rules of OpenAI Evals (`evals.elsuite.basic`)."""

import json
import re
import string

from reward_kit import EvaluateResult, reward_function


def _result(messages, ground_truth, is_right):
    ideals = ground_truth if isinstance(ground_truth, list) else [ground_truth]
    answer = messages[-1].text
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
    """A task file that was made from an eval, the number of its samples, and the fields that it does not contain."""

    path: Path
    samples: int
    dropped: Counter[str]


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
    if kind != _JUDGED and kind not in _PARTS:
        known = [*_PARTS, _JUDGED]
        raise ConfigError(f"{where}: {name}.class: {kind!r} cannot be converted{did_you_mean(kind, known)}")
    dropped = Counter(f"args.{key}" for key in arguments if key not in _ARGUMENTS)
    rows = _find(path, "data", str(arguments.get("samples_jsonl")), f"{where}: {name}.args.samples_jsonl")
    task: dict[str, Any] = {"name": name.partition(".")[0], "dataset_path": "rows.jsonl", "on_text": "end"}
    if kind == _JUDGED:
        task["reward_function_path"] = "reward_kit.rewards:llm_judge"
        task["reward_options"] = {"model": "YOUR-JUDGE", "rubric": _rubric(path, arguments, where, name, dropped)}
    else:
        task["reward_function_path"] = f"rewards.py:{_PARTS[kind]}"
        if kind == "Includes" and arguments.get("ignore_case"):
            task["reward_options"] = {"ignore_case": True}
    with wrap_os_errors("write", folder):
        folder.mkdir(parents=True)
    converted = list(_rows(rows, kind, dropped))
    if not converted:
        raise ConfigError(f"{rows}: has no samples; fix {name}.args.samples_jsonl")
    text = "".join(json.dumps(row) + "\n" for row in converted)
    write_atomically(folder / "rows.jsonl", text.encode(), is_private=False)
    if kind != _JUDGED:
        write_atomically(folder / "rewards.py", _REWARDS.encode(), is_private=False)
    content = yaml.safe_dump(task, sort_keys=False, allow_unicode=True)
    write_atomically(folder / "task.yaml", content.encode(), is_private=False)
    return ConvertedEval(folder / "task.yaml", len(converted), dropped)


def _find(path: Path, kind: str, name: str, where: str) -> Path:
    """Return a file of the registry, which is relative to `registry/data` or to the registry file."""
    roots = [path.parent, path.parent.parent / kind, path.parent / kind]
    found = next((root / name for root in roots if (root / name).is_file()), None)
    if found is None or not any(found.resolve().is_relative_to(root.resolve()) for root in roots):
        raise ConfigError(f"{where}: {name!r} is not a file below {roots[0]} or {roots[1]}; copy the samples there")
    return found


def _rows(path: Path, kind: str, dropped: Counter[str]) -> Iterator[dict[str, Any]]:
    for number, (where, row) in enumerate(read_rows(path)):
        given = row.get("input")
        if isinstance(given, str):
            given = [{"role": "user", "content": given}]
        if not isinstance(given, list) or not all(isinstance(message, dict) for message in given):
            raise ConfigError(f"{where}: input: expected a string or a list of messages, got {given!r:.60}; fix it")
        if "ideal" not in row and kind != _JUDGED:
            raise ConfigError(f"{where}: ideal: is missing; add the ideal answer")
        rest = {key: value for key, value in row.items() if key not in ("input", "ideal", "id", "messages")}
        messages = [_message(message, dropped) for message in given]
        yield {"id": str(row.get("id", number)), "messages": messages, "ground_truth": row.get("ideal"), **rest}


def _message(message: Mapping[str, Any], dropped: Counter[str]) -> dict[str, Any]:
    """Return a message. The names of example messages are written as the roles of the examples."""
    dropped.update(f"input.{key}" for key in message if key not in ("role", "content", "name"))
    return {key: message[key] for key in ("role", "content", "name") if key in message}


def _rubric(path: Path, arguments: Mapping[str, Any], where: str, name: str, dropped: Counter[str]) -> dict[str, str]:
    """Return the rubric of a model-graded eval. The scores of its choices are not used."""
    spec_name = str(arguments.get("modelgraded_spec"))
    spec_path = _find(path, "modelgraded", f"{spec_name}.yaml", f"{where}: {name}.args.modelgraded_spec")
    spec = (load_yaml(spec_path.read_text(encoding="utf-8")) or {}).get(spec_name)
    if not isinstance(spec, dict) or not isinstance(spec.get("prompt"), str):
        raise ConfigError(f"{spec_path}: {spec_name}.prompt: expected a string; fix the file")
    dropped.update(f"modelgraded_spec.{key}" for key in spec if key != "prompt")
    return {"quality": _TEMPLATE.sub(r"[\1]", spec["prompt"])}
