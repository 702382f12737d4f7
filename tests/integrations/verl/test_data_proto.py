"""Test episodes in verl's `DataProto`: results of its own functions, and the conversion back."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
import verl
from verl.trainer.ppo.ray_trainer import compute_response_mask
from verl.trainer.ppo.reward import extract_reward
from verl.utils.model import compute_position_id_with_mask

from reward_kit.integrations.verl.data_proto import from_data_proto, to_data_proto
from reward_kit.rl_helpers import ESTIMATORS, with_credit
from tests.integrations.verl_episodes import collected, equal

pytestmark = pytest.mark.campaign


@pytest.mark.parametrize("per", ["segment", "action"])
@pytest.mark.parametrize("seed", range(10))
def test_episode_round_trip_is_exact_after_trainer_operations(seed: int, per: str) -> None:
    given = collected(seed)
    if seed % 2:
        credit = ESTIMATORS["gigpo"](given.steps, given.scores, group_ids=given.group_ids, omega=0.5, gamma=0.9)
        given = given._replace(steps=with_credit(given.steps, credit))
    options = {"pad_token_id": 0, "per": per, "unscored": "mask", "prompt_length": 24, "response_length": 24}
    # Two halves by themselves, one after the other, mixed, cut in chunks, sent to another process and back.
    halves = [
        to_data_proto(given.episodes[part], given.steps[part], scores=given.scores[part], **options)
        for part in (slice(0, 4), slice(4, None))
    ]
    data = verl.DataProto.concat(halves)
    data.reorder(torch.from_numpy(np.random.default_rng(seed).permutation(len(data))))
    data = verl.DataProto.concat(pickle.loads(pickle.dumps(data.split(3))))
    back = from_data_proto(data)
    found = {made.id_: place for place, made in enumerate(back.episodes)}
    assert found.keys() == {made.id_ for made in given.episodes}
    for made, steps, score in zip(*given, strict=True):
        place = found[made.id_]
        assert back.episodes[place].get_state() == made.get_state()
        assert back.scores[place] == score
        assert all(equal(a, b) for a, b in zip(back.step_data_lists[place], steps, strict=True))


def test_arrays_match_verl_functions() -> None:
    given = collected(1, unscored=False)
    data = to_data_proto(given.episodes, given.steps, pad_token_id=0, scores=given.scores)
    arrays = data.batch
    assert torch.equal(arrays["position_ids"], compute_position_id_with_mask(arrays["attention_mask"]))
    assert torch.equal(arrays["input_ids"], torch.cat([arrays["prompts"], arrays["responses"]], dim=1))
    # What the policy sampled is among the tokens of the response, which is all that verl knows without a mask.
    assert (arrays["response_mask"] <= compute_response_mask(data)).all()
    assert {arrays[key].dtype for key in ("prompts", "responses", "attention_mask", "response_mask")} == {torch.int64}
    rewards, extra = extract_reward(data)
    assert rewards.dtype == torch.float32 and not extra
    ends = data.non_tensor_batch["ends_episode"]
    scores = data.non_tensor_batch["episode_rewards"]
    assert np.allclose(rewards.sum(dim=1).numpy(), np.where(ends, scores, 0.0))


def test_batch_is_merged_with_worker_results() -> None:
    given = collected(1)
    data = to_data_proto(given.episodes, given.steps, pad_token_id=0, scores=given.scores)
    computed = verl.DataProto.from_dict(tensors={"old_log_probs": data.batch["rollout_log_probs"] * 1.0})
    assert "old_log_probs" in data.union(computed).batch.keys()  # noqa: SIM118 - a TensorDict does not answer `in`
    assert len(data.repeat(2)) == 2 * len(data)
