"""Recorded tokens of an episode as shown on the page, and the texts of token ids."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from reward_kit.episodes.record import episode_to_record
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.report.episode_chunks import TokenTexts, token_rows, token_texts
from reward_kit.runs.run_folder import RunHeader

EXAMPLES = Path(__file__).parents[2] / "examples"


def recorded() -> dict[str, Any]:
    """Return two turns that concatenate, then one after a rewrite of the context."""
    episode = SingleAgentEpisode("r1")
    episode.add_env_reset("a")
    for _ in range(3):
        episode.add_env_step("b", {"type": "text", "content": "c"}, 0.0)
    episode.tokens.add_turn(0, [1, 2], [3, 4], [-0.25, -0.5], 7)
    episode.tokens.add_turn(1, [1, 2, 3, 4, 5, 6], [7], [-0.125], 8, allowed_ids=[[7, 8, 9]])
    episode.tokens.add_turn(2, [1, 9], [8, 9], None, reason="reasoning stripped")
    return json.loads(json.dumps(episode_to_record(episode)))  # type: ignore[no-any-return]


def rows_of(record: dict[str, Any], texts: TokenTexts | None = None) -> dict[str, Any]:
    rows = token_rows(record, texts)
    assert rows is not None
    return rows


class TestTokenRows:
    def test_each_action_has_new_context_and_sampled_tokens(self) -> None:
        rows = rows_of(recorded())
        assert rows["texts"] is None
        steps = [(row["step"], row["context"], row["ids"], row["cut"]) for row in rows["steps"]]
        assert steps == [(0, [1, 2], [3, 4], 0), (1, [5, 6], [7], 0), (2, [1, 9], [8, 9], 0)]

    def test_rows_have_logprobs_versions_choices_and_rewrite_reasons(self) -> None:
        first, second, third = rows_of(recorded())["steps"]
        assert [row["logprobs"] for row in (first, second, third)] == [[-0.25, -0.5], [-0.125], [None, None]]
        assert [row["version"] for row in (first, second, third)] == [7, 8, None]
        assert [row["choices"] for row in (first, second, third)] == [None, [3], None]
        assert ["reason" in row for row in (first, second)] == [False, False]
        assert third["reason"] == "reasoning stripped"

    def test_sampled_tokens_match_the_training_rows(self) -> None:
        record = recorded()
        episode = SingleAgentEpisode("r1")
        episode.tokens = type(episode.tokens).from_state(record["tokens"])
        sampled = [id_ for row in episode.tokens.rows() for id_ in row.completion_ids[row.action_mask != 0].tolist()]
        assert [id_ for row in rows_of(record)["steps"] for id_ in row["ids"]] == sampled

    def test_long_context_keeps_its_end_and_counts_cut_tokens(self) -> None:
        episode = SingleAgentEpisode("r1")
        episode.tokens.add_turn(0, list(range(1000)), [5], [-0.1])
        row = rows_of({"tokens": episode.tokens.get_state()})["steps"][0]
        assert (row["context"], row["cut"]) == (list(range(800, 1000)), 800)

    def test_training_values_are_shown_at_their_tokens(self) -> None:
        record = recorded()
        record["training"] = {"advantages": [0.5, None, -1.0], "ratios": [[1.1, 0.9], [1.0], [None, 2.0]]}
        first, second, third = rows_of(record)["steps"]
        assert [row.get("advantages") for row in (first, second, third)] == [[0.5, 0.5], None, [-1.0, -1.0]]
        assert [row["ratios"] for row in (first, second, third)] == [[1.1, 0.9], [1.0], [None, 2.0]]

    def test_non_finite_logprob_is_none(self) -> None:
        episode = SingleAgentEpisode("r1")
        episode.tokens.add_turn(0, [1], [2, 3], [-math.inf, -1.0])
        assert rows_of({"tokens": episode.tokens.get_state()})["steps"][0]["logprobs"] == [None, -1.0]

    def test_record_without_tokens_has_no_token_rows(self) -> None:
        assert token_rows({"messages": []}) is None

    @pytest.mark.parametrize(
        "damage", [{"actions": [[0, 5, 0, 1, 0]]}, {"ids": None}, {"logprobs": []}, {"segments": 3}]
    )
    def test_damaged_tokens_are_reported_without_an_error(self, damage: dict[str, Any]) -> None:
        record = recorded()
        record["tokens"] |= damage
        rows = rows_of(record)
        assert rows["steps"] == [] and rows["damaged"]


class TestTexts:
    def header(self, policy: dict[str, Any], task_path: Path, **task: Any) -> RunHeader:
        return RunHeader(task_name="t", task={"policy": policy, **task}, task_path=str(task_path))

    def test_texts_are_read_from_a_model_folder_beside_the_task(self) -> None:
        task = EXAMPLES / "frozen_lake_training" / "agent.yaml"
        texts = token_texts(self.header({"model": "warm_start"}, task))
        assert texts is not None
        assert texts.of([2, 4, 170, 10**9]) == {"2": "<|end|>", "4": "<|user|>", "170": "down"}

    def test_texts_of_a_training_run_come_from_the_model_of_its_train_file(self) -> None:
        train = EXAMPLES / "frozen_lake_training" / "train.yaml"
        config = {"policy": {"model": "warm_start"}}
        header = RunHeader(task_name="t", **{"training": {"train_path": str(train), "config": config}})
        texts = token_texts(header)
        assert texts is not None and texts.of([170]) == {"170": "down"}
        blotted = {"train_path": str(train), "config": config, "redacts": True}
        assert token_texts(RunHeader(task_name="t", **{"training": blotted})) is None

    def test_models_without_a_local_folder_have_no_texts(self, tmp_path: Path) -> None:
        assert token_texts(self.header({"model": "some/model"}, tmp_path / "task.yaml")) is None
        assert token_texts(self.header({}, tmp_path / "task.yaml")) is None
        assert token_texts(RunHeader(task_name="t")) is None

    def test_redacted_runs_show_no_token_texts(self) -> None:
        task = EXAMPLES / "frozen_lake_training" / "agent.yaml"
        assert token_texts(self.header({"model": "warm_start"}, task, redact="hooks.py:blot")) is None
        texts = token_texts(self.header({"model": "warm_start"}, task))
        record = recorded()
        assert rows_of(record, texts)["texts"]
        record["messages"] = [{"role": "user", "content": "the key is (hidden)"}]
        assert rows_of(record, texts)["texts"] is None

    @pytest.mark.parametrize(
        "decoder", [{"type": "ByteLevel"}, {"type": "Sequence", "decoders": [{"type": "ByteLevel"}]}]
    )
    def test_byte_level_tokens_are_decoded(self, tmp_path: Path, decoder: dict[str, Any]) -> None:
        vocabulary = {"go": 0, "\u0120to": 1, "\u010a": 2, "\u00c3\u00a9": 3, "\u00c3": 4}
        self.write(
            tmp_path, {"type": "BPE", "vocab": vocabulary}, decoder=decoder, added=[{"id": 5, "content": "<|é|>"}]
        )
        texts = TokenTexts.read(tmp_path / "tokenizer.json")
        assert texts is not None
        assert texts.of(range(6)) == {"0": "go", "1": " to", "2": "\n", "3": "é", "4": "\ufffd", "5": "<|é|>"}

    def test_sentencepiece_tokens_are_decoded_with_spaces(self, tmp_path: Path) -> None:
        self.write(tmp_path, {"type": "Unigram", "vocab": [["<unk>", 0.0], ["\u2581go", -1.5]]})
        texts = TokenTexts.read(tmp_path / "tokenizer.json")
        assert texts is not None and texts.of([0, 1]) == {"0": "<unk>", "1": " go"}

    @pytest.mark.parametrize("text", ["", "[]", "{}", '{"model": {"vocab": 3}}', '{"model": {"vocab": [[1]]}}'])
    def test_unknown_tokenizer_file_gives_no_texts(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "tokenizer.json").write_text(text)
        assert TokenTexts.read(tmp_path / "tokenizer.json") is None

    def write(self, folder: Path, model: dict[str, Any], decoder: Any = None, added: Any = ()) -> None:
        data = {"model": model, "decoder": decoder, "pre_tokenizer": None, "added_tokens": list(added)}
        (folder / "tokenizer.json").write_text(json.dumps(data))
