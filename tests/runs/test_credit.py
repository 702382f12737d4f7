"""`credit.jsonl` of a run on disk and its section in `summary.json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from reward_kit.errors import ConfigError, StoreError
from reward_kit.rl_processing import CreditAssigner
from reward_kit.runs.credit import assign_credit, credit_settings, extreme_steps, headline, write_section
from reward_kit.runs.files import read_json
from reward_kit.runs.run_folder import RunFolder, read_credit
from reward_kit.task_parts import CreditModel
from tests.runs.stored_run import episode, make_run, score

GIGPO = CreditModel(estimator="gigpo", omega=0.5, gamma=0.5, epsilon=0.0)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two scored episodes of one group that share s0, an unscored third, and one of another group."""
    episodes = [
        episode("b", ["s0", "s2"], index=1),
        episode("a", ["s0", "s1"], index=0),
        episode("c", ["s0"], index=2),
        episode("alone", ["s0"], group="h"),
    ]
    return make_run(tmp_path, episodes, [score("a", 1.0), score("b", 0.0), score("c", None), score("alone", 1.0)])


def test_credit_file_has_a_complete_line_per_step(run: Path) -> None:
    assign_credit(run, GIGPO)
    lines = [json.loads(line) for line in (run / "credit.jsonl").read_text().splitlines()]
    assert [(line["rollout_id"], line["step"]) for line in lines] == [
        *(("a", 0), ("a", 1), ("b", 0), ("b", 1), ("c", 0), ("alone", 0)),
    ]
    half = pytest.approx(0.5**0.5)
    place = {"schema_version": 1, "rollout_id": "a", "group_id": "g", "state_key": "s0", "step": 0}
    worth = {"base_reward": None, "return_to_go": 0.5, "A_E": half, "A_S": half, "A": half}
    assert lines[0] == {**place, "anchor": 0, "peers": 1, **worth}
    assert (lines[1]["A_E"], lines[1]["A_S"], lines[1]["peers"]) == (half, 0.0, 0)
    assert lines[4]["A"] is None and lines[4]["anchor"] == 0 and lines[4]["peers"] is None
    assert (lines[5]["A"], lines[5]["anchor"]) == (0.0, 3)


def test_summary_records_the_estimator_and_the_scores_used(run: Path) -> None:
    write_section(run, assign_credit(run, GIGPO))
    summary = read_json(run / "summary.json")
    section = summary["credit"]
    assert summary["policies"] == []
    assert (section["estimator"], section["step_rewards"]) == ("gigpo", "reward_function")
    assert section["options"] == dict(CreditAssigner("gigpo", **GIGPO.options()).options)
    counts = ("episodes", "unscored", "groups", "groups_without_peers", "steps")
    assert [section[name] for name in counts] == [4, 1, 2, 1, 6]
    assert section["diagnostics"]["peer_share"] == 0.4 and section["anchor_sizes"] == {"1": 3, "2": 1}
    before = section["scores_sha256"]
    with RunFolder(run) as store:
        store.append_score(score("b", 0.5))
    assert assign_credit(run, GIGPO).section["scores_sha256"] != before


def test_credit_is_rewritten_with_equal_bytes_for_equal_scores(run: Path) -> None:
    assign_credit(run, GIGPO)
    first = (run / "credit.jsonl").read_bytes()
    assign_credit(run, CreditModel(estimator="rloo"))
    assert len((run / "credit.jsonl").read_text().splitlines()) == 6
    assert (run / "credit.jsonl").read_bytes() != first
    assign_credit(run, GIGPO)
    assert (run / "credit.jsonl").read_bytes() == first
    assert not [path for path in run.iterdir() if path.name.startswith(".credit")]


def test_credit_does_not_depend_on_episode_order(tmp_path: Path) -> None:
    episodes = [episode(name, ["s0", "s1"], index=i) for i, name in enumerate("abc")]
    scores = [score(name, float(i == 1)) for i, name in enumerate("abc")]
    files = []
    for name, step in (("forth", 1), ("back", -1)):
        (tmp_path / name).mkdir()
        path = make_run(tmp_path / name, episodes[::step], scores[::step])
        assign_credit(path, GIGPO)
        files.append((path / "credit.jsonl").read_bytes())
    assert files[0] == files[1]


def test_incomplete_last_line_is_ignored(run: Path) -> None:
    assign_credit(run, GIGPO)
    with (run / "credit.jsonl").open("ab") as file:
        file.write(b'{"schema_version":1,"rollout')
    assert len(list(read_credit(run))) == 6


def test_latest_attempts_and_scores_count_and_unfinished_episodes_do_not(tmp_path: Path) -> None:
    again, cut = episode("a", ["s0"]), episode("cut", ["s0"], index=2)
    again.custom_data["attempt"] = 1
    cut.custom_data["stop_reason"] = "run_limit"
    episodes = [episode("a", ["s0", "s1"]), episode("b", ["s0"], index=1), cut, again]
    scores = [score("a", 0.0), score("a", 0.25, attempt=1), score("a", 1.0, attempt=1), score("b", 0.0)]
    assign_credit(make_run(tmp_path, episodes, scores), CreditModel(estimator="rloo"))
    assert [(row["rollout_id"], row["step"], row["A"]) for row in read_credit(tmp_path / "run")] == [
        *(("a", 0, 1.0), ("b", 0, -1.0)),
    ]


def test_step_rewards_option_selects_the_source_of_step_rewards(tmp_path: Path) -> None:
    episodes = [episode("a", ["s0", "s1"]), episode("b", ["s0", "s1"], index=1)]
    path = make_run(tmp_path, episodes, [score("a", 1.0, s0=0.25, s1=0.5), score("b", 0.0)])
    assign_credit(path, GIGPO)
    assert [row["base_reward"] for row in read_credit(path)] == [0.25, 0.5, None, None]
    assert [row["return_to_go"] for row in read_credit(path)] == [0.5, 0.5, 0.0, 0.0]
    assign_credit(path, CreditModel.model_validate({**GIGPO.model_dump(), "step_rewards": "environment"}))
    assert [row["base_reward"] for row in read_credit(path)] == [0.25, 0.5, 0.0, 0.0]


def test_invalid_action_flags_are_read_from_disk(run: Path) -> None:
    penalised = CreditModel.model_validate({**GIGPO.model_dump(), "invalid_action_penalty": 0.25})
    assign_credit(run, penalised)
    first, second, *_ = read_credit(run)
    # The first action of each episode was invalid.
    assert (first["return_to_go"], second["return_to_go"]) == (0.5 - 0.25, 1.0)


@pytest.mark.parametrize("state_hash", ["observation_text", {"name": "last_messages", "count": 1}])
def test_state_hash_option_distinguishes_states_by_observations(tmp_path: Path, state_hash: Any) -> None:
    episodes = [episode("a", ["s0", None]), episode("b", [None, "s0"], index=1)]
    path = make_run(tmp_path, episodes, [score("a", 1.0), score("b", 0.0)])
    settings = CreditModel.model_validate({**GIGPO.model_dump(), "state_hash": state_hash})
    assign_credit(path, settings)
    assert [(row["anchor"], row["peers"]) for row in read_credit(path)] == [(0, 1), (1, 1), (1, 1), (0, 1)]


def test_step_without_a_state_key_is_identified_by_its_observation(tmp_path: Path) -> None:
    episodes = [episode("a", ["s0", None]), episode("b", ["s0", None], index=1)]
    path = make_run(tmp_path, episodes, [score("a", 1.0), score("b", 0.0)])
    assign_credit(path, GIGPO)
    assert [row["state_key"] for row in read_credit(path)] == ["s0", "at None"] * 2
    assert [row["peers"] for row in read_credit(path)] == [1] * 4


def test_extreme_steps_exclude_zero_advantages(run: Path) -> None:
    assign_credit(run, GIGPO)
    best, worst = extreme_steps(run, 2)
    assert [(row["rollout_id"], row["step"]) for row in best] == [("a", 0), ("a", 1)]
    assert [(row["rollout_id"], row["step"]) for row in worst] == [("b", 0), ("b", 1)]
    assert extreme_steps(run, 0) == ([], [])
    assert len(extreme_steps(run, 9)[0]) == 2


def test_run_without_scores_is_rejected_and_nothing_is_written(tmp_path: Path) -> None:
    path = make_run(tmp_path, [episode("a", ["s0"])], [score("a", None)])
    with pytest.raises(ConfigError, match="none of the 1 episodes"):
        assign_credit(path, GIGPO)
    assert not (path / "credit.jsonl").exists()


def test_rejected_estimator_keeps_the_earlier_file(run: Path) -> None:
    assign_credit(run, GIGPO)
    before = (run / "credit.jsonl").read_bytes()
    with pytest.raises(ConfigError, match=r"rollout a.*policy_value_estimate"):
        assign_credit(run, CreditModel(estimator="gae"))
    assert (run / "credit.jsonl").read_bytes() == before


def test_unwritable_credit_file_is_reported(run: Path) -> None:
    (run / "credit.jsonl").mkdir()
    with pytest.raises(StoreError, match=r"cannot write .*credit\.jsonl"):
        assign_credit(run, GIGPO)
    assert not [path for path in run.iterdir() if path.name.startswith(".credit")]


def test_previous_credit_settings_are_restored(run: Path) -> None:
    assert credit_settings(run) is None
    given = CreditModel(estimator="gigpo", combination="additive", step_weight=0.5, state_hash="observation_text")
    write_section(run, assign_credit(run, given))
    found = credit_settings(run)
    assert found is not None
    assert assign_credit(run, found).section == assign_credit(run, given).section
    for damaged in ("{", '{"credit": 3}', '{"credit": {"estimator": "rloo"}}'):
        (run / "summary.json").write_text(damaged)
        assert credit_settings(run) is None


def test_headline_summarizes_the_credit(run: Path) -> None:
    # Of the five scored steps the two in s0 have a peer.
    assert headline(assign_credit(run, GIGPO).section) == (
        "Credit by gigpo (omega 0.5, gamma 0.5): 6 steps of 4 episodes, "
        "40.0% of the scored ones share their state with another step"
    )
    assert headline(assign_credit(run, CreditModel(estimator="rloo")).section) == (
        "Credit by rloo (gamma 1): 6 steps of 4 episodes"
    )
