"""Test that demonstrations become exactly the tokens that an acting policy would see and sample."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from reward_kit.agent.policies.hf_policy import HFAgentPolicy
from reward_kit.agent.policies.simple_policies import ExpertPolicy, ScriptedPolicy
from reward_kit.agent.policy_interface import PolicyOutput
from reward_kit.episodes import SingleAgentEpisode
from reward_kit.errors import ConfigError
from reward_kit.rl.model_kit.models import build_decoder, build_tokenizer, tool_texts, unknown_pieces
from reward_kit.rl.model_kit.sft import DemonstratingPolicy, Demonstrations
from reward_kit.tokens import build_rows
from tests.rl.model_kit.frozen_lake import TOOLS, tokenizer_of, walks

BYTES = build_tokenizer(level="byte")


def turns_of(episode: SingleAgentEpisode) -> list[tuple[list[int], list[int]]]:
    return [(turn.prompt_ids.tolist(), turn.token_ids.tolist()) for turn in episode.tokens.turns().values()]


@pytest.mark.parametrize(
    ("action_format", "written"),
    [
        ("bare", "down<|end|>"),
        ("plain", "act down<|end|>"),
        ("hermes", '<tool_call>\n{"name": "act", "arguments": {"action": "down"}}\n</tool_call><|end|>'),
    ],
)
async def test_an_action_is_written_in_the_models_format(action_format: str, written: str) -> None:
    episodes = await walks()
    tokenizer = tokenizer_of(episodes, action_format)
    (told,) = Demonstrations(tokenizer, action_format=action_format, tools_in_prompt=False)(episodes, TOOLS)
    prompt, answer = turns_of(told)[0]
    assert tokenizer.decode(answer) == written
    assert tokenizer.decode(prompt).startswith("<|system|>Walk.<|user|>[S] F")
    assert tokenizer.decode(prompt).endswith("<|assistant|>")
    assert tokenizer.unk_token_id not in told.tokens.ids


async def test_rows_mask_only_the_actions() -> None:
    episodes = await walks(2)
    demonstrated = Demonstrations(BYTES, action_format="bare")(episodes, TOOLS)
    rows = build_rows(demonstrated, pad_token_id=BYTES.pad_token_id)
    assert len(rows) == 2
    for row, episode in zip(rows, demonstrated, strict=True):
        assert row.batch["loss_mask"].sum() == 0  # no advantages: supervised training reads action_mask
        text = BYTES.decode(row.batch["input_ids"][row.batch["action_mask"] == 1])
        done = [episode.get_actions(step)["arguments"]["action"] for step in range(len(episode))]
        assert text == "".join(f"{action}<|end|>" for action in done)


async def test_input_episodes_are_not_modified() -> None:
    (episode,) = await walks()
    (told,) = Demonstrations(BYTES, action_format="bare")([episode], TOOLS)
    assert len(told.tokens) > 0
    assert len(episode.tokens) == 0
    told.tokens = episode.tokens
    assert told == episode


@pytest.mark.parametrize("options", [{}, {"tools_in_prompt": False}, {"tool_role": "user"}], ids=str)
async def test_demonstration_tokens_equal_those_of_an_acting_model(options: dict[str, Any]) -> None:
    # A model of one choice at a time: what it does, retold as a demonstration, has to be what it recorded.
    model = build_decoder(BYTES, layers=1, width=16, heads=2, context=2048)
    settings = {"action_format": "hermes", "constrain": True, **options}
    policy = HFAgentPolicy(model, BYTES, max_new_tokens=90, temperature=1.0, **settings)
    episodes = await walks(2, policy)
    await policy.close()
    assert all(len(episode) for episode in episodes)
    retold = Demonstrations(BYTES, **settings)(episodes, TOOLS)
    for acted, told in zip(episodes, retold, strict=True):
        assert turns_of(told) == turns_of(acted)
    rows = [build_rows(each, pad_token_id=0).non_tensor_batch["allowed_ids"] for each in (episodes, retold)]
    assert list(rows[0]) == list(rows[1])
    assert all(len(allowed) for allowed in rows[0])


async def test_tokens_recorded_while_acting_equal_tokens_added_afterwards() -> None:
    demonstrations = Demonstrations(BYTES, action_format="plain", constrain=True)
    (while_acting,) = await walks(1, DemonstratingPolicy(ExpertPolicy(), demonstrations))
    (afterwards,) = demonstrations(await walks(), TOOLS)
    assert turns_of(while_acting) == turns_of(afterwards)
    assert while_acting.tokens.get_state() == afterwards.tokens.get_state()


async def test_excluded_actions_remain_in_the_context() -> None:
    episodes = await walks()
    write = Demonstrations(BYTES, action_format="bare", constrain=True)
    (whole,) = write(episodes, TOOLS)
    (some,) = write(episodes, TOOLS, taught=lambda episode, step: step % 2 == 1)
    turns = turns_of(whole)
    assert turns_of(some) == turns[1::2]
    assert len(some.tokens.segments) == 1
    last = len(turns) - 1 if len(turns) % 2 == 0 else len(turns) - 2
    assert list(some.tokens.ids) == turns[last][0] + turns[last][1]
    down = {"type": "tool_call", "name": "act", "arguments": {"action": "down"}}

    def is_taught(output: PolicyOutput) -> bool:
        return output.action_structured != down

    (acting,) = await walks(1, DemonstratingPolicy(ExpertPolicy(), write, taught=is_taught))
    done = [episodes[0].get_actions(step) for step in range(len(turns))]
    kept = [turn for turn, action in zip(turns, done, strict=True) if action["arguments"]["action"] != "down"]
    assert 0 < len(kept) < len(turns)
    assert turns_of(acting) == kept


async def test_tools_may_differ_from_step_to_step() -> None:
    (episode,) = await walks()
    changed = [{**TOOLS[0], "function": {**TOOLS[0]["function"], "description": "Now another."}}]
    demonstrations = Demonstrations(BYTES, action_format="bare")
    (told,) = demonstrations([episode], lambda episode, step: TOOLS if step < 2 else changed)
    assert [segment.reason for segment in told.tokens.segments] == ["start", "tools changed"]
    assert "Now another." in BYTES.decode(turns_of(told)[2][0])


async def test_text_and_combined_actions_are_written() -> None:
    step = {"type": "tool_call", "name": "act", "arguments": {"action": "right"}}
    script = [
        {"type": "text", "content": "I think."},
        {"type": "tool_calls", "content": "Both:", "calls": [step, step]},
        {**step, "reasoning_content": "hm"},
        {"type": "terminate"},
    ]
    (episode,) = await walks(1, ScriptedPolicy(script))
    (told,) = Demonstrations(BYTES)([episode], TOOLS)
    call = '<tool_call>\n{"name": "act", "arguments": {"action": "right"}}\n</tool_call>'
    assert [BYTES.decode(answer) for _, answer in turns_of(told)] == [
        "I think.<|end|>",
        f"Both:\n{call}\n{call}<|end|>",
        f"<think>\nhm\n</think>\n\n{call}<|end|>",
    ]


async def test_steps_beyond_the_context_are_left_out() -> None:
    episodes = await walks()
    (whole,) = Demonstrations(BYTES, action_format="bare")(episodes, TOOLS)
    ends = [len(prompt) + len(answer) for prompt, answer in turns_of(whole)]
    (cut,) = Demonstrations(BYTES, action_format="bare", max_context=ends[2])(episodes, TOOLS)
    assert turns_of(cut) == turns_of(whole)[:3]


async def test_unknown_pieces_are_counted_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    episodes = await walks()
    tokenizer = build_tokenizer([episodes[0].messages[1].text], words=["down", "right"])
    Demonstrations(tokenizer, action_format="bare", tools_in_prompt=False)(episodes, TOOLS)
    assert "tokens in 1 demonstrations are not in the vocabulary" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        Demonstrations(tokenizer_of(episodes), action_format="bare", tools_in_prompt=False)(episodes, TOOLS)
    assert not caplog.text


def test_tool_texts_match_the_chat_template() -> None:
    tokenizer = build_tokenizer(tool_texts(TOOLS))
    shown = tokenizer.apply_chat_template([{"role": "user", "content": ""}], tools=TOOLS, tokenize=False)
    assert shown == f"<|tools|>{tool_texts(TOOLS)[0]}<|user|>"
    assert not unknown_pieces(tokenizer, tool_texts(TOOLS))


async def test_unwritable_action_is_rejected_with_its_location() -> None:
    episodes = await walks()
    with pytest.raises(ConfigError, match=r"episode .*, step 0: .*pass the tools that the action calls"):
        Demonstrations(BYTES, action_format="hermes")(episodes)
    with pytest.raises(ConfigError, match=r"step 0: .*bare needs exactly one tool"):
        Demonstrations(BYTES, action_format="bare")(episodes, [*TOOLS, *TOOLS])
    with pytest.raises(ConfigError, match="did you mean 'plain'"):
        Demonstrations(BYTES, action_format="plane")
