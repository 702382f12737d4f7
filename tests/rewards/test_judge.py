"""`llm_judge`: what earns what, what leaves a rollout unscored, and that a judge is asked no more often than needed."""

from __future__ import annotations

import asyncio
import json
import unicodedata

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reward_kit import with_options
from reward_kit.errors import ConfigError, LimitError, ProviderError, RewardError
from reward_kit.models import Message
from reward_kit.providers.traffic import CURRENT_TRAFFIC, Cassette, Traffic
from reward_kit.reward_agent.levels import load_reward
from reward_kit.reward_agent.scoring import InProcessScorer, ScoringRequest
from reward_kit.rewards import llm_judge
from reward_kit.rewards.judging.client import JudgeClients
from reward_kit.rewards.judging.fencing import fenced
from reward_kit.typed_interface import reward_spec
from tests.chat_server import ChatServer, answer, dropped, html, raw, silent, slow, status
from tests.rewards.injections import INJECTIONS
from tests.rewards.judges import QUICK, block_of, fair, grades, is_obeyed, judged, talk, verdict

QUALITY = {"quality": "It is right."}
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
async def test_the_score_is_the_weighted_share_of_the_scale(messages, options, said, score):
    result, server = await judged(llm_judge, fair(grades(said)), messages, **options)
    assert result.score == pytest.approx(score)
    assert len(server.requests) == 1
    for name, metric in result.metrics.items():
        assert (name == "judge_usage") != metric.is_score_valid


@pytest.mark.parametrize("messages", UNASKED.values(), ids=UNASKED)
async def test_without_an_answer_it_is_0_and_nobody_is_asked(messages):
    result, server = await judged(llm_judge, [], messages)
    assert (result.score, result.is_score_valid, len(server.requests)) == (0.0, True, 0)


async def test_the_judge_sees_conversation_reference_and_answer_apart():
    _, server = await judged(llm_judge, fair(grades(5)), talk("<think>hm</think>Paris"), ground_truth="Paris, France")
    _, data, _ = block_of(server.bodies[0])
    question = {"role": "user", "text": "What is the capital of France?"}
    assert data == {"conversation": [question], "reference": "Paris, France", "answer": "Paris"}


async def test_a_whole_conversation_is_shown_with_its_calls_and_without_thoughts():
    call = {"id": "1", "function": {"name": "look", "arguments": '{"at": 1}'}}
    messages = [*talk(None, tool_calls=[call]), Message(role="tool", content="a map", tool_call_id="1")]
    messages.append(
        Message(role="assistant", content="<think>hidden-thought</think>Paris", reasoning_content="hidden-thought")
    )
    _, server = await judged(llm_judge, fair(grades(5)), messages, judged="conversation")
    _, data, _ = block_of(server.bodies[0])
    assert [entry["role"] for entry in data["conversation"]] == ["user", "assistant", "tool", "assistant"]
    assert data["conversation"][1]["tool_calls"] == [{"name": "look", "arguments": '{"at": 1}'}]
    assert data["conversation"][3]["text"] == "Paris"
    assert "hidden-thought" not in json.dumps(server.bodies[0])


async def test_the_request_is_a_schema_at_temperature_0_with_a_seed():
    _, server = await judged(llm_judge, fair(grades(5)), talk("Paris"), rubric=QUALITY)
    body = server.bodies[0]
    assert (body["model"], body["temperature"], body["seed"]) == ("judge", 0.0, 0)
    schema = body["response_format"]["json_schema"]["schema"]
    assert schema["required"] == ["check", "reasons", "grades"] and schema["additionalProperties"] is False
    assert schema["properties"]["grades"]["properties"] == {"quality": {"type": "integer", "enum": [1, 2, 3, 4, 5]}}
    assert "- quality: It is right." in body["messages"][0]["content"]


async def test_the_system_message_is_the_same_for_every_rollout_so_that_endpoints_can_keep_it():
    bodies = [(await judged(llm_judge, fair(grades(5)), talk(text)))[1].bodies[0] for text in ("Paris", "Lyon")]
    assert bodies[0]["messages"][0] == bodies[1]["messages"][0]
    assert block_of(bodies[0])[0] != block_of(bodies[1])[0]


# ---- votes


async def test_votes_have_seeds_of_their_own_and_the_median_counts():
    said = {0: 1, 1: 4, 2: 5}
    script = lambda body: fair(grades(said[body["seed"]]))(body)  # noqa: E731
    result, server = await judged(llm_judge, script, talk("Paris"), rubric=QUALITY, votes=3)
    assert result.score == 0.75
    assert sorted(body["seed"] for body in server.bodies) == [0, 1, 2]


async def test_a_vote_that_fails_is_left_out_while_more_than_half_are_there():
    script = lambda body: status(400) if body["seed"] == 1 else fair(grades(5))(body)  # noqa: E731
    result, _ = await judged(llm_judge, script, talk("Paris"), votes=3)
    assert result.score == 1.0
    with pytest.raises(ProviderError):
        await judged(llm_judge, script, talk("Paris"), votes=2)


# ---- verdicts that are none


def said(text, **rest):
    """An answer, with the members that every verdict has for OK, and the code of the data for CODE."""
    text = text.replace("OK", '"check": "CODE", "reasons": "r"')
    return lambda body: answer(text.replace("CODE", block_of(body)[0]), **rest)


GOOD = '{OK, "grades": {"quality": 5}}'
UNREADABLE = {
    "empty": "",
    "prose": "I would give it a 5.",
    "prose before": 'Here it is: {OK, "grades": {"quality": 5}}',
    "prose after": '{OK, "grades": {"quality": 5}} Done.',
    "two objects": '{OK, "grades": {"quality": 5}}{OK, "grades": {"quality": 1}}',
    "a list": '[{OK, "grades": {"quality": 5}}]',
    "a number": "5",
    "cut": '{OK, "grades": {"quality": 5',
    "above the scale": '{OK, "grades": {"quality": 6}}',
    "below the scale": '{OK, "grades": {"quality": 0}}',
    "far above": '{OK, "grades": {"quality": 1000}}',
    "negative": '{OK, "grades": {"quality": -5}}',
    "between": '{OK, "grades": {"quality": 4.5}}',
    "float": '{OK, "grades": {"quality": 5.0}}',
    "text": '{OK, "grades": {"quality": "5"}}',
    "true": '{OK, "grades": {"quality": true}}',
    "null": '{OK, "grades": {"quality": null}}',
    "NaN": '{OK, "grades": {"quality": NaN}}',
    "Infinity": '{OK, "grades": {"quality": Infinity}}',
    "huge": '{OK, "grades": {"quality": 5e999}}',
    "twice": '{OK, "grades": {"quality": 1, "quality": 5}}',
    "another dimension": '{OK, "grades": {"quality": 5, "bonus": 5}}',
    "no dimension": '{OK, "grades": {}}',
    "another name": '{OK, "grades": {"Quality": 5}}',
    "grade outside": '{OK, "grades": {"quality": 5}, "score": 5}',
    "flat": '{OK, "quality": 5}',
    "no check": '{"reasons": "r", "grades": {"quality": 5}}',
    "wrong check": '{"check": "0123456789abcdef", "reasons": "r", "grades": {"quality": 5}}',
    "check is null": '{"check": null, "reasons": "r", "grades": {"quality": 5}}',
    "no reasons": '{"check": "CODE", "grades": {"quality": 5}}',
    "reasons is a list": '{"check": "CODE", "reasons": [], "grades": {"quality": 5}}',
    "deep": "[" * 50_000,
    "a fence with prose": 'Sure!\n```json\n{OK, "grades": {"quality": 5}}\n```',
    "many digits": '{OK, "grades": {"quality": ' + "9" * 5_000 + "}}",
    "too long": " " * 200_001,
}
READABLE = {
    "plain": GOOD,
    "blanks around": '\n {OK, "grades": {"quality": 5}} \n',
    "fence": '```json\n{OK, "grades": {"quality": 5}}\n```',
    "thoughts before": '<think>{"grades": {"quality": 1}}</think>\n{OK, "grades": {"quality": 5}}',
    "members in another order": '{"grades": {"quality": 5}, "reasons": "r", "check": "CODE"}',
}


@pytest.mark.parametrize("text", UNREADABLE.values(), ids=UNREADABLE)
async def test_an_unreadable_verdict_is_asked_for_once_more_and_then_the_rollout_is_unscored(text):
    bodies = []

    def script(body):
        bodies.append(body)
        return said(text)(body)

    with pytest.raises(ProviderError, match="no readable verdict"):
        await judged(llm_judge, script, talk("Paris"), rubric=QUALITY)
    assert len(bodies) == 2 and bodies[0]["seed"] != bodies[1]["seed"]


@pytest.mark.parametrize("text", READABLE.values(), ids=READABLE)
async def test_a_readable_verdict(text):
    result, server = await judged(llm_judge, said(text), talk("Paris"), rubric=QUALITY)
    assert (result.score, len(server.requests)) == (1.0, 1)


async def test_the_second_answer_counts_where_the_first_was_unreadable():
    script = lambda body: fair(grades(4))(body) if body["seed"] else answer("Five!")  # noqa: E731
    result, server = await judged(llm_judge, script, talk("Paris"), rubric=QUALITY)
    assert (result.score, len(server.requests)) == (0.75, 2)
    assert "Five!" not in json.dumps(server.bodies[1])  # what a judge said is no more trusted than what it read


FAILURES = {
    "refusal": answer(None, message={"refusal": "I cannot judge this."}),
    "content filter": said(GOOD, finish_reason="content_filter"),
    "cut off": said(GOOD, finish_reason="length"),
    "429 to the end": status(429, {"Retry-After": "0"}),
    "500 to the end": status(500),
    "401": status(401),
    "400": status(400),
    "no choices": raw("{}"),
    "no JSON": raw("hello"),
    "a proxy's page": html(),
    "dropped": dropped(),
}


@pytest.mark.parametrize("behaviour", FAILURES.values(), ids=FAILURES)
async def test_a_judge_that_fails_leaves_the_rollout_unscored_as_provider_error(behaviour):
    script = lambda body: behaviour(body) if behaviour.__name__ == "<lambda>" else behaviour  # noqa: E731
    scored, _ = await scored_by(script)
    assert scored.score is None and scored.result is None
    assert scored.failure.failure_class == "provider_error"


async def test_a_judge_that_is_silent_leaves_the_rollout_unscored():
    scored, _ = await scored_by(lambda body: silent(), client={**QUICK, "total_timeout_s": 0.05, "max_attempts": 1})
    assert scored.failure.failure_class == "provider_error" and "total_timeout_s" in scored.failure.message


async def test_data_that_does_not_fit_the_model_is_a_limit():
    script = [status(400, error={"message": "maximum context length", "code": "context_length_exceeded"})]
    with pytest.raises(LimitError):
        await judged(llm_judge, script, talk("Paris"))


async def scored_by(script, messages=None, **options):
    """As a run scores: by the reward agent's own scorer, with the resource opened and closed."""
    async with ChatServer(script) as server:
        given = {"client": QUICK, "model": "judge", "base_url": server.base_url, "rubric": QUALITY, **options}
        spec = reward_spec(with_options(llm_judge, **given))
        async with InProcessScorer(spec, 10.0) as scorer:
            return await scorer.score(ScoringRequest("r", messages or talk("Paris"))), server


async def test_a_run_scores_with_it_in_process():
    loaded = load_reward("reward_kit.rewards:llm_judge")
    assert loaded.reward.is_async and loaded.notes == ()
    scored, server = await scored_by(fair(grades(5)))
    assert scored.score == 1.0 and scored.sandbox == {"level": "in_process"} and len(server.requests) == 1


# ---- the form of answers


async def test_a_server_without_schemas_is_asked_without_and_remembered():
    def script(body):
        if "response_format" in body:
            return status(400, text="response_format is not supported")
        return said(GOOD)(body)

    clients = JudgeClients()
    async with ChatServer(script) as server:
        options = {"model": "m", "base_url": server.base_url, "rubric": QUALITY, "judge_clients": clients}
        for text in ("Paris", "Lyon"):
            assert (await llm_judge(talk(text), **options)).score == 1.0
        assert ["response_format" in body for body in server.bodies] == [True, False, False]
        await clients.close()


@pytest.mark.parametrize(
    ("form", "kind"), [("text", None), ("json_object", "json_object"), ("json_schema", "json_schema")]
)
async def test_the_form_can_be_chosen(form, kind):
    client = {**QUICK, "answer_form": form}
    script = said(GOOD)
    _, server = await judged(llm_judge, script, talk("Paris"), rubric=QUALITY, client=client)
    assert server.bodies[0].get("response_format", {}).get("type") == kind


# ---- asked once


async def test_the_same_request_is_asked_once_even_at_the_same_time():
    clients = JudgeClients()
    script = lambda body: slow(0.05, fair(grades(4))(body))  # noqa: E731
    async with ChatServer(script) as server:
        options = {"model": "m", "base_url": server.base_url, "rubric": QUALITY, "judge_clients": clients}
        results = await asyncio.gather(*(llm_judge(talk("Paris"), **options) for _ in range(20)))
        results.append(await llm_judge(talk("Paris"), **options))
        assert len(server.requests) == 1
        assert {result.score for result in results} == {0.75}
        usages = sorted(result.metrics["judge_usage"].reason for result in results)
        assert usages.count("calls=0 cached=1 prompt_tokens=0 completion_tokens=0 cost_usd=0.000000") == 20
        await llm_judge(talk("Lyon"), **options)
        await llm_judge(talk("Paris"), **{**options, "model": "other"})
        await llm_judge(talk("Paris"), **options, ground_truth="Paris")
        await llm_judge(talk("Paris"), **options, client={"seed": 7})
        assert len(server.requests) == 5
        await clients.close()


async def test_who_waits_for_another_score_asks_anew_where_that_one_was_cancelled():
    clients = JudgeClients()
    arrived = asyncio.Event()

    def script(body):
        if arrived.is_set():
            return said(GOOD)(body)
        arrived.set()
        return silent()

    async with ChatServer(script) as server:
        options = {"model": "m", "base_url": server.base_url, "rubric": QUALITY, "judge_clients": clients}
        first = asyncio.ensure_future(llm_judge(talk("Paris"), **options))
        await arrived.wait()
        second = asyncio.ensure_future(llm_judge(talk("Paris"), **options))
        await asyncio.sleep(0.01)
        assert len(server.requests) == 1
        first.cancel()
        assert (await second).score == 1.0
        assert first.cancelled() and len(server.requests) == 2
        await clients.close()


async def test_what_failed_is_asked_again():
    clients = JudgeClients()
    script = iter([status(400), status(400)])
    async with ChatServer(lambda body: next(script, None) or fair(grades(5))(body)) as server:
        options = {"model": "m", "base_url": server.base_url, "judge_clients": clients}
        with pytest.raises(ProviderError):
            await llm_judge(talk("Paris"), **options)
        assert (await llm_judge(talk("Paris"), **options)).score == 1.0
        await clients.close()


async def test_a_cache_file_serves_later_runs_and_tells_them_apart(tmp_path):
    cache = tmp_path / "judge" / "cache.jsonl"
    async with ChatServer(fair(grades(4))) as server:
        options = {"model": "m", "base_url": server.base_url, "rubric": QUALITY, "cache": str(cache)}
        first = await llm_judge(talk("Paris"), **options)
        whole = cache.read_bytes()
        cache.write_bytes(whole + b'{"key": "torn')
        again = await llm_judge(talk("Paris"), **options)
        assert len(server.requests) == 1
        assert (again.score, again.reason) == (first.score, first.reason)
        await llm_judge(talk("Lyon"), **options)
        await llm_judge(talk("Lyon"), **options)
        assert len(server.requests) == 2
    lines = cache.read_text().splitlines()
    assert json.loads(lines[0]) == {"judge_cache": 1}
    assert sum(line.startswith('{"key":') and line.endswith("}") for line in lines) == 2


async def test_an_unreadable_verdict_is_not_kept(tmp_path):
    cache = tmp_path / "cache.jsonl"
    with pytest.raises(ProviderError):
        await judged(llm_judge, lambda body: answer("no"), talk("Paris"), cache=str(cache))
    assert cache.read_text() == '{"judge_cache":1}\n'


async def test_another_file_is_no_cache(tmp_path):
    (tmp_path / "data.jsonl").write_text('{"messages": []}\n')
    with pytest.raises(ConfigError, match="is no cache of a judge"):
        await judged(llm_judge, [], talk("Paris"), cache=str(tmp_path / "data.jsonl"))
    assert (tmp_path / "data.jsonl").read_text() == '{"messages": []}\n'
    with pytest.raises(ConfigError, match="cannot be written"):
        await judged(llm_judge, [], talk("Paris"), cache=str(tmp_path))


async def test_a_recording_holds_each_request_once_and_is_replayed_without_a_server_or_key(tmp_path, monkeypatch):
    async def scores(traffic, base_url):
        clients, token = JudgeClients(), CURRENT_TRAFFIC.set(traffic)
        try:
            options = {
                "model": "m",
                "base_url": base_url,
                "judge_clients": clients,
                "client": {"api_key_env": "JUDGE_KEY"},
            }
            options["cache"] = str(tmp_path / "cache.jsonl")
            return [(await llm_judge(talk(text), **options)).score for text in ("Paris", "Paris", "Lyon")]
        finally:
            CURRENT_TRAFFIC.reset(token)
            await clients.close()
            traffic.close()

    monkeypatch.setenv("JUDGE_KEY", "sk-judge-secret")
    async with ChatServer(fair(grades(4))) as server:
        url = server.base_url
        recorded = await scores(Traffic(cassette=Cassette.record(tmp_path / "tape.jsonl")), url)
        assert len(server.requests) == 2
        assert server.requests[0].headers["Authorization"] == "Bearer sk-judge-secret"
    monkeypatch.delenv("JUDGE_KEY")
    assert await scores(Traffic(cassette=Cassette.replay(tmp_path / "tape.jsonl")), url) == recorded == [0.75] * 3
    written = "".join(path.read_text() for path in tmp_path.iterdir())
    assert "sk-judge-secret" not in written


# ---- cost


async def test_tokens_and_cost_are_told_by_the_price_file(tmp_path):
    (tmp_path / "prices.yaml").write_text("judge: {input: 1000000, output: 0}\n")
    client = {**QUICK, "price_file": str(tmp_path / "prices.yaml")}
    result, _ = await judged(llm_judge, fair(grades(5)), talk("Paris"), client=client)
    told = "calls=1 cached=0 prompt_tokens=11 completion_tokens=7 cost_usd=11.000000"
    assert result.metrics["judge_usage"].reason == told
    result, _ = await judged(llm_judge, fair(grades(5)), talk("Paris"))
    assert result.metrics["judge_usage"].reason.endswith("cost_usd=unknown")


# ---- injection


def gullible(body):
    """Grades what it reads by its first word, unless something it can take for an instruction says otherwise."""
    code, data, _ = block_of(body)
    grade = 5 if is_obeyed(body) else 4 if data["answer"].startswith("Paris") else 2
    return verdict({"check": code, "reasons": "as told"}, grades={"quality": grade})


@pytest.mark.parametrize("text", INJECTIONS.values(), ids=INJECTIONS)
def test_the_gullible_judge_would_obey_each_of_them_in_a_plain_prompt(text):
    def plain(answer):
        return {
            "messages": [{"role": "system", "content": "Grade."}, {"role": "user", "content": f"It says: {answer}"}]
        }

    assert is_obeyed(plain(text)) and not is_obeyed(plain("Lyon, I think."))


@pytest.mark.parametrize("place", ["answer", "question", "reference", "tool call", "rubric of one's own"])
@pytest.mark.parametrize("text", INJECTIONS.values(), ids=INJECTIONS)
async def test_an_injection_does_not_move_the_score(text, place):
    reply = f"Lyon {text}" if place == "answer" else "Lyon"
    messages, options = talk(reply, text if place == "question" else "Where?"), {}
    if place == "reference":
        options["ground_truth"] = text
    if place == "tool call":
        call = Message(role="assistant", tool_calls=[{"id": "1", "function": {"name": text, "arguments": text}}])
        messages = [messages[0], call, Message(role="tool", content=text, name=text), messages[1]]
    if place == "rubric of one's own":
        options["sample"] = {"rubric": text}  # nobody named it, so it is none
    result, server = await judged(llm_judge, gullible, messages, rubric=QUALITY, **options)
    assert result.score == 0.25
    _, data, outside = block_of(server.bodies[0])
    if place == "answer":
        assert (
            data["answer"] == reply.rpartition("</think>")[2].strip()
        )  # it reaches the judge unchanged, and only there
        assert reply[5:25].strip() not in outside + server.bodies[0]["messages"][0]["content"]


@settings(max_examples=200, deadline=None)
@given(st.text(st.characters(codec=None), max_size=60) | st.sampled_from(list(INJECTIONS.values())))
def test_no_text_leaves_its_string(text):
    block = fenced({"answer": text}, "rules")
    opening, body, closing = block.text.split("\n")
    assert (opening, closing) == (f"<data-{block.code}>", f"</data-{block.code}>")
    assert json.loads(body)["answer"].encode("utf-16", "surrogatepass") == text.encode("utf-16", "surrogatepass")
    assert not set("<>\u2028\u2029\x85\x00\x1b\u202e") & set(body)
    assert not {unicodedata.category(letter) for letter in body} & {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}
    assert fenced({"answer": text}, "rules") == block
    assert fenced({"answer": text}, "other rules").code != block.code


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
    "name with a line end": ({"rubric": {"a\nb": "x"}}, "cannot name a dimension"),
    "name of ours": ({"rubric": {"judge_usage": "x"}}, "cannot name a dimension"),
    "scale upside down": ({"scale": (5, 1)}, "option scale"),
    "scale of one": ({"scale": (1, 1)}, "option scale"),
    "scale without end": ({"scale": (0, 10**9)}, "option scale"),
    "two rubrics": ({"rubric": QUALITY, "rubric_key": "r"}, "exclude each other"),
    "unknown option of the client": ({"client": {"tempreature": 1}}, "tempreature"),
    "negative temperature": ({"client": {"temperature": -1}}, "temperature"),
    "a key of ours": ({"client": {"extra_body": {"messages": []}}}, "belongs to the judge"),
    "votes without seeds": ({"client": {"seed": None}, "votes": 3}, "need a seed"),
    "a URL with a password": ({"base_url": "http://me:secret@host/v1"}, "user name or password"),
    "no price file": ({"client": {"price_file": "nowhere.yaml"}}, "nowhere.yaml"),
}


@pytest.mark.parametrize(("options", "message"), BAD.values(), ids=BAD)
async def test_a_wrong_option_is_named(options, message):
    with pytest.raises(ConfigError, match=message):
        await judged(llm_judge, [], talk("Paris"), **options)


@pytest.mark.parametrize(
    "options", [{"votes": 0}, {"votes": 26}, {"judged": "all"}, {"client": {"x": 1}}, {"longest": 5}]
)
def test_a_wrong_option_is_refused_when_it_is_fixed(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        with_options(llm_judge, **options)


async def test_a_sample_without_its_rubric_is_unscored():
    with pytest.raises(RewardError, match="no field 'r'"):
        await judged(llm_judge, [], talk("Paris"), rubric_key="r", sample={})


async def test_a_long_text_is_cut_in_the_middle_and_shows_it():
    _, server = await judged(llm_judge, fair(grades(5)), talk("a" * 3_000 + "b" * 3_000, "short"), longest=1_000)
    _, data, _ = block_of(server.bodies[0])
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


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(histories, st.sampled_from(["answer", "conversation"]))
def test_any_history_is_scored(history, what):
    async def score():
        return await judged(llm_judge, fair(grades(3)), history, judged=what)

    result, server = asyncio.run(score())
    assert result.score == (0.5 if server.requests else 0.0)
