"""Rows of a `DataProto` as what a reward is given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.integrations.verl.step_columns import EPISODE
from reward_kit.reward_agent import ScoringRequest
from reward_kit.rl.reward_manager import NaiveRewardManager
from reward_kit.rl.reward_manager.batches import RewardBatch
from reward_kit.rl.reward_manager.managers import RewardManager, Tokenizer, check_tokenizer


class RowRequests(NaiveRewardManager):
    """The whole episode where a row brings it along; else the chat of the prompt and the decoded answer.

    The latter as our manager of single answers reads them.

    Args:
        tokenizer: decodes prompts and answers.

    Raises:
        ConfigError: it cannot decode.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        RewardManager.__init__(self, tokenizer, 0)
        check_tokenizer(tokenizer)

    def of(self, data: Any) -> list[ScoringRequest]:
        """The request of each row.

        Raises:
            ConfigError: a row lacks something, or has it in another form.
        """
        carried = [carried_episode(data.non_tensor_batch, row) for row in range(len(data))]
        if all(episode is not None for episode in carried):
            return [ScoringRequest.of(episode) for episode in carried if episode is not None]
        requests = self._requests(RewardBatch.of(data))
        return [
            request if episode is None else ScoringRequest.of(episode)
            for request, episode in zip(requests, carried, strict=True)
        ]


def carried_episode(columns: Mapping[str, Any], row: int) -> SingleAgentEpisode | None:
    """The episode that a row brings along, itself or in the `extra_fields` of its agent loop; None where it does not.

    In verl's reward loop those fields are called `tool_extra_fields`.
    """
    carried = columns[EPISODE][row] if EPISODE in columns else None
    for name in ("extra_fields", "tool_extra_fields"):
        if carried is None and name in columns:
            carried = (columns[name][row] or {}).get(EPISODE)
    return None if carried is None else SingleAgentEpisode.from_state(carried["state"])
