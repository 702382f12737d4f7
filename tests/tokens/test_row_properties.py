"""Property tests of training rows against a reference loop."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reward_kit.tokens import TokenBatch, build_rows, pack_rows, pad_rows, row_columns
from tests.profiles import examples
from tests.tokens.episode_strategies import KEYS, PAD, PlayedEpisode, batches, looped_actions, looped_segments, play

LOOPS = {"segment": looped_segments, "action": looped_actions}
FILL = {"input_ids": PAD, "policy_versions": -1}
PER = st.sampled_from(["segment", "action"])
PADDING = st.sampled_from(["right", "left", "outer"])
quick = settings(max_examples=examples(40), deadline=None)


def rows_of(made: list[PlayedEpisode], **options: Any) -> TokenBatch:
    return build_rows([one.episode for one in made], [one.steps for one in made], pad_token_id=PAD, **options)


@quick
@given(per=PER, padding=PADDING, made=batches())
def test_rows_match_a_reference_loop(per: str, padding: str, made: list[PlayedEpisode]) -> None:
    batch = rows_of(made, per=per, padding=padding).batch
    expected = [row for one in made for row in LOOPS[per](one)]
    assert len(batch["input_ids"]) == len(expected)
    for index, row in enumerate(expected):
        there = batch["attention_mask"][index] == 1
        for key in KEYS:
            np.testing.assert_array_equal(batch[key][index][there], [token[key] for token in row], err_msg=key)
            assert (batch[key][index][~there] == FILL.get(key, 0)).all(), key


@quick
@given(per=PER, made=batches())
def test_padding_side_moves_rows_without_changing_them(per: str, made: list[PlayedEpisode]) -> None:
    right, left, outer = (rows_of(made, per=per, padding=side).batch for side in ("right", "left", "outer"))
    for index in range(len(right["input_ids"])):
        length = right["attention_mask"][index].sum()
        assert right["attention_mask"][index, :length].all()
        assert left["attention_mask"][index, left["attention_mask"].shape[1] - length :].all()
        prompt = int(length - right["completion_mask"][index].sum())
        begin = outer["prompt_ids"].shape[1] - prompt
        assert outer["attention_mask"][index, begin : begin + length].all()
    both = np.concatenate([outer["prompt_ids"], outer["completion_ids"]], axis=1)
    np.testing.assert_array_equal(outer["input_ids"], both)


@quick
@given(padding=PADDING, made=batches())
def test_prompt_and_completion_ids_are_the_two_parts_of_a_row(padding: str, made: list[PlayedEpisode]) -> None:
    batch = rows_of(made, padding=padding).batch
    expected = [row for one in made for row in looped_segments(one)]
    for key, part, on_left in (
        ("prompt_ids", 0, padding != "right"),
        ("completion_ids", 1, padding == "left"),
    ):
        parts = [[token["input_ids"] for token in row if token["completion_mask"] == part] for row in expected]
        width = max(map(len, parts), default=0)
        filled = [[PAD] * (width - len(ids)) + ids if on_left else ids + [PAD] * (width - len(ids)) for ids in parts]
        np.testing.assert_array_equal(batch[key], np.array(filled, dtype=int).reshape(len(parts), width))


@quick
@given(per=PER, made=batches())
def test_packed_rows_equal_padded_rows(per: str, made: list[PlayedEpisode]) -> None:
    columns = row_columns([one.episode for one in made], [one.steps for one in made], per=per)
    packed, padded = pack_rows(columns), pad_rows(columns, pad_token_id=PAD).batch
    there = padded["attention_mask"] == 1
    assert packed.batch.keys() == padded.keys() - {"prompt_ids", "completion_ids", "attention_mask"} | {"row_ids"}
    for key in KEYS:
        np.testing.assert_array_equal(packed.batch[key], padded[key][there][None], err_msg=key)
    np.testing.assert_array_equal(np.diff(packed.cu_seqlens), there.sum(axis=1))
    np.testing.assert_array_equal(packed.batch["row_ids"][0], np.nonzero(there)[0])
    assert len(packed) == len(padded["input_ids"])
    assert packed.cu_seqlens.dtype == np.int32


@quick
@given(per=PER, made=batches())
def test_loss_mask_is_product_of_masks_where_advantage_is_known(per: str, made: list[PlayedEpisode]) -> None:
    credited = [
        PlayedEpisode(one.episode, one.turns, [s.model_copy(update={"advantage": 1.0}) for s in one.steps])
        for one in made
    ]
    batch = rows_of(credited, per=per).batch
    np.testing.assert_array_equal(batch["loss_mask"], batch["completion_mask"] * batch["action_mask"])
    uncredited = rows_of(made, per=per).batch
    assert (uncredited["loss_mask"] <= uncredited["completion_mask"] * uncredited["action_mask"]).all()


@quick
@given(made=batches())
def test_every_sampled_token_counts_once_per_segment_and_per_action(made: list[PlayedEpisode]) -> None:
    sampled = sum(len(ids) for one in made for _, ids in one.turns)
    for per in ("segment", "action"):
        batch = rows_of(made, per=per).batch
        assert batch["action_mask"].sum() == sampled
        rewards = sum(one.value(t, "base_reward") for one in made for t, (_, ids) in enumerate(one.turns) if ids)
        assert batch["step_rewards"].sum() == pytest.approx(rewards, abs=1e-9)


@quick
@given(made=batches(2))
def test_rows_contain_exactly_the_prompts_the_model_saw(made: list[PlayedEpisode]) -> None:
    """Up to any action, a segment's row and the action's own row equal its prompt."""
    segments, actions = rows_of(made).batch, rows_of(made, per="action").batch
    row = 0
    for one in made:
        contexts = [
            (segments["input_ids"][index][segments["attention_mask"][index] == 1].tolist(), number)
            for number, index in enumerate(range(row, row + len(looped_segments(one))))
        ]
        row += len(contexts)
        segment_of = {span.step: span.segment for span in one.episode.tokens.spans}
        for t, (prompt, sampled) in enumerate(one.turns):
            seen, _ = contexts[segment_of[t]]
            assert seen[: len(prompt) + len(sampled)] == prompt + sampled
    shown = [prompt for one in made for prompt, sampled in one.turns if sampled]
    for index, prompt in enumerate(shown):
        assert actions["prompt_ids"][index][: len(prompt)].tolist() == prompt


@quick
@given(per=PER, made=batches(), scores=st.lists(st.none() | st.floats(0, 1), min_size=4, max_size=4))
def test_exactly_one_row_ends_each_episode_with_sampled_tokens(
    per: str, made: list[PlayedEpisode], scores: list[float | None]
) -> None:
    batch = rows_of(made, per=per, scores=scores[: len(made)])
    acts = batch.batch["action_mask"].any(axis=1)
    for number in range(len(made)):
        own = np.flatnonzero(batch.non_tensor_batch["rollout_id"] == f"r{number}")
        last = [row for row in own if acts[row]][-1:]
        assert [row for row in own if batch.non_tensor_batch["ends_episode"][row]] == last
        rewards = batch.non_tensor_batch["episode_rewards"][own]
        np.testing.assert_array_equal(rewards, np.full(len(own), scores[number], dtype=float))


@quick
@given(made=batches(2), start=st.integers(0, 3))
def test_episode_chunks_have_rows_of_their_own_tokens_only(made: list[PlayedEpisode], start: int) -> None:
    """Tokens before a chunk are context; a segment of only context has no row."""
    episodes = []
    for one in made:
        chunk = play(one.episode.id_, one.turns[start:]).episode
        chunk.tokens = one.episode.tokens.part(start, None)
        episodes.append(chunk)
    rows = build_rows(episodes, pad_token_id=PAD)
    expected = [row for chunk in episodes for row in chunk.tokens.rows()]
    assert len(rows) == len(expected)
    for item, row in zip(rows, expected, strict=True):
        prompt, total = len(row.prompt_ids), len(row.prompt_ids) + len(row.completion_ids)
        assert item.batch["input_ids"][:total].tolist() == [*row.prompt_ids, *row.completion_ids]
        assert item.batch["completion_mask"].sum() == total - prompt
        assert item.batch["action_mask"][prompt:total].tolist() == row.action_mask.tolist()
        np.testing.assert_array_equal(item.batch["logprobs"][prompt:total], row.logprobs)


@quick
@given(made=batches())
def test_building_rows_does_not_modify_episodes(made: list[PlayedEpisode]) -> None:
    before = [(one.episode.get_state(), [step.model_dump() for step in one.steps]) for one in made]
    batch = rows_of(made)
    for values in batch.batch.values():
        values += 1
    for facts in batch.non_tensor_batch["extra_info"]:
        facts["mine"] = True
    assert before == [(one.episode.get_state(), [step.model_dump() for step in one.steps]) for one in made]
