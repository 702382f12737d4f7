"""Rewards for whole groups. verl's trainer requests them itself instead of using its reward loop.

They are needed for a reward that scores a group in one call or post-processes its scores (`post_process_scores`),
because verl's reward loop passes single rollouts to a reward. Set `+reward.reward_kit.in_trainer=true` with one of
reward-kit's trainers.

`RewardPipeline` is the reward agent for a `DataProto`. `submit` returns immediately, and results can be fetched as
groups finish. A loop that is one step off-policy submits the next batch before it fetches the results of the last one.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from reward_kit.errors import ConfigError
from reward_kit.integrations.verl.compute_score import SECTION, RewardOptions, scorer_factory
from reward_kit.integrations.verl.data_proto import objects
from reward_kit.integrations.verl.row_format import DataProtoFormat, ScoredRows
from reward_kit.reward_agent import SyncRewardAgent, Ticket
from reward_kit.reward_agent.tickets import Order
from reward_kit.task_parts import SandboxLevel
from reward_kit.tokens.columns import Array

_TOKENS = ("prompts", "responses", "response_mask")
_COLUMNS = ("uid", "raw_prompt", "data_source", "reward_model", "extra_info", "extra_fields")


class RewardPipeline:
    """Rewards for verl batches. Use the pipeline as a context manager.

    It is a `SyncRewardAgent` with a `DataProtoFormat`, which describes rollouts and groups. A reward that scores groups
    is called once for each group.

    Args:
        reward: `file.py:function`, which runs in a sandbox as on the command line, or a reward function or class.
        tokenizer: the tokenizer that decodes prompts and answers.
        folder: the directory for relative file paths. The default is the working directory.
        level: the sandbox level of a reward that is passed by name.
        options: keyword arguments that are always passed to the reward.
        **agent_options: the options of `AsyncRewardAgent`: `max_concurrency`, `deadline_s`, `retries`, ….

    Attributes:
        agent: the reward agent.

    Raises:
        ConfigError: If the reward cannot be loaded, or if an option is invalid.
    """

    def __init__(
        self,
        reward: Any,
        tokenizer: Any,
        *,
        folder: str | Path | None = None,
        level: SandboxLevel | None = None,
        options: dict[str, Any] | None = None,
        **agent_options: Any,
    ) -> None:
        made = RewardOptions(level=level, options=options or {})
        scorer = scorer_factory(reward, made, Path(folder) if folder else None)()
        self.agent = SyncRewardAgent(scorer, batch_format=DataProtoFormat(tokenizer), **agent_options)

    def __enter__(self) -> Self:
        self.agent.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.agent.__exit__(kind, error, trace)

    def submit(self, data: Any, group_size: int = 1, *, deadline_s: float | None = None) -> Ticket:
        """Request the rewards of a batch and return immediately. `get` and `mini_batches` fetch the results.

        Args:
            data: a `DataProto` with `prompts`, `responses` and `attention_mask`.
            group_size: the number of rollouts in a group.
            deadline_s: the time limit in seconds. A rollout that has no score by then is unscored.

        Raises:
            ConfigError: If the rollouts do not form groups, or if the rows are incomplete.
        """
        return self.agent.submit(data, group_size, deadline_s=deadline_s)

    def compute_reward_pipeline(self, data: Any, group_size: int = 1) -> int:
        """Submit a batch without a ticket, and return the number of its rollouts for `get`."""
        return self.agent.compute_reward_pipeline(data, group_size)

    def get(
        self,
        chunk_size: int,
        hook_func: Callable[..., Any] | None = None,
        *,
        ticket: Ticket | None = None,
        order: Order = "completion",
        **kwargs: Any,
    ) -> Any:
        """Wait until the next `chunk_size` rollouts, in whole groups, are scored, and return their `ScoredRows`.

        Args:
            chunk_size: the number of rollouts.
            hook_func: a function that is called with the three columns of the rows. Its result is returned instead. If
                the function raises an error, the rows remain available.
            ticket: the ticket of the batch. The default is the oldest batch that has results left.
            order: "completion" returns the groups that finish first, and "submission" returns the groups that were
                submitted first.
            **kwargs: keyword arguments for `hook_func`.

        Raises:
            ConfigError: If fewer rollouts are left, or if the number would split a group.
        """
        return self.agent.get(chunk_size, hook_func, ticket=ticket, order=order, **kwargs)

    def mini_batches(
        self, chunk_size: int, *, ticket: Ticket | None = None, order: Order = "completion"
    ) -> Iterator[ScoredRows]:
        """Call `get` until the batch has no results left. The last mini-batch may be smaller."""
        return self.agent.mini_batches(chunk_size, ticket=ticket, order=order)


class TrainerRewards:
    """A replacement for verl's `RewardLoopManager` in reward-kit's trainers.

    It requests all groups of a batch at the same time. The reward of an unscored rollout is NaN, and the trainer
    excludes the rollout from the loss. `reward.reward_kit` contains `reward`, `folder` and the keys of `RewardOptions`.

    Raises:
        ConfigError: If no reward is set, if it cannot be loaded, or if a key of the section is unknown or has no
            effect.
    """

    reward_loop_worker_handles = None
    """None. verl therefore does not score rollouts as they finish."""

    def __init__(self, config: Any, tokenizer: Any) -> None:
        section = dict(config.reward.reward_kit)
        section.pop("in_trainer", None)
        reward, folder = section.pop("reward", None), section.pop("folder", None)
        if reward is None:
            raise ConfigError(f"no reward is set; set +{SECTION}.reward=file.py:function")
        for key in ("on_unscored", "metrics"):
            if key in section:
                raise ConfigError(f"{SECTION}.{key} has no effect with in_trainer; remove it")
        options = RewardOptions.of(section, SECTION)
        self._tokenizer = tokenizer
        self._pipeline = RewardPipeline(
            reward,
            tokenizer,
            folder=folder and Path(folder),
            level=options.level,
            options=dict(options.options),
            max_concurrency=options.max_concurrency,
            deadline_s=options.deadline_s,
        )
        self._pipeline.__enter__()

    def score(self, batch: Any) -> Any:
        """Write `rm_scores` to the rows of a `KVBatchMeta`. Each score is written once, at the last sampled token."""
        from tensordict import TensorDict

        queue = import_verl_queue()
        fetched = queue.kv_batch_get(
            keys=batch.keys, partition_id=batch.partition_id, select_fields=[*_TOKENS, *_COLUMNS]
        )
        data = _rows_of_queue(batch.keys, fetched, self._tokenizer.pad_token_id)
        uids = data.non_tensor_batch["uid"]
        tickets = []
        for uid in dict.fromkeys(uids.tolist()):
            rows = np.flatnonzero(uids == uid)
            group = data.select_idxs(rows)
            size = len(set(group.non_tensor_batch["traj_uid"].tolist()))
            tickets.append((rows, size, self._pipeline.submit(group, size)))
        rewards_BT = torch.zeros_like(data.batch["responses"], dtype=torch.float32)
        for rows, size, ticket in tickets:
            rewards_BT[torch.from_numpy(rows)] = self._pipeline.get(size, ticket=ticket).data.batch["rm_scores"]
        unpadded = [rewards_BT[row, : len(ids)] for row, ids in enumerate(fetched["responses"].unbind())]
        nested = torch.nested.as_nested_tensor(unpadded, layout=torch.jagged)
        fields = TensorDict({"rm_scores": nested}, batch_size=len(unpadded))
        return queue.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)


def import_verl_queue() -> Any:
    """Return the module of verl's queue. The module is installed with verl."""
    return importlib.import_module("transfer_queue")


def _rows_of_queue(keys: list[str], fetched: Any, pad_token_id: int) -> Any:
    """Return rows from verl's queue as a `DataProto`. Prompts are padded on the left and responses on the right."""
    from verl import DataProto

    def padded(rows: list[Tensor], fill: int, side: str) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=fill, padding_side=side)

    prompts, responses, masks = (list(fetched[name].unbind()) for name in _TOKENS)
    attention = [
        padded([torch.ones_like(row) for row in rows], 0, side)
        for rows, side in ((prompts, "left"), (responses, "right"))
    ]
    sessions, ends = parse_sessions(keys)
    return DataProto.from_dict(
        tensors={
            "prompts": padded(prompts, pad_token_id, "left"),
            "responses": padded(responses, pad_token_id, "right"),
            "response_mask": padded(masks, 0, "right"),
            "attention_mask": torch.cat(attention, dim=1),
        },
        non_tensors={
            **{name: objects(list(fetched[name])) for name in _COLUMNS if name in set(fetched.keys())},
            "traj_uid": sessions,
            "ends_episode": ends,
        },
    )


def parse_sessions(keys: Sequence[str]) -> tuple[Array, Array]:
    """Return the session in each `uid_session_output` key, and whether the key is that of its session's last output.

    Both arrays have shape (B,).
    """
    numbered = [key.rsplit("_", 1) for key in keys]
    last: dict[str, int] = {}
    for session, output in numbered:
        last[session] = max(last.get(session, -1), int(output))
    return objects([session for session, _ in numbered]), np.array([int(out) == last[of] for of, out in numbered])
