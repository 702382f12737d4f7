"""Test that action formats round-trip, keep broken JSON verbatim, and treat other output as text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_kit.agent.policies.hf.action_formats import (
    MAX_LISTED,
    Bare,
    Hermes,
    Llama,
    Mistral,
    Plain,
    ResponseTemplate,
    ToolSchema,
    all_calls,
    find_action_format,
    tools_of,
)
from reward_kit.environments.base import tool_spec
from reward_kit.errors import ConfigError, PolicyError
from tests.agent.policies.hf.small_models import CHATML, LLAMA_LIKE, PLAIN_TEXT, byte_tokenizer

SAY = ToolSchema("say", {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]})
LOOK = ToolSchema("look", {"type": "object", "properties": {}})
ADD = ToolSchema("add", {"type": "object", "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}}})
TOOLS = [SAY, LOOK, ADD]
RESPONSE_TEMPLATE = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "content": {},
        "reasoning_content": {"open": "<think>", "close": "</think>"},
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
    },
}


def call(name, **arguments):
    return {"type": "tool_call", "name": name, "arguments": arguments}


values = st.text(st.characters(exclude_categories=["Cs", "Cc"]))


@pytest.mark.parametrize("form", [Hermes(), Llama(), Mistral(), Plain()], ids=lambda form: form.name)
@given(text=values, x=st.integers(), y=st.integers())
def test_formats_parse_their_own_output(form, text, x, y):
    for tool, arguments in ((SAY, {"text": text}), (LOOK, {}), (ADD, {"x": x, "y": y}), (ADD, {})):
        # A turn that may begin with reasoning is cut at "</think>", wherever it stands; Hypothesis tries that text too.
        action = form.action(form.write(tool, arguments), TOOLS, may_reason=False)
        action.pop("id", None)
        assert action == call(tool.name, **arguments)


@pytest.mark.parametrize(
    ("form", "text", "action"),
    [
        (Hermes(), "Hello there.", {"type": "text", "content": "Hello there."}),
        (
            Hermes(),
            '<tool_call>{"name": "say", "arguments": "{\\"text\\": \\"a\\"}"}</tool_call>',
            call("say", text="a"),
        ),
        (Hermes(), '<tool_call>\n{"name": "look"}\n</tool_call>', call("look")),
        (Hermes(), '<tool_call>{"name": "add", "arguments": {"x": 1', "add|" + '{"x": 1'),
        (Hermes(), "<tool_call>nonsense</tool_call>", "|nonsense"),
        (Hermes(), '<tool_call>["a"]</tool_call>', '|["a"]'),
        (Llama(), '{"name": "add", "parameters": {"x": 1, "y": 2}}', call("add", x=1, y=2)),
        (Llama(), '<|python_tag|>{"name": "look", "parameters": {}}', call("look")),
        (Llama(), '{"answer": 42}', {"type": "text", "content": '{"answer": 42}'}),
        (Llama(), '{"name": "add", "parameters": {"x": }}', "add|" + '{"x": }}'),
        (Plain(), "say it is {late}", call("say", text="it is {late}")),
        (Plain(), 'say {"text": "a"}', call("say", text="a")),
        (Plain(), "say", call("say")),
        (Plain(), " look\n", call("look")),
        (Plain(), "look around", {"type": "text", "content": "look around"}),
        (Plain(), 'add {"x": 1', "add|" + '{"x": 1'),
        (Plain(), "jump {}", {"type": "text", "content": "jump {}"}),
        (Plain(), "", {"type": "text", "content": ""}),
    ],
)
def test_formats_parse_model_output(form, text, action):
    if isinstance(action, str):  # name|arguments that are no JSON object
        name, _, verbatim = action.partition("|")
        action = {"type": "tool_call", "name": name, "arguments_text": verbatim}
    assert form.action(text, TOOLS) == action


@pytest.mark.parametrize("form", [Hermes(), Llama(), Mistral(), Plain()], ids=lambda form: form.name)
@pytest.mark.parametrize("text", ["</tool_call>", "a<tool_call>{}</tool_call>b", "</think>", "; {", "}]"])
def test_call_delimiters_are_allowed_in_arguments(form, text):
    action = form.action(form.write(SAY, {"text": text}), TOOLS, may_reason=False)
    action.pop("id", None)
    assert action == call("say", text=text)


def test_call_after_a_broken_call_is_parsed():
    action = Hermes().action(
        '<tool_call>{"name": "add",</tool_call> and <tool_call>{"name": "look"}</tool_call>.', TOOLS
    )
    assert [each["name"] for each in action["calls"]] == ["add", "look"]
    assert action["content"] == "and ."


@pytest.mark.parametrize("name", ["", "a b", "a\n"])
def test_plain_format_rejects_tool_names_with_spaces(name):
    with pytest.raises(PolicyError, match="action_format plain cannot call"):
        Plain().check([ToolSchema(name, {})])


def test_several_calls_are_parsed_with_surrounding_text():
    calls = ['{"name": "look"}', '{"name": "say", "arguments": {"text": "a"}}']
    text = "Both." + "".join(f"\n<tool_call>{each}</tool_call>" for each in calls)
    action = Hermes().action(text, TOOLS)
    assert action["content"] == "Both."
    assert [each["name"] for each in action["calls"]] == ["look", "say"]
    llama = Llama().action('{"name": "look", "parameters": {}}; {"name": "add", "parameters": {"x": 1}}', TOOLS)
    assert [each["arguments"] for each in llama["calls"]] == [{}, {"x": 1}]


@pytest.mark.parametrize(
    "text",
    [
        '[TOOL_CALLS][{"name": "look", "arguments": {}}, {"name": "add", "arguments": {"x": 1}}]',
        '[TOOL_CALLS]look[ARGS]{}[TOOL_CALLS]add[ARGS]{"x": 1}',
        '[TOOL_CALLS]look{}[TOOL_CALLS]add{"x": 1}',
        '[TOOL_CALLS]look[CALL_ID]abc[ARGS]{}[TOOL_CALLS]add[CALL_ID]abc[ARGS]{"x": 1}',
    ],
)
def test_mistral_parses_every_call_syntax(text):
    calls = Mistral().action(text, TOOLS, turn=3)["calls"]
    assert [(each["name"], each["arguments"]) for each in calls] == [("look", {}), ("add", {"x": 1})]
    assert [each["id"] for each in calls] == ["c00003000", "c00003001"]


def test_reasoning_is_separated_from_the_action():
    action = Plain().action("<think>\nIt is dark.\n</think>\n\nlook", TOOLS)
    assert action == {**call("look"), "reasoning_content": "It is dark."}
    # The generation prompt may have opened it.
    assert Hermes().action("hm</think>done", TOOLS) == {"type": "text", "content": "done", "reasoning_content": "hm"}


def test_bare_format_needs_one_tool_with_one_string_argument():
    assert Bare().action(" go to bed\n", [SAY]) == call("say", text="go to bed")
    with pytest.raises(PolicyError, match=r"got say, look.*action_format: plain"):
        Bare().check([SAY, LOOK])
    with pytest.raises(PolicyError, match="bare"):
        Bare().check([ADD])


def test_template_format_uses_the_response_template_of_the_tokenizer():
    tokenizer = byte_tokenizer()
    tokenizer.response_template = RESPONSE_TEMPLATE
    form = find_action_format("auto", tokenizer, CHATML, "<|im_end|>\n<|im_start|>assistant\n<think>")
    assert isinstance(form, ResponseTemplate)
    text = 'hm</think>ok<tool_call>{"name": "add", "arguments": {"x": 1}}</tool_call>'
    action = form.action(text, TOOLS)
    assert action["calls"] == [{"name": "add", "arguments": {"x": 1}}]
    assert (action["content"], action["reasoning_content"]) == ("ok", "hm")
    broken = form.action('</think><tool_call>{"name": "add", "arguments": {oops</tool_call>', TOOLS)
    assert broken == {"type": "tool_call", "name": "add", "arguments_text": "{oops</tool_call>"}
    assert form.action("</think><tool_call>oops</tool_call>", TOOLS)["type"] == "text"


@pytest.mark.parametrize(
    ("template", "name"),
    [(CHATML + '"arguments"', "hermes"), ("[TOOL_CALLS]", "mistral"), (LLAMA_LIKE, "llama")],
)
def test_auto_detects_the_format_from_the_template(template, name):
    assert find_action_format("auto", byte_tokenizer(), template).name == name


@pytest.mark.parametrize("template", [PLAIN_TEXT, "<tool_call><function=", None])
def test_auto_reports_the_options_if_the_template_is_ambiguous(template):
    error = find_action_format("auto", byte_tokenizer(), template)
    assert isinstance(error, PolicyError)
    assert "set action_format to hermes, llama, mistral, plain or bare" in str(error)


def test_unknown_format_is_rejected():
    with pytest.raises(ConfigError, match="did you mean 'hermes'"):
        find_action_format("hermess", byte_tokenizer(), CHATML)
    with pytest.raises(ConfigError, match="no response_template"):
        find_action_format("template", byte_tokenizer(), CHATML)


def test_finite_calls_are_enumerated():
    on_off = {"type": "boolean"}
    lamp = ToolSchema("lamp", {"properties": {"on": on_off, "of": {"enum": ["a", "b"]}}, "required": ["of"]})
    assert lamp.listed_calls() == [
        {"of": "a"}, {"of": "b"}, {"on": True, "of": "a"}, {"on": True, "of": "b"}, {"on": False, "of": "a"},
        {"on": False, "of": "b"},
    ]  # fmt: skip
    assert LOOK.listed_calls() == [{}]
    assert SAY.listed_calls() is None
    assert all_calls([LOOK, SAY]) is None
    many = ToolSchema("many", {"properties": {"n": {"enum": list(range(MAX_LISTED + 1))}}, "required": ["n"]})
    assert many.listed_calls() is None
    assert tools_of([tool_spec("look", "", {"type": "object"})])[0].listed_calls() == [{}]
