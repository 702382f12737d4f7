"""Groups of a training run's kept episodes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from reward_kit.episodes.record import episode_to_record
from reward_kit.errors import StoreError
from reward_kit.report import training_data as module
from reward_kit.report.training_data import KeptGroups, kept_groups
from reward_kit.runs.run_folder import RunHeader
from tests.runs.stored_run import episode

HEADER = RunHeader(task_name="t", **{"training": {"config": {"credit": {"estimator": "gigpo", "omega": 0.5}}}})


def line(rollout_id: str, group: str, index: int, score: float | None) -> str:
    made = episode(rollout_id, ["s", "t"], group, index)
    made.tokens.add_turn(0, [1, 2], [3], [-0.5], 0)
    credit = [
        {"rollout_id": rollout_id, "group_id": group, "step": step, "state_key": key, "A": 0.5, "A_E": 1.0, "A_S": 0.0}
        for step, key in enumerate("st")
    ]
    training = {"score": score, "credit": credit, "advantages": [0.5], "ratios": [[1.25]]}
    return json.dumps({**episode_to_record(made), "training": training}) + "\n"


def kept(folder: Path, update: int, lines: list[str]) -> None:
    (folder / "episodes").mkdir(exist_ok=True)
    (folder / "episodes" / f"update-{update:06d}.jsonl").write_text("".join(lines))


def read(text: str) -> list[tuple[str, Any]]:
    """Return the letters and values of the lines of a chunk."""
    return [(one[0], json.loads(one[1:])) for one in text.splitlines()]


def groups_in(run: Path) -> KeptGroups:
    groups = kept_groups(run, HEADER)
    assert groups is not None
    return groups


def test_kept_episode_has_its_score_and_step_credit(tmp_path: Path) -> None:
    kept(tmp_path, 2, [line("b", "g", 1, 0.0), line("a", "g", 0, 1.0)])
    groups = groups_in(tmp_path)
    assert (groups.update, groups.groups, groups.left_out) == (2, {"g": ["a", "b"]}, 0)
    (text,) = groups.data.texts
    letters = read(text)
    assert [letter for letter, _ in letters] == ["E", "S", "C"] * 2
    record, score, credit = (value for _, value in letters[:3])
    assert (record["rollout_id"], score["score"]) == ("a", 1.0)
    assert [(row["step"], row["A"]) for row in credit] == [(0, 0.5), (1, 0.5)]
    assert record["tokens"]["steps"][0]["ratios"] == [1.25] and record["tokens"]["steps"][0]["advantages"] == [0.5]
    assert "credit" not in record["training"], "it stands in its own line already"


def test_index_lists_kept_episodes_and_the_estimator(tmp_path: Path) -> None:
    kept(tmp_path, 1, [line("a", "g", 0, 1.0)])
    index = json.loads(groups_in(tmp_path).data.index)
    assert index["chunks"] == [[["g", 1, 0, ["a"]]]]
    assert index["credit"] == {"estimator": "gigpo", "omega": 0.5}


def test_kept_groups_are_of_the_latest_update_with_differing_scores_first(tmp_path: Path) -> None:
    kept(tmp_path, 9, [line("old", "g", 0, 1.0)])
    rows = [
        line("a", "same", 0, 1.0),
        line("b", "same", 1, 1.0),
        line("c", "apart", 0, 1.0),
        line("d", "apart", 1, 0.0),
    ]
    kept(tmp_path, 10, [*rows, line("e", "unscored", 0, None)])
    groups = groups_in(tmp_path)
    assert groups.update == 10 and list(groups.groups) == ["apart", "same", "unscored"]


def test_groups_beyond_the_size_limit_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_BYTES", 3000)
    kept(tmp_path, 1, [line(f"r{number}", f"g{number}", 0, 1.0) for number in range(9)])
    groups = groups_in(tmp_path)
    assert len(groups.groups) + groups.left_out == 9 and 1 <= len(groups.groups) < 9
    assert sum(map(len, groups.data.texts)) <= 3000 + len(groups.data.texts[0])


def test_lines_without_training_values_give_no_groups(tmp_path: Path) -> None:
    record = json.loads(line("a", "g", 0, 1.0))
    del record["training"]
    kept(tmp_path, 1, [json.dumps(record) + "\n"])
    assert kept_groups(tmp_path, HEADER) is None


def test_run_without_kept_episodes_has_no_groups(tmp_path: Path) -> None:
    assert kept_groups(tmp_path, HEADER) is None


@pytest.mark.parametrize("damage", ["{", "[]\n", "{}\n"])
def test_damaged_line_is_reported(tmp_path: Path, damage: str) -> None:
    kept(tmp_path, 1, [line("a", "g", 0, 1.0), damage])
    with pytest.raises(StoreError, match=r"update-000001\.jsonl:2"):
        kept_groups(tmp_path, HEADER)
