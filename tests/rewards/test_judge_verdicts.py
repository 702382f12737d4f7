"""Judge verdicts: accepted forms, retries and failures."""

from __future__ import annotations

import json

import pytest

from reward_kit import with_options
from reward_kit.errors import LimitError, ProviderError
from reward_kit.reward_agent.in_process import InProcessScorer
from reward_kit.reward_agent.loading import load_reward
from reward_kit.reward_agent.scoring import ScoringRequest
from reward_kit.rewards import llm_judge
from reward_kit.rewards.judge_client import JudgeClients
from reward_kit.rewards.judge_prompts import METRIC
from reward_kit.typed_interface import reward_spec
from tests.chat_server import ChatServer, answer, dropped, html, raw, silent, status
from tests.rewards.judges import GOOD, QUALITY, QUICK, fair, grades, judged, said, talk

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
async def test_unreadable_verdict_is_requested_once_more_then_unscored(text):
    bodies = []

    def script(body):
        bodies.append(body)
        return said(text)(body)

    with pytest.raises(ProviderError, match="no verdict that can be parsed"):
        await judged(llm_judge, script, talk("Paris"), rubric=QUALITY)
    assert len(bodies) == 2 and bodies[0]["seed"] != bodies[1]["seed"]


@pytest.mark.parametrize("text", READABLE.values(), ids=READABLE)
async def test_readable_verdict_is_accepted(text):
    result, server = await judged(llm_judge, said(text), talk("Paris"), rubric=QUALITY)
    assert (result.score, len(server.requests)) == (1.0, 1)


async def test_second_answer_counts_if_the_first_is_unreadable():
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
async def test_failing_judge_is_a_provider_error(behaviour):
    script = lambda body: behaviour(body) if behaviour.__name__ == "<lambda>" else behaviour  # noqa: E731
    scored, _ = await scored_by(script)
    assert scored.score is None and (scored.result is None or list(scored.result.metrics) == [METRIC])
    assert scored.failure.failure_class == "provider_error"


async def test_silent_judge_leaves_the_rollout_unscored():
    scored, _ = await scored_by(lambda body: silent(), client={**QUICK, "total_timeout_s": 0.05, "max_attempts": 1})
    assert scored.failure.failure_class == "provider_error" and "total_timeout_s" in scored.failure.message


async def test_context_length_error_of_the_judge_is_a_limit_error():
    script = [status(400, error={"message": "maximum context length", "code": "context_length_exceeded"})]
    with pytest.raises(LimitError):
        await judged(llm_judge, script, talk("Paris"))


async def scored_by(script, messages=None, **options):
    """Score as in a run: with the reward agent's scorer and an opened resource."""
    async with ChatServer(script) as server:
        given = {"client": QUICK, "model": "judge", "base_url": server.base_url, "rubric": QUALITY, **options}
        spec = reward_spec(with_options(llm_judge, **given))
        async with InProcessScorer(spec, 10.0) as scorer:
            return await scorer.score(ScoringRequest("r", messages or talk("Paris"))), server


async def test_judge_reward_runs_in_process():
    loaded = load_reward("reward_kit.rewards:llm_judge")
    assert loaded.reward.is_async and loaded.notes == ()
    scored, server = await scored_by(fair(grades(5)))
    assert scored.score == 1.0 and scored.sandbox == {"level": "in_process"} and len(server.requests) == 1


async def test_server_without_schema_support_is_remembered():
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
async def test_answer_form_option_selects_the_response_format(form, kind):
    client = {**QUICK, "answer_form": form}
    script = said(GOOD)
    _, server = await judged(llm_judge, script, talk("Paris"), rubric=QUALITY, client=client)
    assert server.bodies[0].get("response_format", {}).get("type") == kind
