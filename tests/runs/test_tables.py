"""Test the summary table on a terminal of 80 columns."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO

import pytest

from reward_kit.console import SafeConsole
from reward_kit.runs.display import difference_text, interval_text, signed, summary_table
from reward_kit.runs.statistics import Interval
from reward_kit.runs.summary import PolicySummary

SUMMARY = PolicySummary(
    policy="openai/your-model",
    episodes=12,
    scored=10,
    score=Interval(0.75, 0.5, 0.9, 0.1, 10, 3, 2),
    pass_at_1=0.625,
    k=4,
    pass_at_k=1.0,
    pass_hat_k=0.25,
    errors={"crash": 1, "timeout": 1},
    failures=3,
    limits=2,
    stop_reasons={"answered": 10, "error": 2},
    mean_steps=3.25,
    tool_errors=5,
    mean_return=1.5,
    tokens=1_234_567,
    cost=0.125,
    first_error=None,
    first_traceback=None,
)


def shown(*summaries: PolicySummary, title: str = "my task", width: int = 80) -> str:
    console = SafeConsole(width=width, file=StringIO(), record=True)
    console.print(summary_table(summaries, title))
    return console.export_text()


def cells(*summaries: PolicySummary) -> dict[str, str]:
    """Return the text after each name, with continuation lines joined."""
    found: dict[str, str] = {}
    name = ""
    for line in shown(*summaries).splitlines()[2:]:
        label, cell = line[2:32].strip(), line[32:].strip()
        name = label or name
        if name and cell:
            found[name] = f"{found[name]}, {cell}" if name in found else cell
    return found


def test_every_figure_is_shown_with_its_name() -> None:
    found = cells(SUMMARY)
    expected = {
        "mean score": "0.750  [0.500, 0.900]",
        "pass@1": "62.5%",
        "pass@4": "100.0%",
        "pass^4": "25.0%",
        "episodes (scored)": "12 (10)",
        "failures (scored, not passed)": "3",
        "errors": "crash 1, timeout 1",
        "limits (cut off)": "2",
        "stop reasons": "answered 10, error 2",
        "tool errors": "5",
        "environment return": "1.500",
        "steps per episode": "3.2",
        "tokens": "1,234,567",
        "cost": "$0.1250",
    }
    assert {name: found.get(name) for name in expected} == expected
    assert "reasoning tokens" not in found
    details = {"cached_tokens": 1000, "reasoning_tokens": 34_000}
    found = cells(replace(SUMMARY, token_details=details))
    assert (found["cached tokens"], found["reasoning tokens"]) == ("1,000", "34,000")
    assert "cache write tokens" not in found


def test_table_fits_80_columns_and_lists_policies_in_order() -> None:
    text = shown(SUMMARY, replace(SUMMARY, policy="random"))
    assert all(len(line) <= 80 for line in text.splitlines())
    assert text.splitlines()[0].strip() == "my task"
    assert text.index("openai/your-model") < text.index("random")


def test_long_name_is_wrapped() -> None:
    name = "openai/" + "a-very-long-model-name-" * 3 + "end"
    text = shown(replace(SUMMARY, policy=name))
    assert all(len(line) <= 80 for line in text.splitlines())
    header = text[: text.index("━")].splitlines()[2:]
    assert "".join(line.strip() for line in header) == name


@pytest.mark.parametrize("name", ["model[1]", "[draft]", "[/b]", "[red]x[/red]"])
def test_name_in_brackets_is_shown_literally(name: str) -> None:
    text = shown(replace(SUMMARY, policy=name), title=f"{name}  (3 samples)")
    assert text.splitlines()[0].strip() == f"{name}  (3 samples)"
    assert name in text.splitlines()[2]


class TestUnknown:
    def test_no_scores_are_shown_as_unscored(self) -> None:
        bare = replace(SUMMARY, score=None, scored=0, pass_at_1=None, k=0, mean_return=None, errors={}, stop_reasons={})
        found = cells(bare)
        assert (found["mean score"], found["pass@1"], found["environment return"]) == ("unscored", "–", "–")
        assert (found["errors"], found["episodes (scored)"]) == ("0", "12 (0)")
        assert not [name for name in found if name.startswith(("pass@0", "pass^"))]

    def test_mean_without_an_interval_is_shown_alone(self) -> None:
        assert cells(replace(SUMMARY, score=Interval(0.5, None, None, None, 2, 1)))["mean score"] == "0.500"

    def test_unknown_cost_is_not_free(self) -> None:
        assert cells(replace(SUMMARY, cost=None))["cost"] == "unknown"
        assert cells(replace(SUMMARY, cost=0.0))["cost"] == "$0.0000"

    def test_token_line_is_absent_without_tokens(self) -> None:
        assert not {"tokens", "cost"} & cells(replace(SUMMARY, tokens=0)).keys()

    def test_single_attempt_shows_only_pass_at_1(self) -> None:
        found = cells(replace(SUMMARY, k=1, pass_at_k=None, pass_hat_k=None))
        assert [name for name in found if name.startswith("pass")] == ["pass@1"]

    def test_table_without_policies_is_shown(self) -> None:
        assert "my task" in shown()


def test_each_policy_is_shown_under_its_own_k() -> None:
    fewer = replace(SUMMARY, policy="other", k=3, pass_at_k=0.875, pass_hat_k=0.375)
    found = {
        line.split()[0]: line.split()[1:]
        for line in shown(SUMMARY, fewer, width=100).splitlines()
        if "pass" in line[:8]
    }
    assert found == {
        "pass@1": ["62.5%", "62.5%"],
        "pass@3": ["–", "87.5%"],
        "pass^3": ["–", "37.5%"],
        "pass@4": ["100.0%", "–"],
        "pass^4": ["25.0%", "–"],
    }


class TestFirstError:
    def test_first_error_is_shown_with_user_frames(self) -> None:
        traceback = "ZeroDivisionError: division by zero\n  reward.py:3 in f\n    return 1 / 0"
        text = shown(replace(SUMMARY, first_error="reward 'f': division by zero\nmore", first_traceback=traceback))
        after = text[text.index("first error") :].splitlines()
        assert [line.rstrip() for line in after] == [
            "first error of openai/your-model: reward 'f': division by zero",
            "more",
            "  reward.py:3 in f",
            "    return 1 / 0",
        ]

    def test_last_log_lines_of_a_server_are_truncated_to_a_line_each(self) -> None:
        log = [f"line {n}" for n in range(20)] + ["wide " * 40, "OSError: no licence"]
        text = shown(replace(SUMMARY, first_error="\n".join(["the server ended; its last lines:", *log])))
        first, *more = [line.rstrip() for line in text[text.index("first error") :].splitlines()]
        assert first.endswith("the server ended; its last lines:")
        assert more[:2] == ["…", "line 15"] and more[-1] == "OSError: no licence"
        assert len(more) == 8 and len(more[-2]) == 80 and more[-2].endswith("…")

    def test_untrusted_text_is_escaped_for_the_terminal(self) -> None:
        text = shown(replace(SUMMARY, first_error="reward 'f': \x1b[2J\x9b31m owned", first_traceback=None))
        assert "reward 'f': \\x1b[2J\\x9b31m owned" in text

    def test_first_error_fits_a_screen(self) -> None:
        traceback = "\n".join(f"  line {n}" for n in range(100))
        text = shown(replace(SUMMARY, first_error="x" * 5_000, first_traceback=traceback), width=2_000)
        assert len(text[text.index("first error") :].splitlines()) <= 15
        assert "x" * 500 in text and "x" * 501 not in text

    def test_error_without_message_or_frames_is_shown(self) -> None:
        assert "first error" in shown(replace(SUMMARY, first_error="\n", first_traceback=None))
        assert "first error" not in shown(replace(SUMMARY, first_error=None))

    def test_brackets_in_a_message_are_not_markup(self) -> None:
        assert "got [/x] in [red]" in shown(replace(SUMMARY, first_error="got [/x] in [red]"))


@pytest.mark.parametrize(
    ("value", "told"),
    [(0.25, "+0.250"), (-0.25, "−0.250"), (0.0, "0.000"), (-1e-9, "0.000"), (None, "–"), (-4e6, "−4e+06")],
)
def test_differences_have_their_sign(value: float | None, told: str) -> None:
    assert signed(value) == told


def test_intervals_are_shown_with_their_bounds() -> None:
    interval = Interval(-0.25, -0.5, 0.125, 0.1, 10, 3, 2)
    assert interval_text(interval) == "-0.250  [-0.500, 0.125]"
    assert difference_text(interval) == "−0.250  [−0.500, +0.125]"
    alone = replace(interval, low=None, high=None)
    assert (interval_text(alone), difference_text(alone)) == ("-0.250", "−0.250")
    assert (interval_text(None), difference_text(None)) == ("unscored", "–")


def test_metrics_have_a_line_each_below_the_table() -> None:
    metrics = {"[b]state\x1b": Interval(0.5, 0.25, 0.75, 0.1, 4, 4, 8), "a name that is longer than the line" * 2: None}
    text = shown(replace(SUMMARY, metrics=metrics), replace(SUMMARY, policy="random", metrics={}))
    assert all(len(line) <= 80 for line in text.splitlines())
    (line,) = (line for line in text.splitlines() if "state" in line)
    assert line.split()[1:] == ["openai/your-model", "0.500", "[0.250,", "0.750]", "4", "8"]
    assert line.split()[0].startswith("[b]state") and "\x1b" not in text
    assert "no value" in text and "random" not in text.split("Metrics")[1]


def test_many_metrics_are_cut() -> None:
    text = shown(replace(SUMMARY, metrics={f"test {n}": None for n in range(100)}))
    assert "test 39" in text and "test 40" not in text and "… and 60 more in summary.json" in text
