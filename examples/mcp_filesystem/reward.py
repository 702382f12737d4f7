"""Are the files, at the end, what they should be? Nothing the agent says counts; only what is in the folder."""

from __future__ import annotations

from reward_kit import EvaluateResult, reward_function


@reward_function
def right_files(messages: list, ground_truth: dict[str, str | None], state: dict[str, str | bytes]) -> EvaluateResult:
    """1 where each file holds its text, and is not there where its text is null; space at the ends does not count."""
    wrong = [path for path, text in ground_truth.items() if stripped(state.get(path)) != text]
    return EvaluateResult(
        score=float(not wrong), reason=f"not as expected: {', '.join(wrong)}" if wrong else "as expected"
    )


def stripped(content: str | bytes | None) -> str | bytes | None:
    """The content without space at its ends."""
    return content if content is None else content.strip()
