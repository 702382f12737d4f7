"""Test `grounded_judge`, which checks each sentence of an answer against passages."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reward_kit import with_options
from reward_kit.errors import ConfigError, ProviderError, RewardError
from reward_kit.models import Message
from reward_kit.rewards import grounded_judge
from reward_kit.rewards.judges import cited_in, split_sentences
from tests.chat_server import status
from tests.rewards.judges import data_block, fair, judged, talk

PASSAGES = ["Paris is the capital of France.", "The Seine flows through Paris."]
SAMPLE = {"docs": PASSAGES}


def labels(*said):
    """A judge that labels the sentences in turn: "+1" is supported by passage 1, others by first letter."""
    words = {"-": "contradicted", "?": "not_found", "0": "no_claim"}

    def decide(data, _):
        found = {}
        for name, mark in zip(data["sentences"], said, strict=True):
            numbers = [int(digit) for digit in mark[1:]] if mark.startswith("+") else []
            found[name] = {"label": words.get(mark, "supported"), "passages": numbers}
        return {"labels": found}

    return fair(decide)


SCORED = {
    "all supported": ("Paris is. The Seine too.", ["+1", "+2"], {}, 1.0),
    "none supported": ("Rome is. The Tiber too.", ["?", "?"], {}, 0.0),
    "half supported": ("Paris is. The Tiber too.", ["+1", "?"], {}, 0.5),
    "contradicted is not supported": ("Paris is. It is not on the Seine.", ["+1", "-"], {}, 0.5),
    "no claim does not count": ("Hello! Paris is.", ["0", "+1"], {}, 1.0),
    "padding with no claims earns nothing": ("Hello! Well! Sure! Rome is.", ["0", "0", "0", "?"], {}, 0.0),
    "several passages": ("Paris is on the Seine.", ["+12"], {}, 1.0),
    "one sentence of four": ("A. B. C. D.", ["+1", "?", "-", "?"], {}, 0.25),
    "abstaining earns 0": ("I do not know.", ["0"], {}, 0.0),
    "abstaining as the author says": ("I do not know.", ["0"], {"abstaining": 0.3}, 0.3),
    "cited and right": ("Paris is [1].", ["+1"], {"score_by": "attribution"}, 1.0),
    "cited behind the full stop": ("Paris is. [1] The Seine too. [2]", ["+1", "+2"], {"score_by": "attribution"}, 1.0),
    "cited wrongly": ("Paris is [2].", ["+1"], {"score_by": "attribution"}, 0.0),
    "not cited": ("Paris is.", ["+1"], {"score_by": "attribution"}, 0.0),
    "cited and not supported": ("Rome is [1].", ["?"], {"score_by": "attribution"}, 0.0),
    "one of two citations": ("Paris is [1, 2].", ["+2"], {"score_by": "attribution"}, 1.0),
    "cites everything": ("Rome is [1][2].", ["-"], {"score_by": "attribution"}, 0.0),
    "citations do not count for faithfulness": ("Paris is [7].", ["+1"], {}, 1.0),
    "Chinese": ("巴黎是首都。塞纳河也是。", ["+1", "+2"], {}, 1.0),
    "lines": ("Paris is\nThe Seine too", ["+1", "?"], {}, 0.5),
    "a list": ("- Paris\n- Seine\n", ["+1", "+2"], {}, 1.0),
    "no full stop": ("Paris", ["+1"], {}, 1.0),
    "decimals are no ends": ("It has 2.1 million.", ["+1"], {}, 1.0),
    "surrogates": ("Paris \ud800. B.", ["+1", "?"], {}, 0.5),
    "thoughts are no claims": ("<think>Rome. Tiber.</think>Paris is.", ["+1"], {}, 1.0),
}


@pytest.mark.parametrize(("text", "said", "options", "score"), SCORED.values(), ids=SCORED)
async def test_score_is_the_share_of_supported_claims(text, said, options, score):
    options = {"sample": SAMPLE, "passages_key": "docs", **options}
    result, server = await judged(grounded_judge, labels(*said), talk(text), **options)
    assert result.score == pytest.approx(score)
    assert len(server.requests) == 1 and "judge_usage" in result.metrics


PLACES = {
    "a list of texts": (["a", "b"], ["a", "b"]),
    "one text": ("a", ["a"]),
    "mappings with text": ([{"text": "a", "id": 1}], ["a"]),
    "mappings with content": ([{"content": "a"}, {"passage": "b"}, {"page_content": "c"}], ["a", "b", "c"]),
    "other mappings": ([{"title": "a"}], ['{"title": "a"}']),
    "numbers": ([1], ["1"]),
}


@pytest.mark.parametrize(("given_", "shown"), PLACES.values(), ids=PLACES)
async def test_passages_are_read_from_the_sample(given_, shown):
    _, server = await judged(grounded_judge, labels("+1"), talk("A."), sample={"docs": given_}, passages_key="docs")
    assert list(data_block(server.bodies[0])[1]["passages"].values()) == shown


@pytest.mark.parametrize("sample", [None, {}, {"docs": None}, {"docs": []}, {"docs": ""}])
async def test_a_sample_without_passages_is_unscored(sample):
    with pytest.raises(RewardError, match="'docs'"):
        await judged(grounded_judge, [], talk("A."), sample=sample, passages_key="docs")


async def test_tool_results_are_passages_by_default():
    call = {"id": "1", "function": {"name": "search"}}
    messages = [
        *talk(None, "Where?", tool_calls=[call]),
        Message(role="tool", content=PASSAGES[0], tool_call_id="1"),
        Message(role="tool", content="", tool_call_id="2"),
        Message(role="assistant", content="Paris."),
    ]
    result, server = await judged(grounded_judge, labels("+1"), messages)
    _, data, _ = data_block(server.bodies[0])
    assert result.score == 1.0
    assert data == {
        "request": [{"role": "user", "text": "Where?"}],
        "passages": {"passage_1": PASSAGES[0]},
        "sentences": {"sentence_1": "Paris."},
    }


async def test_claims_without_passages_are_unsupported():
    result, _ = await judged(grounded_judge, labels("?"), talk("Paris."))
    assert result.score == 0.0
    with pytest.raises(ProviderError, match="must be an empty list"):
        await judged(grounded_judge, labels("+1"), talk("Paris."))


@pytest.mark.parametrize("messages", [talk(""), talk(None), talk("<think>x"), [], [Message(role="user", content="x")]])
async def test_empty_answer_scores_zero_without_a_request(messages):
    result, server = await judged(grounded_judge, [], messages, sample=SAMPLE, passages_key="docs")
    assert (result.score, len(server.requests)) == (0.0, 0)


BAD = {
    "supported by nothing": {"label": "supported", "passages": []},
    "a passage that is not there": {"label": "supported", "passages": [3]},
    "passage 0": {"label": "supported", "passages": [0]},
    "another label": {"label": "true", "passages": []},
    "the passage's name": {"label": "supported", "passages": ["passage_1"]},
    "no passages": {"label": "not_found"},
    "true for a number": {"label": "supported", "passages": [True]},
    "a word": "supported",
}


@pytest.mark.parametrize("said", BAD.values(), ids=BAD)
async def test_malformed_labels_are_an_unreadable_verdict(said):
    script = fair(lambda data, _: {"labels": {"sentence_1": said}})
    with pytest.raises(ProviderError, match="no verdict that can be parsed"):
        await judged(grounded_judge, script, talk("Paris."), sample=SAMPLE, passages_key="docs")


async def test_labels_with_missing_or_extra_sentences_are_unreadable():
    one = {"label": "supported", "passages": [1]}
    for names in (["sentence_1"], ["sentence_1", "sentence_2", "sentence_3"]):
        script = fair(lambda data, _, names=names: {"labels": dict.fromkeys(names, one)})
        with pytest.raises(ProviderError, match="no verdict that can be parsed"):
            await judged(grounded_judge, script, talk("A. B."), sample=SAMPLE, passages_key="docs")


async def test_server_error_leaves_the_rollout_unscored():
    with pytest.raises(ProviderError):
        await judged(grounded_judge, lambda body: status(500), talk("A."), sample=SAMPLE, passages_key="docs")


VOTES = {
    "more than half": (["+1", "+1", "?"], 1.0),
    "the strictest where they are split": (["+1", "?", "-"], 0.0),
    "not found beats supported at half": (["+1", "?"], 0.0),
    "all": (["+1", "+1", "+1"], 1.0),
}


@pytest.mark.parametrize(("said", "score"), VOTES.values(), ids=VOTES)
async def test_votes_are_combined(said, score):
    script = lambda body: labels(said[body["seed"]])(body)  # noqa: E731
    options = {"sample": SAMPLE, "passages_key": "docs", "votes": len(said)}
    result, _ = await judged(grounded_judge, script, talk("Paris."), **options)
    assert result.score == score


@pytest.mark.parametrize("options", [{"votes": 0}, {"abstaining": 1.5}, {"abstaining": -1}, {"score_by": "recall"}])
def test_invalid_option_is_rejected_when_fixed(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        with_options(grounded_judge, **options)


SENTENCES = {
    "two": ("A b. C d.", ["A b.", "C d."]),
    "a citation behind the stop stays": ("A b. [1] C d. [2, 3]", ["A b. [1]", "C d. [2, 3]"]),
    "question and exclamation": ("What? No! Yes.", ["What?", "No!", "Yes."]),
    "no space, no end": ("See example.com/a.b now", ["See example.com/a.b now"]),
    "blank lines": ("\n\nA\n\n\nB\n", ["A", "B"]),
    "nothing": ("  \n ", []),
    "dots alone": ("...", ["..."]),
}


@pytest.mark.parametrize(("text", "found"), SENTENCES.values(), ids=SENTENCES)
def test_text_is_split_into_sentences(text, found):
    assert split_sentences(text) == found


@given(st.text(max_size=400))
def test_splitting_into_sentences_loses_no_text(text):
    assert "".join("".join(split_sentences(text)).split()) == "".join(text.split())


@pytest.mark.parametrize("unit", ["a. ", "[1] ", "[1,", "[", ".", "\n", "。", "a", "a.\n[1]\n"])
def test_megabyte_answer_is_split_into_at_most_sixty_sentences(unit):
    text = unit * (1_000_000 // len(unit))
    assert len(split_sentences(text)) <= 60
    assert cited_in(text) <= {1}


@settings(max_examples=20, deadline=None)
@given(st.lists(st.sampled_from(["+1", "+2", "-", "?", "0"]), min_size=1, max_size=12))
def test_score_is_the_share_for_any_number_of_sentences(said):
    text = " ".join(f"S{number}." for number in range(len(said)))
    result, _ = asyncio.run(judged(grounded_judge, labels(*said), talk(text), sample=SAMPLE, passages_key="docs"))
    claims = [mark for mark in said if mark != "0"]
    assert result.score == pytest.approx(sum(mark[0] == "+" for mark in claims) / len(claims) if claims else 0.0)
