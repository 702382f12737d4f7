"""Kept episodes of training: scores, credit and token ratios."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from reward_kit.episodes.json_codec import from_json_value
from reward_kit.errors import StoreError
from reward_kit.report.episode_chunks import token_rows
from reward_kit.rl.training.figures import UpdateRecorder
from reward_kit.runs.redaction import Redaction
from reward_kit.runs.scoring import read_transcripts
from tests import command_line
from tests.rl.training.frozen_lake import TRAIN, lake_folder, trained
from tests.runs.test_store import make_episode


def kept(run: Path, update: int = 1) -> list[dict[str, Any]]:
    lines = (run / "episodes" / f"update-{update:06d}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


async def test_a_kept_episode_has_its_score_and_the_credit_of_its_steps(tmp_path: Path) -> None:
    path = lake_folder(tmp_path, updates=1, evaluation=None, logs={"episodes_every": 1})
    await trained(path, tmp_path / "run")
    records = kept(tmp_path / "run")
    assert len(records) == 4
    for record in records:
        made = record["training"]
        assert made["score"] == pytest.approx(record["environment_return"] + record["num_steps"] / 100)
        assert [row["step"] for row in made["credit"]] == list(range(record["num_steps"]))
        assert made["advantages"] == pytest.approx([row["A"] for row in made["credit"]])
    by_group: dict[str, list[float]] = {}
    for record in records:
        by_group.setdefault(record["group_id"], []).append(record["training"]["credit"][0]["A_E"])
    assert [sum(values) for values in by_group.values()] == pytest.approx([0.0, 0.0])


@pytest.mark.parametrize("rate", [0.0, 0.05])
async def test_ratios_compare_sampled_tokens_before_and_after_the_update(tmp_path: Path, rate: float) -> None:
    ppo = {"lr": rate, "epochs": 2, "minibatches": 2}
    path = lake_folder(tmp_path, updates=1, evaluation=None, logs={"episodes_every": 1}, ppo=ppo)
    await trained(path, tmp_path / "run")
    found = []
    for record in kept(tmp_path / "run"):
        rows = token_rows(record)
        assert rows is not None
        for row, ratios, logprobs in zip(
            rows["steps"], record["training"]["ratios"], record["tokens"]["logprobs"], strict=True
        ):
            assert len(ratios) == len(logprobs) == len(row["ids"])
            assert row["ratios"] == pytest.approx(ratios, abs=1e-4)
            found += ratios
    if rate == 0.0:
        assert found == pytest.approx([1.0] * len(found), abs=1e-5), "nothing is learned at a rate of 0"
    else:
        assert max(abs(ratio - 1.0) for ratio in found) > 0.01
        better = [ratio for record in kept(tmp_path / "run") for ratio in of_sign(record, 1)]
        worse = [ratio for record in kept(tmp_path / "run") for ratio in of_sign(record, -1)]
        assert sum(better) / len(better) > sum(worse) / len(worse), (
            "what was better became likelier than what was worse"
        )


def of_sign(record: dict[str, Any], sign: int) -> list[float]:
    made = record["training"]
    pairs = zip(made["advantages"], made["ratios"], strict=True)
    return [ratio for advantage, ratios in pairs for ratio in ratios if advantage * sign > 0]


async def test_ratios_are_computed_only_for_kept_updates(tmp_path: Path) -> None:
    path = lake_folder(tmp_path, updates=3, evaluation=None, logs={"episodes_every": 2})
    await trained(path, tmp_path / "run")
    assert [file.name for file in (tmp_path / "run" / "episodes").iterdir()] == ["update-000002.jsonl"]
    assert all("training" in record for record in kept(tmp_path / "run", 2))


async def test_kept_episodes_can_be_rescored_with_their_final_states(tmp_path: Path) -> None:
    path = lake_folder(tmp_path, updates=1, evaluation=None, logs={"episodes_every": 1})
    await trained(path, tmp_path / "run")
    reward = "def cell(messages, state):\n    return {'score': state['state'] / 15}\n"
    (tmp_path / "other.py").write_text(reward)
    arguments = ("score", "run/episodes/update-000001.jsonl", "--reward", "other.py:cell", "--log-dir", "again")
    done = command_line.call(*arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (again,) = (tmp_path / "again").iterdir()
    scores = [json.loads(line) for line in (again / "scores.jsonl").read_text().splitlines()]
    ends = {
        record["rollout_id"]: json.loads(from_json_value(record["final_state"]["payload"]))["state"]
        for record in kept(tmp_path / "run")
    }
    assert len(scores) == 4 and any(ends.values())
    assert {score["rollout_id"]: score["score"] for score in scores} == pytest.approx(
        {rollout_id: cell / 15 for rollout_id, cell in ends.items()}
    )


SECRET = "sk-a-long-secret-0123456789"


def test_stored_line_and_final_state_contain_no_secret(tmp_path: Path) -> None:
    episode = make_episode(text=f"the key is {SECRET}")
    payload = json.dumps({"note": SECRET}).encode()
    episode.custom_data["final_state"] = {"kind": "json", "payload": payload}
    path = tmp_path / "update-000001.jsonl"
    path.write_bytes(UpdateRecorder().line(episode, Redaction([SECRET])))
    assert SECRET not in path.read_text()
    (read,) = read_transcripts(path)
    assert read.messages[0].text == "the key is (hidden)"
    assert read.custom_data["final_state"] == {"kind": "json", "payload": b'{"note": "(hidden)"}'}


async def test_kept_lines_are_redacted_by_secrets_and_hook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = {**TRAIN["task"], "redact": "privacy.py:blot"}
    path = lake_folder(tmp_path, task=task, updates=1, evaluation=None, logs={"episodes_every": 1})
    (tmp_path / "privacy.py").write_text("def blot(text):\n    return text.replace('S', 'START')\n")
    (tmp_path / "lakes.jsonl").write_text("".join(json.dumps({"id": i, "note": f"{SECRET} S"}) + "\n" for i in "ab"))
    monkeypatch.setenv("LAKE_API_KEY", SECRET)
    await trained(path, tmp_path / "run")
    assert SECRET not in (tmp_path / "run" / "episodes" / "update-000001.jsonl").read_text()
    assert json.loads((tmp_path / "run" / "run.json").read_bytes())["training"]["redacts"]
    for record in kept(tmp_path / "run"):
        assert record["sample"]["note"] == "(hidden) START"
        assert record["training"]["credit"] and record["training"]["ratios"]


async def test_failed_redaction_hook_keeps_no_episodes(tmp_path: Path) -> None:
    task = {**TRAIN["task"], "redact": "privacy.py:blot"}
    path = lake_folder(tmp_path, task=task, updates=1, evaluation=None, logs={"episodes_every": 1})
    (tmp_path / "privacy.py").write_text("def blot(text):\n    raise KeyError('names')\n")
    with pytest.raises(
        StoreError, match=r"the task's redact function.*nothing was written, because the redaction failed"
    ):
        await trained(path, tmp_path / "run")
    assert not list((tmp_path / "run" / "episodes").iterdir())
