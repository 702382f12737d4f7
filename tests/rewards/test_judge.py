"""`llm_judge`: scores, requests and options."""

from __future__ import annotations

import asyncio
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reward_kit import with_options
from reward_kit.errors import ConfigError, ProviderError, RewardError
from reward_kit.models import Message
from reward_kit.rewards import llm_judge
from tests.chat_server import status
from tests.profiles import examples
from tests.rewards.judges import QUALITY, data_block, fair, grades, judged, talk

TWO = {"safety": {"description": "It is safe.", "weight": 3}, "factuality": "It is true."}

SCORES = {
    "all at the top": (talk("Paris"), {"rubric": QUALITY}, 5, 1.0),
    "all at the bottom": (talk("Lyon"), {"rubric": QUALITY}, 1, 0.0),
    "in the middle": (talk("Paris?"), {"rubric": QUALITY}, 3, 0.5),
    "one above the bottom is not one fifth": (talk("Paris?"), {"rubric": QUALITY}, 2, 0.25),
    "scale of ten": (talk("Paris"), {"rubric": QUALITY, "scale": (1, 10)}, 10, 1.0),
    "scale from 0": (talk("Paris"), {"rubric": QUALITY, "scale": (0, 4)}, 1, 0.25),
    "yes or no": (talk("Paris"), {"rubric": QUALITY, "scale": (0, 1)}, 1, 1.0),
    "scale to a hundred": (talk("Paris"), {"rubric": QUALITY, "scale": (0, 100)}, 37, 0.37),
    "weights count": (talk("Paris"), {"rubric": TWO}, {"safety": 5, "factuality": 1}, 0.75),
    "weights count the other way": (talk("Paris"), {"rubric": TWO}, {"safety": 1, "factuality": 5}, 0.25),
    "weights of any size": (
        talk("Paris"),
        {"rubric": {"a": {"description": "x", "weight": 1e300}, "b": {"description": "y", "weight": 1e300}}},
        {"a": 5, "b": 1},
        0.5,
    ),
    "the default rubric": (talk("Paris"), {}, {"helpfulness": 5, "factuality": 5, "safety": 1}, 2 / 3),
    "the task's rubric": (
        talk("Paris"),
        {"evaluation_criteria": {"rubric": TWO}},
        {"safety": 5, "factuality": 1},
        0.75,
    ),
    "the option beats the task's": (talk("Paris"), {"rubric": QUALITY, "evaluation_criteria": {"rubric": TWO}}, 5, 1.0),
    "the sample's rubric": (
        talk("Paris"),
        {"rubric_key": "r", "sample": {"r": TWO}},
        {"safety": 1, "factuality": 5},
        0.25,
    ),
    "criteria without a rubric": (talk("Paris"), {"evaluation_criteria": {"final_state_query": "x"}}, 5, 1.0),
    "names in any language": (talk("Paris"), {"rubric": {"Höflichkeit 礼貌": "x"}}, 4, 0.75),
    "thoughts are not judged": (talk("<think>Lyon?</think>Paris"), {"rubric": QUALITY}, 5, 1.0),
    "content in parts": (
        [Message(role="user", content="x"), Message(role="assistant", content=[{"type": "text", "text": "Paris"}])],
        {"rubric": QUALITY},
        5,
        1.0,
    ),
    "answer without a question": ([Message(role="assistant", content="Paris")], {"rubric": QUALITY}, 5, 1.0),
    "a conversation of tool calls alone": (
        talk(None, tool_calls=[{"id": "1", "function": {"name": "look"}}]),
        {"rubric": QUALITY, "judged": "conversation"},
        4,
        0.75,
    ),
    "not JSON in the ground truth": (talk("Paris"), {"rubric": QUALITY, "ground_truth": {"a": {1, 2}}}, 5, 1.0),
    "a long answer": (talk("Paris " * 100_000), {"rubric": QUALITY}, 5, 1.0),
    "surrogates": (talk("\ud83d Paris"), {"rubric": QUALITY}, 5, 1.0),
    "braces of a template": (talk("{task} {0} %s {{ x }}"), {"rubric": {"b": "{form} {}"}}, 5, 1.0),
}
UNASKED = {
    "empty": talk(""),
    "None": talk(None),
    "blanks": talk(" \n\t "),
    "a thought alone": talk("<think>Paris"),
    "tool call alone": talk(None, tool_calls=[{"id": "1", "function": {"name": "look"}}]),
    "no assistant": [Message(role="user", content="Paris")],
    "nothing": [],
}


@pytest.mark.parametrize(("messages", "options", "said", "score"), SCORES.values(), ids=SCORES)
async def test_score_is_the_weighted_share_of_the_scale(messages, options, said, score):
    result, server = await judged(llm_judge, fair(grades(said)), messages, **options)
    assert result.score == pytest.approx(score)
    assert len(server.requests) == 1
    for name, metric in result.metrics.items():
        assert (name == "judge_usage") != metric.is_score_valid


@pytest.mark.parametrize("messages", UNASKED.values(), ids=UNASKED)
async def test_missing_answer_scores_zero_without_a_request(messages):
    result, server = await judged(llm_judge, [], messages)
    assert (result.score, result.is_score_valid, len(server.requests)) == (0.0, True, 0)


async def test_conversation_reference_and_answer_are_sent_separately():
    _, server = await judged(llm_judge, fair(grades(5)), talk("<think>hm</think>Paris"), ground_truth="Paris, France")
    _, data, _ = data_block(server.bodies[0])
    question = {"role": "user", "text": "What is the capital of France?"}
    assert data == {"conversation": [question], "reference": "Paris, France", "answer": "Paris"}


async def test_conversation_is_sent_with_tool_calls_and_without_thoughts():
    call = {"id": "1", "function": {"name": "look", "arguments": '{"at": 1}'}}
    messages = [*talk(None, tool_calls=[call]), Message(role="tool", content="a map", tool_call_id="1")]
    messages.append(
        Message(role="assistant", content="<think>hidden-thought</think>Paris", reasoning_content="hidden-thought")
    )
    _, server = await judged(llm_judge, fair(grades(5)), messages, judged="conversation")
    _, data, _ = data_block(server.bodies[0])
    assert [entry["role"] for entry in data["conversation"]] == ["user", "assistant", "tool", "assistant"]
    assert data["conversation"][1]["tool_calls"] == [{"name": "look", "arguments": '{"at": 1}'}]
    assert data["conversation"][3]["text"] == "Paris"
    assert "hidden-thought" not in json.dumps(server.bodies[0])


async def test_request_has_a_schema_temperature_zero_and_a_seed():
    _, server = await judged(llm_judge, fair(grades(5)), talk("Paris"), rubric=QUALITY)
    body = server.bodies[0]
    assert (body["model"], body["temperature"], body["seed"]) == ("judge", 0.0, 0)
    schema = body["response_format"]["json_schema"]["schema"]
    assert schema["required"] == ["check", "reasons", "grades"] and schema["additionalProperties"] is False
    assert schema["properties"]["grades"]["properties"] == {"quality": {"type": "integer", "enum": [1, 2, 3, 4, 5]}}
    assert "- quality: It is right." in body["messages"][0]["content"]


async def test_system_message_is_equal_for_every_rollout_for_prompt_caching():
    bodies = [(await judged(llm_judge, fair(grades(5)), talk(text)))[1].bodies[0] for text in ("Paris", "Lyon")]
    assert bodies[0]["messages"][0] == bodies[1]["messages"][0]
    assert data_block(bodies[0])[0] != data_block(bodies[1])[0]


# ---- votes


async def test_votes_have_different_seeds_and_the_median_counts():
    said = {0: 1, 1: 4, 2: 5}
    script = lambda body: fair(grades(said[body["seed"]]))(body)  # noqa: E731
    result, server = await judged(llm_judge, script, talk("Paris"), rubric=QUALITY, votes=3)
    assert result.score == 0.75
    assert sorted(body["seed"] for body in server.bodies) == [0, 1, 2]


async def test_failed_vote_is_ignored_if_a_majority_remains():
    script = lambda body: status(400) if body["seed"] == 1 else fair(grades(5))(body)  # noqa: E731
    result, _ = await judged(llm_judge, script, talk("Paris"), votes=3)
    assert result.score == 1.0
    with pytest.raises(ProviderError):
        await judged(llm_judge, script, talk("Paris"), votes=2)


# ---- options


BAD = {
    "no model": ({"model": ""}, "option model"),
    "empty rubric": ({"rubric": {}}, "1 to 32 dimensions"),
    "weight of 0": ({"rubric": {"a": {"description": "x", "weight": 0}}}, "weight"),
    "negative weight": ({"rubric": {"a": {"description": "x", "weight": -1}}}, "weight"),
    "weight without end": ({"rubric": {"a": {"description": "x", "weight": float("inf")}}}, "weight"),
    "no description": ({"rubric": {"a": ""}}, "description"),
    "misspelt key": ({"rubric": {"a": {"description": "x", "wieght": 2}}}, "wieght"),
    "rubric is a text": ({"rubric": "be good"}, "option rubric"),
    "name with a line end": ({"rubric": {"a\nb": "x"}}, "is not a valid name for a dimension"),
    "name of ours": ({"rubric": {"judge_usage": "x"}}, "is not a valid name for a dimension"),
    "scale upside down": ({"scale": (5, 1)}, "option scale"),
    "scale of one": ({"scale": (1, 1)}, "option scale"),
    "scale without end": ({"scale": (0, 10**9)}, "option scale"),
    "two rubrics": ({"rubric": QUALITY, "rubric_key": "r"}, "set either rubric or rubric_key, not both"),
    "unknown option of the client": ({"client": {"tempreature": 1}}, "tempreature"),
    "negative temperature": ({"client": {"temperature": -1}}, "temperature"),
    "a key of ours": ({"client": {"extra_body": {"messages": []}}}, "is set by the judge"),
    "votes without seeds": ({"client": {"seed": None}, "votes": 3}, "require a seed"),
    "a URL with a password": ({"base_url": "http://me:secret@host/v1"}, "user name or password"),
    "no price file": ({"client": {"price_file": "nowhere.yaml"}}, "nowhere.yaml"),
}


@pytest.mark.parametrize(("options", "message"), BAD.values(), ids=BAD)
async def test_invalid_option_is_named(options, message):
    with pytest.raises(ConfigError, match=message):
        await judged(llm_judge, [], talk("Paris"), **options)


@pytest.mark.parametrize(
    "options", [{"votes": 0}, {"votes": 26}, {"judged": "all"}, {"client": {"x": 1}}, {"longest": 5}]
)
def test_invalid_option_is_rejected_when_fixed(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        with_options(llm_judge, **options)


async def test_a_sample_without_its_rubric_is_unscored():
    with pytest.raises(RewardError, match="no rubric in its field 'r'"):
        await judged(llm_judge, [], talk("Paris"), rubric_key="r", sample={})


async def test_long_text_is_cut_in_the_middle_with_a_note():
    _, server = await judged(llm_judge, fair(grades(5)), talk("a" * 3_000 + "b" * 3_000, "short"), longest=1_000)
    _, data, _ = data_block(server.bodies[0])
    assert data["conversation"][0]["text"] == "short"
    assert (
        data["answer"].startswith("aaa") and data["answer"].endswith("bbb") and "characters left out" in data["answer"]
    )
    assert len(data["answer"]) < 1_100


histories = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "tool", "system"])},
        optional={"content": st.none() | st.text(st.characters(codec=None), max_size=30)},
    ),
    max_size=4,
)


@settings(max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(histories, st.sampled_from(["answer", "conversation"]))
def test_any_history_is_scored(history, what):
    async def score():
        return await judged(llm_judge, fair(grades(3)), history, judged=what)

    result, server = asyncio.run(score())
    assert result.score == (0.5 if server.requests else 0.0)
