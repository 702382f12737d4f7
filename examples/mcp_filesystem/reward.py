"""Compare the final files with the expected ones. The agent's messages do not count."""

from __future__ import annotations

from reward_kit import EvaluateResult, reward_function


@reward_function
def right_files(messages: list, ground_truth: dict[str, str | None], state: dict[str, str | bytes]) -> EvaluateResult:
    """Return 1 if all files have the expected text, or are absent if it is null, ignoring outer whitespace."""
    wrong = [path for path, text in ground_truth.items() if stripped(state.get(path)) != text]
    return EvaluateResult(
        score=float(not wrong), reason=f"not as expected: {', '.join(wrong)}" if wrong else "as expected"
    )


def stripped(content: str | bytes | None) -> str | bytes | None:
    """Return the content without outer whitespace."""
    return content if content is None else content.strip()
