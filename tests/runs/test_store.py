"""Test the run directory: readable after a kill, and exact round trips."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_kit.environments.base import StateSnapshot
from reward_kit.environments.snapshots import compose, decompose
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.errors import ConfigError, StoreError
from reward_kit.models import Message
from reward_kit.runs.redaction import Redaction, without_secrets
from reward_kit.runs.run_folder import (
    RunFolder,
    RunHeader,
    RunTiming,
    latest_run,
    load_episode,
    new_run_path,
    read_episodes,
    read_scores,
)


def make_episode(rollout_id: str = "a-0", text: str = "hello") -> SingleAgentEpisode:
    episode = SingleAgentEpisode(rollout_id)
    episode.add_messages([Message(role="user", content=text)])
    episode.add_env_reset(text, {"state_key": "k0"})
    episode.add_assistant_message(Message(role="assistant", content="answer"))
    episode.add_env_step("", {"type": "text", "content": "answer"}, 1.0, {"is_action_valid": True}, terminated=True)
    snapshot = StateSnapshot("json", b'{"x":1}')
    episode.custom_data = {
        "sample_id": "a",
        "group_id": "a",
        "rollout_index": 0,
        "attempt": 0,
        "policy": "p",
        "stop_reason": "answered",
        "failure": None,
        "seeds": {},
        "start": {},
        "usage": {},
        "sample": {},
        "ground_truth": None,
        "timing": {},
        "final_state": {"kind": snapshot.kind, "payload": snapshot.payload},
    }
    return episode


@pytest.fixture
def store(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "run", RunHeader(task_name="t"))


def test_episode_round_trip_with_final_state(store: RunFolder) -> None:
    episode = make_episode(text="lone \ud800 surrogate and ünïcode")
    with store:
        store.append_episode(episode)
    (record,) = read_episodes(store.path)
    assert load_episode(store.path, record) == episode
    assert [path.suffix for path in (store.path / "states").iterdir()] == [".json"]


def test_changed_or_missing_final_state_is_detected(store: RunFolder) -> None:
    with store:
        store.append_episode(make_episode())
    (record,) = read_episodes(store.path)
    (state,) = (store.path / "states").iterdir()
    state.write_bytes(b"{}")
    with pytest.raises(StoreError, match="was changed"):
        load_episode(store.path, record)
    state.unlink()
    with pytest.raises(StoreError, match="missing"):
        load_episode(store.path, record)


@pytest.mark.parametrize("torn", [b'{"rollout_id": "b', b"{", b"x" * 200_000])
def test_incomplete_last_line_is_ignored_and_truncated_on_opening(store: RunFolder, torn: bytes) -> None:
    with store:
        store.append_episode(make_episode())
    path = store.path / "episodes.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + torn)
    assert [record["rollout_id"] for record in read_episodes(store.path)] == ["a-0"]
    with RunFolder(store.path):
        assert path.read_bytes() == whole


def test_file_with_only_an_incomplete_line_becomes_empty(store: RunFolder) -> None:
    (store.path / "scores.jsonl").write_bytes(b'{"rollout')
    with RunFolder(store.path):
        assert list(read_scores(store.path)) == []
        assert (store.path / "scores.jsonl").read_bytes() == b""


@pytest.mark.parametrize("value", ['"good"', '"1.0"', "true", "NaN", "-Infinity", "1e999", f"1{'0' * 400}", "[1]"])
def test_invalid_score_is_reported_before_figures(tmp_path: Path, value: str) -> None:
    store = RunFolder.create(tmp_path / "run", RunHeader(task_name="t"))
    lines = [f'{{"rollout_id": "r{n}", "score": {score}}}\n' for n, score in enumerate(("0.5", "1", "null", value))]
    (store.path / "scores.jsonl").write_text("".join(lines[:3]))
    assert [line["score"] for line in read_scores(store.path)] == [0.5, 1, None]
    (store.path / "scores.jsonl").write_text("".join(lines))
    with pytest.raises(StoreError, match=r"scores\.jsonl:4: the score of r3 must be a finite number or null, got "):
        list(read_scores(store.path))


def test_damaged_line_in_the_middle_is_an_error_with_its_number(store: RunFolder) -> None:
    (store.path / "scores.jsonl").write_bytes(b'{"rollout_id": "a"}\nnot json\n{"rollout_id": "b"}\n')
    with pytest.raises(StoreError, match=r"scores\.jsonl:2"):
        list(read_scores(store.path))


def test_run_is_locked_against_a_second_process(store: RunFolder) -> None:
    with store, pytest.raises(StoreError, match="another process"), RunFolder(store.path):
        pass
    with RunFolder(store.path):
        pass


@pytest.mark.parametrize("name", [".lock", "episodes.jsonl", "scores.jsonl", "run.json"])
def test_run_that_cannot_be_opened_is_named_and_not_locked(store: RunFolder, name: str) -> None:
    (store.path / name).unlink(missing_ok=True)
    (store.path / name).mkdir()
    with pytest.raises(StoreError, match=rf"cannot \w+ .*{name}"), RunFolder(store.path):
        pass
    (store.path / name).rmdir()
    store.write_header(store.header)
    with RunFolder(store.path):
        pass


def test_missing_run_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"cannot open .*gone"), RunFolder(tmp_path / "gone"):
        pass


def test_unreadable_run_file_is_named(store: RunFolder) -> None:
    (store.path / "episodes.jsonl").mkdir()
    with pytest.raises(StoreError, match=r"cannot read .*episodes\.jsonl"):
        list(read_episodes(store.path))


def test_unwritable_final_state_is_named(store: RunFolder) -> None:
    (store.path / "states").write_text("no folder")
    with store, pytest.raises(StoreError, match=r"cannot write .*states"):
        store.append_episode(make_episode())


def test_the_latest_run_is_found_by_task(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run"):
        latest_run(tmp_path)
    for hour, name in enumerate(("one", "two", "one")):
        timing = RunTiming(started_at=datetime(2026, 1, 1, hour, tzinfo=UTC))
        last = RunFolder.create(
            new_run_path(tmp_path, name), RunHeader(task_name=name, task_path="t", timing=timing)
        ).path
    RunFolder.create(new_run_path(tmp_path, "one"), RunHeader(task_name="one", data="transcripts.jsonl"))
    assert latest_run(tmp_path) == latest_run(tmp_path, "one") == last
    assert RunHeader.read(latest_run(tmp_path, "two")).task_name == "two"


def test_secrets_are_hidden_at_any_depth() -> None:
    hidden = without_secrets({"policies": [{"options": {"api_key": "sk-1", "max_tokens": 5, "model": "m"}}]})
    assert hidden == {"policies": [{"options": {"api_key": "(hidden)", "max_tokens": 5, "model": "m"}}]}


@given(st.text(max_size=80))
def test_run_path_is_always_a_single_plain_folder_name(name: str) -> None:
    path = new_run_path(Path("runs"), name)
    assert path.parent == Path("runs")
    assert path.name.isascii() and "/" not in path.name and not path.name.startswith((".", "-2"))


def test_states_of_several_resources_are_redacted(tmp_path: Path) -> None:
    parts = {"a": StateSnapshot("json", b'{"key":"abcdefgh1234"}'), "b": StateSnapshot("sqlite", b"abcdefgh1234")}
    snapshot = compose(parts)
    episode = make_episode()
    episode.custom_data["final_state"] = {"kind": snapshot.kind, "payload": snapshot.payload}
    with RunFolder.create(tmp_path / "run", RunHeader(task_name="t"), Redaction(["abcdefgh1234"])) as store:
        store.append_episode(episode)
        (record,) = read_episodes(store.path)
        kept = load_episode(store.path, record).custom_data["final_state"]
    found = decompose(StateSnapshot(kept["kind"], kept["payload"]))
    assert b"abcdefgh1234" not in found["a"].payload and found["b"] == parts["b"]
