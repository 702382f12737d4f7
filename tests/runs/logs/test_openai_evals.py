"""Test tasks that are made from OpenAI evals."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from reward_kit.errors import ConfigError
from reward_kit.models import Message
from reward_kit.runs.logs.openai_evals import convert_evals
from reward_kit.runs.run_folder import read_episodes, read_scores
from reward_kit.runs.tasks import load_task
from tests.chat_server import Behavior, ChatServer, answer
from tests.command_line import call
from tests.rewards.judges import fair, grades

SAMPLES: list[dict[str, Any]] = [
    {"input": [{"role": "system", "content": "Be short."}, {"role": "user", "content": "2+2?"}], "ideal": "4"},
    {"input": "Capital of France?", "ideal": ["Paris", "paris"], "level": 1},
]
SPEC = """
fact:
  prompt: |-
    Compare. [Question]: {input} [Submission]: {completion}
  choice_strings: ABCDE
  choice_scores: {A: 1.0, B: 1.0, C: 1.0, D: 0.0, E: 0.5}
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


def test_few_shot_examples_precede_the_last_message(tmp_path: Path) -> None:
    arguments = "    few_shot_jsonl: sums/few.jsonl\n    num_few_shot: 1\n    max_tokens: 5\n"
    path = write_registry(tmp_path, "Match", arguments)
    examples = [[{"role": "system", "content": text, "name": "example_user"}] for text in ("1+1?", "never shown")]
    (tmp_path / "data" / "sums" / "few.jsonl").write_text("".join(json.dumps({"sample": e}) + "\n" for e in examples))
    [converted] = convert_evals(path, tmp_path / "task")
    messages = load_task(converted.path).samples[0].row["messages"]
    assert [message["content"] for message in messages] == ["Be short.", "1+1?", "2+2?"]
    assert converted.dropped == {"args.max_tokens": 1}


def judged(tmp_path: Path, spec: str, samples: list[Any] = SAMPLES) -> dict[str, Any]:
    path = write_registry(tmp_path, "ModelBasedClassify", "    modelgraded_spec: fact\n", samples)
    (tmp_path / "modelgraded" / "fact.yaml").write_text(spec)
    [converted] = convert_evals(path, tmp_path / "task")
    return dict(yaml.safe_load(converted.path.read_text())["reward_options"])


class TestModelGraded:
    def test_prompt_becomes_the_rubric(self, tmp_path: Path) -> None:
        options = judged(tmp_path, SPEC)
        assert options["scale"] == [0, 2]
        text = options["rubric"]["quality"]
        assert text.startswith("Compare. [Question]: [input] [Submission]: [completion]")
        assert text.endswith("The grade is 2 for 'A', 2 for 'B', 2 for 'C', 0 for 'D', 1 for 'E'.")

    def test_scores_of_choices_are_mapped_to_grades(self, tmp_path: Path) -> None:
        spec = "fact:\n  prompt: '{completion}'\n  choice_strings: ['1', '2', '5']\n  choice_scores: from_strings\n"
        options = judged(tmp_path, spec)
        assert options["scale"] == [0, 4]
        assert options["rubric"]["quality"].endswith("The grade is 0 for '1', 1 for '2', 4 for '5'.")

    def test_fields_of_the_samples_are_in_their_own_rubrics(self, tmp_path: Path) -> None:
        spec = "fact:\n  prompt: 'Criterion: {criteria}'\n  choice_scores: {Y: 1, N: 0}\n"
        samples = [{"input": "a?", "criteria": "concise"}, {"input": "b?", "criteria": "polite {x}"}]
        options = judged(tmp_path, spec, samples)
        assert options == {"rubric_key": "rubric", "scale": [0, 1]}
        rows = (tmp_path / "task" / "rows.jsonl").read_text().splitlines()
        rubrics = [json.loads(row)["rubric"]["quality"] for row in rows]
        assert [text.partition("\n")[0] for text in rubrics] == ["Criterion: concise", "Criterion: polite {x}"]
        (tmp_path / "task").rename(tmp_path / "first")
        with pytest.raises(ConfigError, match=r"samples.jsonl:1: criteria: is missing, but"):
            judged(tmp_path, spec, [{"input": "a?"}])

    @pytest.mark.parametrize(
        ("spec", "problem"),
        [
            ("{prompt: 'x', choice_strings: AB}", "fact.choice_scores: expected a score for each choice"),
            ("{prompt: 'x', choice_strings: AB, choice_scores: {A: 1, C: 0}}", "'C' is not one of the choice_str"),
            ("{prompt: 'x', choice_scores: {A: 1, B: 1}}", "all choices have the same score"),
            ("{prompt: 'x', choice_scores: {A: 0, B: 0.0001, C: 1}}", "need more than 100 grades"),
            ("{prompt: '{a.b}', choice_scores: {A: 0, B: 1}}", "fact.prompt: is not a valid template"),
            ("{prompt: '{input:999999999}', choice_scores: {A: 0, B: 1}}", "fact.prompt: is not a valid template"),
            ("{prompt: '{', choice_scores: {A: 0, B: 1}}", "fact.prompt: is not a valid template"),
            ("{prompt: 'x', input_outputs: {input1: completion1}}", "input_outputs: only"),
            ("{prompt: [1]}", "fact.prompt: expected a string"),
        ],
    )
    def test_invalid_specification_names_the_file_and_the_key(self, tmp_path: Path, spec: str, problem: str) -> None:
        with pytest.raises(ConfigError, match=problem) as error:
            judged(tmp_path, f"fact: {spec}\n")
        assert "fact.yaml" in str(error.value)
        assert not (tmp_path / "task").exists()


ANSWERS = {"2+2?": "4.", "Capital of France?": "It is Paris."}


def reply(body: dict[str, Any]) -> Behavior:
    return answer(ANSWERS[body["messages"][-1]["content"]])


@pytest.mark.parametrize(
    ("kind", "arguments", "expected"),
    [
        ("match", "", {"4.": 1.0, "It is Paris.": 0.0}),
        ("includes", "    ignore_case: true\n", {"4.": 1.0, "It is Paris.": 1.0}),
        ("fuzzy_match", "", {"4.": 1.0, "It is Paris.": 1.0}),
    ],
)
async def test_converted_eval_is_run(tmp_path: Path, kind: str, arguments: str, expected: dict[str, float]) -> None:
    kinds = {"match": "Match", "includes": "Includes", "fuzzy_match": "FuzzyMatch"}
    path = write_registry(tmp_path, kinds[kind], arguments)
    done = call("import", str(path), "-o", "task", cwd=tmp_path)
    assert "Run it:  reward-kit run task/task.yaml --model PROVIDER/MODEL\n" in done.stderr
    async with ChatServer(reply) as server:
        options = ["--model", "openai/tiny", "--base-url", server.base_url]
        done = await asyncio.to_thread(call, "run", "task/task.yaml", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    [run] = (tmp_path / "runs").iterdir()
    answers = {record["rollout_id"]: record["messages"][-1]["content"] for record in read_episodes(run)}
    assert {answers[line["rollout_id"]]: line["score"] for line in read_scores(run)} == expected


async def test_model_graded_eval_is_run(tmp_path: Path) -> None:
    path = write_registry(tmp_path, "ModelBasedClassify", "    modelgraded_spec: fact\n")
    done = call("import", str(path), "-o", "task", cwd=tmp_path)
    assert "-T reward_options.model=JUDGE" in done.stderr
    async with ChatServer(reply) as server, ChatServer(fair(grades(1))) as judge:
        options = ["--model", "openai/tiny", "--base-url", server.base_url, "-T", "reward_options.model=judge"]
        options += ["-T", f"reward_options.base_url={judge.base_url}"]
        done = await asyncio.to_thread(call, "run", "task/task.yaml", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    [run] = (tmp_path / "runs").iterdir()
    assert [line["score"] for line in read_scores(run)] == [0.5, 0.5]


@pytest.mark.parametrize(
    ("kind", "arguments", "samples", "problem"),
    [
        ("Translate", "", SAMPLES, r"sums.yaml:\d+: sums.dev.v0.class: .*Translate' cannot be converted; write a task"),
        ("Match", "", [{"input": 3, "ideal": ""}], r"samples.jsonl:1: input: expected a string or a list"),
        ("Match", "", [{"input": ""}], r"samples.jsonl:1: ideal: is missing"),
        ("Match", "    samples_jsonl: ../../../etc/passwd\n", SAMPLES, "duplicate|not a file below"),
        ("Match", "", [], "has no samples"),
        ("Includes", "    ignorecase: true\n", SAMPLES, "args.ignorecase: unknown argument; did you mean"),
        ("Match", "", [{"input": [{"rol": "user", "content": "a"}], "ideal": "b"}], r"input\[0\]\.role: is missing"),
    ],
)
def test_invalid_eval_leaves_nothing_behind(
    tmp_path: Path, kind: str, arguments: str, samples: list[Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        convert_evals(write_registry(tmp_path, kind, arguments, samples), tmp_path / "task")
    assert not (tmp_path / "task").exists()
