"""A run watched while it grows agrees with a run read at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from reward_kit.errors import ConfigError, StoreError
from reward_kit.report.episode_chunks import StoredLines
from reward_kit.report.run_data import read_run
from reward_kit.report.viewer_runs import WatchedRun
from reward_kit.runs.run_folder import RunHeader
from tests.report.run_factory import episode, make_run, random_run, score


def add(run: Path, kind: str, *lines: dict[str, Any]) -> None:
    with (run / f"{kind}.jsonl").open("a") as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines))


def names(watch: WatchedRun, since: int = 0) -> list[str]:
    return [facts.row.rollout_id for facts in watch.changed_since(since)]


def test_run_read_incrementally_equals_run_read_at_once(tmp_path: Path) -> None:
    whole = random_run(tmp_path, 60)
    (tmp_path / "growing").mkdir()
    growing = make_run(tmp_path / "growing", [], [], task={"pass_threshold": 0.5})
    (growing / "run.json").write_bytes((whole / "run.json").read_bytes())
    watch = WatchedRun(growing)
    scores = {line["rollout_id"]: line for line in map(json.loads, (whole / "scores.jsonl").read_text().splitlines())}
    for line in map(json.loads, (whole / "episodes.jsonl").read_text().splitlines()):
        add(growing, "episodes", line)
        watch.poll_all()
        if line["rollout_id"] in scores:
            add(growing, "scores", scores[line["rollout_id"]])
    watch.poll_all()
    assert list(watch.facts().episodes) == list(read_run(whole).episodes)
    at_once = WatchedRun(whole)
    at_once.poll_all()
    assert at_once.facts() == read_run(whole)


def test_each_byte_is_read_once_across_polls(tmp_path: Path) -> None:
    run = make_run(tmp_path, [], [])
    watch = WatchedRun(run)
    for number in range(50):
        add(run, "episodes", episode(f"r{number}"))
        watch.poll_all()
        add(run, "scores", score(f"r{number}", 1.0))
        watch.poll_all()
        watch.poll_all()
    assert watch.bytes_read == sum((run / name).stat().st_size for name in ("episodes.jsonl", "scores.jsonl"))


def test_changed_since_returns_new_episodes_and_scores_only(tmp_path: Path) -> None:
    run = make_run(tmp_path, [episode("a"), episode("b")], [score("a", 1.0)])
    watch = WatchedRun(run)
    watch.poll_all()
    assert set(names(watch)) == {"a", "b"}
    before = watch.change
    assert names(watch, before) == []
    add(run, "episodes", episode("c"))
    add(run, "scores", score("b", 0.0))
    watch.poll_all()
    assert set(names(watch, before)) == {"b", "c"}
    assert [facts.row.score for facts in watch.changed_since(before) if facts.row.rollout_id == "b"] == [0.0]


def test_later_attempt_replaces_the_earlier_attempt(tmp_path: Path) -> None:
    run = make_run(tmp_path, [episode("a", stop_reason="error")], [])
    watch = WatchedRun(run)
    watch.poll_all()
    add(run, "scores", score("a", 0.25, attempt=1))  # may be seen before the episode is
    watch.poll_all()
    add(run, "episodes", episode("a", attempt=1))
    watch.poll_all()
    (facts,) = watch.facts().episodes
    assert (facts.row.stop_reason, facts.row.score, watch.facts().earlier_attempts) == ("answered", 0.25, 1)
    add(run, "scores", score("a", 1.0, attempt=0))
    watch.poll_all()
    assert watch.facts().episodes[0].row.score == 0.25


def test_replaced_files_start_a_new_epoch(tmp_path: Path) -> None:
    run = make_run(tmp_path, [episode("a"), episode("b")], [score("a", 1.0)])
    watch = WatchedRun(run)
    watch.poll_all()
    epoch = watch.epoch
    for kind, line in (("episodes", episode("z")), ("scores", score("z", 0.5))):
        (run / "new").write_text(json.dumps(line) + "\n")
        (run / "new").replace(run / f"{kind}.jsonl")
    watch.poll_all()
    assert watch.epoch != epoch
    assert [(facts.row.rollout_id, facts.row.score) for facts in watch.facts().episodes] == [("z", 0.5)]


def test_header_is_reread_when_it_changes(tmp_path: Path) -> None:
    run = make_run(tmp_path, [], [], status="running")
    watch = WatchedRun(run)
    watch.poll_all()
    before = watch.change
    header = RunHeader.read(run)
    (run / "run.json").write_bytes(header.replace(status="complete").to_bytes())
    watch.poll_all()
    assert watch.header.status == "complete" and watch.change > before


def test_group_lines_are_returned_as_stored(tmp_path: Path) -> None:
    run = make_run(tmp_path, [episode("a"), episode("other", sample="y"), episode("b")], [score("b", 1.0)])
    steps = [{"rollout_id": "a", "step": 0, "A": 0.5}, {"rollout_id": "a", "step": 1, "A": 1.0}]
    add(run, "credit", *steps, {"rollout_id": "other", "step": 0})
    watch = WatchedRun(run)
    watch.poll_all()
    lines = (run / "episodes.jsonl").read_bytes().splitlines(keepends=True)
    credit = (run / "credit.jsonl").read_bytes().splitlines(keepends=True)
    assert watch.episode_lines("b").lines == [
        StoredLines(lines[0], None, credit[0] + credit[1]),
        StoredLines(lines[2], (run / "scores.jsonl").read_bytes(), b""),
    ]
    assert watch.group_lines("x-p") == watch.episode_lines("a")


def test_episode_cut_off_by_a_limit_is_not_in_its_group(tmp_path: Path) -> None:
    cut = episode("cut", stop_reason="run_limit")
    watch = WatchedRun(make_run(tmp_path, [episode("a"), cut], []))
    watch.poll_all()
    assert watch.group_lines("x-p").size == len(watch.episode_lines("a").lines) == 1
    with pytest.raises(ConfigError, match="episode 'cut' does not exist yet"):
        watch.episode_lines("cut")


def test_episode_lines_of_a_large_group_are_the_surrounding_part(tmp_path: Path) -> None:
    run = make_run(tmp_path, [episode(f"r{n:03}", rollout_index=n) for n in range(150)], [])
    watch = WatchedRun(run)
    watch.poll_all()
    size, first, lines = watch.episode_lines("r100")
    ids = [json.loads(one.episode)["rollout_id"] for one in lines]
    assert (size, first, ids) == (150, 64, [f"r{n:03}" for n in range(64, 128)])
    assert watch.group_lines("x-p").first == 0


def test_rewritten_credit_is_reread(tmp_path: Path) -> None:
    run = make_run(tmp_path, [episode("a")], [])
    watch = WatchedRun(run)
    watch.poll_all()
    assert watch.episode_lines("a").lines[0].credit == b""
    for value in (0.5, 0.25):
        (run / "new").write_text(json.dumps({"rollout_id": "a", "step": 0, "A": value}) + "\n")
        (run / "new").replace(run / "credit.jsonl")
        assert json.loads(watch.episode_lines("a").lines[0].credit)["A"] == value


def test_unknown_episode_and_group_are_named(tmp_path: Path) -> None:
    watch = WatchedRun(make_run(tmp_path, [episode("a")], []))
    watch.poll_all()
    for ask, told in ((watch.episode_lines, "episode 'z'"), (watch.group_lines, "group 'z'")):
        with pytest.raises(ConfigError, match=told):
            ask("z")


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    run = make_run(tmp_path, [episode("a")], [])
    watch = WatchedRun(run)
    watch.poll_all()
    with (run / "scores.jsonl").open("a") as file:
        file.write('{"rollout_id": "a", "score": "high"}\n')
    for _ in range(2):
        with pytest.raises(StoreError, match="score of a must be a finite number"):
            watch.poll_all()


def test_training_run_is_rejected(tmp_path: Path) -> None:
    run = make_run(tmp_path, [], [], training={"train_path": "x"})
    with pytest.raises(ConfigError, match="training run"):
        WatchedRun(run)


def test_search_finds_texts_and_calls_of_the_latest_lines(tmp_path: Path) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "look_up", "arguments": '{"town": "Oslo"}'}}
    coded = {"__type__": "text", "value": "aGFsZiBcdWQ4MDA="}
    messages = [{"role": "user", "content": "Wie heißt die STRASSE?"}, {"role": "assistant", "tool_calls": [call]}]
    parts = [{"role": "user", "content": [{"type": "text", "text": "a picture"}]}, {"role": "tool", "content": coded}]
    run = make_run(tmp_path, [episode("a", messages=messages), episode("b", messages=parts)], [])
    watch = WatchedRun(run)
    watch.poll_all()
    for query, found in {
        "HEISST": [],
        "heißt die strasse": ["a"],
        "look_up": ["a"],
        "oslo": ["a"],
        "A Picture": ["b"],
        "assistant": [],
        "tool_calls": [],
        "": [],
        "\ud800": [],
    }.items():
        assert watch.find(query) == found, query
    add(run, "episodes", episode("c", messages=messages), episode("a", attempt=1, messages=parts))
    watch.poll_all()
    assert watch.find("oslo") == ["c"], "a later attempt replaces the earlier one"
    (run / "episodes.jsonl").write_text(json.dumps(episode("d", steps=[{"action": "go to Oslo"}])) + "\n")
    watch.poll_all()
    assert watch.find("oslo") == ["d"], "without messages, the actions are searched"
