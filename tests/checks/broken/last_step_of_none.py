"""The last step of an answer without steps has index -1: verl issue 6476."""

from __future__ import annotations

from reward_kit import EvaluateResult, Message, StepOutput, reward_function


@reward_function
def reward(messages: list[Message], ground_truth: str, assistant_turns: list[int]) -> EvaluateResult:
    score = float(bool(messages) and messages[-1].text == ground_truth)
    steps = [StepOutput(step_index=len(assistant_turns) - 1, base_reward=score)]
    return EvaluateResult(score=score, step_outputs=steps)
