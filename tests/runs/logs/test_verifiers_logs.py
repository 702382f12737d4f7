"""Test logs of verifiers. `tests/integrations/verifiers/make_verifiers_log.py` made the fixture with version 0.4.0."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from reward_kit.checks.rows import check_foreign_file
from reward_kit.checks.run import check_run
from reward_kit.errors import ConfigError
from reward_kit.runs.export import Selection, selected
from reward_kit.runs.logs.exporting import export_logs
from reward_kit.runs.logs.importing import detect_format, import_logs
from reward_kit.runs.results import Result, read_results
from reward_kit.runs.run_folder import RunFolder, RunHeader
from tests.integrations.verifiers.episodes import random_episode
from tests.runs.stored_run import make_run, score

LOG = Path(__file__).with_name("verifiers_traces.jsonl")


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(path: Path, lines: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def export(run: Path, target: Path) -> dict[str, int]:
    header = RunHeader.read(run)
    results = selected(run, Selection(header.pass_threshold))
    return dict(export_logs(run, header, results, "verifiers", target, is_private=False).dropped)


def results(run: Path) -> dict[tuple[str, int], Result]:
    return {(one.episode["sample_id"], one.episode["rollout_index"]): one for one in read_results(run)}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return import_logs([LOG], tmp_path_factory.mktemp("runs")).path


class TestImport:
    def test_run_passes_the_check(self, run: Path) -> None:
        assert not check_run(run).findings
        header = RunHeader.read(run)
        assert (header.task_name, header.total) == ("make_verifiers_log", 10)

    def test_score_is_the_weighted_sum_of_the_rewards(self, run: Path) -> None:
        trace = read(LOG)[0]["traces"][0]
        found = results(run)["sum-0", 0].score
        assert found is not None
        rewards = trace["rewards"]
        assert found["score"] == pytest.approx(sum(one["score"] * one["weight"] for one in rewards.values()))
        metrics = {name: metric["score"] for name, metric in found["result"]["metrics"].items()}
        assert metrics == {"reward": 2.5, "reward/correct": 1.0, "reward/brief": 1.0, "calls": 2.0}

    def test_conversation_usage_and_time_are_those_of_the_trace(self, run: Path) -> None:
        trace = read(LOG)[0]["traces"][0]
        record = results(run)["sum-0", 0].episode
        assert [message["role"] for message in record["messages"]] == [
            *("system", "user", "assistant", "tool", "tool", "assistant")
        ]
        assert record["messages"][2]["reasoning_content"] == "add helps"
        assert [call["function"]["name"] for call in record["messages"][2]["tool_calls"]] == ["add", "add"]
        assert (record["policy"], record["ground_truth"], record["num_steps"]) == ("tiny", "3", 2)
        calls = trace["calls"]
        assert record["usage"]["prompt_tokens"] == sum(call["usage"]["prompt_tokens"] for call in calls)
        agent = trace["timing"]["agent"]
        assert record["timing"]["duration_s"] == pytest.approx(agent["end"] - trace["timing"]["start"])

    def test_ends_are_mapped(self, run: Path) -> None:
        ends = {name: result.episode["stop_reason"] for (name, index), result in results(run).items() if index == 0}
        assert ends == {
            "sum-0": "recorded",
            "endless-1": "recorded",
            "cut-2": "output_limit",
            "fail-3": "error",
            "broken-4": "recorded",
        }
        failed = results(run)["fail-3", 0]
        assert failed.score is None
        assert failed.episode["failure"]["class"] == "provider_error"
        assert "this prompt is not allowed" in failed.episode["failure"]["message"]

    def test_failed_reward_leaves_the_episode_unscored_with_its_error(self, run: Path) -> None:
        broken = results(run)["broken-4", 1]
        assert broken.episode["failure"] is None
        assert broken.score is not None
        assert broken.score["score"] is None
        assert "the answer cannot be judged" in broken.score["failure"]["message"]
        assert broken.score["result"]["metrics"]["calls"]["score"] == 2.0

    def test_fields_without_a_place_are_listed(self, run: Path) -> None:
        imported = RunHeader.read(run).imported
        assert imported is not None
        nodes = [node for line in read(LOG) for trace in line["traces"] for node in trace["nodes"]]
        assert imported["fields"]["log_only"]["node.timestamp"] == len(nodes)
        assert imported["fields"]["log_only"]["episode.run"] == 10

    def test_metric_can_be_selected_as_the_score(self, tmp_path: Path) -> None:
        run = import_logs([LOG], tmp_path, scorer="calls").path
        found = results(run)["endless-1", 0].score
        assert found is not None
        assert found["score"] == 6.0

    def test_logs_of_one_model_get_different_names(self, tmp_path: Path) -> None:
        paths = [write(tmp_path / name / "traces.jsonl", read(LOG)) for name in ("before", "after")]
        run = import_logs(paths, tmp_path / "runs")
        assert [one.policy for one in run.policies] == ["tiny (after/traces)", "tiny (before/traces)"]
        export(run.path, tmp_path / "out")
        assert read(tmp_path / "out" / "traces.jsonl") == read(tmp_path / "out" / "traces-1.jsonl") == read(LOG)


class TestRoundTrip:
    def test_imported_log_is_equal_after_export(self, tmp_path: Path) -> None:
        run = import_logs([LOG], tmp_path / "runs").path
        assert export(run, tmp_path / "out.jsonl") == {}
        assert read(tmp_path / "out.jsonl") == read(LOG)

    def test_lines_with_any_number_of_traces_are_equal_after_export(self, tmp_path: Path) -> None:
        lines = read(LOG)
        judge = {**lines[1]["traces"][0], "agent": {"name": "judge", "config": {"model": "big"}}}
        several = {**lines[0], "traces": [*lines[0]["traces"], judge]}
        errors = [{"type": "EnvError", "message": "setup failed"}]
        none = {**lines[2], "traces": [], "ok": False, "errors": errors}
        bare = lines[4]["traces"][0]
        path = write(tmp_path / "traces.jsonl", [several, none, bare, bare])
        run = import_logs([path], tmp_path / "runs").path
        assert not check_run(run).findings
        episodes = [result.episode for result in read_results(run)]
        assert [one["policy"] for one in episodes] == ["tiny", "big (judge)", "verifiers", "tiny", "tiny"]
        assert episodes[2]["failure"]["message"] == "verifiers: setup failed"
        export(run, tmp_path / "out.jsonl")
        assert read(tmp_path / "out.jsonl") == read(path)

    def test_new_score_replaces_the_rewards(self, tmp_path: Path) -> None:
        run = import_logs([LOG], tmp_path / "runs").path
        store = RunFolder(run)
        with store:
            for (name, _), result in results(run).items():
                if name == "broken-4":
                    store.append_score({**score(result.episode["rollout_id"], 0.25), "scorer": {"id": "mine"}})
        export(run, tmp_path / "out.jsonl")
        lines, before = read(tmp_path / "out.jsonl"), read(LOG)
        assert lines[:8] == before[:8]
        [trace], [original] = lines[8]["traces"], before[8]["traces"]
        assert (lines[8]["ok"], trace["ok"], trace["errors"]) == (True, True, [])
        assert (trace["rewards"], trace["metrics"]) == ({"reward": {"score": 0.25, "weight": 1.0}}, {})
        changed = {"rewards", "metrics", "ok", "errors"}
        assert {key: trace[key] for key in trace.keys() - changed} == {
            key: original[key] for key in original.keys() - changed
        }

    def test_run_is_equal_after_export_and_import(self, tmp_path: Path) -> None:
        episodes = [random_episode(seed, is_sound=True) for seed in range(20)]
        for number, episode in enumerate(episodes):
            episode.custom_data |= {"sample_id": str(number), "failure": None, "stop_reason": "answered"}
            episode.is_terminated, episode.is_truncated = True, False
        run = make_run(tmp_path, episodes, [score(episode.id_, 0.5) for episode in episodes])
        assert export(run, tmp_path / "out.jsonl") == {}
        assert not [one for found in check_foreign_file(tmp_path / "out.jsonl", "verifiers") for one in found]
        back = import_logs([tmp_path / "out.jsonl"], tmp_path / "runs").path
        ids = {"rollout_id", "group_id", "rollout_index", "custom_data"}
        for before, after in zip(read_results(run), read_results(back), strict=True):
            assert after.score is not None
            assert after.score["score"] == 0.5
            assert {key: value for key, value in after.episode.items() if key not in ids} == {
                key: value for key, value in before.episode.items() if key not in ids
            }

    def test_lost_fields_are_listed(self, tmp_path: Path) -> None:
        episode = random_episode(1)
        episode.custom_data |= {"failure": None, "final_state": {"kind": "k", "payload": b"state"}}
        line = score(episode.id_, 0.5, s0=1.0)
        line["result"] |= {"reason": "half", "metrics": {"m": {"score": 0.5, "reason": "why"}}}
        dropped = export(make_run(tmp_path, [episode], [line]), tmp_path / "out.jsonl")
        assert dropped == {"final_state": 1, "score.reason": 1, "score.step_outputs": 1, "metric.reason": 1}


def trace(**change: Any) -> dict[str, Any]:
    nodes = [
        {"parent": None, "message": {"role": "user", "content": "2 + 2?"}},
        {"parent": 0, "message": {"role": "assistant", "content": "4"}, "sampled": True},
    ]
    return {"id": "t", "task": {"type": "T", "data": {"id": "a"}}, "nodes": nodes, "ok": True, **change}


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ([1], r"\[0\]: expected an object"),
        ({"traces": [3]}, r"line 2: traces\[0\]: expected an object"),
        (trace(nodes=[3]), r"line 2: nodes\[0\]: expected an object"),
        (trace(nodes=[{"parent": 0}]), "line 2: node 0 of the trace: parent"),
        (trace(nodes=[{"parent": None}]), "line 2: node 0 of the trace: message"),
        (trace(nodes=[{"message": {"role": "robot"}}]), "line 2: node 0 of the trace: message: .*role"),
        (trace(rewards=[1]), "line 2: rewards: expected an object"),
        (trace(rewards={"r": 1}), "line 2: rewards.r: expected an object"),
        (trace(rewards={"r": {"score": 1, "weight": "x"}}), "line 2: rewards.r.weight: expected a number"),
        (trace(errors={"type": "x"}, ok=False), "line 2: errors: expected a list"),
        (trace(nodes=[{"message": {"role": "assistant", "tool_calls": [{"id": "c"}]}}]), r"tool_calls\[0\].name: exp"),
        (trace(nodes=[{"message": {"role": "user"}, "semantic_parents": [3]}]), r"semantic_parents\[0\]: expected"),
        (trace(calls=[1]), r"line 2: calls\[0\]: expected an object"),
        (trace(task="sum"), "line 2: task: expected an object"),
    ],
)
def test_invalid_trace_names_the_line_and_the_field(tmp_path: Path, line: Any, problem: str) -> None:
    path = write(tmp_path / "t.jsonl", [line] if isinstance(line, list) else [trace(), line])
    if isinstance(line, list):
        path.write_text(json.dumps(line))
    with pytest.raises(ConfigError, match=problem) as error:
        import_logs([path], tmp_path / "runs", form="verifiers")
    assert str(path) in str(error.value)
    assert not list((tmp_path / "runs").glob("*"))


def test_format_is_detected(tmp_path: Path) -> None:
    assert detect_format(LOG).name == "verifiers"
    assert detect_format(write(tmp_path / "t.jsonl", [trace()])).name == "verifiers"
