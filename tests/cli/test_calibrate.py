"""Test `reward-kit calibrate` with a custom reward and with LLM judges at a local endpoint."""

from __future__ import annotations

import asyncio
import csv
import json
from pathlib import Path
from typing import NamedTuple

import pytest
from click.testing import CliRunner

from reward_kit import Task, evaluate
from reward_kit.cli.calibrate import command
from reward_kit.errors import RewardKitError
from reward_kit.runs.label_file import append_label, parse_label
from reward_kit.runs.run_folder import read_episodes
from tests.chat_server import ChatServer, status
from tests.cli.project import Project
from tests.rewards.judges import fair

OWN = """
from reward_kit import EvaluateResult, Message, reward_function

@reward_function
def length(messages: list[Message], sample: dict, *, most: int = 10) -> EvaluateResult:
    assert "label" not in sample
    return EvaluateResult(score=min(1.0, len(messages[-1].text) / most), reason="counted")
"""
QUICK = ("--resamples", "50")
ANSWERS = [("1", "no"), ("2", "a"), ("4", "Paris"), ("5", "Paris, France"), ("5", "x"), ("1", "never, in all my life")]


class Done(NamedTuple):
    exit_code: int
    stdout: str
    stderr: str


def call(*arguments: str) -> Done:
    """Run the command in this process; return errors as `main` shows them."""
    done = CliRunner().invoke(command, [*arguments, *(() if "--resamples" in arguments else QUICK)])
    if isinstance(done.exception, RewardKitError):
        return Done(done.exception.exit_code, done.stdout, f"error: {done.exception}")
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return Done(done.exit_code, done.stdout, done.stderr)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "own.py").write_text(OWN)
    with (tmp_path / "labels.csv").open("w", newline="") as file:
        rows = [[f"q{n}", label, "Capital?", text] for n, (label, text) in enumerate(ANSWERS)]
        csv.writer(file).writerows([["id", "label", "prompt", "response"], *rows])
    with (tmp_path / "pairs.csv").open("w", newline="") as file:
        rows = [["p0", "A", "Capital?", "Paris", "Lyon"], ["p1", "B", "Capital?", "Metz", "Paris"]]
        csv.writer(file).writerows([["id", "winner", "prompt", "response_a", "response_b"], *rows])
    return tmp_path


def test_table_shows_intervals_and_the_worst_disagreements(folder: Path) -> None:
    done = call("labels.csv", "--reward", "own.py:length", "--sandbox", "in_process")
    assert done.exit_code == 0, done.stderr
    for text in ("kappa quadratic", "kendall tau b", "length gap", "95% interval", "6 of 6 rows scored"):
        assert text in done.stdout
    worst = done.stdout.partition("Largest disagreements")[2]
    assert worst.index("(q5): label 1, score 1.00") < worst.index("(q4): label 5, score 0.10")
    assert "reason: counted" in worst
    assert not (folder / "runs").exists()  # it leaves nothing


def test_json_is_equal_in_every_run(folder: Path) -> None:
    arguments = ["labels.csv", "--reward", "own.py:length", "--json", "--resamples", "200"]
    one, again = Project(folder).call("calibrate", *arguments), call(*arguments)
    assert (one.returncode, again.exit_code) == (0, 0), one.stderr
    assert one.stdout == again.stdout
    output = json.loads(one.stdout)
    assert (output["rows"], output["scored"], output["unscored"], output["levels"]) == (6, 6, {}, [1, 2, 4, 5])
    assert (
        output["figures"]["accuracy"]["low"]
        < output["figures"]["accuracy"]["value"]
        < output["figures"]["accuracy"]["high"]
    )


def test_reward_options_are_passed(folder: Path) -> None:
    arguments = ["labels.csv", "--reward", "own.py:length", "--sandbox", "in_process", "--json"]
    one, other = (json.loads(call(*arguments, "-O", f"most={most}").stdout) for most in (10, 100))
    assert one["figures"]["mean_difference"]["value"] > other["figures"]["mean_difference"]["value"]
    bad = call(*arguments, "-O", "mots=10")
    assert bad.exit_code == 2 and "did you mean 'most'?" in bad.stderr


BAD = {
    "no such file": (["nowhere.csv"], "does not exist"),
    "no such column": (["labels.csv", "--label-column", "stars"], "labels.csv:2: missing column 'stars'"),
    "no numbers": (["labels.csv", "--levels", "a,b"], "must be numbers separated by commas"),
    "a label beside the levels": (["labels.csv", "--levels", "1,2,3"], "the label 4 is not among the levels"),
    "no such reward": (["labels.csv", "--reward", "own.py:lenght"], "lenght"),
}


@pytest.mark.parametrize(("arguments", "message"), BAD.values(), ids=BAD)
def test_invalid_input_is_one_clear_error(folder: Path, arguments: list[str], message: str) -> None:
    reward = [] if "--reward" in arguments else ["--reward", "own.py:length"]
    done = call(*arguments, *reward, "--sandbox", "in_process")
    assert done.exit_code == 2 and message in done.stderr and "Traceback" not in done.stderr


def knows(data, properties):
    """A judge that prefers Paris and ignores everything else."""
    if "winner" in properties:
        return {"winner": next((place for place in ("first", "second") if data[place] == "Paris"), "tie")}
    return {"grades": dict.fromkeys(properties["grades"]["properties"], 5 if "Paris" in data["answer"] else 1)}


async def test_llm_judge_is_calibrated(folder: Path) -> None:
    async with ChatServer(fair(knows)) as server:
        endpoint = ["-O", "model=m", "-O", f"base_url={server.base_url}", "-O", "rubric.right=It is right.", "--json"]
        arguments = ["labels.csv", "--reward", "reward_kit.rewards:llm_judge", *endpoint]
        done = await asyncio.to_thread(call, *arguments, "-O", "cache=judge.jsonl")
        assert done.exit_code == 0, done.stderr
        assert len(server.requests) == 6
        output = json.loads(done.stdout)
        assert output["figures"]["accuracy"]["value"] == pytest.approx(3 / 6)
        again = await asyncio.to_thread(call, *arguments, "-O", "cache=judge.jsonl")
        assert again.stdout == done.stdout and len(server.requests) == 6


async def test_judge_in_another_api_is_calibrated_with_its_own_key(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANTHROPIC_API_KEY", "sk-ant")
    async with ChatServer(fair(knows)) as server:
        endpoint = ["-O", "model=m", "-O", f"base_url={server.base_url}", "-O", "rubric.right=It is right.", "--json"]
        client = ["-O", "client.api=messages", "-O", "client.api_key_env=ANTHROPIC_API_KEY"]
        arguments = ["labels.csv", "--reward", "reward_kit.rewards:llm_judge", *endpoint, *client]
        done = await asyncio.to_thread(call, *arguments)
        assert done.exit_code == 0, done.stderr
        assert json.loads(done.stdout)["figures"]["accuracy"]["value"] == pytest.approx(3 / 6)
        assert {request.headers["x-api-key"] for request in server.requests} == {"sk-ant"}


async def test_pairwise_judge_is_calibrated_with_its_position_bias(folder: Path) -> None:
    async with ChatServer(fair(knows)) as server:
        endpoint = ["-O", "model=m", "-O", f"base_url={server.base_url}", "--json", "--pairs", "judge"]
        arguments = ["pairs.csv", "--reward", "reward_kit.rewards:pairwise_judge", *endpoint]
        output = json.loads((await asyncio.to_thread(call, *arguments)).stdout)
        assert output["figures"]["accuracy"]["value"] == 1.0
        assert output["figures"]["first_place_wins"]["value"] == 0.5
        assert len(server.requests) == 4  # both ways ask the same two questions
    async with ChatServer(fair(lambda data, properties: {"winner": "first"})) as server:
        endpoint = ["-O", "model=m", "-O", f"base_url={server.base_url}", "--json", "--pairs", "judge"]
        arguments = ["pairs.csv", "--reward", "reward_kit.rewards:pairwise_judge", *endpoint]
        output = json.loads((await asyncio.to_thread(call, *arguments)).stdout)
        assert output["figures"]["first_place_wins"]["value"] == 1.0
        assert output["figures"]["accuracy"]["value"] == 0.0


async def test_rows_without_a_verdict_are_counted_separately(folder: Path) -> None:
    def script(body):
        return status(400, text="no") if "never" in body["messages"][1]["content"] else fair(knows)(body)

    async with ChatServer(script) as server:
        endpoint = ["-O", "model=m", "-O", f"base_url={server.base_url}"]
        arguments = ["labels.csv", "--reward", "reward_kit.rewards:llm_judge", *endpoint]
        done = await asyncio.to_thread(call, *arguments)
        assert done.exit_code == 0, done.stderr
        assert "5 of 6 rows scored; unscored and excluded: provider_error 1" in done.stdout
        assert "first error: " in done.stdout and "HTTP 400" in done.stdout
    async with ChatServer(lambda body: status(401)) as server:
        endpoint = ["-O", "model=m", "-O", f"base_url={server.base_url}"]
        arguments = ["labels.csv", "--reward", "reward_kit.rewards:llm_judge", *endpoint]
        done = await asyncio.to_thread(call, *arguments)
        assert done.exit_code == 3 and "none of the 6 rows could be scored" in done.stderr


TRUTHFUL = """
from reward_kit import EvaluateResult, Message, reward_function

@reward_function
def right(messages: list[Message], ground_truth: str) -> EvaluateResult:
    return EvaluateResult(score=float(messages[-1].text == ground_truth), reason="compared")
"""


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--reward", "truthful.py:right"), "needs ground_truth, but no row has one"),
        (("--reward", "own.py:length", "--threshold", "5"), "5.0 is not in the range 0<=x<=1"),
        (("--reward", "own.py:length", "--pairs", "judge"), "--pairs judge compares two answers"),
    ],
)
def test_options_without_effect_are_rejected(folder: Path, arguments: tuple[str, ...], problem: str) -> None:
    (folder / "truthful.py").write_text(TRUTHFUL)
    done = call("labels.csv", *arguments)
    assert done.exit_code == 2 and problem in done.stderr


def test_recorded_metric_is_compared_without_calling_a_reward(folder: Path) -> None:
    (folder / "tone.py").write_text("def tone(messages, sample):\n    return sample['tone'], 'as heard'\n")
    rows = [{"id": f"q{n}", "tone": tone} for n, tone in enumerate((0.0, 0.25, 0.75, 1.0))]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = Task(
        "calls",
        dataset=str(folder / "rows.jsonl"),
        rewards={"tone": "tone.py:tone"},
        policy={"type": "scripted", "actions": [{"type": "text", "content": "Hello"}]},
        initial_user_prompt="Greet.",
        folder=folder,
    )
    run = evaluate(task, log_dir=folder / "runs").path
    names = {record["sample_id"]: record["rollout_id"] for record in read_episodes(run)}
    for sample, label in (("q0", "fail"), ("q1", "pass"), ("q2", "pass"), ("q3", "pass")):
        append_label(run, parse_label({"rollout_id": names[sample], "label": label}))
    (folder / "tone.py").unlink()
    labels = str(run / "labels.jsonl")
    done = call(labels, "--metric", "tone", "--json")
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["reward"], found["scored"], found["worst"][0]["score"]) == ("recorded tone", 4, 0.25)
    assert found["figures"]["accuracy"]["value"] == pytest.approx(0.75)
    assert json.loads(call(labels, "--metric", "score", "--json").stdout)["scored"] == 4
    wrong = call(labels, "--metric", "tune")
    assert wrong.exit_code == 2 and "unknown metric 'tune'; did you mean 'tone'?" in wrong.stderr
    assert "has no scores.jsonl" in call("labels.csv", "--metric", "tone").stderr
    for arguments in ((), ("--reward", "own.py:length", "--metric", "tone"), ("--metric", "tone", "-O", "most=1")):
        assert call(labels, *arguments).exit_code == 2
