"""`evaluate` gives the same results as the command, also inside a running event loop."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from reward_kit.errors import ConfigError
from reward_kit.processes import LOG_FOLDER
from reward_kit.providers.session import CURRENT_PROVIDER_SESSION
from reward_kit.runs.evaluation import Task, evaluate, evaluate_async, score_transcripts
from reward_kit.runs.finished import FinishedRun
from tests import command_line

REWARD = """
from reward_kit import EvaluateResult, reward_function

@reward_function
def right(messages, ground_truth=None):
    if ground_truth == "broken":
        raise ValueError("no <b>score</b>")
    return EvaluateResult(score=float(messages[-1].content == ground_truth))
"""
TASK = """
name: capitals
initial_user_prompt: "{question}"
dataset_path: rows.jsonl
num_rollouts_per_sample: 2
reward_function_path: reward.py:right
policy: {type: scripted, actions: [{type: text, content: Paris}]}
"""
ROWS = [
    {"id": "f", "question": "France?", "ground_truth": "Paris"},
    {"id": "i", "question": "Italy?", "ground_truth": "Rome"},
]


@pytest.fixture
def task(tmp_path: Path) -> Path:
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "task.yaml").write_text(TASK)
    write_rows(tmp_path, ROWS)
    return tmp_path / "task.yaml"


def write_rows(folder: Path, rows: list[dict[str, str]]) -> None:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_evaluate_gives_the_same_summary_as_the_command(task: Path, tmp_path: Path) -> None:
    run = evaluate(task, log_dir=tmp_path / "here")
    told = command_line.call("run", "task.yaml", "--json", cwd=tmp_path)
    (policy,) = json.loads(told.stdout)["policies"]
    assert (run.status, run.why_stopped, run.score) == ("complete", None, policy["score"]["mean"])
    theirs = Path(tmp_path, json.loads(told.stdout)["run"])
    assert {path.name for path in run.path.iterdir()} - {"run.log"} == {path.name for path in theirs.iterdir()}
    assert run.page.is_file() and json.loads((run.path / "summary.json").read_text())["policies"] == [policy]
    assert [row.sample_id for row in run.failed] == ["i", "i"] and run.errors == []
    assert [result.score["score"] for result in run.results() if result.score] == [1.0, 1.0, 0.0, 0.0]


def test_evaluate_works_inside_a_running_event_loop(task: Path, tmp_path: Path) -> None:
    async def notebook() -> tuple[FinishedRun, FinishedRun]:
        return evaluate(task, log_dir=tmp_path / "a"), await evaluate_async(task, rollouts=1, log_dir=tmp_path / "b")

    blocked, awaited = asyncio.run(notebook())
    assert (len(blocked.rows), len(awaited.rows), blocked.score) == (4, 2, awaited.score)


def test_errors_are_not_failures_and_html_is_escaped(task: Path, tmp_path: Path) -> None:
    write_rows(tmp_path, [ROWS[0], {**ROWS[1], "ground_truth": "broken"}])
    run = evaluate(str(task), rollouts=1, log_dir=tmp_path / "runs")
    assert (run.score, len(run.errors), run.failed) == (1.0, 1, [])
    assert "mean score" in str(run) and "1 (crash)" not in str(run)
    assert "<b>score</b>" in str(run) and "<b>" not in run._repr_html_()
    assert "no <b>score</b>" in (run.path / "run.log").read_text() or run.errors[0].score_error == "crash"


def test_policies_have_separate_summaries(task: Path, tmp_path: Path) -> None:
    (tmp_path / "always.py").write_text(
        "from reward_kit import AgentPolicy, PolicyOutput\n"
        "class Rome(AgentPolicy):\n"
        "    async def get_action(self, observation, available_tools_specs=None):\n"
        "        return PolicyOutput({'type': 'text', 'content': 'Rome'}, None, None, None)\n"
    )
    run = evaluate(task, policies=["always.py:Rome", "scripted"], limit=1, rollouts=1, log_dir=tmp_path / "runs")
    assert {policy.policy: policy.pass_at_1 for policy in run.policies} == {"always.py:Rome": 0.0, "scripted": 1.0}
    with pytest.raises(ConfigError, match="has 2 policies; read their scores"):
        _ = run.score


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"rollouts": 0}, "rollouts: expected a whole number above 0, got 0"),
        ({"sample_ids": ["x"]}, "no sample 'x'"),
        ({"overrides": {"nam": "t"}}, "nam: unknown key"),
        (
            {"overrides": {"limits.reward_times": 3}},
            r"^overrides: limits\.reward_times: .* mean 'reward_time_s'",
        ),
        ({"overrides": {"limts.cost": 3}}, "^overrides: limts: unknown key; did you mean 'limits'"),
        ({"overrides": {"name.x": 3}}, r"^overrides=\{'name\.x': …\}: 'name' is not a mapping"),
        ({"policies": "expret"}, "expret"),
        ({"rollouts": "3"}, "rollouts: expected a whole number above 0, got '3'"),
        ({"policies": [3]}, "policies must be a name or a list of names, got an int"),
        ({"overrides": ["name=t"]}, "overrides must be a dict, got a list"),
    ],
)
def test_errors_are_raised_before_writing(task: Path, tmp_path: Path, options: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        evaluate(task, log_dir=tmp_path / "runs", **options)
    assert not (tmp_path / "runs").exists()


def test_logging_configuration_of_the_program_is_unchanged(
    task: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    package = logging.getLogger("reward_kit")
    before = (package.level, package.propagate, list(package.handlers))
    write_rows(tmp_path, [{**ROWS[0], "ground_truth": "broken"}])
    evaluate(task, rollouts=1, log_dir=tmp_path / "runs")
    assert (package.level, package.propagate, list(package.handlers)) == before
    assert [record.levelname for record in caplog.records if record.levelno < logging.WARNING] == []


def test_transcripts_are_scored(task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    said = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "Rome"}]
    rows = [{"id": town, "ground_truth": town, "messages": said} for town in ("Paris", "Rome")]
    Path("said.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = score_transcripts("said.jsonl", "reward.py:right")
    assert (run.score, run.path.parent, len(run.rows)) == (0.5, Path("runs"), 2)
    with pytest.raises(ConfigError, match=r"^overrides policy: .* reward_options and redact can be set here"):
        score_transcripts("said.jsonl", "reward.py:right", overrides={"policy": "x"})


def test_misspelt_names_are_reported_at_once(task: Path) -> None:
    with pytest.raises(TypeError, match="got an unexpected keyword argument 'policy'"):
        evaluate(task, policy="expert")
    assert "rollouts" in inspect.signature(evaluate).parameters
    with pytest.raises(ConfigError, match="task must be the path of a file, got a dict"):
        evaluate({"name": "t"})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"reward must be 'file\.py:function', got a function"):
        score_transcripts("said.jsonl", evaluate)  # type: ignore[arg-type]


def test_secrets_stay_out_of_the_files_of_transcripts(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-very-secret-0123456789")
    said = [
        {"role": "user", "content": "my key is sk-very-secret-0123456789"},
        {"role": "assistant", "content": "Rome"},
    ]
    (tmp_path / "said.jsonl").write_text(json.dumps({"messages": said, "ground_truth": "Rome"}) + "\n")
    run = score_transcripts(tmp_path / "said.jsonl", "reward.py:right", folder=tmp_path, log_dir=tmp_path / "runs")
    assert run.score == 1.0
    written = [path for path in run.path.rglob("*") if path.is_file()]
    assert len(written) >= 5 and not [path for path in written if b"very-secret" in path.read_bytes()]


def test_unwritable_report_loses_no_result(task: Path, tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(
        REWARD + "\n@reward_function\ndef blocks(messages):\n    from pathlib import Path\n"
        "    (run,) = Path("
        + repr(str(tmp_path / "runs"))
        + ").iterdir()\n    (run / 'report.html').mkdir(exist_ok=True)\n"
        "    return EvaluateResult(score=1.0)\n"
    )
    asked = {"reward_function_path": "reward.py:blocks", "sandbox.level": "in_process"}
    run = evaluate(task, rollouts=1, overrides=asked, log_dir=tmp_path / "runs")
    assert (run.score, run.status) == (1.0, "complete")
    assert "report was not written" in (run.path / "run.log").read_text()


def test_watch_context_ends_with_the_run(task: Path, tmp_path: Path) -> None:
    async def notebook() -> None:
        before = CURRENT_PROVIDER_SESSION.get(), LOG_FOLDER.get(None)
        await evaluate_async(task, rollouts=1, limit=1, log_dir=tmp_path / "runs")
        assert (CURRENT_PROVIDER_SESSION.get(), LOG_FOLDER.get(None)) == before

    asyncio.run(notebook())


def test_ctrl_c_in_a_running_loop_stops_the_run_and_reports_its_path(task: Path, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        "import asyncio\nfrom reward_kit import AgentPolicy\nclass Slow(AgentPolicy):\n"
        "    async def get_action(self, observation, available_tools_specs=None):\n"
        "        print('waiting', flush=True)\n        await asyncio.sleep(600)\n"
    )
    notebook = (
        "import asyncio\nfrom reward_kit import evaluate\n"
        "async def cell():\n    evaluate('task.yaml', policies='slow.py:Slow', log_dir='runs')\n"
        "asyncio.new_event_loop().run_until_complete(cell())\n"  # as a notebook's loop runs, with no handler of its own
    )
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", notebook], cwd=tmp_path, text=True, **pipes) as process:
        assert process.stdout is not None and process.stdout.readline() == "waiting\n"
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode != 0 and "KeyboardInterrupt" in said
    assert len(list((tmp_path / "runs").iterdir())) == 1


def test_a_task_whose_constructor_raised_has_a_repr() -> None:
    assert repr(Task.__new__(Task)) == "Task(not loaded)"
