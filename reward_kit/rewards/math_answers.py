"""Rewards for answers that are mathematics: any expression, or a plain number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reward_kit.errors import RewardError
from reward_kit.models import EvaluateResult, Message
from reward_kit.reward_calls import checks_options
from reward_kit.rewards.mathematics.equality import Terms, Units, same
from reward_kit.rewards.mathematics.forms import Form, quick_number, read_form
from reward_kit.rewards.mathematics.numbers import check_tolerances, close
from reward_kit.rewards.option_types import Tolerance, check_extra
from reward_kit.rewards.reading.found_answers import Found, Unmarked, find_answer, last_number, truth_text
from reward_kit.rewards.reading.texts import last_answer, needed, passed, shown
from reward_kit.typed_interface import reward_function


def _check_packages(_options: Mapping[str, Any]) -> None:
    check_extra("math", "math_verify", "mpmath", "sympy")


@reward_function(sandbox="warm")
@checks_options(_check_packages)
def math_answer(
    messages: list[Message],
    ground_truth: Any,
    *,
    unmarked: Unmarked = "refuse",
    units: Units = "ignore",
    absolute_tolerance: Tolerance = 0.0,
    relative_tolerance: Tolerance = 0.0,
) -> EvaluateResult:
    r"""1 where the final answer is mathematically the expected one, else 0.

    The answer is the last `\boxed{…}`; else what follows the last "####", "the answer is", "answer:" or stands in
    `<answer>`; else the whole reply where it is one short line. Boxes that are offered together ("\boxed{3} or
    \boxed{4}") are several values, and so not any one of them.

    It is read and compared exactly: LaTeX and plain notation, fractions, roots, powers, functions, variables,
    percentages, thousands (1,000), mixed numbers, tuples and intervals (by their brackets), sets, lists in any order,
    ±, matrices, equations (x = 5 is 5), inequalities as intervals, units, words. 3.14 is not π, and 0.333 not 1/3,
    without a tolerance. Notation that the reader does not know (integrals, sums, set operations) is put to math-verify.
    What would be huge to work out, such as 9^{9^9}, is not worked out and earns nothing unless it is spelled as
    expected.

    Args:
        messages: the conversation; its last assistant message is read.
        ground_truth: the expected answer: a number, a text, a worked solution that boxes it or ends in "#### …", or a
            list of accepted answers.
        unmarked: what is done with a reply that marks no answer: "refuse" it, or take its "last_number".
        units: "ignore": a unit may be left out, and one that is stated must fit; "require": the unit of the ground
            truth must be stated too. Either way units of one kind convert, and 5% is also 0.05.
        absolute_tolerance: the largest difference of two real numbers.
        relative_tolerance: the same as a share of the expected one; the larger of the two counts.

    Raises:
        ConfigError: a tolerance is negative; when it is loaded, also where the extra `math` is not installed.
        RewardError: there is no ground truth, so that the rollout is unscored.

    Example:
        ```python
        math_answer(messages, r"\frac{1}{2}")  # 1 for "The answer is 0.5." and for r"\boxed{\tfrac{2}{4}}"
        ```
    """
    check_tolerances(absolute_tolerance, relative_tolerance)
    truths = _truths(ground_truth, "math_answer")
    found = find_answer(last_answer(messages), unmarked)
    if not found.text:
        return passed(False, f"no answer: {found.why}")
    terms = Terms(units, absolute_tolerance, relative_tolerance)
    is_right = any(_is_equal(truth, found.text, terms) for truth in truths)
    why = "" if is_right else _why_unread(found.text)
    return _verdict(is_right, found, truths, why)


@reward_function
def number_answer(
    messages: list[Message],
    ground_truth: Any,
    *,
    unmarked: Unmarked = "refuse",
    units: Units = "ignore",
    absolute_tolerance: Tolerance = 0.0,
    relative_tolerance: Tolerance = 0.0,
) -> EvaluateResult:
    r"""1 where the final answer is the expected number, compared as exact fractions; else 0. As in GSM8K (Cobbe 2021).

    The answer is found as by `math_answer`. It counts where it is a number: with a sign, thousands separators,
    decimals, an exponent, a fraction, a currency, a percentage or a unit, or "x = 5". Several numbers are no answer. It
    needs no package and takes microseconds, and so runs where it is called.

    Args:
        messages: the conversation; its last assistant message is read.
        ground_truth: a number, a text that is one or ends in "#### 42", or a list of accepted numbers.
        unmarked: what is done with a reply that marks no answer: "refuse" it, or take its "last_number".
        units: as for `math_answer`.
        absolute_tolerance: the largest difference.
        relative_tolerance: the same as a share of the expected number; the larger of the two counts.

    Raises:
        ConfigError: a tolerance is negative.
        RewardError: the ground truth is missing, or no number, so that the rollout is unscored.

    Example:
        ```python
        number_answer(messages, 72)  # 1 for "… so #### 72", "The answer is $72.00." and r"\boxed{72}"
        ```
    """
    check_tolerances(absolute_tolerance, relative_tolerance)
    truths = _truths(ground_truth, "number_answer")
    forms = [_number_form(truth) for truth in truths]
    if unread := [truth for truth, form in zip(truths, forms, strict=True) if form is None]:
        raise RewardError(f"number_answer compares with a number, and the ground_truth is {shown(unread[0])}")
    found = find_answer(last_answer(messages), unmarked)
    if not found.text:
        return passed(False, f"no answer: {found.why}")
    form = _number_form(found.text) or (_number_form(last_number(found.text)) if unmarked == "last_number" else None)
    if form is None:
        return passed(False, f"the answer {shown(found.text)} is not one number")
    terms = Terms(units, absolute_tolerance, relative_tolerance)
    return _verdict(any(truth is not None and same(truth, form, terms) for truth in forms), found, truths)


def _truths(ground_truth: Any, reward: str) -> list[str]:
    """The accepted answers as texts.

    Raises:
        RewardError: there is none.
    """
    given = needed(ground_truth, reward)
    texts = [truth_text(str(item)) for item in (given if isinstance(given, list | tuple) else [given])]
    if not texts or not all(texts):
        raise RewardError(f"{reward} compares with a ground_truth, and the sample's is empty")
    return texts


def _is_equal(truth: str, answer: str, terms: Terms) -> bool:
    """Plain numbers at once; else by reading both, and by asking math-verify where one is in a notation of its own."""
    left, right = quick_number(truth), quick_number(answer)
    if left is not None and right is not None:
        return close(left, right, terms.absolute, terms.relative)
    expected, given = read_form(truth), read_form(answer)
    if expected.kind != "words" and expected.text == given.text and expected.text:
        return True
    if same(expected, given, terms):
        return True
    if expected.kind == "several" and given.kind == "value" and "," in given.text:
        return same(expected, read_form(answer, thousands=False), terms)
    return _needs_second_opinion(expected, given) and _second_opinion(expected, given)


def _needs_second_opinion(truth: Form, answer: Form) -> bool:
    kinds = {truth.kind, answer.kind}
    return "words" not in kinds and ("unread" in kinds or kinds & {"union", "relation"} != set())


def _second_opinion(truth: Form, answer: Form) -> bool:
    from reward_kit.rewards.mathematics.second_opinion import agrees

    return agrees(truth.text, answer.text)


def _why_unread(text: str) -> str:
    form = read_form(text)
    return f"; it could not be read as mathematics: {form.why}" if form.kind == "unread" else ""


def _number_form(text: str) -> Form | None:
    """A text as one number; None where it is anything else."""
    if (number := quick_number(text)) is not None:
        return Form("value", text, number=number)
    form = read_form(text)
    members = {"equation": form.parts[1:] if form.name else form.parts, "several": form.parts}.get(form.kind, (form,))
    return form if all(part.kind == "value" and part.number is not None for part in members) else None


def _verdict(is_right: bool, found: Found, truths: list[str], why: str = "") -> EvaluateResult:
    expected = " or ".join(shown(truth) for truth in truths[:3])
    equal = "is" if is_right else "is not"
    return passed(is_right, f"the answer {shown(found.text)} ({found.how}) {equal} {expected}{why}")
