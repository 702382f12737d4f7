"""Layout of training rows: token ids, masks, values and facts per row."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import pytest

from reward_kit.agent.models import StepData, episode_steps
from reward_kit.episodes import SingleAgentEpisode
from reward_kit.errors import ConfigError, EpisodeError
from reward_kit.integrations.verl.data_proto import verl_rows
from reward_kit.models import Message
from reward_kit.rl_helpers import ESTIMATORS, with_credit
from reward_kit.tokens import ImageInputs, TokenBatch, TokenItem, build_rows, default_pipeline

PAD = 99


def episode(rollout_id: str, turns: list[tuple[list[int], list[int]]]) -> SingleAgentEpisode:
    """Return an episode with a step per (prompt_ids, token_ids); token n has logprob -n/10, step t version t."""
    made = SingleAgentEpisode(rollout_id)
    made.add_env_reset("o")
    for step, (prompt, sampled) in enumerate(turns):
        made.tokens.add_turn(step, prompt, sampled, [-n / 10 for n in sampled], policy_version=step)
        made.add_env_step("o", {"type": "text", "content": ""}, 0.0)
    made.custom_data["group_id"] = f"group of {rollout_id}"
    return made


def valued(made: SingleAgentEpisode, values: list[float | None]) -> list[StepData]:
    """Return its steps with advantage v, return 10v and base reward 100v."""
    update = [{"advantage": v, "return_to_go": v and 10 * v, "base_reward": v and 100 * v} for v in values]
    return [step.model_copy(update=change) for step, change in zip(episode_steps(made), update, strict=True)]


# p = 1 2, a1 = 3 4, o1 = 5, a2 = 6; and p = 7, a1 = 8.
LONG = episode("long", [([1, 2], [3, 4]), ([1, 2, 3, 4, 5], [6])])
SHORT = episode("short", [([7], [8])])


def rows(values: list[float | None] | None = None) -> TokenBatch:
    return build_rows([LONG, SHORT], [valued(LONG, values or [0.5, -1.0]), valued(SHORT, [2.0])], pad_token_id=PAD)


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("prompt_ids", [[1, 2], [7, PAD]]),
        ("completion_ids", [[3, 4, 5, 6], [8, PAD, PAD, PAD]]),
        ("input_ids", [[1, 2, 3, 4, 5, 6], [7, 8, PAD, PAD, PAD, PAD]]),
        ("attention_mask", [[1, 1, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0]]),
        ("position_ids", [[0, 1, 2, 3, 4, 5], [0, 1, 0, 0, 0, 0]]),
        ("completion_mask", [[0, 0, 1, 1, 1, 1], [0, 1, 0, 0, 0, 0]]),
        ("action_mask", [[0, 0, 1, 1, 0, 1], [0, 1, 0, 0, 0, 0]]),
        ("loss_mask", [[0, 0, 1, 1, 0, 1], [0, 1, 0, 0, 0, 0]]),
        ("logprobs", [[0, 0, -0.3, -0.4, 0, -0.6], [0, -0.8, 0, 0, 0, 0]]),
        ("policy_versions", [[-1, -1, 0, 0, -1, 1], [-1, 0, -1, -1, -1, -1]]),
        ("advantages", [[0, 0, 0.5, 0.5, 0, -1.0], [0, 2.0, 0, 0, 0, 0]]),
        ("returns", [[0, 0, 5.0, 5.0, 0, -10.0], [0, 20.0, 0, 0, 0, 0]]),
        ("step_rewards", [[0, 0, 0, 50.0, 0, -100.0], [0, 200.0, 0, 0, 0, 0]]),
    ],
)
def test_batch_layout(key: str, expected: list[list[float]]) -> None:
    np.testing.assert_array_equal(rows().batch[key], expected)


def test_returns_are_returns_to_go_without_value_estimates_added() -> None:
    """Credit includes A + V; rows take `return_to_go` unchanged."""
    steps = [
        [step.model_copy(update={"policy_value_estimate": 3.0}) for step in episode_steps(e)] for e in (LONG, SHORT)
    ]
    credited = with_credit(steps, ESTIMATORS["rloo"](steps, [1.0, 0.5], group_ids=["g", "g"]))
    batch = build_rows([LONG, SHORT], credited, pad_token_id=PAD).batch
    np.testing.assert_array_equal(batch["advantages"], [[0, 0, 0.5, 0.5, 0, 0.5], [0, -0.5, 0, 0, 0, 0]])
    np.testing.assert_array_equal(batch["returns"], [[0, 0, 3.5, 3.5, 0, 3.5], [0, 2.5, 0, 0, 0, 0]])


def test_layout_test_covers_every_array() -> None:
    (mark,) = test_batch_layout.pytestmark  # type: ignore[attr-defined]
    assert {key for key, _ in mark.args[1]} == rows().batch.keys()


def test_step_without_advantage_is_masked_out_of_the_loss() -> None:
    batch = rows([None, 1.0]).batch
    np.testing.assert_array_equal(batch["loss_mask"][0], [0, 0, 0, 0, 0, 1])
    np.testing.assert_array_equal(batch["action_mask"][0], [0, 0, 1, 1, 0, 1])
    np.testing.assert_array_equal(batch["advantages"][0], [0, 0, 0, 0, 0, 1.0])


def test_unscored_episode_has_empty_loss_mask() -> None:
    batch = rows([None, None]).batch
    assert not batch["loss_mask"][0].any()
    assert batch["loss_mask"][1].any()
    assert not build_rows([LONG], pad_token_id=PAD).batch["loss_mask"].any()


def test_rewritten_context_starts_a_new_row() -> None:
    made = episode("two", [([1, 2], [3]), ([1, 9], [4])])
    batch = build_rows([made], [valued(made, [1.0, 2.0])], pad_token_id=PAD)
    assert batch.batch["input_ids"].tolist() == [[1, 2, 3], [1, 9, 4]]
    assert batch.batch["advantages"].tolist() == [[0, 0, 1.0], [0, 0, 2.0]]
    assert batch.non_tensor_batch["rollout_id"].tolist() == ["two", "two"]
    assert batch.non_tensor_batch["segment"].tolist() == [0, 1]


def test_unknown_logprob_is_nan() -> None:
    made = SingleAgentEpisode("r")
    made.add_env_reset("o")
    made.tokens.add_turn(0, [1], [2], None)
    made.add_env_step("o", {}, 0.0)
    assert np.isnan(build_rows([made], pad_token_id=PAD).batch["logprobs"][0, 1])


def test_batch_has_ids_and_meta_info() -> None:
    batch = rows()
    assert batch.non_tensor_batch["rollout_id"].tolist() == ["long", "short"]
    assert batch.non_tensor_batch["group_id"].tolist() == ["group of long", "group of short"]
    assert batch.meta_info == {"pad_token_id": PAD, "padding": "right"}


def test_batch_has_the_facts_that_reward_managers_read() -> None:
    made = SingleAgentEpisode("r")
    made.add_env_reset("o", {"won": False})
    image = {"url": "data:image/png;base64,AA=="}
    made.add_messages([Message(role="user", content=[{"type": "image_url", "image_url": image}])])
    calls = [{"name": "look", "arguments": {}}, {"name": "go", "arguments": {}}]
    for step, action in enumerate(({"type": "tool_calls", "calls": calls}, {"type": "tool_call", **calls[0]})):
        made.tokens.add_turn(step, list(range(4 * step + 1)), [7, 7, 7])
        made.add_env_step("o", action, 0.0, {"won": True})
    sample = {"data_source": "rooms", "extra_info": {"split": "train"}}
    made.custom_data = {"sample": sample, "sample_id": "s", "ground_truth": "4", "stop_reason": "answered"}
    facts = build_rows([made, SHORT], pad_token_id=PAD, scores=[0.25, None])[[0, 2]].non_tensor_batch
    assert facts["episode_rewards"][0] == 0.25 and np.isnan(facts["episode_rewards"][1])
    assert facts["episode_lengths"].tolist() == [2, 1]
    assert facts["tool_callings"].tolist() == [3, 0]
    assert facts["data_source"].tolist() == ["rooms", "unknown"]
    assert facts["extra_info"][0] == {"split": "train", "sample_id": "s", "stop_reason": "answered"}
    assert facts["reward_model"][0] == {"ground_truth": "4"}
    assert facts["success"].tolist() == [True, None]
    assert facts["message_parts"].tolist() == [{"image_url": [image]}, {}]
    assert facts["traj_uid"].tolist() == ["r", "short"]
    assert facts["uid"].tolist() == ["r", "group of short"]
    assert facts["ends_episode"].tolist() == [False, True]


def picture(color: tuple[int, int, int]) -> dict[str, Any]:
    """Return a PNG of 56 by 28 pixels as a part of a message."""
    Image = pytest.importorskip("PIL.Image")
    file = io.BytesIO()
    Image.new("RGB", (56, 28), color).save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def episode_with_pictures() -> SingleAgentEpisode:
    made = SingleAgentEpisode("r")
    made.add_env_reset("o")
    text = {"type": "text", "text": "Where?"}
    for step, color in enumerate([(0, 0, 0), (255, 255, 255)]):
        made.add_messages([Message(role="user", content=[text, picture(color)])])
        made.tokens.add_turn(step, [1] * (2 * step + 1), [7])
        made.assistant_turns.append(len(made.messages))
        made.add_messages([Message(role="assistant", content="left")])
        made.add_env_step("o", {"type": "text", "content": "left"}, 0.0)
    return made


def test_image_inputs_are_the_pictures_before_each_action() -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    processor = Qwen2VLImageProcessorPil(min_pixels=28 * 28, max_pixels=56 * 56)
    pipeline = default_pipeline("action")
    pipeline.append(ImageInputs(processor))
    batch = build_rows([episode_with_pictures(), SHORT], pad_token_id=PAD, pipeline=pipeline)
    first, both, none = batch.non_tensor_batch["multi_modal_inputs"]
    assert first["image_grid_thw"].tolist() == [[1, 2, 4]] and both["image_grid_thw"].tolist() == [[1, 2, 4]] * 2
    assert none == {} and len(both["pixel_values"]) == 2 * len(first["pixel_values"]) == 16
    np.testing.assert_array_equal(both["pixel_values"][:8], first["pixel_values"])
    assert (both["pixel_values"][8:] > both["pixel_values"][:8]).all()
    rows = verl_rows([episode_with_pictures()], pad_token_id=PAD, pipeline=pipeline).non_tensor_batch
    assert rows["multi_modal_inputs"][1].keys() == both.keys() and "image_url" in rows["message_parts"][0]


def test_pictures_at_urls_are_not_fetched() -> None:
    made = episode_with_pictures()
    made.messages[0].content[1]["image_url"]["url"] = "https://example.com/a.png"
    pipeline = default_pipeline()
    pipeline.append(ImageInputs(lambda **_: {}))
    with pytest.raises(ConfigError, match="episode r: an image must be a base64 data URL, got 'https://example"):
        build_rows([made], pad_token_id=PAD, pipeline=pipeline)


@pytest.mark.parametrize("index", [slice(1, None), [1], np.array([1]), np.array([False, True])])
def test_rows_can_be_indexed_by_slice_list_and_mask(index: slice | list[int] | np.ndarray) -> None:
    part = rows()[index]
    assert isinstance(part, TokenBatch)
    assert len(part) == 1
    assert part.batch["prompt_ids"].tolist() == [[7, PAD]]
    assert part.non_tensor_batch["rollout_id"].tolist() == ["short"]
    assert part.meta_info == {"pad_token_id": PAD, "padding": "right"}


def test_int_index_returns_a_row_without_the_leading_axis() -> None:
    item = rows()[-1]
    assert isinstance(item, TokenItem)
    assert item.batch["prompt_ids"].tolist() == [7, PAD]
    assert item.non_tensor_batch["rollout_id"] == "short"
    assert [row.non_tensor_batch["rollout_id"] for row in rows()] == ["long", "short"]
    with pytest.raises(IndexError):
        rows()[2]


def test_episodes_without_tokens_give_an_empty_batch() -> None:
    without_tokens = SingleAgentEpisode("r")
    assert len(build_rows([without_tokens], [[]], pad_token_id=PAD)) == 0
    assert len(build_rows([], pad_token_id=PAD)) == 0
    assert len(rows()[[]]) == 0


def test_action_row_has_all_preceding_tokens_as_prompt() -> None:
    batch = build_rows([LONG], [valued(LONG, [0.5, -1.0])], pad_token_id=PAD, per="action")
    assert batch.batch["prompt_ids"].tolist() == [[1, 2, PAD, PAD, PAD], [1, 2, 3, 4, 5]]
    assert batch.batch["completion_ids"].tolist() == [[3, 4], [6, PAD]]
    assert batch.batch["advantages"].tolist() == [[0, 0, 0.5, 0.5, 0, 0], [0, 0, 0, 0, 0, -1.0]]
    assert batch.non_tensor_batch["step"].tolist() == [0, 1]
    assert batch.non_tensor_batch["ends_episode"].tolist() == [False, True]


def test_invalid_options_are_rejected() -> None:
    with pytest.raises(ConfigError, match="padding must be 'right', 'left' or 'outer', got 'both'"):
        build_rows([LONG], pad_token_id=PAD, padding="both")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="per must be 'segment' or 'action', got 'turn'"):
        build_rows([LONG], pad_token_id=PAD, per="turn")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="1 episodes require 1 scores, got 2"):
        build_rows([LONG], pad_token_id=PAD, scores=[1.0, 2.0])
    with pytest.raises(ConfigError, match=r"pipeline=default_pipeline\(per\)"):
        build_rows([LONG], pad_token_id=PAD, per="action", pipeline=default_pipeline())


def test_steps_must_fit_the_episodes() -> None:
    with pytest.raises(ConfigError, match="2 episodes require 2 step lists, got 1"):
        build_rows([LONG, SHORT], [episode_steps(LONG)], pad_token_id=PAD)
    with pytest.raises(EpisodeError, match="episode long has tokens for step 1, but only 1 of its steps"):
        build_rows([LONG], [episode_steps(LONG)[:1]], pad_token_id=PAD)


@pytest.mark.parametrize("pad_token_id", [None, "0", 0.5, 2**31])
def test_pad_token_id_must_be_a_token_id(pad_token_id: object) -> None:
    # Many tokenizers have none.
    with pytest.raises(ConfigError, match=r"pad_token_id must be a token id, got .*eos_token_id"):
        build_rows([LONG], pad_token_id=pad_token_id)  # type: ignore[arg-type]


def test_policy_version_can_be_a_time_in_milliseconds() -> None:
    made = SingleAgentEpisode("r")
    made.add_env_reset("o")
    made.tokens.add_turn(0, [1], [2, 3], policy_version=1_800_000_000_000)
    made.add_env_step("o", {"type": "text", "content": ""}, 0.0)
    assert build_rows([made], pad_token_id=PAD).batch["policy_versions"].tolist() == [[-1] + [1_800_000_000_000] * 2]
