"""Test tasks that are made from OpenAI evals."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from reward_kit.errors import ConfigError
from reward_kit.models import Message
from reward_kit.runs.logs.openai_evals import convert_evals
from reward_kit.runs.tasks import load_task

SAMPLES: list[dict[str, Any]] = [
    {"input": [{"role": "system", "content": "Be short."}, {"role": "user", "content": "2+2?"}], "ideal": "4"},
    {"input": "Capital of France?", "ideal": ["Paris", "paris"], "level": 1},
]
SPEC = """
fact:
  prompt: |-
    Compare. [Question]: {input} [Submission]: {completion}
  choice_strings: ABCDE
  input_outputs: {input: completion}
"""


def write_registry(folder: Path, kind: str, arguments: str = "", samples: list[Any] = SAMPLES) -> Path:
    """Write a registry with one eval, in the layout of the repository of OpenAI Evals."""
    for name in ("evals", "data/sums", "modelgraded"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "data" / "sums" / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in samples))
    (folder / "modelgraded" / "fact.yaml").write_text(SPEC)
    path = folder / "evals" / "sums.yaml"
    path.write_text(
        "sums:\n  id: sums.dev.v0\n  metrics: [accuracy]\nsums.dev.v0:\n"
        f"  class: evals.elsuite.basic.x:{kind}\n  args:\n    samples_jsonl: sums/samples.jsonl\n{arguments}"
    )
    return path


@pytest.mark.parametrize("kind", ["Match", "Includes", "FuzzyMatch", "JsonMatch"])
def test_eval_becomes_a_task_that_loads(tmp_path: Path, kind: str) -> None:
    [converted] = convert_evals(write_registry(tmp_path, kind), tmp_path / "task")
    task = load_task(converted.path)
    assert converted.samples == len(task.samples) == 2
    assert task.samples[0].row["messages"] == SAMPLES[0]["input"]
    assert task.samples[1].row["messages"] == [{"role": "user", "content": "Capital of France?"}]
    assert task.samples[1].ground_truth == ["Paris", "paris"]
    assert task.samples[1].row["level"] == 1


@pytest.mark.parametrize(
    ("name", "answer", "ideal", "expected"),
    [
        ("match", "Paris.", ["Lyon", "Paris"], 1.0),
        ("match", "It is Paris", "Paris", 0.0),
        ("includes", "It is Paris", "Paris", 1.0),
        ("includes", "It is paris", "Paris", 0.0),
        ("fuzzy_match", "The Paris!", "paris", 1.0),
        ("fuzzy_match", "", "paris", 0.0),
        ("json_match", '{"a": 1, "b": 2}', '{"b": 2, "a": 1}', 1.0),
        ("json_match", '{"a": 1}', ['{"a": 2}', '{"a": 1}'], 1.0),
        ("json_match", "not JSON", "{}", 0.0),
    ],
)
def test_rewards_score_as_in_evals(tmp_path: Path, name: str, answer: str, ideal: Any, expected: float) -> None:
    convert_evals(write_registry(tmp_path, "Match"), tmp_path / "task")
    spec = importlib.util.spec_from_file_location("eval_rewards", tmp_path / "task" / "rewards.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    messages = [Message(role="assistant", content=answer)]
    assert getattr(module, name)(messages=messages, ground_truth=ideal).score == expected


def test_model_graded_eval_becomes_a_judge(tmp_path: Path) -> None:
    path = write_registry(tmp_path, "ModelBasedClassify", "    modelgraded_spec: fact\n")
    [converted] = convert_evals(path, tmp_path / "task")
    text = converted.path.read_text()
    assert "reward_kit.rewards:llm_judge" in text
    assert "Compare." in text
    assert converted.dropped["modelgraded_spec.choice_strings"] == 1


@pytest.mark.parametrize(
    ("kind", "arguments", "samples", "problem"),
    [
        ("Translate", "", SAMPLES, r"sums.yaml:\d+: sums.dev.v0.class: 'Translate' cannot be converted"),
        ("Match", "", [{"input": 3, "ideal": ""}], r"samples.jsonl:1: input: expected a string or a list"),
        ("Match", "", [{"input": ""}], r"samples.jsonl:1: ideal: is missing"),
        ("Match", "    samples_jsonl: ../../../etc/passwd\n", SAMPLES, "duplicate|not a file below"),
        ("Match", "", [], "has no samples"),
    ],
)
def test_invalid_eval_leaves_nothing_behind(
    tmp_path: Path, kind: str, arguments: str, samples: list[Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        convert_evals(write_registry(tmp_path, kind, arguments, samples), tmp_path / "task")
    assert not (tmp_path / "task").exists()
