"""What is kept of an error: its class, one line, and the user's own frames."""

import asyncio
import sys
from pathlib import Path

import pytest

from reward_kit.errors import (
    AlignmentError,
    ConfigError,
    DeadlineError,
    EnvironmentFailure,
    Failure,
    InvalidResultError,
    LimitError,
    PolicyError,
    ProviderError,
    RewardError,
    RewardKitError,
    StoreError,
    ToolError,
    boundary,
    did_you_mean,
    safe_str,
    type_name,
    user_traceback,
)


class Hostile(Exception):
    def __str__(self):
        raise KeyError("no text for you")


def failure_of(error_type, raised):
    with pytest.raises(RewardKitError) as caught, boundary(error_type, "the call"):
        raise raised
    return caught.value


def test_a_foreign_error_becomes_the_type_of_its_boundary_with_the_original_as_cause():
    original = ValueError("bad")
    error = failure_of(ToolError, original)
    assert type(error) is ToolError
    assert str(error) == "the call: ValueError: bad"
    assert error.__cause__ is original


def test_our_own_errors_pass_unchanged():
    original = ProviderError("429")
    assert failure_of(PolicyError, original) is original


def test_a_timeout_is_a_deadline_whatever_the_boundary():
    error = failure_of(RewardError, TimeoutError())
    assert type(error) is DeadlineError
    assert str(error) == "the call: timed out"


def test_user_code_that_exits_the_process_is_an_error_like_any_other():
    assert str(failure_of(RewardError, SystemExit(3))) == "the call: SystemExit: 3"


def test_stop_iteration_is_classified_too():
    assert type(failure_of(RewardError, StopIteration("end"))) is RewardError


def test_an_interrupt_passes_through():
    with pytest.raises(KeyboardInterrupt), boundary(RewardError, "the call"):
        raise KeyboardInterrupt


async def test_the_cancellation_of_the_running_task_passes_through():
    async def work():
        with boundary(RewardError, "the call"):
            await asyncio.sleep(30)

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_cancellation_that_leaks_out_of_foreign_code_is_its_failure():
    inner = asyncio.create_task(asyncio.sleep(30))
    inner.cancel()
    told = "the call: a task it awaited was cancelled"
    with pytest.raises(RewardError, match=told), boundary(RewardError, "the call"):
        await inner


def test_an_exception_without_readable_text_is_still_recorded():
    failure = Failure.from_exception(failure_of(RewardError, Hostile()))
    assert "Hostile whose text cannot be read: KeyError" in failure.message


def test_long_messages_are_cut_and_say_so():
    text = safe_str("x" * 5_000)
    assert text.startswith("x" * 2_000 + "…")
    assert text.endswith("(5000 characters)")


@pytest.mark.parametrize(
    ("error_type", "failure_class"),
    [
        (ConfigError, "refused"),
        (ProviderError, "provider_error"),
        (PolicyError, "crash"),
        (EnvironmentFailure, "crash"),
        (RewardError, "crash"),
        (InvalidResultError, "invalid_result"),
        (AlignmentError, "invalid_result"),
        (DeadlineError, "timeout"),
        (LimitError, "limit"),
        (ZeroDivisionError, "crash"),
    ],
)
def test_every_type_is_counted_in_one_class(error_type, failure_class):
    failure = Failure.from_exception(error_type("x"))
    assert (failure.failure_class, failure.where) == (failure_class, error_type.__name__)


def test_config_errors_leave_with_2_and_all_others_with_3():
    assert ConfigError.exit_code == 2
    assert {t.exit_code for t in (ProviderError, StoreError, RewardError)} == {3}


def run_file(path: Path, code: str) -> BaseException:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(code)
    try:
        exec(compile(code, str(path), "exec"), {})
    except (ValueError, ArithmeticError) as error:
        return error
    raise AssertionError("the code did not raise")


def test_the_innermost_frame_of_the_user_comes_first(tmp_path):
    mine = tmp_path / "reward.py"
    lines = user_traceback(run_file(mine, "def inner():\n    1 / 0\ndef outer():\n    inner()\nouter()\n")).splitlines()
    assert lines[0] == "ZeroDivisionError: division by zero"
    assert lines[1] == f"  {mine}:2 in inner"
    assert lines[2].strip() == "1 / 0"
    assert lines[3] == f"  {mine}:4 in outer"


def test_frames_of_libraries_are_left_out_where_there_are_own_ones(tmp_path):
    mine = tmp_path / "reward.py"
    text = user_traceback(run_file(mine, "import json\njson.loads('{')\n"))
    assert str(mine) in text
    assert "json/decoder" not in text


def test_where_only_libraries_are_there_is_no_frame_to_show(tmp_path):
    installed = tmp_path / "site-packages" / "lib.py"
    try:
        exec(compile("1 / 0", str(installed), "exec"), {})
    except ZeroDivisionError as error:
        error.__traceback__ = error.__traceback__.tb_next
        assert user_traceback(error) == ""


def test_a_folder_whose_name_begins_like_the_packages_is_the_users(tmp_path):
    package = Path(sys.modules["reward_kit.errors"].__file__).parent
    filename = f"{package}_of_mine/reward.py"
    try:
        exec(compile("1 / 0", filename, "exec"), {})
    except ZeroDivisionError as error:
        assert filename in user_traceback(error)


def test_a_traceback_has_at_most_fifteen_lines(tmp_path):
    error = run_file(tmp_path / "deep.py", "def f(n):\n    return f(n - 1) if n else 1 / 0\nf(50)\n")
    assert len(user_traceback(error).splitlines()) == 15


def test_an_error_raised_by_us_alone_has_no_traceback():
    error = ConfigError("no such file")
    assert Failure.from_exception(error).traceback == ""


def test_a_failure_survives_json():
    failure = Failure("timeout", "DeadlineError", "too slow", "frames")
    assert failure.to_json()["class"] == "timeout"
    assert Failure.from_json(failure.to_json()) == failure


def test_a_failure_is_one_line_and_read_again_as_far_as_that_goes():
    failure = Failure("timeout", "DeadlineError", "too slow: 3 s", "frames")
    assert failure.to_line() == "timeout: too slow: 3 s"
    assert Failure.from_line(failure.to_line(), "rollout") == Failure("timeout", "rollout", "too slow: 3 s")
    assert Failure.from_line("no class: here", "rollout") == Failure("crash", "rollout", "no class: here")


def test_an_unknown_failure_class_is_refused_when_read():
    with pytest.raises(StoreError, match="unknown failure class 'oops'"):
        Failure.from_json({"class": "oops", "where": "", "message": ""})


def test_the_nearest_word_is_offered_else_all_of_them_once():
    assert did_you_mean("pritn", ["print", "input"]) == "; did you mean 'print'?"
    assert did_you_mean("GRPO", ["gae", "grpo"]) == "; did you mean 'grpo'?"
    assert did_you_mean("httpresource", ["HttpResource"]) == "; did you mean 'HttpResource'?"
    assert did_you_mean("zzz", ["b", "a", "b"]) == "; known: a, b"
    assert did_you_mean("zzz", []) == ""
    assert did_you_mean("zzz", map("s{:04}".format, range(9_000))).endswith("s0038, s0039, … (9,000 in all)")


def test_a_kind_has_its_article_and_a_type_without_a_name_is_a_value():
    assert [type_name(value) for value in (1, "", type("", (), {})())] == ["an int", "a str", "a value"]
