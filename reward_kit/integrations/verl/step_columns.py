"""What verl's rows are told beside their tokens: their actions, the states these were taken in, what they earned."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from reward_kit.agent.models import StepData, steps_of
from reward_kit.credit.state_hashes import readable_keys
from reward_kit.episodes.segments import ActionSpan
from reward_kit.errors import ConfigError
from reward_kit.tokens.columns import Array, Columns

EPISODE = "reward_kit_episode"
"""The row column with the whole episode, by which it comes back."""
STEP_COLUMNS = ("steps", "action_lengths", "state_keys", "step_rewards", "valid_actions")
"""The row columns with one item for each action of the row."""

_CREDIT = ("base_reward", "advantage", "return_to_go")
_ALIGNED = ("metrics", "reward_reason")  # what alignment adds to a step's info


def step_columns(columns: Columns, *, with_episodes: bool = True) -> Columns:
    """A connector that adds, for each row, lists with one item for each of its actions.

    `steps` are the actions' numbers in their episode; `action_lengths` count the tokens of each; `state_keys` name the
    state in which it was taken, by equal texts for equal keys; `step_rewards` are base rewards, None where unset;
    `valid_actions` is False where the environment could not read an action. Where every row has one action,
    `anchor_obs` is its state key, as verl-agent calls it. `reward_kit_episode` is the whole episode, once for all of
    its rows.

    Args:
        columns: with rows, by `segment_rows` or `action_rows`.
        with_episodes: add `reward_kit_episode`.

    Raises:
        ConfigError: there are no such rows, or an episode has tokens of only some of its steps.
    """
    if "segment" not in columns.rows:
        raise ConfigError("no row column 'segment': the pipeline needs segment_rows or action_rows")
    steps_E = columns.step_data or [steps_of(episode) for episode in columns.episodes]
    spans_B = _spans_of_rows(columns)
    _check_whole(columns, spans_B, steps_E)
    keys_E = [readable_keys([steps]) for steps in steps_E]
    rows: dict[str, list[Any]] = {name: [] for name in STEP_COLUMNS}
    for owner, spans in zip(columns.episodes_B.tolist(), spans_B, strict=True):
        steps = [steps_E[owner][span.step] for span in spans]
        rows["steps"].append([span.step for span in spans])
        rows["action_lengths"].append([span.stop - span.start for span in spans])
        rows["state_keys"].append([keys_E[owner][span.step] for span in spans])
        rows["step_rewards"].append([step.base_reward for step in steps])
        rows["valid_actions"].append([step.step_info.get("is_action_valid") is not False for step in steps])
    if rows["steps"] and all(len(steps) == 1 for steps in rows["steps"]):
        rows["anchor_obs"] = [keys[0] for keys in rows["state_keys"]]
    if with_episodes:
        whole_E = [_whole(columns, place, steps_E) for place in range(len(columns.episodes))]
        rows[EPISODE] = [whole_E[owner] for owner in columns.episodes_B.tolist()]
    return columns.adding(rows={name: objects(values) for name, values in rows.items()})


def objects(values: Sequence[Any]) -> Array:
    """(B,) of any objects. `np.array` would take lists apart."""
    return np.fromiter(values, dtype=object, count=len(values))


def _spans_of_rows(columns: Columns) -> list[list[ActionSpan]]:
    by_segment: list[dict[int, list[ActionSpan]]] = []
    for episode in columns.episodes:
        found: dict[int, list[ActionSpan]] = defaultdict(list)
        for span in episode.tokens.spans:
            found[span.segment].append(span)
        by_segment.append(found)
    steps: Sequence[int | None] = (
        columns.rows["step"].tolist() if "step" in columns.rows else [None] * len(columns.lengths_B)
    )
    places = zip(columns.episodes_B.tolist(), columns.rows["segment"].tolist(), steps, strict=True)
    return [
        [span for span in by_segment[owner][segment] if step is None or span.step == step]
        for owner, segment, step in places
    ]


def _check_whole(columns: Columns, spans_B: list[list[ActionSpan]], steps_E: Sequence[Sequence[StepData]]) -> None:
    """Credit looks at whole trajectories: where a row stands for some of an episode's steps, none may be missing."""
    present: dict[int, set[int]] = defaultdict(set)
    for owner, spans in zip(columns.episodes_B.tolist(), spans_B, strict=True):
        present[owner].update(span.step for span in spans)
    for owner, found in present.items():
        missing = sorted(set(range(len(steps_E[owner]))) - found)
        if missing:
            raise ConfigError(
                f"episode {columns.episodes[owner].id_}: step {missing[0]} has no tokens in these rows, and the others "
                "have; verl knows steps by their tokens. Export episodes of one policy that records all of them"
            )


def _whole(columns: Columns, place: int, steps_E: Sequence[Sequence[StepData]]) -> dict[str, Any]:
    steps = [
        {
            **{name: getattr(step, name) for name in _CREDIT},
            "step_info": {name: step.step_info[name] for name in _ALIGNED if name in step.step_info},
        }
        for step in steps_E[place]
    ]
    return {"state": columns.episodes[place].get_state(), "steps": steps}
