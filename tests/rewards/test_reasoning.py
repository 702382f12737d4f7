"""Test reasoning steps, with known miscounts of published step counters."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_kit import with_options
from reward_kit.errors import ConfigError
from reward_kit.rewards.formats import reasoning_steps
from tests.rewards.forms import ask, histories, long, texts, turns

STEPS: dict[str, tuple[str | None, dict, int]] = {
    "numbers": ("1. Add two and two\n2. Take one from that\n3. Write the result down", {}, 3),
    "brackets": ("1) Add two and two\n2) Take one from that\n(3) Write the result down", {}, 3),
    "steps": ("Step 1: Add two and two\nStep 2: Take one away\nStep 3: Write it down", {}, 3),
    "steps, capitals": ("STEP 1: Add two and two\nstep 2: Take one away", {}, 2),
    "steps in a sentence": ("Step 1: Add two and two. Step 2: Take one away.", {}, 2),
    "headings": ("### Step 1: Add two and two\n### Step 2: Take one away", {}, 2),
    "bold": ("**Step 1:** Add two and two\n**Step 2:** Take one away", {}, 2),
    "bold numbers": ("**1.** Add two and two\n**2.** Take one away", {}, 2),
    "text on the next line": ("Step 1\nAdd two and two\n\nStep 2\n\nTake one away", {}, 2),
    "title and text on the next line": ("Step 1: Sum\nAdd two and two\nStep 2: Rest\nTake one away", {}, 2),
    "hyphens": ("- Add two and two\n- Take one away", {}, 2),
    "stars": ("* Add two and two\n* Take one away", {}, 2),
    "dots": ("• Add two and two\n• Take one away", {}, 2),
    "indented": ("  - Add two and two\n    - Take one away", {}, 2),
    "quoted": ("> 1. Add two and two\n> 2. Take one away", {}, 2),
    "openers": ("First, add two and two. Then, take one away. Finally, write it down.", {}, 3),
    "openers on lines": ("First, add two and two.\nSecond, take one away.\nThird, write it down.", {}, 3),
    "openers, lower case after a colon": ("So: first, add two and two; then, take one away.", {}, 2),
    "first of all": ("First of all, add two and two.", {}, 1),
    "bullet and step are one": ("- Step 1: Add two and two", {}, 1),
    "number and opener are one": ("1. First, add two and two", {}, 1),
    "sums are words": ("1. 2 + 2 = 4\n2. 4 - 1 = 3\n3. 3 * 3 = 9", {}, 3),
    "chinese": ("1. 先把两个数相加\n2. 再减去一", {}, 2),
    "chinese openers": ("首先，把两个数相加。", {"openers": ("首先",)}, 1),
    "german openers": ("Zuerst, nehme ich zwei dazu.", {"openers": ("zuerst",)}, 1),
    "behind a tag": ("<think>1. Add two and two\n2. Take one away</think><answer>3. It is three</answer>", {}, 3),
    "windows lines": ("1. Add two and two\r\n2. Take one away\r\n", {}, 2),
    "one more than wanted": ("1. a b c\n2. a b d\n3. a b e\n4. a b f", {}, 4),
    "trap: bare numbers": ("1.\n2.\n3.\n4.", {}, 0),
    "trap: bare numbers and dots": ("1. ...\n2. ...\n3. ...", {}, 0),
    "trap: bare steps": ("Step 1: Step 2: Step 3:", {}, 0),
    "trap: bare openers": ("First, Second, Next, Finally,", {}, 0),
    "trap: bare bullets": ("-\n-\n-\n*\n*", {}, 0),
    "trap: one word a step": ("1. Yes\n2. No\n3. Well", {}, 0),
    "trap: the same again": ("1. Add two and two\n2. Add two and two\n3. add two AND two!", {}, 1),
    "trap: rules": ("a\n---\nb\n***\nc\n- - -", {}, 0),
    "trap: decimals": ("3.14 is a number that\n2.71 is another one too\n1.41 is a third one", {}, 0),
    "trap: negative numbers": ("so\n-5 is the first result\n-7 is the second result", {}, 0),
    "trap: bold lines": ("so\n**this is quite bold**\n*and this is not*", {}, 0),
    "trap: years": ("It was in\n1999. Then it was over soon", {}, 0),
    "trap: step in a sentence": ("the next step 1 is to take two more", {}, 0),
    "trap: first as a word": ("The first thing, then the second thing, and finally the third", {}, 0),
    "trap: in code": ("```\n1. Add two and two\n# Step 2: Take one away\n```", {}, 0),
    "trap: a hyphen in a word": ("well-known, so-called\nfirst-rate things are here", {}, 0),
    "no steps": ("I add two and two and have four.", {}, 0),
    "empty": ("", {}, 0),
    "nothing": (None, {}, 0),
    "more words wanted": ("1. Add two and two\n2. Take one", {"min_words": 4}, 1),
    "fewer words wanted": ("1. Yes\n2. No", {"min_words": 1}, 2),
    "of the thought": ("<think>1. Add two and two</think>2. Take one away", {"of": "thought"}, 1),
    "of the answer": ("<think>1. Add two and two</think>2. Take one away\n3. And one more", {"of": "answer"}, 2),
}


@pytest.mark.parametrize(("reply", "options", "count"), STEPS.values(), ids=STEPS)
def test_only_new_steps_are_counted(reply, options, count):
    for wanted in (1, 3, 10):
        assert ask(reasoning_steps, reply, at_least=wanted, **options).score == pytest.approx(min(1, count / wanted))


@pytest.mark.parametrize("options", [{"at_least": 0}, {"min_words": 0}, {"openers": "first"}])
def test_invalid_options_are_rejected(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        with_options(reasoning_steps, **options)


def test_openers_can_be_empty_or_contain_regex_characters():
    assert ask(reasoning_steps, "First, add two and two.", openers=()).score == 0
    assert ask(reasoning_steps, "(a+)+, add two and two.", openers=("(a+)+", " "), at_least=1).score == 1


@given(histories, turns)
def test_reasoning_steps_scores_any_history(history, own):
    assert 0 <= reasoning_steps(history, own).score <= 1


@given(texts, st.integers(1, 9))
def test_higher_at_least_never_raises_the_score(text, wanted):
    assert ask(reasoning_steps, text, at_least=wanted + 1).score <= ask(reasoning_steps, text, at_least=wanted).score


@given(
    st.lists(st.sampled_from(["add two", "take three", "write four"]), max_size=6), st.randoms(use_true_random=False)
)
def test_the_order_of_steps_does_not_matter_and_repetition_earns_nothing(said, chance):
    shuffled = chance.sample(said, len(said))
    scores = {
        ask(reasoning_steps, "\n".join(f"{n}. now {text}" for n, text in enumerate(order)), at_least=9).score
        for order in (said, shuffled, said + said)
    }
    assert scores == {len(set(said)) / 9}


@pytest.mark.parametrize("piece", ["1. ", "1.\n", "First, ", "Step 1: ", "* ", "**", "#", "```\n", ". "])
def test_a_megabyte_is_read_in_linear_time(piece):
    assert ask(reasoning_steps, long(piece)).score <= 1
