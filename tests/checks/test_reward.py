"""Test the report of `check_reward`: findings, facts, and checks that were not possible."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from reward_kit.checks.findings import FAIL_ON
from reward_kit.checks.reward_behavior import attacks
from reward_kit.checks.reward_bench import Given, RewardReport, build_questions
from reward_kit.checks.reward_cases import (
    FORMS,
    equal_forms,
    is_tool_call,
    long_texts,
    make_request,
    near_values,
    odd_histories,
    said,
    user,
    wrong_values,
)
from reward_kit.checks.source_facts import kind_in, read_facts, rewards_in
from reward_kit.errors import ConfigError
from reward_kit.reward_agent.scoring import ScoringRequest
from tests.checks.reward_check import checked, codes, written

EXACT = """
@reward_function
def reward(messages: list[Message], ground_truth: str) -> EvaluateResult:
    if ground_truth is None:
        raise ValueError("no ground truth")
    return EvaluateResult(score=float(last(messages).strip() == ground_truth))
"""
ALWAYS_ZERO = """
@reward_function
def reward(messages: list[Message]) -> EvaluateResult:
    return EvaluateResult(score=0.0)
"""
READS = """
@reward_function
def reward(messages: list[Message]) -> EvaluateResult:
    home = os.environ.get("FAVOURITE", "none")
    try:
        words = open("/etc/hostname").read()
    except OSError:
        words = ""
    return EvaluateResult(score=float(last(messages) == home), reason=words)
"""
NEEDS_STATE = """
@reward_function
def reward(messages: list[Message], state: Any) -> EvaluateResult:
    return EvaluateResult(score=float(state["won"]))
"""
LENIENT = """
@reward_function
def reward(messages: list[Message], ground_truth: str) -> EvaluateResult:
    return EvaluateResult(score=float(ground_truth.lower() in last(messages).lower()))
"""


def test_report_is_equal_for_equal_seeds(tmp_path: Path) -> None:
    reference = written(tmp_path, EXACT)
    one, other = (checked(reference, level="in_process").to_json() for _ in range(2))
    assert {**one, "facts": None} == {**other, "facts": None}
    assert one["facts"]["scores"] == other["facts"]["scores"]


def test_files_and_variables_read_are_reported_as_info(tmp_path: Path) -> None:
    report = checked(written(tmp_path, READS))
    assert "FAVOURITE" in report.facts["environment variables"] and "/etc/hostname" in report.facts["files opened"]
    (finding,) = [finding for finding in report.findings if finding.kind == "reads-outside"]
    assert finding.level == "info"


def test_state_reward_without_a_final_state_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"final state.*task file.*--data"):
        checked(written(tmp_path, NEEDS_STATE))


def test_impossible_checks_are_listed_with_the_fix(tmp_path: Path) -> None:
    report = checked(written(tmp_path, ALWAYS_ZERO.replace("messages:", "ground_truth: str, messages:")))
    unknown = set(report.unchecked)
    assert "score of a correct answer" in unknown and any("injections" in check for check in unknown)
    assert all("--gold" in why or "answer" in why for why in report.unchecked.values())


def test_in_process_report_lists_checks_that_need_the_sandbox(tmp_path: Path) -> None:
    report = checked(written(tmp_path, EXACT), level="in_process")
    assert report.level == "in_process" and "state kept between calls" in report.unchecked
    assert not codes(report, "error")


def test_given_gold_answer_must_score_one(tmp_path: Path) -> None:
    reference = written(tmp_path, EXACT)
    good, bad = (
        checked(reference, Given(("Paris",), (gold,)), "in_process") for gold in ("Paris", "It is Paris, of course.")
    )
    assert "gold-below-one" not in codes(good) and "gold-below-one" in codes(bad, "error")


def test_transcripts_provide_ground_truths_and_gold_answers(tmp_path: Path) -> None:
    asked = user("The capital of France?")
    rollouts = [
        ScoringRequest("a", (asked, said("Lyon")), "Paris", [1], {"gold_answer": "Paris"}),
        ScoringRequest("b", (asked, said("Paris")), "Paris", [1]),
    ]
    report = checked(written(tmp_path, EXACT), Given(rollouts=rollouts), "in_process")
    assert not codes(report, "error") and report.facts["scores"]["highest"] == 1.0
    assert "score of a correct answer" not in report.unchecked


def test_two_rewards_are_compared_and_disagreements_listed(tmp_path: Path) -> None:
    strict, lenient = written(tmp_path, EXACT, "strict.py"), written(tmp_path, LENIENT, "lenient.py")
    report = checked(strict, Given(("Paris",), ("Paris",)), "in_process", against=lenient)
    facts = report.facts[f"agreement with {lenient}"]
    assert facts["rollouts"] > 10 and 0 < facts["kappa"] <= 1
    (worst,) = [finding for finding in report.findings if finding.kind == "disagrees"]
    assert all(line.startswith("0 vs. 1: ") for line in worst.evidence)


def test_reward_agrees_with_itself(tmp_path: Path) -> None:
    strict = written(tmp_path, EXACT)
    report = checked(strict, level="in_process", against=strict)
    assert report.facts[f"agreement with {strict}"]["kappa"] == 1.0 and "disagrees" not in codes(report)


def test_report_sets_the_exit_code_and_escapes_control_characters() -> None:
    report = RewardReport("own.py:reward", level="warm", seed=3)
    report.note("nothing-much", "warning", "little", ["a line\nwith \x1b[31m colours"])
    report.cannot("more", "it is not known")
    report.cannot("more", "said once")
    assert [report.exit_code(at) for at in FAIL_ON] == [0, 1, 1, 0]
    assert json.loads(json.dumps(report.to_json()))["counts"] == {"error": 0, "warning": 1, "info": 0}
    lines = list(report.lines())
    assert "\x1b" not in "".join(lines) and len(report.unchecked) == 1
    assert lines[-1] == "own.py:reward: 0 errors, 1 warning, 1 check not possible (run warm, seed 3)"


@pytest.mark.parametrize("truth", [42, "42", 2.5, True, "Paris", "B", ["red", "green"], {"city": "Paris"}])
def test_wrong_and_near_values_differ_from_the_truth(truth: object) -> None:
    import random

    for value in (*wrong_values(truth, random.Random(0)), *near_values(truth)):
        assert value != truth and type(value) is type(truth)


def test_equal_forms_have_equal_values() -> None:
    for name, text in equal_forms("1000"):
        number = float(text.strip().strip("$").rstrip(".").replace(",", ""))
        assert number == 1000, name


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"name": "f", "arguments": {}}, True),
        ([{"function": {"name": "f", "arguments": "{}"}}], True),
        ({"tool_calls": [{"name": "f", "args": {}}]}, True),
        ({"name": "Ada", "age": 36}, False),
        ([], False),
        ("f", False),
    ],
)
def test_tool_calls_are_recognized_by_structure(value: object, expected: bool) -> None:
    assert is_tool_call(value) is expected


def test_every_answer_form_contains_the_answer() -> None:
    assert all("Paris" in form.write("Paris") for form in FORMS)
    assert len({form.name for form in FORMS}) == len(FORMS)


@pytest.mark.parametrize(
    ("annotation", "kinds"),
    [
        ("int", {int}),
        ("str | None", {str}),
        ("list[str]", {list}),
        ("dict[str, Any]", {dict}),
        ("", {str}),
        ("bool", {bool}),
    ],
)
def test_ground_truths_are_generated_from_the_annotation(annotation: str, kinds: set[type]) -> None:
    grounds = build_questions(Given(), annotation, takes_truth=True)
    assert {type(ground.truth) for ground in grounds} == kinds and not any(ground.is_truth_given for ground in grounds)


def test_gold_answer_without_a_ground_truth_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--ground-truth"):
        checked(written(tmp_path, EXACT), Given(golds=("Paris",)))
    with pytest.raises(ConfigError, match="1 ground truths, but 2 correct answers"):
        Given(("a",), ("b", "c"))


def test_odd_histories_are_valid_requests_with_unique_names() -> None:
    odd = list(odd_histories((user("?"),)))
    assert len({history.name for history in odd}) == len(odd) >= 15
    for history in odd:
        request = make_request(history.messages)
        assert [request.messages[turn].role for turn in request.assistant_turns] == ["assistant"] * len(
            request.assistant_turns
        )
    assert all(len(text) > 1_000_000 for _, text in long_texts())


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (r"(a+)+$", "aaaa"),
        (r"(a*)*b", "aaaa"),
        (r"x(?:\d+,?)+y", "x1,1,1,"),
        (r"<t>(?:[^<]|\s)*</t>", "<t>aaaa"),
        (r"(?:\W\w+)*!", " a a a"),
    ],
)
def test_attack_text_is_generated_from_the_pattern(pattern: str, text: str) -> None:
    assert any(attack.startswith(text) for _, attack, _ in attacks([pattern]))


@pytest.mark.parametrize("pattern", [r"abc", r"(", r"\d{2,4}", r"[^\x00-\x7f]?"])
def test_pattern_without_a_loop_has_no_attack(pattern: str) -> None:
    assert list(attacks([pattern])) == []


def test_source_is_parsed_without_execution() -> None:
    text = '''
"""A file."""
import random, re
raise SystemExit
def score(messages, ground_truth: list[str]):
    """Says nothing."""
    try:
        return re.search("a+b", messages) or len({1}) or "a word"
    except Exception:
        return 0.0
class World:
    def step(self): ...
class Judge:
    def score(self, messages, ground_truth: int): ...
'''
    facts = read_facts(text, "score")
    assert (facts.ground_truth, facts.patterns, facts.chance, facts.zeros) == (
        "list[str]",
        ("a+b",),
        ("random",),
        (10,),
    )
    assert set(facts.words) == {"a+b", "a word"} and facts.has_sets
    assert read_facts(text, "Judge").ground_truth == "int" and read_facts("def", "x").words == ()
    assert [kind_in(text, name) for name in ("score", "Judge", "World", "nobody")] == ["reward", "reward", "class", ""]


SHARE = """
from reward_kit import MetricResult

@reward_function
def reward(messages: list[Message], ground_truth: int) -> EvaluateResult:
    said = re.findall(r"\\d{1,6}", last(messages))
    away = abs(int(said[0]) - ground_truth) / ground_truth if said else 1.0
    reason = "" if away <= 1 else None
    return EvaluateResult(score=float(away == 0), metrics={"away": MetricResult(score=away, reason=reason)})
"""


def test_invalid_result_is_not_reported_as_equal_scores(tmp_path: Path) -> None:
    report = checked(written(tmp_path, SHARE), Given((95,)), "in_process")
    assert "invalid-result" in codes(report, "error") and "right-and-wrong-alike" not in codes(report)


def test_equal_scores_for_right_and_wrong_answers_are_an_error(tmp_path: Path) -> None:
    report = checked(written(tmp_path, LENIENT), Given(("a",)), "in_process")
    assert "right-and-wrong-alike" in codes(report, "error")


BY_LENGTH = """
@reward_function
def reward(messages: list[Message]) -> EvaluateResult:
    return EvaluateResult(score=min(1, len(last(messages)) / 1000))
"""
BY_TAG = """
@reward_function
def reward(messages: list[Message]) -> EvaluateResult:
    return EvaluateResult(score=float("<answer>" in last(messages)))
"""


@pytest.mark.parametrize(("body", "code"), [(BY_LENGTH, "length-earns"), (BY_TAG, "format-alone-earns")])
def test_score_without_an_answer_is_a_warning(tmp_path: Path, body: str, code: str) -> None:
    report = checked(written(tmp_path, body), level="in_process")
    assert code in codes(report, "warning") and not codes(report, "error"), "\n".join(report.lines())


def test_tags_around_the_right_choice_are_valid() -> None:
    report = checked("reward_kit.rewards:choice_answer")
    assert not codes(report, "error", "warning"), "\n".join(report.lines())


@pytest.mark.parametrize("name", ["exact_answer", "tool_calls_match"])
def test_generated_ground_truths_fit_built_in_rewards(name: str) -> None:
    report = checked(f"reward_kit.rewards:{name}")
    assert not codes(report, "error", "warning"), "\n".join(report.lines())
    assert report.facts["scores"]["highest"] == 1.0


def test_unknown_ground_truth_format_asks_for_the_option() -> None:
    report = checked("reward_kit.rewards:python_code")
    assert codes(report) == {"never-scores"} and "--ground-truth" in report.findings[0].message


KEEPS_COUNT = """
calls = []
@reward_function
def reward(messages: list[Message], ground_truth: str) -> EvaluateResult:
    if ground_truth is None:
        raise ValueError("no ground truth")
    calls.append(1)
    return EvaluateResult(score=1.0 if len(calls) > 400 else float(last(messages).strip() == ground_truth))
"""


def test_state_visible_after_hundreds_of_calls_is_hidden_state(tmp_path: Path) -> None:
    assert codes(checked(written(tmp_path, KEEPS_COUNT), level="in_process"), "error", "warning") == {"hidden-state"}


REPEATS = """
@reward_function
def reward(messages: list[Message], ground_truth: str) -> EvaluateResult:
    if ground_truth is None:
        raise ValueError("no ground truth")
    text = last(messages)
    found = re.search(r"PATTERN", text)
    return EvaluateResult(score=float(text.strip() == ground_truth), reason=str(bool(found)))
"""


@pytest.mark.parametrize(
    ("pattern", "code", "told"),
    [
        (r"<a>(?:\w+,?)+!", "catastrophic-regex", "do not nest repeats"),
        pytest.param(r"<answer>\s*(.*?)\s*</answer>", "slow-regex", "strip()", marks=pytest.mark.campaign),
    ],
)
def test_slow_pattern_is_reported_with_matching_advice(tmp_path: Path, pattern: str, code: str, told: str) -> None:
    report = checked(written(tmp_path, REPEATS.replace("PATTERN", pattern)))
    (finding,) = [finding for finding in report.findings if finding.kind.endswith("-regex")]
    assert finding.kind == code and told in finding.message and "more than 1 s on" in finding.evidence[0]


QUOTES = """
@reward_function
def reward(messages: list[Message], ground_truth: str) -> EvaluateResult:
    if ground_truth is None:
        raise ValueError("no ground truth")
    answer = last(messages)
    return EvaluateResult(score=float(answer.strip() == ground_truth), reason=f"answered {answer!r}")
"""


def test_reason_of_a_megabyte_is_reported_as_info(tmp_path: Path) -> None:
    report = checked(written(tmp_path, QUOTES))
    assert "large-result" in codes(report, "info") and not codes(report, "error", "warning")


def test_swallowed_exceptions_are_attributed_to_the_right_reward() -> None:
    swallows = "    try:\n        return 1\n    except Exception:\n        return 0.0\n"
    text = f"def helper():\n{swallows}def other():\n{swallows}def reward(messages):\n    return helper()\n"
    assert read_facts(text, "reward").zeros == (5,) and read_facts(text, "other").zeros == (10,)


def test_rewards_of_a_file_are_listed() -> None:
    marked = "@reward_function\ndef one(messages): ...\ndef two(messages): ...\ndef three(x): ...\n"
    assert rewards_in(marked) == ["one"] and rewards_in(marked.split("\n", 1)[1]) == ["one", "two"]
    assert rewards_in("def") == []
