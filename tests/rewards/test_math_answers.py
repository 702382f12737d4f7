"""Test `math_answer` and `number_answer` on traps of MATH, GSM8K and AIME graders, and hostile text."""

from __future__ import annotations

import itertools
import logging
import random
import threading
from fractions import Fraction
from typing import Any

import math_verify
import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from reward_kit.errors import ConfigError, RewardError
from reward_kit.reward_calls import with_options
from reward_kit.rewards.answers import truth_text
from reward_kit.rewards.math_answers import math_answer, number_answer
from reward_kit.typed_interface import reward_spec
from tests.profiles import examples
from tests.rewards.answers import ask, histories, wild_text

RIGHT = {
    # Minerva's and lm-eval's normalisers
    "full-stop": ("5.", "5"),
    "dollar": (r"\$5", "5"),
    "bare-dollar": ("$5", "5"),
    "dollars": ("5 dollars", "5"),
    "cents-are-dollars": ("50 cents", r"\$0.50"),
    "percent-sign-dropped": (r"5\%", "5"),
    "percent-is-a-hundredth": (r"5\%", "0.05"),
    "truth-in-percent": ("0.05", r"5\%"),
    "dfrac": (r"\dfrac{1}{2}", r"\frac{1}{2}"),
    "tfrac": (r"\tfrac{1}{2}", "0.5"),
    "frac-without-braces": (r"\frac12", r"\frac{1}{2}"),
    "frac-half-braces": (r"\frac1{2}", "1/2"),
    "sqrt-without-braces": (r"3\sqrt2", r"3\sqrt{2}"),
    "half": ("0.5", "1/2"),
    "negative-fraction": (r"-\frac{1}{2}", r"\frac{-1}{2}"),
    "left-right": (r"\left(1, 2\right)", "(1,2)"),
    "space-in-pair": ("(1,2)", "(1, 2)"),
    "thin-spaces": (r"11,\! 111,\! 100", "11111100"),
    "latex-thousands": (r"1{,}000", "1000"),
    "thousands": ("1,000", "1000"),
    "thousands-in-truth": ("1000", "1,000"),
    "millions": ("5 million", "5,000,000"),
    "text-letter": (r"\text{(A)}", "A"),
    "text-word": (r"\text{Evelyn}", "Evelyn"),
    "short-word": ("yes", "Yes"),
    "unit-in-text": (r"12 \text{ cm}^2", "12"),
    "unit-in-truth": ("12", r"12 \text{ cm}^2"),
    "unit-spelled-out": ("12 square centimeters", r"12 \mathrm{~cm}^{2}"),
    "unit-converted": ("100 cm", "1 m"),
    "degrees": (r"90^\circ", "90"),
    "degree-word": ("90 degrees", r"90^{\circ}"),
    "unicode-minus": ("−3", "-3"),
    "unicode-power": ("x²+½", r"x^2+\frac{1}{2}"),
    "exponent": ("1e3", "1000"),
    "times-ten": (r"4.5\times 10^{3}", "4500"),
    "power": ("2^{10}", "1024"),
    "python-power": ("2**10", "1024"),
    "negative-power": ("10^{-2}", "0.01"),
    "repeating-decimal": (r"0.\overline{3}", r"\frac{1}{3}"),
    "mixed-number": (r"1\frac{1}{2}", "3/2"),
    "mixed-number-plain": ("1 1/2", "1.5"),
    "base": ("1010_2", "1010_{2}"),
    "trailing-zero": ("2.0", "2"),
    # symbols
    "order-of-terms": ("x+1", "1+x"),
    "expanded": ("x^{2}-4", "(x-2)(x+2)"),
    "implicit-product": ("2(x+1)", "2x+2"),
    "trigonometry": (r"\sin^2 x+\cos^2 x", "1"),
    "inverse-function": (r"\tan^{-1} 1", r"\frac{\pi}{4}"),
    "rationalised": (r"\frac{1}{\sqrt{2}}", r"\frac{\sqrt2}{2}"),
    "plain-sqrt": ("sqrt(2)/2", r"\frac{1}{\sqrt 2}"),
    "complex": ("6-5i", "-5i+6"),
    "logarithm": (r"\log_2 8", "3"),
    "factorial": ("5!", "120"),
    "binomial": (r"\binom{n}{2}", r"\frac{n(n-1)}{2}"),
    # forms
    "equation-for-value": ("x=5", "5"),
    "value-for-equation": ("5", "x = 5"),
    "label": (r"\text{Area} = 12", "12"),
    "chain": ("1/2+1/3=5/6", "5/6"),
    "same-line": ("2x+4y=6", "x+2y=3"),
    "function": ("f(x)=x^2", "x^2"),
    "set-order": (r"\{1,2\}", r"\{2, 1\}"),
    "set-repeats": (r"\{1,1,2\}", r"\{1,2\}"),
    "list-order": ("1, 2", "2, 1"),
    "list-words": (r"1 \text{ and } 2", "2,1"),
    "plus-minus": (r"\pm 3", "3, -3"),
    "two-roots": (r"2\pm\sqrt3", r"2-\sqrt{3}, 2+\sqrt{3}"),
    "roots-as-equations": ("x=3 or x=-3", r"x=\pm 3"),
    "membership": (r"x \in [1,2)", "[1,2)"),
    "inequality": (r"1\le x<2", "[1,2)"),
    "half-line": ("x>3", r"(3,\infty)"),
    "union-order": (r"(-\infty,1)\cup(2,3]", r"(2,3] \cup (-\infty, 1)"),
    "matrix-brackets": (
        r"\begin{pmatrix}1&2\\3&4\end{pmatrix}",
        r"\begin{bmatrix} 1 & 2 \\ 3 & \frac{8}{2} \end{bmatrix}",
    ),
    "matrix-python": ("[[1,2],[3,4]]", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"),
    "infinity": (r"+\infty", "∞"),
    "thousands-or-pair": ("1,234", "1, 234"),
    "empty-set": (r"\emptyset", r"\{\}"),
    "ratio": ("3:2", "3:2"),
    "math-verify-for-sums": (r"\sum_{k=1}^{3} k", "6"),
    # the earlier package's defects
    "earlier-thousands": ("1,000", "1000"),
    "earlier-symbol": ("x+1", "x+1"),
    "earlier-root": (r"\sqrt{2}", r"\sqrt{2}"),
    "earlier-unboxed-truth": ("0.5", r"\frac{1}{2}"),
}  # fmt: skip

WRONG = {
    "earlier-near-number": ("9", "10"),
    "earlier-frac-read-as-2": ("2", r"\frac{1}{2}"),
    "pi-rounded": ("3.14", r"\pi"),
    "third-rounded": ("0.333", "1/3"),
    "root-rounded": ("1.41421356", r"\sqrt{2}"),
    "open-or-closed": ("(1,2)", "[1,2)"),
    "pair-order": ("(1,2)", "(2,1)"),
    "pair-or-set": ("(1,2)", r"\{1,2\}"),
    "choice-of-two": ("3 or 4", "4"),
    "list-for-one": ("3, 4", "4"),
    "one-for-list": ("4", "3, 4"),
    "list-longer": ("1,2", "1,2,3"),
    "list-repeats": ("1,1,2", "1,2"),
    "named-values-unnamed": ("2, 1", "x = 1, y = 2"),
    "false-chain": ("9=10", "10"),
    "other-variable": ("x=5", "y=5"),
    "capital-variable": ("x", "X"),
    "other-power": ("x^2", "x^3"),
    "absolute-value": ("|x|", "x"),
    "other-unit": ("5 m", "5 cm"),
    "other-currency": (r"\$5", "5 euros"),
    "percent-wrong": (r"5\%", "6"),
    "infinity-sign": (r"\infty", r"-\infty"),
    "strict-inequality": ("x>3", r"x\ge 3"),
    "anagram": ("lube", "blue"),
    "negated": ("not 5", "5"),
    "words-behind": ("5 is wrong", "5"),
    "other-base": ("1010_2", "1010"),
    "ratio-flipped": ("2:3", "3:2"),
    "two-times-three": ("2(3)", "5"),
    "division-by-zero": ("1/0", "0"),
    "tower": ("9^{9^{9^{9}}}", "5"),
    "python-tower": ("9**9**9**9", "5"),
    "power-of-powers": ("(((9^{99})^{99})^{99})^{99}", "5"),
    "huge-exponent": ("10^{400000}", "5"),
    "huge-scientific": ("1e99999", "5"),
    "huge-factorial": ("99999999!", "5"),
    "huge-sum": (r"\sum_{k=1}^{99999999999} k^{k^k}", "5"),
    "unbalanced": ("{", "5"),
    "hundred-for-ten": ("100", "10"),
}  # fmt: skip


@pytest.mark.parametrize(("answer", "truth"), RIGHT.values(), ids=RIGHT)
def test_equivalent_answer_is_correct(answer: str, truth: str) -> None:
    result = ask(math_answer, f"So it is $\\boxed{{{answer}}}$.", truth)
    assert result.score == 1.0, result.reason


@pytest.mark.parametrize(("answer", "truth"), WRONG.values(), ids=WRONG)
def test_different_answer_scores_zero(answer: str, truth: str) -> None:
    result = ask(math_answer, f"So it is $\\boxed{{{answer}}}$.", truth)
    assert result.score == 0.0, result.reason


FOUND = {
    "box": (r"Thus \boxed{42}.", 1),
    "nested-braces": (r"\boxed{\frac{84}{2}}", 1),
    "last-box": (r"\boxed{3}. No, wait. \boxed{42}", 1),
    "first-box-is-no-answer": (r"\boxed{42}. No, wait. \boxed{3}", 0),
    "hedged-boxes": (r"\boxed{42} or \boxed{3}", 0),
    "hedged-in-words": (r"\boxed{3} or it could be \boxed{42}", 0),
    "listed-boxes": (r"\boxed{3}, \boxed{42}", 0),
    "same-box-twice": (r"\boxed{42} or \boxed{84/2}", 1),
    "box-of-the-prompt": (r"I write it in \boxed{}. It is \boxed{42}", 1),
    "empty-box-last": (r"\boxed{42} in \boxed{}", 1),
    "unclosed": (r"\boxed{42", 0),
    "box-without-braces": (r"\boxed 42 and \fbox{42}", 1),
    "hashes": ("3*14\n#### 42", 1),
    "answer-is": ("The answer is 42.", 1),
    "answer-is-bold": ("**Answer:** 42", 1),
    "all-bold": ("**Final answer: 42**", 1),
    "minerva": ("Final Answer: The final answer is $42$. I hope it is correct.", 1),
    "answer-to-the-question": ("The answer to the question is 42 because 6*7 is.", 1),
    "hedged-sentence": ("The answer is $3$ or $42$.", 0),
    "last-mark": ("The answer is 3.\nSo the answer is 42.", 1),
    "tag": ("x\n<answer>42</answer>", 1),
    "whole": ("42", 1),
    "enthusiasm": ("The answer is 42!", 1),
    "unmarked": ("It has 42 apples.\nWe are done.", 0),
    "thought-only": (r"<think>\boxed{42}</think> I do not know.", 0),
    "open-thought": (r"<think>\boxed{42}", 0),
    "empty": ("", 0),
}


@pytest.mark.parametrize(("reply", "score"), FOUND.values(), ids=FOUND)
def test_final_answer_is_extracted_from_the_reply(reply: str, score: int) -> None:
    for reward in (math_answer, number_answer):
        assert ask(reward, reply, 42).score == score, reply


def test_last_number_counts_only_with_the_option() -> None:
    reply = "First 3, then 1,000.\nDone."
    assert ask(math_answer, reply, 1000).score == 0.0
    assert ask(math_answer, reply, 1000, unmarked="last_number").score == 1.0


def test_unmarked_equation_scores_zero() -> None:
    proof = "Let a = b. Then a^2 = ab, so (a+b)(a-b) = b(a-b), and 2b = b.\nHence 1 = 2. QED."
    assert ask(math_answer, proof, "1").score == 0.0
    assert ask(math_answer, rf"{proof} \boxed{{1=2}}", "2").score == 0.0


def test_units_may_be_required() -> None:
    strict = with_options(math_answer, units="require")
    assert [ask(strict, rf"\boxed{{{text}}}", "12 cm").score for text in ("12", "12 cm", "0.12 m", "12 m")] == [
        0,
        1,
        1,
        0,
    ]
    assert ask(strict, r"\boxed{12 cm}", "12").score == 0.0
    assert ask(strict, r"\boxed{5\%}", "0.05").score == 1.0
    assert ask(strict, r"\boxed{5}", r"5\%").score == 0.0


def test_larger_of_absolute_and_relative_tolerance_applies() -> None:
    assert ask(math_answer, r"\boxed{3.14}", r"\pi", relative_tolerance=0.001).score == 1.0
    assert ask(math_answer, r"\boxed{3.1}", r"\pi", relative_tolerance=0.001).score == 0.0
    assert ask(number_answer, "#### 99", 100, absolute_tolerance=1).score == 1.0
    assert ask(number_answer, "#### 98.999", 100, absolute_tolerance=1).score == 0.0
    with pytest.raises(ConfigError, match="absolute_tolerance"):
        ask(number_answer, "1", 1, absolute_tolerance=-1.0)
    with pytest.raises(ConfigError, match="relative_tolerance"):
        ask(math_answer, "1", 1, relative_tolerance=float("nan"))


@pytest.mark.parametrize("truth", [None, "", [], "####"])
def test_a_sample_without_a_truth_is_unscored(truth: Any) -> None:
    for reward in (math_answer, number_answer):
        with pytest.raises(RewardError, match="ground_truth"):
            ask(reward, r"\boxed{1}", truth)
    with pytest.raises(RewardError, match="must be a number"):
        ask(number_answer, r"\boxed{1}", "blue")


def test_ground_truth_can_be_a_list_a_solution_or_a_number() -> None:
    assert ask(math_answer, r"\boxed{2}", ["1", "2"]).score == 1.0
    assert ask(math_answer, r"\boxed{1/2}", r"We see that it is $\boxed{\frac{1}{2}}$.").score == 1.0
    assert ask(number_answer, "#### 1,500", "48/2 = 24\n#### 1500").score == 1.0
    assert ask(math_answer, r"\boxed{\frac{1}{10}}", 0.1).score == 1.0


def test_math_answer_requires_a_sandbox_and_number_answer_does_not() -> None:
    assert reward_spec(math_answer).sandbox == "warm"
    assert reward_spec(number_answer).sandbox is None


@given(st.fractions(), st.fractions())
def test_numbers_are_compared_as_fractions(truth: Fraction, answer: Fraction) -> None:
    spelled = rf"\boxed{{\frac{{{answer.numerator}}}{{{answer.denominator}}}}}"
    for reward in (math_answer, number_answer):
        assert ask(reward, spelled, str(truth)).score == float(truth == answer)


def polynomials() -> st.SearchStrategy[sympy.Expr]:
    x, y = sympy.symbols("x y")
    leaf = st.one_of(st.sampled_from([x, y, sympy.sqrt(2), sympy.pi]), st.integers(-6, 6).map(sympy.Integer))
    return st.recursive(
        leaf,
        lambda inner: st.one_of(
            st.tuples(inner, inner).map(lambda pair: pair[0] + pair[1]),
            st.tuples(inner, inner).map(lambda pair: pair[0] * pair[1]),
            st.tuples(inner, st.integers(0, 3)).map(lambda pair: pair[0] ** pair[1]),
        ),
        max_leaves=6,
    )


@settings(max_examples=examples(40), deadline=None, derandomize=True)
@given(polynomials(), polynomials())
def test_verdicts_agree_with_sympy(left: sympy.Expr, right: sympy.Expr) -> None:
    expanded = sympy.expand(left)
    assert ask(math_answer, rf"\boxed{{{sympy.latex(expanded)}}}", sympy.latex(left)).score == 1.0
    is_equal = sympy.expand(left - right) == 0
    assert ask(math_answer, rf"\boxed{{{sympy.latex(right)}}}", sympy.latex(left)).score == float(is_equal)
    assert ask(math_answer, rf"\boxed{{{left}}}", sympy.latex(left)).score == 1.0


def test_verdicts_agree_with_math_verify() -> None:
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    random.seed(7)
    atoms = [
        "3",
        "-4",
        "0.5",
        r"\frac{1}{2}",
        r"\frac{3}{4}",
        r"\sqrt{2}",
        r"\pi",
        "x",
        "y",
        "x^{2}",
        r"\sqrt{x}",
        "10^{-2}",
    ]
    texts = atoms + [f"{a} + {b}" for a, b in zip(atoms, reversed(atoms), strict=True)]
    texts += [rf"\frac{{{a}}}{{7}}" for a in atoms]
    texts += [rf"\left({a}, {b}\right)" for a, b in itertools.pairwise(atoms)]
    texts += [rf"\{{{a}, {b}\}}" for a, b in zip(atoms, atoms[3:], strict=False)]
    pairs = [(text, text) for text in texts] + [tuple(random.sample(texts, 2)) for _ in range(30)]
    pairs += [(f"{b} + {a}", f"{a} + {b}") for a, b in zip(atoms, atoms[2:], strict=False)]
    for truth, answer in pairs:
        parsed = [math_verify.parse(f"${text}$", parsing_timeout=None) for text in (truth, answer)]
        expected = math_verify.verify(*parsed, timeout_seconds=None)
        assert ask(math_answer, rf"\boxed{{{answer}}}", truth).score == float(expected), (truth, answer)


@pytest.mark.parametrize(("truth", "answer"), [("5", "2(3)"), (r"\frac{1}{3}", "0.3333333"), ("X", "x")])
def test_answers_wrongly_accepted_by_math_verify_are_rejected(truth: str, answer: str) -> None:
    parsed = [math_verify.parse(f"${text}$", parsing_timeout=None) for text in (truth, answer)]
    assert math_verify.verify(*parsed, timeout_seconds=None)
    assert ask(math_answer, rf"\boxed{{{answer}}}", truth).score == 0.0


@settings(max_examples=examples(100), deadline=None)
@given(wild_text, wild_text)
def test_no_reply_raises(reply: str, truth: str) -> None:
    truth = truth if truth_text(truth) else "5"
    for text in (reply, rf"\boxed{{{reply}}}"):
        assert ask(math_answer, text, truth).score in {0.0, 1.0}
        assert ask(number_answer, text, 5).score in {0.0, 1.0}


@settings(max_examples=examples(100), deadline=None)
@given(histories)
def test_no_history_raises(messages: list[Any]) -> None:
    assert math_answer(messages, "3").score in {0.0, 1.0}
    assert number_answer(messages, 3).score in {0.0, 1.0}


@settings(max_examples=examples(150), deadline=None)
@given(st.text(min_size=1, max_size=30).filter(str.strip))
def test_ground_truth_itself_is_a_correct_answer(truth: str) -> None:
    """Except texts that the answer's markup consumes: braces, backslashes, marks."""
    if not set(truth) & set("{}\\#$*`_") and truth.strip(" .,;!?:\"'()…").isalnum():
        assert ask(math_answer, rf"\boxed{{{truth}}}", truth).score == 1.0


def test_the_verdict_is_the_same_in_a_thread() -> None:
    scores: list[float] = []
    replies = [(r"\boxed{\sum_{k=1}^{3} k}", "6"), (r"\boxed{\sqrt{8}}", r"2\sqrt2"), (r"\boxed{7}", r"\int_0^1 x dx")]

    def work() -> None:
        scores.extend(ask(math_answer, reply, truth).score for reply, truth in replies)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert scores == [1.0, 1.0, 0.0]
