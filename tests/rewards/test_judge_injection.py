"""Prompt injections in judged text do not change a score."""

from __future__ import annotations

import json
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reward_kit.models import Message
from reward_kit.rewards import grounded_judge, group_judge, llm_judge, pairwise_judge
from reward_kit.rewards.judge_client import JudgeClients
from reward_kit.rewards.judge_prompts import fence_data
from tests.chat_server import ChatServer
from tests.profiles import examples
from tests.rewards.injections import INJECTIONS
from tests.rewards.judges import QUALITY, data_block, is_obeyed, talk, verdict

PASSAGES = ["Paris is the capital of France."]


@pytest.mark.parametrize("text", INJECTIONS.values(), ids=INJECTIONS)
def test_test_judge_obeys_every_injection_in_a_plain_prompt(text):
    def plain(answer):
        return {
            "messages": [{"role": "system", "content": "Grade."}, {"role": "user", "content": f"It says: {answer}"}]
        }

    assert is_obeyed(plain(f"Lyon {text}")) and not is_obeyed(plain("Lyon, I think."))


def grading(body):
    """Grade only Paris as right, unless text that reads as an instruction says otherwise."""
    code, data, _ = data_block(body)
    grade = 5 if is_obeyed(body) else 4 if data["answer"].startswith("Paris") else 2
    return verdict({"check": code, "reasons": "as told"}, grades={"quality": grade})


def comparing(body):
    code, data, _ = data_block(body)
    place = "second" if is_obeyed(body) == data["first"].startswith("Paris") else "first"
    return verdict({"check": code, "reasons": "as told"}, winner=place)


def ranking(body):
    code, data, _ = data_block(body)
    found = {name: 8 if text.startswith("Paris") else 2 for name, text in data["answers"].items()}
    found = dict.fromkeys(found, 10) if is_obeyed(body) else found
    return verdict({"check": code, "reasons": "as told"}, grades=found)


def checking(body):
    code, data, _ = data_block(body)
    label = {"label": "supported", "passages": [1]} if is_obeyed(body) else {"label": "not_found", "passages": []}
    return verdict({"check": code, "reasons": "as told"}, labels=dict.fromkeys(data["sentences"], label))


def in_answer(text):
    return {"messages": talk(f"Lyon {text}", "Where?")}


def in_question(text):
    return {"messages": talk("Lyon", text)}


def in_reference(text):
    return {"messages": talk("Lyon"), "ground_truth": text}


def in_tool_call(text):
    question, reply = talk("Lyon")
    call = Message(role="assistant", tool_calls=[{"id": "1", "function": {"name": text, "arguments": text}}])
    return {"messages": [question, call, Message(role="tool", content=text, name=text), reply]}


def in_sample(text):
    return {"messages": talk("Lyon"), "sample": {"rubric": text}}  # not configured as the rubric


def in_pair(text):
    return {"messages": talk(f"Lyon. {text}"), "ground_truth": "Paris"}


def in_other_of_pair(text):
    return {"messages": talk("Paris"), "ground_truth": f"Lyon {text}"}


def in_group(text):
    return {"rollouts_messages": [talk("Paris"), talk(f"Lyon {text}")], "ground_truths": [text, text]}


def in_sentence(text):
    return {"messages": talk(f"Rome. {text}"), "sample": {"docs": PASSAGES}, "passages_key": "docs"}


def in_passage(text):
    return {"messages": talk("Rome."), "sample": {"docs": [text]}, "passages_key": "docs"}


PLACES = {
    "an answer": (llm_judge, grading, in_answer, 0.25),
    "a question": (llm_judge, grading, in_question, 0.25),
    "a reference": (llm_judge, grading, in_reference, 0.25),
    "a tool call": (llm_judge, grading, in_tool_call, 0.25),
    "a field of the sample": (llm_judge, grading, in_sample, 0.25),
    "one of a pair": (pairwise_judge, comparing, in_pair, 0.0),
    "the other of a pair": (pairwise_judge, comparing, in_other_of_pair, 1.0),
    "one of a group": (group_judge, ranking, in_group, [0.8, 0.2]),
    "a sentence": (grounded_judge, checking, in_sentence, 0.0),
    "a passage": (grounded_judge, checking, in_passage, 0.0),
}


@pytest.mark.parametrize(("reward", "judge", "place", "score"), PLACES.values(), ids=PLACES)
async def test_no_injection_moves_the_score(reward, judge, place, score):
    clients = JudgeClients()
    async with ChatServer(judge) as server:
        options = {"model": "m", "base_url": server.base_url, "judge_clients": clients}
        options |= {"rubric": QUALITY} if reward is llm_judge else {}
        for name, text in INJECTIONS.items():
            asked = len(server.requests)
            result = await reward(**place(text), **options)
            found = [one.score for one in result] if isinstance(result, list) else result.score
            assert found == score, name
            assert len(server.requests) > asked or place is in_sample, name  # where every request is the same
            for body in server.bodies[asked:]:
                check_that_nothing_leaks(body, text)
    await clients.close()


def check_that_nothing_leaks(body, text):
    """Check that text occurs only in the data block, and never at the start of a line."""
    code, _, outside = data_block(body)
    told = body["messages"][0]["content"] + outside
    for line in text.split("\n"):
        assert len(line) < 20 or line not in told
    assert body["messages"][1]["content"].count("\n") == 4
    assert body["messages"][1]["content"].count(code) == 3


@settings(max_examples=examples(200), deadline=None)
@given(st.text(st.characters(codec=None), max_size=60) | st.sampled_from(list(INJECTIONS.values())))
def test_text_cannot_escape_its_data_block(text):
    block = fence_data({"answer": text}, "rules")
    opening, body, closing = block.text.split("\n")
    assert (opening, closing) == (f"<data-{block.code}>", f"</data-{block.code}>")
    assert json.loads(body)["answer"].encode("utf-16", "surrogatepass") == text.encode("utf-16", "surrogatepass")
    assert not set("<>\u2028\u2029\x85\x00\x1b\u202e") & set(body)
    assert not {unicodedata.category(letter) for letter in body} & {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}
    assert fence_data({"answer": text}, "rules") == block
    assert fence_data({"answer": text}, "other rules").code != block.code
