"""Episodes as what verl's agent loops return: a loop of one's own runs a rollout worker, and hands over its episode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from reward_kit.agent.models import StepData
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.errors import ConfigError
from reward_kit.integrations.verl.data_proto import EPISODE, STEP_COLUMNS, step_columns
from reward_kit.tokens import row_columns


def agent_loop_outputs(
    episode: SingleAgentEpisode,
    steps: Sequence[StepData] | None = None,
    *,
    score: float | None = None,
    with_episode: bool = True,
) -> list[Any]:
    """verl's `AgentLoopOutput` for each segment of an episode, in order; return them from `AgentLoopBase.run`.

    `extra_fields` hold what reward_kit's trainers ask for (`step_columns`), and the episode for its reward manager.

    Args:
        episode: what was collected.
        steps: its steps, with the base rewards that are to count; by default the bare ones, which have none.
        score: where it is scored already; else verl's reward loop does it.
        with_episode: hand the whole episode over to the reward.

    Raises:
        ConfigError: no action has tokens, or only some have.
    """
    from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

    columns = step_columns(row_columns([episode], None if steps is None else [steps]))
    if not len(columns.lengths_B):
        raise ConfigError(f"episode {episode.id_} has no tokens, and verl trains on nothing else")
    outputs = []
    for row, (start, length, prompt) in enumerate(
        zip(columns.starts_B.tolist(), columns.lengths_B.tolist(), columns.prompt_lengths_B.tolist(), strict=True)
    ):
        parts = {
            name: columns.tokens[name][start : start + length].tolist()
            for name in ("input_ids", "action_mask", "logprobs")
        }
        logprobs = parts["logprobs"][prompt:]
        outputs.append(
            AgentLoopOutput(
                prompt_ids=parts["input_ids"][:prompt],
                response_ids=parts["input_ids"][prompt:],
                response_mask=parts["action_mask"][prompt:],
                response_logprobs=None if any(value != value for value in logprobs) else logprobs,
                reward_score=score,
                num_turns=len(episode.messages),
                metrics=AgentLoopMetrics(),
                extra_fields={name: columns.rows[name][row] for name in STEP_COLUMNS},
            )
        )
    if with_episode:
        outputs[-1].extra_fields[EPISODE] = columns.rows[EPISODE][0]
    return outputs
