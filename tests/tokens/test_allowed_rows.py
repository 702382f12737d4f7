"""Allowed token ids in training rows."""

import numpy as np
import pytest

from reward_kit.episodes import SingleAgentEpisode
from reward_kit.tokens import TokenBatch, build_rows, micro_batches

TURNS = [  # prompt, sampled, what was allowed
    ([1, 2, 3], [4, 5], [[4, 9], None]),
    ([1, 2, 3, 4, 5, 6], [7], [[5, 7]]),
    ([8], [4, 4], [None, [3, 4]]),
]


def episode(rollout_id="r", turns=TURNS, steps=3):
    made = SingleAgentEpisode(rollout_id)
    made.add_env_reset("o")
    for t, (prompt, sampled, allowed) in enumerate(turns):
        made.tokens.add_turn(t, prompt, sampled, [-1.0] * len(sampled), 0, allowed_ids=allowed)
    for _ in range(steps):
        made.add_env_step("o", {"type": "text", "content": ""}, 0.0)
    return made


def allowed_tokens(rows):
    """Return (row, column, ids) in the padded array, from the places."""
    found = []
    for row, allowed in enumerate(rows.non_tensor_batch["allowed_ids"]):
        columns = np.flatnonzero(rows.batch["attention_mask"][row])
        for m in range(0 if allowed is None else len(allowed)):
            found.append((row, int(columns[allowed.places[m]]), allowed.at(m).tolist()))
    return found


@pytest.mark.parametrize("padding", ["right", "left", "outer"])
@pytest.mark.parametrize("per", ["segment", "action"])
def test_sampled_tokens_are_among_their_allowed_tokens(padding, per):
    rows = build_rows([episode("long", [([0] * 7, [1], None)], 1), episode()], pad_token_id=0, padding=padding, per=per)
    found = allowed_tokens(rows)
    assert [ids for _, _, ids in found] == [[4, 9], [5, 7], [3, 4]]
    for row, column, ids in found:
        assert rows.batch["action_mask"][row, column] == 1
        assert rows.batch["input_ids"][row, column] in ids


def test_unconstrained_row_has_no_allowed_ids():
    rows = build_rows([episode("free", [([1], [2], None)], 1), episode()], pad_token_id=0)
    assert [allowed is None for allowed in rows.non_tensor_batch["allowed_ids"]] == [True, False, False]


def test_row_operations_carry_allowed_ids_along():
    rows = build_rows([episode("a"), episode("b", [([1], [2, 3], [None, [3, 8]])], 1)], pad_token_id=0)
    again = TokenBatch.concat([rows[[2]], rows[[0, 1]]]).repeat(2)
    expected = [ids for row in (2, 2, 0, 0, 1, 1) for r, _, ids in allowed_tokens(rows) if r == row]
    assert [ids for _, _, ids in allowed_tokens(again)] == expected
    assert [ids for part in micro_batches(rows.lengths(), 8) for _, _, ids in allowed_tokens(rows[part])]
    assert rows.union(rows).non_tensor_batch["allowed_ids"][0] == rows.non_tensor_batch["allowed_ids"][0]


def test_episode_chunk_has_allowed_ids_of_its_own_steps_only():
    whole = episode()
    rows = build_rows([whole[1:2]], pad_token_id=0)
    assert [ids for _, _, ids in allowed_tokens(rows)] == [[5, 7]]
