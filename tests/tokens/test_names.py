"""Conversion of a TokenBatch to the names and shapes of verl."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from reward_kit.errors import ConfigError
from reward_kit.tokens import TokenBatch, build_rows, verl_batch
from reward_kit.tokens.layout import VERL_NAMES
from tests.profiles import examples
from tests.tokens.episode_strategies import PAD, PlayedEpisode, batches, play

quick = settings(max_examples=examples(40), deadline=None)


def outer(made: list[PlayedEpisode]) -> TokenBatch:
    return build_rows([one.episode for one in made], [one.steps for one in made], pad_token_id=PAD, padding="outer")


def test_verl_batch_has_verl_shapes_and_positions() -> None:
    long = play("long", [([1, 2], [3, 4]), ([1, 2, 3, 4, 5], [6])], [{"advantage": 1.0}, {"advantage": 2.0}])
    batch = verl_batch(outer([long, play("short", [([7], [8])])])).batch
    assert batch["prompts"].tolist() == [[1, 2], [PAD, 7]]
    assert batch["responses"].tolist() == [[3, 4, 5, 6], [8, PAD, PAD, PAD]]
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5, 6], [PAD, 7, 8, PAD, PAD, PAD]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 1, 1], [0, 1, 1, 0, 0, 0]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 4, 5], [0, 0, 1, 0, 0, 0]]
    assert batch["response_mask"].tolist() == [[1, 1, 0, 1], [1, 0, 0, 0]]
    assert batch["advantages"].tolist() == [[1, 1, 0, 2], [0, 0, 0, 0]]


@quick
@given(made=batches())
def test_verl_batch_keeps_every_value(made: list[PlayedEpisode]) -> None:
    ours = outer(made)
    theirs = verl_batch(ours)
    prompt = ours.batch["prompt_ids"].shape[1]
    for key, values in ours.batch.items():
        found = theirs.batch[VERL_NAMES.get(key, key)]
        np.testing.assert_array_equal(found, values if found.shape == values.shape else values[:, prompt:])
        if found.shape != values.shape:
            # What is cut off says nothing: the policy samples in completions only.
            assert (values[:, :prompt] == (-1 if key == "policy_versions" else 0)).all()
    assert {values.shape[1] for key, values in theirs.batch.items() if key.startswith(("response", "rollout"))} == {
        theirs.batch["responses"].shape[1]
    }


@quick
@given(made=batches())
def test_verl_batches_can_be_concatenated_and_trimmed(made: list[PlayedEpisode]) -> None:
    whole = verl_batch(outer(made))
    first, rest = verl_batch(outer(made[:1])), verl_batch(outer(made[1:]))
    joined = TokenBatch.concat([first, rest])
    for key, values in whole.batch.items():
        np.testing.assert_array_equal(joined.batch[key], values, err_msg=key)
    for key, values in whole[: len(first)].trim().batch.items():
        np.testing.assert_array_equal(first.batch[key], values, err_msg=key)


def test_verl_batch_rejects_rows_without_outer_padding() -> None:
    made = play("r", [([1], [2])])
    with pytest.raises(
        ConfigError, match=r"build_rows\(…, padding='outer'\) that have prompt_ids, got padding 'right'"
    ):
        verl_batch(build_rows([made.episode], pad_token_id=PAD))
    with pytest.raises(ConfigError, match="that have prompt_ids"):
        verl_batch(outer([made]).select(["input_ids", "attention_mask"]))
