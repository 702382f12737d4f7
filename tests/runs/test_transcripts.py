"""Transcripts as episodes: accepted rows and errors."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from reward_kit.agent.models import episode_steps
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.errors import ConfigError, EpisodeError, StoreError
from reward_kit.reward_agent import ScoringRequest
from reward_kit.runs.run_folder import RunFolder, RunHeader
from reward_kit.runs.scoring import read_transcripts
from tests.runs.test_store import make_episode

USER = {"role": "user", "content": "2+2"}
ANSWER = {"role": "assistant", "content": "4"}


def calling(*calls: tuple[str, str], content: str | None = None) -> dict[str, Any]:
    made = [
        {"id": f"c{n}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for n, (name, arguments) in enumerate(calls)
    ]
    return {"role": "assistant", "content": content, "tool_calls": made}


def read(folder: Path, *rows: Any) -> list[SingleAgentEpisode]:
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_transcripts(path)


def facts(episode: SingleAgentEpisode, *names: str) -> tuple[Any, ...]:
    return tuple(episode.custom_data[name] for name in names)


class TestSteps:
    def test_each_assistant_message_is_a_step(self, tmp_path: Path) -> None:
        tool = {"role": "tool", "content": "four", "tool_call_id": "c0"}
        (episode,) = read(tmp_path, {"messages": [USER, calling(("add", '{"x": 2}')), tool, ANSWER]})
        assert len(episode) == 2
        assert episode.assistant_turns.tolist() == [1, 3]
        assert [episode.get_observations(t) for t in range(3)] == ["2+2", "four", ""]
        assert [step.action_taken["type"] for step in episode_steps(episode)] == ["tool_call", "text"]
        assert [message.to_chat() for message in episode.messages][1]["tool_calls"][0]["function"]["name"] == "add"
        assert episode.is_terminated and facts(episode, "stop_reason", "failure") == ("recorded", None)

    def test_messages_before_the_first_action_are_its_observation(self, tmp_path: Path) -> None:
        system = {"role": "system", "content": "be short"}
        (episode,) = read(tmp_path, {"messages": [system, USER, ANSWER]})
        assert episode.get_observations(0) == "be short\n2+2"

    def test_transcript_can_have_no_steps_or_end_with_the_user(self, tmp_path: Path) -> None:
        none, ended = read(
            tmp_path, {"messages": [USER]}, {"messages": [USER, ANSWER, {"role": "user", "content": "?"}]}
        )
        assert (len(none), len(ended)) == (0, 1)
        assert none.is_terminated and ended.is_terminated
        assert ended.get_observations(1) == "?"

    def test_transcripts_have_no_environment_return(self, tmp_path: Path) -> None:
        (episode,) = read(tmp_path, {"messages": [USER, ANSWER]})
        assert ScoringRequest.from_episode(episode).environment_return is None


class TestIdentity:
    def test_rows_with_equal_ids_are_rollouts_of_the_same_sample(self, tmp_path: Path) -> None:
        row = {"messages": [USER, ANSWER]}
        episodes = read(tmp_path, {"id": "a", **row}, {"id": "b", **row}, {"id": "a", **row}, row)
        found = [facts(episode, "sample_id", "rollout_index") for episode in episodes]
        assert found == [("a", 0), ("b", 0), ("a", 1), ("sample-3", 0)]
        groups = [episode.custom_data["group_id"] for episode in episodes]
        assert groups[0] == groups[2] and len(set(groups)) == 3
        assert len({episode.id_ for episode in episodes}) == 4

    def test_number_is_accepted_as_id(self, tmp_path: Path) -> None:
        (episode,) = read(tmp_path, {"id": 7, "messages": [USER]})
        assert episode.custom_data["sample_id"] == "7"

    @pytest.mark.parametrize(
        ("row", "policy"),
        [
            ({}, "transcript"),
            ({"model": "m"}, "m"),
            ({"policy": "p", "model": "m"}, "p"),
            ({"policy": ""}, "transcript"),
        ],
    )
    def test_policy_name_comes_from_the_row(self, tmp_path: Path, row: dict[str, Any], policy: str) -> None:
        (episode,) = read(tmp_path, {**row, "messages": [USER]})
        assert episode.custom_data["policy"] == policy

    def test_other_row_fields_are_passed_to_the_reward(self, tmp_path: Path) -> None:
        (episode,) = read(tmp_path, {"id": "a", "messages": [USER], "ground_truth": {"x": 1}, "level": 3})
        assert facts(episode, "ground_truth", "sample") == ({"x": 1}, {"id": "a", "level": 3})


class TestActions:
    @pytest.mark.parametrize(
        ("arguments", "known"),
        [("", {"arguments": {}}), ('{"x": 2}', {"arguments": {"x": 2}}), ('{"x": ' * 100_000, None)],
    )
    def test_actions_equal_those_of_a_policy_with_the_same_output(
        self, tmp_path: Path, arguments: str, known: dict[str, Any] | None
    ) -> None:
        (episode,) = read(tmp_path, {"messages": [USER, calling(("add", arguments))]})
        expected = {"type": "tool_call", "name": "add", "id": "c0", **(known or {"arguments_text": arguments})}
        assert [step.action_taken for step in episode_steps(episode)] == [expected]

    def test_reasoning_is_kept(self, tmp_path: Path) -> None:
        (episode,) = read(tmp_path, {"messages": [USER, {**ANSWER, "reasoning_content": "2 and 2"}]})
        assert episode.get_actions(0)["reasoning_content"] == "2 and 2"


class TestRefusals:
    @pytest.mark.parametrize(
        ("row", "message"),
        [
            ({"id": "a", "q": 1}, "must have a list 'messages'; this row has id, q"),
            ({"messages": []}, "messages: expected a list of messages, got "),
            ({"messages": {"role": "user"}}, "messages: expected a list of messages"),
            ({"messages": "[not json"}, "messages: not JSON"),
            ({"messages": "[" * 100_000}, "messages: not JSON"),
            ({"messages": [{"role": "asistant"}]}, "role: .*asistant"),
            ({"messages": ["hello"]}, "messages: .*hello"),
        ],
    )
    def test_invalid_row_is_reported_with_its_line(self, tmp_path: Path, row: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigError, match=rf"data\.jsonl:2: .*{message}") as caught:
            read(tmp_path, {"messages": [USER]}, row)
        assert len(str(caught.value).splitlines()) == 1

    def test_invalid_message_among_valid_messages_is_reported(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="messages: role: missing"):
            read(tmp_path, {"messages": [USER, {"content": "x"}]})


def test_csv_cell_contains_the_messages_as_json(tmp_path: Path) -> None:
    path = tmp_path / "data.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["id", "messages"], ["a", json.dumps([USER, ANSWER])]])
    (episode,) = read_transcripts(path)
    assert [message.text for message in episode.messages] == ["2+2", "4"]


class TestEpisodesOfARun:
    def store(self, folder: Path, *ids: str) -> Path:
        with RunFolder.create(folder / "run", RunHeader(task_name="t")) as store:
            for rollout_id in ids:
                store.append_episode(make_episode(rollout_id))
        return store.path

    def test_episodes_of_a_run_round_trip(self, tmp_path: Path) -> None:
        path = self.store(tmp_path, "a-0", "a-1")
        assert read_transcripts(path / "episodes.jsonl") == [make_episode("a-0"), make_episode("a-1")]

    def test_duplicate_episode_is_rejected_with_both_lines(self, tmp_path: Path) -> None:
        path = self.store(tmp_path, "a-0", "a-1", "a-0") / "episodes.jsonl"
        with pytest.raises(ConfigError) as caught:
            read_transcripts(path)
        assert str(caught.value) == f"{path}:3: rollout 'a-0' is already used at {path}:1"

    def test_file_moved_without_its_final_states_is_reported(self, tmp_path: Path) -> None:
        path = self.store(tmp_path, "a-0") / "episodes.jsonl"
        moved = path.rename(tmp_path / "moved.jsonl")
        with pytest.raises(StoreError, match=r"its final state .* is missing"):
            read_transcripts(moved)

    @pytest.mark.parametrize(
        ("state", "expected"),
        [
            ({"kind": "json"}, "episode a-0: final_state must have a kind and either a sha256 or a payload"),
            ({"kind": "json", "payload": "{}"}, "final_state must have a kind and either a sha256 or a payload"),
            ({"kind": "json", "payload": {"__type__": "bytes", "value": "e"}}, r"episodes.jsonl:1: it cannot be read"),
        ],
    )
    def test_damaged_final_state_is_reported_in_a_single_line(self, tmp_path: Path, state: Any, expected: str) -> None:
        path = self.store(tmp_path, "a-0") / "episodes.jsonl"
        path.write_text(json.dumps({**json.loads(path.read_text()), "final_state": state}) + "\n")
        with pytest.raises(StoreError, match=expected):
            read_transcripts(path)

    def test_episode_of_another_version_is_reported_in_a_single_line(self, tmp_path: Path) -> None:
        path = self.store(tmp_path, "a-0") / "episodes.jsonl"
        record = json.loads(path.read_text())
        path.write_text(json.dumps({**record, "schema_version": 99}) + "\n")
        with pytest.raises(EpisodeError, match="the episode record has version 99"):
            read_transcripts(path)

    def test_latest_attempt_counts_and_episodes_cut_off_by_a_limit_do_not(self, tmp_path: Path) -> None:
        path = self.store(tmp_path, "a-0", "a-1", "a-2") / "episodes.jsonl"
        first, second, third = map(json.loads, path.read_text().splitlines())
        again = {**first, "attempt": 2, "policy": "again"}
        lines = [again, {**first, "attempt": None}, second, third, {**third, "attempt": 1}]
        lines[-1]["stop_reason"] = "run_limit"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        episodes = read_transcripts(path)
        assert [(one.id_, one.custom_data["policy"]) for one in episodes] == [("a-0", "again"), ("a-1", "p")]
