"""Test `reward-kit credit` and the `credit:` block of a task."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from reward_kit.agent.actions import action_text
from reward_kit.cli.credit import command
from reward_kit.credit.state_hashes import STATE_HASHES
from reward_kit.errors import ConfigError, StoreError
from reward_kit.rl_helpers import ESTIMATORS
from reward_kit.rl_processing import CreditAssigner
from reward_kit.runs.files import read_json
from reward_kit.runs.run_folder import RunFolder, read_credit
from tests.cli.project import Project
from tests.runs.stored_run import episode, make_run, score

REWARD = """
from reward_kit import EvaluateResult, reward_function

@reward_function
def uneven(messages, rollout_id: str) -> EvaluateResult:
    return EvaluateResult(score=float(rollout_id.endswith("0")))
"""


def call(*arguments: str, **options: Any) -> Result:
    options.setdefault("catch_exceptions", False)
    return CliRunner().invoke(command, arguments, **options)


def stored_run(folder: Path, **task: Any) -> Path:
    """Write a run of one group: a and b diverge in s0, and c is unscored."""
    episodes = [episode("a", ["s0", "s1"]), episode("b", ["s0", "s2"], index=1), episode("c", ["s0"], index=2)]
    return make_run(folder, episodes, [score("a", 1.0), score("b", 0.0), score("c", None)], **task)


def estimates(run: Path) -> tuple[str, dict[str, Any]]:
    section = read_json(run / "summary.json")["credit"]
    return section["estimator"], section["options"]


# The command


def test_credit_covers_every_step_and_shows_the_extremes(tmp_path: Path) -> None:
    run = stored_run(tmp_path)
    done = call(str(run))
    assert done.exit_code == 0
    assert done.stdout.startswith(
        "Credit by gigpo (omega 0.5, gamma 0.95): 5 steps of 3 episodes, 50.0% of the scored ones share"
    )
    assert "3, 1 unscored and without credit" in done.stdout
    best = next(line for line in done.stdout.splitlines() if "a.0" in line)
    assert best.split() == ["+0.707", "+0.707", "+0.707", "+0.950", "1", "a", "0", "s0", "a.0"]
    assert "Written to" in done.stderr
    assert re.search(r"state hash +state_key\s", done.stdout)
    page = (run / "report.html").read_text(encoding="utf-8")
    assert '"estimator":"gigpo"' in page and '"state_hash":"state_key"' in page
    assert [row["A"] is None for row in read_credit(run)] == [False] * 4 + [True]
    assert estimates(run)[0] == "gigpo"


def test_json_is_one_object_with_the_actions_of_the_extremes(tmp_path: Path) -> None:
    run = stored_run(tmp_path)
    output = json.loads(call(str(run), "--json", "--top", "1").stdout)
    assert (output["run"], output["steps"], output["unscored"]) == (str(run), 5, 1)
    ((best,), (worst,)) = output["best"], output["worst"]
    assert (best["action"]["content"], worst["action"]["content"]) == ("a.0", "b.0")
    assert {key: output[key] for key in read_json(run / "summary.json")["credit"]} == read_json(run / "summary.json")[
        "credit"
    ]


def test_command_line_overrides_the_settings_of_the_task(tmp_path: Path) -> None:
    run = stored_run(tmp_path, credit={"estimator": "gigpo", "omega": 0.25, "gamma": 0.5})
    call(str(run), "-O", "gamma=0.75", "-O", "state_hash={name: last_messages, count: 2}")
    name, options = estimates(run)
    assert (name, options["omega"], options["gamma"]) == ("gigpo", 0.25, 0.75)
    assert options["state_hash"] == {"name": "last_messages", "count": 2}


def test_other_estimator_ignores_options_of_the_task_estimator(tmp_path: Path) -> None:
    run = stored_run(tmp_path, credit={"omega": 0.25, "step_rewards": "environment"})
    call(str(run), "--estimator", "rloo")
    assert estimates(run)[0] == "rloo"
    assert read_json(run / "summary.json")["credit"]["step_rewards"] == "environment"
    call(str(run), "--estimator", "gigpo")
    assert estimates(run)[1]["omega"] == 0.25


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--estimator", "GIGPO"], "unknown estimator 'GIGPO'; did you mean 'gigpo'"),
        (["--estimator", "gigpoo"], "unknown estimator 'gigpoo'; did you mean 'gigpo'"),
        (["-O", "omgea=0.5"], "gigpo has no option 'omgea'; did you mean 'omega'"),
        (["-O", "gamma='0.5'"], "gigpo, option 'gamma': expected a number"),
        (["-O", "gamma"], "-O 'gamma': write key=value"),
        (["-O", "step_rewards=env"], "-O step_rewards: expected 'reward_function' or 'environment'"),
        (["-O", "estimator=rloo"], "-O estimator: write --estimator NAME"),
        (["--estimator", "gae"], r"rollout a.*policy_value_estimate"),
    ],
)
def test_invalid_options_are_rejected_and_nothing_is_written(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    run = stored_run(tmp_path)
    with pytest.raises(ConfigError, match=message):
        call(str(run), *arguments)
    assert not (run / "credit.jsonl").exists()


def test_credit_rejects_a_training_run_and_names_its_credit_files(tmp_path: Path) -> None:
    run = stored_run(tmp_path)
    header = read_json(run / "run.json")
    (run / "run.json").write_text(json.dumps({**header, "training": {"train_path": "train.yaml"}}))
    with pytest.raises(ConfigError, match=r"is a training run, which has no episodes.*; the credit .* in episodes/"):
        call(str(run))
    assert not (run / "credit.jsonl").exists()


def test_misspelled_run_suggests_the_nearest(tmp_path: Path) -> None:
    run = stored_run(tmp_path)
    with pytest.raises(ConfigError, match=re.escape(f"it has no run.json; did you mean '{run}'")):
        call(str(tmp_path / "rum"))


def test_bare_run_name_or_run_file_suggests_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = stored_run(tmp_path)
    (tmp_path / "runs").mkdir()
    run.rename(tmp_path / "runs" / "lake-1")
    monkeypatch.chdir(tmp_path)
    for named in ("lake-1", "runs/lake-1/episodes.jsonl"):
        with pytest.raises(ConfigError, match=r"is not a run directory: .*; did you mean 'runs/lake-1'"):
            call(named)


@pytest.mark.parametrize(
    ("file", "key", "value", "message"),
    [
        ("episodes.jsonl", "steps", 5, "episodes.jsonl:1: it cannot be read as an episode: TypeError"),
        ("episodes.jsonl", "schema_version", 99, "episodes.jsonl:1: the episode record has version 99"),
        ("episodes.jsonl", "rollout_id", None, "episodes.jsonl:1: expected an object with a string rollout_id"),
        ("scores.jsonl", "result", "x", "scores.jsonl: the score of a: result: .*expected a mapping of keys"),
    ],
)
def test_damaged_line_is_named(tmp_path: Path, file: str, key: str, value: Any, message: str) -> None:
    run = stored_run(tmp_path)
    first, *others = (run / file).read_text(encoding="utf-8").splitlines()
    changed = json.dumps({**json.loads(first), key: value})
    (run / file).write_text("\n".join([changed, *others, ""]), encoding="utf-8")
    with pytest.raises(StoreError, match=message):
        call(str(run))
    assert not (run / "credit.jsonl").exists()


def test_top_zero_lists_no_steps(tmp_path: Path) -> None:
    assert "No step was better" not in call(str(stored_run(tmp_path)), "--top", "0").stdout


def test_digest_state_is_shortened_in_the_table(tmp_path: Path) -> None:
    state = "0123456789abcdef" * 2
    run = make_run(
        tmp_path, [episode("a", [state]), episode("b", [state], index=1)], [score("a", 1.0), score("b", 0.0)]
    )
    assert "01234567…" in (shown := call(str(run)).stdout) and state not in shown and "-0.000" not in shown
    assert json.loads(call(str(run), "--json").stdout)["best"][0]["state_key"] == state


def test_open_run_is_rejected(tmp_path: Path) -> None:
    run = stored_run(tmp_path)
    with RunFolder(run), pytest.raises(StoreError, match="is open in another process"):
        call(str(run))


def test_run_without_differences_prints_no_table(tmp_path: Path) -> None:
    episodes = [episode("a", ["s0"]), episode("b", ["s0"], index=1)]
    run = make_run(tmp_path, episodes, [score("a", 1.0), score("b", 1.0)])
    done = call(str(run))
    assert "No step is better or worse than comparable steps." in done.stdout and "Best steps" not in done.stdout
    assert "warning: " in done.stderr


def test_run_without_shared_states_warns_unless_the_estimator_uses_none(tmp_path: Path) -> None:
    episodes = [episode("a", ["s0", "s1"]), episode("b", ["s2", "s3"], index=1)]
    run = make_run(tmp_path, episodes, [score("a", 1.0), score("b", 0.0)])
    assert "warning: only 0.0% of the steps share their state with another" in call(str(run)).stderr
    (warning,) = read_json(run / "summary.json")["credit"]["warnings"]
    assert "different state_hash" in warning
    assert "warning" not in call(str(run), "--estimator", "rloo").stderr


def test_credit_reports_groups_without_peers(tmp_path: Path) -> None:
    run = make_run(
        tmp_path, [episode("a", ["s0"]), episode("b", ["s0"], group="h")], [score("a", 1.0), score("b", 0.0)]
    )
    done = call(str(run))
    assert "2, 2 with fewer than two scored episodes" in done.stdout
    assert "warning: every group has only one scored trajectory" in done.stderr


def test_untrusted_text_does_not_reach_the_terminal(tmp_path: Path) -> None:
    episodes = [episode("a", ["\x1b[31m s0"]), episode("b", ["\x1b[31m s0"], index=1)]
    run = make_run(tmp_path, episodes, [score("a", 1.0), score("b", 0.0)])
    assert "\x1b" not in call(str(run)).stdout


@pytest.mark.parametrize(
    ("action", "text"),
    [
        ({"type": "text", "content": "Paris"}, "Paris"),
        ({"type": "tool_call", "name": "move", "arguments": {"way": "up", "n": 2}}, 'move(way="up", n=2)'),
        ({"type": "tool_calls", "calls": [{"name": "a"}, {"name": "b", "arguments": "{"}]}, "a(); b({)"),
        ({"type": "terminate"}, "terminate"),
    ],
)
def test_action_is_described_as_text(action: dict[str, Any], text: str) -> None:
    assert action_text(action) == text


# The block of a task


def uneven_project(folder: Path, **task: Any) -> Project:
    project = Project(folder, rows=2, reward_function_path="uneven.py:uneven", **task)
    (folder / "uneven.py").write_text(REWARD)
    return project


def test_task_with_a_credit_block_gets_credit_after_its_run(tmp_path: Path) -> None:
    project = uneven_project(tmp_path, credit={"omega": 0.25, "gamma": 0.5, "state_hash": "observation_text"})
    done = project.call("run", "task.yaml", "--json", "--display", "none")
    assert done.returncode == 0, done.stderr
    run = project.run_path()
    output = json.loads(done.stdout)["credit"]
    assert output == read_json(run / "summary.json")["credit"]
    assert (output["options"]["omega"], output["options"]["state_hash"]) == (0.25, "observation_text")
    assert (
        "Credit by gigpo (omega 0.25, gamma 0.5): 8 steps of 4 episodes, 100.0% of the scored ones share" in done.stderr
    )
    assert f"reward-kit credit runs/{run.name}" in done.stderr
    assert sorted({row["A"] > 0 for row in read_credit(run)}) == [False, True]


def test_credit_of_a_resumed_run_covers_all_scores(tmp_path: Path) -> None:
    project = uneven_project(tmp_path)
    project.call("run", "task.yaml", "--display", "none", "-T", "run_limits.steps=3", "--max-concurrency", "1")
    run = project.run_path()
    assert not (run / "credit.jsonl").exists()
    call(str(run), "--estimator", "rloo")
    before = estimates(run), len(list(read_credit(run)))
    done = project.call("run", "--resume", str(run), "-T", "run_limits.steps=null", "--display", "none")
    assert done.returncode == 0, done.stderr
    assert (estimates(run), len(list(read_credit(run)))) == (before[0], 8) and before[1] < 8


HASH = """
import datetime

def turn(history):
    assert all(message.role != "assistant" for message in history[-1:]), "only what came before the action"
    return datetime.timedelta(len(history))

def action(step):
    return step.action_taken["type"]
"""


def test_state_hash_may_be_a_function_in_a_file(tmp_path: Path) -> None:
    project = uneven_project(tmp_path, credit={"gamma": 0.5, "state_hash": "hash.py:turn"})
    (tmp_path / "hash.py").write_text(HASH)
    done = project.call("run", "task.yaml", "--display", "none", "-T", "run_limits.steps=3", "--max-concurrency", "1")
    assert done.returncode == 1, done.stderr
    run = project.run_path()
    assert (run / "inputs" / "state_hash.py").read_text() == HASH
    resumed = project.call("run", "--resume", str(run), "-T", "run_limits.steps=null", "--display", "none")
    assert resumed.returncode == 0, resumed.stderr
    rows = list(read_credit(run))
    assert len(rows) == 8 and {row["peers"] for row in rows} == {1}
    assert {row["state_key"].partition(" #")[0] for row in rows} == {
        "datetime.timedelta(days=1)",
        "datetime.timedelta(days=3)",
    }
    again = project.call("credit", str(run), "-O", "state_hash=[hash.py:action, hash.py:turn]")
    assert again.returncode == 0, again.stderr
    assert estimates(run)[1]["state_hash"] == [f"{tmp_path}/hash.py:action", f"{tmp_path}/hash.py:turn"]
    assert project.call("check", str(run)).returncode == 0
    (tmp_path / "hash.py").write_text(HASH + "# changed\n")
    refused = project.call("run", "--resume", str(run))
    assert refused.returncode == 2 and "the state hash" in refused.stderr and "+# changed" in refused.stderr


def test_command_line_may_name_a_state_hash_function(tmp_path: Path) -> None:
    project = uneven_project(tmp_path)
    (tmp_path / "hash.py").write_text(HASH)
    done = project.call("run", "task.yaml", "--display", "none", "-T", "credit.state_hash=hash.py:action")
    assert done.returncode == 0, done.stderr
    rows = list(read_credit(project.run_path()))
    assert {row["state_key"] for row in rows} == {"tool_call", "text"}
    wrong = project.call("run", "task.yaml", "-T", "credit.state_hash=hash.py:actions")
    assert wrong.returncode == 2
    assert "credit.state_hash: state hash 'hash.py:actions'" in wrong.stderr.replace(f"{tmp_path}/", "")
    assert "hash.py has no 'actions'; did you mean 'action'?" in wrong.stderr


ADVANTAGE = """
from reward_kit.credit import relative


def scaled(batch, *, scale: float):
    assert all(step.resulting_messages_history for step in batch.steps)
    return scale * batch.to_steps(relative(batch.scores_B, batch.groups_B, "mean"))
"""


def test_estimator_may_be_a_function_in_a_file(tmp_path: Path) -> None:
    project = uneven_project(tmp_path, credit={"estimator": "advantage.py:scaled", "scale": 2})
    (tmp_path / "advantage.py").write_text(ADVANTAGE)
    done = project.call("run", "task.yaml", "--display", "none", "-T", "run_limits.steps=3", "--max-concurrency", "1")
    assert done.returncode == 1, done.stderr
    run = project.run_path()
    assert (run / "inputs" / "estimator.py").read_text() == ADVANTAGE
    resumed = project.call("run", "--resume", str(run), "-T", "run_limits.steps=null", "--display", "none")
    assert resumed.returncode == 0, resumed.stderr
    rows = list(read_credit(run))
    assert [abs(row["A"]) for row in rows] == [pytest.approx(1.0)] * 8 and {row["anchor"] for row in rows} == {None}
    assert estimates(run) == (f"{tmp_path}/advantage.py:scaled", {"scale": 2})
    again = project.call("credit", str(run), "-O", "scale=4")
    assert again.returncode == 0 and "Credit by advantage.py:scaled: 8 steps" in again.stdout, again.stderr
    assert [abs(row["A"]) for row in read_credit(run)] == [pytest.approx(2.0)] * 8
    assert project.call("check", str(run)).returncode == 0
    (tmp_path / "advantage.py").write_text(ADVANTAGE + "# changed\n")
    refused = project.call("run", "--resume", str(run))
    assert refused.returncode == 2 and "the estimator" in refused.stderr and "+# changed" in refused.stderr


def test_command_line_may_name_an_estimator_function(tmp_path: Path) -> None:
    project = uneven_project(tmp_path)
    (tmp_path / "advantage.py").write_text(ADVANTAGE)
    assert project.call("run", "task.yaml", "--display", "none").returncode == 0
    run = str(project.run_path())
    for options, message in (
        ((), "scaled needs the option 'scale'"),
        (("-O", "scale=much"), "scaled, option 'scale': expected a number"),
        (("-O", "scale=1", "-O", "scal=1"), "scaled has no option 'scal'; did you mean 'scale'"),
    ):
        wrong = project.call("credit", run, "--estimator", "advantage.py:scaled", *options)
        assert wrong.returncode == 2 and message in wrong.stderr
    done = project.call("credit", run, "--estimator", "advantage.py:scaled", "-O", "scale=3")
    assert done.returncode == 0 and estimates(Path(run)) == (f"{tmp_path}/advantage.py:scaled", {"scale": 3})


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (
            "credit:\n  estimator: advantage.py:scaled\n  scale: 1\n  scal: 1\n",
            "15: credit.scal: scaled has no option 'scal'; did you mean 'scale'",
        ),
        ("credit: advantage.py:scaled\n", "12: credit: scaled needs the option 'scale'"),
        (
            "credit:\n  scale: 1\n  estimator: advantage.py:scale\n",
            "14: credit.estimator: estimator '{folder}/advantage.py:scale': '{folder}/advantage.py:scale': {folder}",
        ),
        ("credit:\n  estimator: gigpo\n  omgea: 0.5\n", "14: credit.omgea: gigpo has no option 'omgea'; did you mean"),
        ("credit: gigpoo\n", "12: credit.estimator: unknown estimator 'gigpoo'; did you mean 'gigpo'"),
        ("credit:\n  gamma: 0.5\n  estimator: rlo\n", "14: credit.estimator: unknown estimator 'rlo'"),
        ("credit:\n  gamma: 0.5\n  omega: 1.5\n", "14: credit.omega: convex needs omega in"),
        ("credit:\n  gamma: 0.5\n  state_hash: {name: regexp}\n", "14: credit.state_hash: unknown state hash 'regexp'"),
        ("credit:\n  step_rewards: env\n", "13: credit.step_rewards: expected 'reward_function'"),
    ],
)
def test_errors_in_the_credit_block_name_the_line(tmp_path: Path, block: str, message: str) -> None:
    head = (
        "name: t\nreward_function_path: reward.py:right\nground_truth: x\nmessages:\n  - role: user\n    content: x\n"
    )
    head += "policy:\n  type: scripted\n  actions:\n    - type: text\n      content: x\n"
    Project(tmp_path)
    (tmp_path / "advantage.py").write_text(ADVANTAGE)
    (tmp_path / "task.yaml").write_text(head + block)
    with pytest.raises(ConfigError) as error:
        load(tmp_path)
    assert str(error.value).startswith(f"{tmp_path / 'task.yaml'}:{message.replace('{folder}', str(tmp_path))}")


def load(folder: Path, **overrides: Any) -> Any:
    from reward_kit.runs.tasks import load_task

    return load_task(folder / "task.yaml", overrides)


def test_errors_in_credit_options_name_the_option(tmp_path: Path) -> None:
    Project(tmp_path)
    with pytest.raises(ConfigError, match=r"-T: credit\.omega: convex needs omega"):
        load(tmp_path, **{"credit.omega": 3.0})
    for block in (5, ["gigpo"], True):
        with pytest.raises(ConfigError, match="credit: write the name of an estimator, or a mapping such as"):
            load(tmp_path, credit=block)
    with pytest.raises(ConfigError, match="credit: the key for the estimator is 'estimator', not 'name'"):
        load(tmp_path, credit={"name": "gigpo"})
    assert load(tmp_path, **{"credit": "rloo"}).definition.credit.estimator == "rloo"


def test_credit_block_without_a_reward_is_rejected(tmp_path: Path) -> None:
    Project(tmp_path, reward_function_path=None, credit={"omega": 0.5})
    with pytest.raises(ConfigError, match="credit has no effect: the task has no reward_function_path"):
        load(tmp_path)


def test_failing_estimator_sets_the_exit_code_and_keeps_the_run(tmp_path: Path) -> None:
    project = uneven_project(tmp_path, credit="gae")
    done = project.call("run", "task.yaml", "--display", "none")
    assert done.returncode == 2
    assert "No credit was assigned: rollout " in done.stderr and "policy_value_estimate" in done.stderr
    assert read_json(project.run_path() / "summary.json")["policies"][0]["scored"] == 4
    assert "mean score" in done.stdout


# The guide, which tests/pages runs

GUIDE = (Path(__file__).parent.parent.parent / "docs" / "concepts" / "credit.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", GUIDE, re.DOTALL)


@pytest.mark.parametrize("block", blocks("yaml"))
def test_credit_blocks_of_the_guide_are_valid(tmp_path: Path, block: str) -> None:
    told = yaml.safe_load(block)
    Project(tmp_path, **told)
    for file, text in re.findall(r'```python title="(.*?)"\n(.*?)```', GUIDE, re.DOTALL):
        (tmp_path / file).write_text(text)
    credit = load(tmp_path).definition.credit
    assert {"estimator": credit.estimator.replace(f"{tmp_path}/", ""), **credit.options()} == told["credit"]


def test_state_hashes_of_the_guide_exist(tmp_path: Path) -> None:
    section = GUIDE.split("## Which states are the same")[1].split("## Reading")[0]
    named = [yaml.safe_load(text) for text in re.findall(r"^\| `(\S[^`]*)`", section, re.MULTILINE)]
    hashes = [one for one in named if isinstance(one, dict) or one in STATE_HASHES]
    assert {one["name"] if isinstance(one, dict) else one for one in hashes} == STATE_HASHES.keys() - {"recorded"}
    for state_hash in hashes:
        assert CreditAssigner(state_hash=state_hash).options["state_hash"] == state_hash


def test_guide_lists_every_estimator_with_its_defaults() -> None:
    section = GUIDE.split("## Estimators")[1].split("## Which states")[0]
    rows = {row[0]: row[1] for row in re.findall(r"^\| `(\w+)` \|.*\|([^|]*)\|$", section, re.MULTILINE)}
    assert rows.keys() == ESTIMATORS.keys()
    for estimator, told in rows.items():
        options = CreditAssigner(estimator).options
        for name, value in re.findall(r"`(\w+)` ([\w.]+)", told):
            assert str(options[name]).removesuffix(".0") == value, (estimator, name)
