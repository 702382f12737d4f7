"""Row pipelines: default and custom connectors, and validation of their columns."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from hypothesis import given, settings

from reward_kit.errors import ConfigError, TrainingError
from reward_kit.tokens import (
    Columns,
    RowPipeline,
    build_rows,
    default_pipeline,
    identities,
    pack_rows,
    pad_rows,
    row_columns,
    segment_rows,
    standardized_advantages,
    step_values,
)
from tests.profiles import examples
from tests.tokens.episode_strategies import PAD, PlayedEpisode, batches, play

# a1 = 3 4, a2 = 6, worth 4 and 1; and a1 = 8, worth nothing that is known.
LONG = play("long", [([1, 2], [3, 4]), ([1, 2, 3, 4, 5], [6])], [{"advantage": 4.0}, {"advantage": 1.0}])
SHORT = play("short", [([7], [8])])
EPISODES, STEPS = [LONG.episode, SHORT.episode], [LONG.steps, SHORT.steps]


def rows_by(pipeline: RowPipeline):
    return build_rows(EPISODES, STEPS, pad_token_id=PAD, pipeline=pipeline)


def turn_numbers(columns: Columns) -> Columns:
    """Return the running number of the policy's tokens in the row."""
    return columns.with_columns(tokens={"acted": np.cumsum(columns.tokens["action_mask"])})


class OnlyScored:
    """A connector that drops rows without a learning signal."""

    def __call__(self, columns: Columns) -> Columns:
        taking_part = np.add.reduceat(columns.tokens["loss_mask"], columns.starts_B)
        return columns.select_rows(taking_part > 0)


def test_default_pipeline_lists_named_connectors() -> None:
    names = ["segment_rows", "step_values", "credit_on_tokens", "identities", "episode_facts"]
    assert default_pipeline().names == names
    assert default_pipeline("action").names == ["action_rows", *names[1:]]
    assert "identities" in default_pipeline() and len(list(default_pipeline())) == len(default_pipeline()) == 5


def test_custom_column_becomes_a_batch_array() -> None:
    pipeline = default_pipeline()
    pipeline.insert_after("segment_rows", turn_numbers)
    assert rows_by(pipeline).batch["acted"].tolist() == [[0, 0, 1, 2, 2, 3], [3, 4, 0, 0, 0, 0]]


def test_tokens_masked_by_a_connector_get_no_loss() -> None:
    def no_first_tokens(columns: Columns) -> Columns:
        mask = columns.tokens["action_mask"].copy()
        mask[[2, 7]] = 0
        return columns.with_columns(tokens={"action_mask": mask})

    pipeline = default_pipeline()
    pipeline.insert_after("segment_rows", no_first_tokens)
    rows = rows_by(pipeline)
    assert rows.batch["loss_mask"].tolist() == [[0, 0, 0, 1, 0, 1], [0] * 6]
    assert rows.non_tensor_batch["ends_episode"].tolist() == [True, False]


def test_connector_can_drop_rows() -> None:
    pipeline = default_pipeline()
    pipeline.insert_after("credit_on_tokens", OnlyScored())
    assert "OnlyScored" in pipeline
    rows = rows_by(pipeline)
    assert rows.non_tensor_batch["rollout_id"].tolist() == ["long"]
    assert rows.batch["input_ids"].tolist() == [[1, 2, 3, 4, 5, 6]]


@settings(max_examples=examples(40), deadline=None)
@given(made=batches())
def test_select_rows_equals_indexing_the_batch(made: list[PlayedEpisode]) -> None:
    columns = row_columns([one.episode for one in made], [one.steps for one in made])
    order = np.arange(len(columns.lengths_B))[::-2]
    taken = pad_rows(columns.select_rows(order), pad_token_id=PAD)
    indexed = pad_rows(columns, pad_token_id=PAD)[order].trim()
    for key, values in taken.batch.items():
        np.testing.assert_array_equal(indexed.batch[key], values, err_msg=key)
    for key, values in taken.non_tensor_batch.items():
        np.testing.assert_array_equal(indexed.non_tensor_batch[key], values, err_msg=key)


def test_advantages_are_standardized_per_action_before_expansion() -> None:
    """Per token, the two tokens of the first action would count twice: a mean of 3, not 2.5."""
    pipeline = default_pipeline()
    pipeline.insert_after("step_values", standardized_advantages)
    advantages = rows_by(pipeline).batch["advantages"][0]
    deviation = np.std([4.0, 1.0], ddof=1) + 1e-6
    np.testing.assert_allclose(advantages, np.array([0, 0, 1.5, 1.5, 0, -1.5]) / deviation, rtol=1e-12)
    assert rows_by(pipeline).batch["loss_mask"].tolist() == [[0, 0, 1, 1, 0, 1], [0] * 6]


@pytest.mark.parametrize("advantages", [[0.1, 0.1], [0.1, None], [None, None]])
def test_equal_advantages_become_zero_and_unknown_advantages_stay_nan(advantages: list[float | None]) -> None:
    steps = [step.model_copy(update={"advantage": a}) for step, a in zip(LONG.steps, advantages, strict=True)]
    made = standardized_advantages(step_values(Columns.from_episodes([LONG.episode], [steps])))
    expected = [np.nan if a is None else 0.0 for a in advantages]
    np.testing.assert_array_equal(made.steps["advantage"], expected)


def test_connectors_can_be_inserted_and_removed() -> None:
    pipeline = RowPipeline([segment_rows])
    pipeline.append(identities)
    pipeline.insert_before("identities", turn_numbers, name="mine")
    assert pipeline.names == ["segment_rows", "mine", "identities"]
    assert pipeline.remove("mine") is turn_numbers
    assert pipeline.names == ["segment_rows", "identities"]


def test_unknown_and_duplicate_connector_names_are_rejected() -> None:
    pipeline = default_pipeline()
    with pytest.raises(ConfigError, match="unknown connector 'identitys'; did you mean 'identities'"):
        pipeline.insert_before("identitys", turn_numbers)
    with pytest.raises(ConfigError, match="unknown connector 'nothing'"):
        pipeline.remove("nothing")
    with pytest.raises(ConfigError, match="the pipeline already has a connector named 'identities'"):
        pipeline.append(identities)


def test_connector_errors_name_the_connector() -> None:
    broken = RowPipeline([segment_rows])
    broken.append(lambda columns: columns.tokens["nowhere"], name="mine")
    with pytest.raises(TrainingError, match="connector 'mine': KeyError: 'nowhere'"):
        rows_by(broken)
    forgetful = RowPipeline([segment_rows])
    forgetful.append(lambda columns: None, name="mine")  # type: ignore[arg-type, return-value]
    with pytest.raises(ConfigError, match=r"connector 'mine' returned NoneType; return columns\.with_columns"):
        rows_by(forgetful)


def test_columns_must_have_the_length_of_their_axis() -> None:
    columns = segment_rows(Columns.from_episodes(EPISODES))
    for axis, size in (("tokens", 8), ("rows", 2), ("steps", 3)):
        with pytest.raises(ConfigError, match=rf"{axis} column 'x' must have the shape \({size},\), got \(9,\)"):
            columns.with_columns(**{axis: {"x": np.zeros(9)}})


def test_a_pipeline_without_rows_makes_no_batch() -> None:
    for lay_out in (pack_rows, lambda columns: pad_rows(columns, pad_token_id=PAD)):
        with pytest.raises(ConfigError, match="the token column 'input_ids' is missing; add segment_rows"):
            lay_out(row_columns(EPISODES, STEPS, pipeline=RowPipeline([step_values])))


def test_layout_functions_reject_values_that_are_not_columns() -> None:
    batch = pad_rows(row_columns(EPISODES, STEPS), pad_token_id=PAD)
    for lay_out in (pack_rows, lambda columns: pad_rows(columns, pad_token_id=PAD)):
        for wrong, kind in ((batch, "a TokenBatch"), (EPISODES, "a list")):
            with pytest.raises(ConfigError, match=f"the Columns that a RowPipeline returns, got {kind}"):
                lay_out(wrong)  # type: ignore[arg-type]


def test_connectors_do_not_modify_their_input() -> None:
    before = copy.deepcopy([episode.get_state() for episode in EPISODES])
    columns = Columns.from_episodes(EPISODES, STEPS, [1.0, None])
    for connector in (*default_pipeline(), standardized_advantages, turn_numbers):
        given_to_it = copy.deepcopy((columns.steps, columns.tokens, columns.rows))
        made = connector(columns)
        for kept, now in zip(given_to_it, (columns.steps, columns.tokens, columns.rows), strict=True):
            assert kept.keys() == now.keys()
            for key, values in kept.items():
                np.testing.assert_array_equal(now[key], values)
        columns = made
    assert before == [episode.get_state() for episode in EPISODES]
