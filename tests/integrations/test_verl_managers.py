"""Test reward managers on verl's `DataProto`: rewards at the same positions; known differences are stated."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from reward_kit.rl.reward_manager import load_reward_manager
from tests.integrations.peers import Peer, generator

pytestmark = pytest.mark.campaign

ROWS, PROMPT, RESPONSE = 8, 4, 10


def random_tensors(seed: int, *, empty_row: int | None = None, with_tools: bool = False) -> dict[str, Tensor]:
    """Return left-padded prompts and right-padded responses under verl's names."""
    draw = generator(seed)
    starts = torch.randint(0, PROMPT, (ROWS, 1), generator=draw)
    ends = torch.randint(3, RESPONSE + 1, (ROWS, 1), generator=draw)
    if empty_row is not None:
        ends[empty_row] = 0
    attention = torch.cat([torch.arange(PROMPT) >= starts, torch.arange(RESPONSE) < ends], dim=1).long()
    ids = torch.randint(2, 13, (ROWS, PROMPT + RESPONSE), generator=draw) * attention
    tensors = {"prompts": ids[:, :PROMPT], "responses": ids[:, PROMPT:], "attention_mask": attention}
    if with_tools:
        sampled = (torch.rand((ROWS, RESPONSE), generator=draw) < 0.6).long()
        sampled.scatter_(1, (ends - 1).clamp(min=0), 0)  # a tool has the last word
        sampled[:, 0] = 1
        tensors["response_mask"] = attention[:, PROMPT:] * sampled
    return tensors


def described() -> dict[str, Any]:
    return {
        "data_source": ["a", "b"] * (ROWS // 2),
        "reward_model": [{"ground_truth": f"word{2 + row}"} for row in range(ROWS)],
        "extra_info": [{"row": row} for row in range(ROWS)],
    }


def last_of(mask: Tensor) -> Tensor:
    """Return (B,) the last column of the mask, by a loop."""
    return torch.tensor([max((t for t, is_in in enumerate(row) if is_in), default=-1) for row in mask.tolist()])


@pytest.mark.parametrize("options", [{}, {"normalize_by_length": True}, {"normalization_type": "variance"}])
@pytest.mark.parametrize("with_tools", [False, True])
def test_episode_rewards_have_the_same_positions_in_dataproto(
    managers: Peer, options: dict[str, Any], with_tools: bool
) -> None:
    tensors = random_tensors(1, with_tools=with_tools, empty_row=2)
    others: dict[str, Any] = {
        "episode_rewards": [0.5, 0.5, 1.0, None, None, 2.0, 2.0, 2.0],
        "episode_lengths": [2, 2, 1, 2, 2, 3, 3, 3],
        "traj_uid": ["a", "a", "b", "c", "c", "d", "d", "d"],
    }
    found = managers.ask("episode", tensors=tensors, others=others, options=options)
    # No tokenizer: nothing is decoded where nothing is shown.
    here = SimpleNamespace(batch=tensors, non_tensor_batch={name: np.array(v, object) for name, v in others.items()})
    manager: Any = load_reward_manager("episode", None, 0, **options)
    assert torch.equal(found["rewards"], manager(here))
    assert found["is_scored"] == [score is not None for score in others["episode_rewards"]]
    ends = last_of(tensors.get("response_mask", tensors["attention_mask"][:, PROMPT:]))
    assert found["rewards"].nonzero().tolist() == [
        [1, ends[1].item()],
        [7, ends[7].item()],
    ]  # row 2 is empty, and c is unscored


@pytest.mark.parametrize("name", ["naive", "batch", "dapo", "prime"])
@pytest.mark.parametrize("seed", range(3))
def test_single_turn_rewards_equal_verl(managers: Peer, name: str, seed: int) -> None:
    found = managers.ask("single_turn", name=name, tensors=random_tensors(seed), others=described(), longest=RESPONSE)
    assert torch.allclose(found["ours"], found["theirs"], atol=1e-6) and found["ours"].count_nonzero() == ROWS


def test_overlong_penalty_is_bounded_where_verl_keeps_growing(managers: Peer) -> None:
    found = managers.ask("single_turn", name="dapo", tensors=random_tensors(0), others=described(), longest=8)
    lengths = random_tensors(0)["attention_mask"][:, PROMPT:].sum(dim=1)
    # 0.5 for the 3 tokens before the longest; a response of 10 is 2 longer still.
    beyond = 0.5 * (lengths - 8).clamp(min=0) / 3
    assert beyond.any()
    assert torch.allclose(found["ours"].sum(dim=1) - beyond, found["theirs"].sum(dim=1), atol=1e-6)


def test_empty_response_gets_no_reward_but_in_verl_the_last_column(managers: Peer) -> None:
    tensors = random_tensors(4, empty_row=3)
    found = managers.ask("single_turn", name="naive", tensors=tensors, others=described())
    assert not found["ours"][3].any() and found["theirs"][3, -1] == 0.25
    found["theirs"][3, -1] = 0.0
    assert torch.allclose(found["ours"], found["theirs"], atol=1e-6)


def test_score_is_on_the_last_action_where_verl_uses_the_tool_answer(managers: Peer) -> None:
    tensors = random_tensors(5, with_tools=True)
    found = managers.ask("single_turn", name="naive", tensors=tensors, others=described())
    assert torch.allclose(found["ours"].sum(dim=1), found["theirs"].sum(dim=1), atol=1e-6)
    actions, tokens = last_of(tensors["response_mask"]), last_of(tensors["attention_mask"][:, PROMPT:])
    rows = torch.arange(ROWS)
    assert found["ours"][rows, actions].all() and found["theirs"][rows, tokens].all()
    assert (actions < tokens).all()
