"""Test that samples under a grammar are valid calls for the tool schema in each format."""

import json

import numpy as np
import pytest

from reward_kit.agent.policies.hf.action_formats import Bare, Hermes, Llama, Mistral, Plain, ToolSchema
from reward_kit.agent.policies.hf.chat_layout import ChatLayout
from reward_kit.agent.policies.hf.constraints import Choices, JsonGrammar, TurnConstraints
from reward_kit.errors import ConfigError, PolicyError
from tests.agent.policies.hf.small_models import byte_tokenizer, word_tokenizer

TOKENIZER = byte_tokenizer()
LAYOUT = ChatLayout(TOKENIZER)
STOP = TOKENIZER.eos_token_id
COUNT = {"type": "integer", "minimum": 0, "maximum": 99}
ADD = ToolSchema("add", {"properties": {"x": COUNT, "y": COUNT}, "required": ["x", "y"]})
SAY = ToolSchema("say", {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]})
SET = ToolSchema("set", {"properties": {"on": {"type": "boolean"}, "to": {"enum": ["a b", "c"]}}, "required": ["to"]})
ROOMS = ToolSchema(
    "go", {"properties": {"to": {"type": "string", "enum": ["fridge 1", "fridge 12"]}}, "required": ["to"]}
)


def constraints(tokenizer=TOKENIZER, max_new_tokens=500):
    return TurnConstraints(ChatLayout(tokenizer), tokenizer, STOP, max_new_tokens)


def sampled(constraint, seed):
    """Sample uniformly among the allowed tokens, but end strings soon."""
    draw, ids = np.random.default_rng(seed), []
    quote = TOKENIZER.convert_tokens_to_ids('"')
    while not constraint.is_done:
        allowed = np.asarray(constraint.allowed())
        token = int(quote if quote in allowed and draw.random() < 0.3 else draw.choice(allowed))
        ids.append(token)
        constraint.advance(token)
    assert ids[-1] == STOP
    return TOKENIZER.decode(ids[:-1], clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("form", [Hermes(), Llama(), Mistral(), Plain()], ids=lambda form: form.name)
def test_every_sample_is_a_valid_call(form):
    tools, made = [ADD, SET, ROOMS], constraints()
    names = set()
    for seed in range(12):
        constraint = made.start("tools", tools, form)
        assert isinstance(constraint, JsonGrammar)
        action = form.action(sampled(constraint, seed), tools)
        assert action["type"] == "tool_call"
        arguments = action["arguments"]
        names.add(action["name"])
        if action["name"] == "add":
            assert arguments.keys() == {"x", "y"}
            assert all(0 <= value < 100 for value in arguments.values())
        elif action["name"] == "go":
            assert arguments in ({"to": "fridge 1"}, {"to": "fridge 12"})
        else:
            assert arguments.get("on") in (True, False, None)
            assert arguments["to"] in ("a b", "c")
    assert names == {"add", "set", "go"}


def test_free_text_in_the_plain_format_is_a_tool_call():
    texts = {sampled(constraints().start("tools", [SAY, ADD], Plain()), seed) for seed in range(4)}
    actions = [Plain().action(text, [SAY, ADD]) for text in texts]
    assert {action["type"] for action in actions} == {"tool_call"}


@pytest.mark.parametrize("form", [Hermes(), Llama(), Mistral(), Plain(), Bare()], ids=lambda form: form.name)
def test_enumerable_calls_become_a_trie_and_parse_correctly(form):
    tools = [ROOMS] if form.name == "bare" else [ROOMS, SET]
    made, seen = constraints(), set()
    for seed in range(40):
        constraint = made.start("tools", tools, form)
        assert isinstance(constraint, Choices)
        text = sampled(constraint, seed)
        assert constraint.chosen == text
        action = form.action(text, tools)
        seen.add(json.dumps([action["name"], action["arguments"]]))
    assert len(seen) == (2 if form.name == "bare" else 2 + 2 * 3)


def test_equal_masks_share_one_array():
    constraint = constraints().start("tools", [SAY], Hermes())
    for token in LAYOUT.encode('<tool_call>\n{"name": "say", "arguments": {"text": "a'):
        constraint.advance(token)
    first = constraint.allowed()
    constraint.advance(int(LAYOUT.encode("b")[0]))
    assert constraint.allowed() is first
    assert len(first) > 50


def test_token_outside_the_grammar_is_rejected():
    constraint = constraints().start("tools", [ADD], Hermes())
    with pytest.raises(PolicyError, match="constrain:"):
        constraint.advance(LAYOUT.encode("x")[0])


def test_choice_longer_than_max_new_tokens_is_rejected():
    with pytest.raises(PolicyError, match="the longest choice has 13 tokens, but the limit is max_new_tokens=12"):
        constraints(max_new_tokens=12).start("tools", [ROOMS], Plain())


def test_tokenizer_unknown_to_llguidance_is_rejected():
    tokenizer = word_tokenizer(["add", "{", "}"])
    made = TurnConstraints(ChatLayout(tokenizer), tokenizer, tokenizer.eos_token_id, 50)
    with pytest.raises(ConfigError, match="llguidance cannot read this tokenizer"):
        made.start("tools", [ADD], Plain())


def test_choices_that_encode_to_unknown_tokens_are_rejected():
    tokenizer = word_tokenizer(["go"])
    made = TurnConstraints(ChatLayout(tokenizer), tokenizer, tokenizer.eos_token_id, 50)
    rooms = ToolSchema("go", {"properties": {"to": {"enum": ["bed", "desk"]}}, "required": ["to"]})
    with pytest.raises(PolicyError, match="'go bed' and 'go desk' have the same token ids"):
        made.start("tools", [rooms], Plain())


def test_unsupported_schema_is_rejected_with_the_reason():
    strange = ToolSchema("odd", {"properties": {"x": {"type": "array", "uniqueItems": True}}, "required": ["x"]})
    with pytest.raises(PolicyError, match=r"cannot be enforced token by token: .*uniqueItems"):
        constraints().start("tools", [strange], Hermes())
