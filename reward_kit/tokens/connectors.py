"""Connectors: small functions that convert episodes to rows step by step. They take and return `Columns`."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from reward_kit.agent.policy_interface import get_tool_calls
from reward_kit.episodes.allowed_ids import AllowedIds
from reward_kit.episodes.record import get_facts
from reward_kit.episodes.segments import ActionSpan, EpisodeTokens
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.errors import ConfigError, EpisodeError, type_name
from reward_kit.tokens.columns import Array, Columns, Floats, Ints, ranges

STD_FLOOR = 1e-6


class _Stream(NamedTuple):
    """The concatenated tokens of all episodes. The tokens of each segment are contiguous."""

    tokens: dict[str, Array]  # (N,)
    starts: Ints  # of each segment
    prompt_lengths: Ints  # the number of tokens before the first action of the segment
    acts: Array  # whether the segment contains an action
    owners: Ints  # the index of the segment's episode
    numbers: Ints  # the number of the segment within its episode
    # For each action: its `step`, `index` on the axis of all steps, `start`, `stop`, `version`, and `row`, the index of
    # its segment in `starts`.
    actions: dict[str, Ints]

    @property
    def lengths(self) -> Ints:
        return np.diff(self.starts, append=len(self.tokens["input_ids"]))


def segment_rows(columns: Columns) -> Columns:
    """Create one row for each segment that contains an action. The completion of a row is `a1 o1 a2 o2 … aN`.

    The completion begins at the first action; everything before it is the prompt. The connector adds the token columns
    `input_ids`, `completion_mask`, `action_mask`, `logprobs`, `policy_versions` and `step`, and the row columns
    `segment` and `allowed_ids`. The column `allowed_ids` contains the ids that were allowed at constrained tokens (see
    `reward_kit.episodes.allowed_ids.AllowedIds`), or None if a row has no constrained tokens.

    Raises:
        EpisodeError: If an episode has tokens for a step that is not among its steps.
    """
    stream = _stream(columns)
    made = columns.with_rows(stream.lengths, stream.prompt_lengths, stream.owners)
    completion_mask = np.ones(len(stream.tokens["step"]), dtype=np.int8)
    completion_mask[ranges(stream.starts, stream.prompt_lengths)] = 0
    allowed = _allowed(columns, stream.owners, stream.starts, stream.starts, stream.starts + stream.lengths)
    rows = {"segment": stream.numbers, "allowed_ids": allowed}
    made = made.with_columns(tokens={**stream.tokens, "completion_mask": completion_mask}, rows=rows)
    # In a chunk of an episode, a segment may contain only context.
    return made if stream.acts.all() else made.select_rows(stream.acts)


def action_rows(columns: Columns) -> Columns:
    """Create one row for each action. The prompt of a row is everything before the action in its segment.

    Earlier actions are part of the prompt, where the masks of sampled tokens are 0, so each sampled token is trained on
    in exactly one row. An action without tokens gets no row. The connector adds the columns of `segment_rows` and the
    row column `step`, the index of the action in its episode.

    Raises:
        EpisodeError: If an episode has tokens for a step that is not among its steps.
    """
    stream = _stream(columns)
    sampled = stream.actions["stop"] > stream.actions["start"]
    step, start, stop, segment = (stream.actions[key][sampled] for key in ("step", "start", "stop", "row"))
    begin = stream.starts[segment]
    made = columns.with_rows(stop - begin, start - begin, stream.owners[segment])
    places = ranges(begin, made.lengths_B)
    in_prompt = places < np.repeat(start, made.lengths_B)
    tokens = {key: values[places] for key, values in stream.tokens.items()}
    for key, off in (("step", -1), ("policy_versions", -1), ("action_mask", 0), ("logprobs", 0.0)):
        tokens[key][in_prompt] = off
    tokens["completion_mask"] = (~in_prompt).astype(np.int8)
    allowed = _allowed(columns, stream.owners[segment], begin, start, stop)
    return made.with_columns(
        tokens=tokens, rows={"segment": stream.numbers[segment], "allowed_ids": allowed, "step": step}
    )


def _allowed(columns: Columns, owners_B: Ints, begins_B: Ints, starts_B: Ints, stops_B: Ints) -> Array:
    """Return, for each row (B,), the ids that were allowed at the tokens `start:stop`.

    The arguments are indices into the stream. Positions in the result are relative to `begin`.
    """
    recorded = [episode.tokens for episode in columns.episodes]
    allowed_B = np.full(len(owners_B), None, dtype=object)
    if not any(tokens.allowed for tokens in recorded):
        return allowed_B
    sizes = np.array([len(tokens) for tokens in recorded], dtype=np.int64)
    offsets_E = np.cumsum(sizes) - sizes
    bounds = zip(owners_B, begins_B, starts_B, stops_B, strict=True)
    for row, (owner, begin, start, stop) in enumerate(bounds):
        offset = int(offsets_E[owner])
        allowed = recorded[owner].allowed.between(int(start) - offset, int(stop) - offset)
        if allowed is not None:
            allowed_B[row] = AllowedIds.shared(allowed.places + np.int32(start - begin), allowed.which, allowed.sets)
    return allowed_B


def _stream(columns: Columns) -> _Stream:
    recorded = [episode.tokens for episode in columns.episodes]
    sizes = np.array([len(tokens) for tokens in recorded], dtype=np.int64)
    offsets = np.cumsum(sizes) - sizes
    counts = np.array([len(tokens.segments) for tokens in recorded], dtype=np.int64)
    first_rows = np.cumsum(counts) - counts
    owners = np.repeat(np.arange(len(recorded)), counts)
    segments = [segment for tokens in recorded for segment in tokens.segments]
    actions = _actions(columns, recorded, offsets, first_rows)
    starts = np.array([segment.start for segment in segments], dtype=np.int64) + offsets[owners]
    firsts = starts + np.diff(starts, append=sizes.sum())
    firsts[actions["row"][::-1]] = actions["start"][::-1]  # of several actions, the first one takes precedence
    return _Stream(
        tokens=_sampled(recorded, actions),
        starts=starts,
        prompt_lengths=firsts - starts,
        acts=np.isin(np.arange(len(segments)), actions["row"]),
        owners=owners,
        numbers=np.arange(len(segments)) - first_rows[owners],
        actions=actions,
    )


def _actions(columns: Columns, recorded: list[EpisodeTokens], offsets: Ints, first_rows: Ints) -> dict[str, Ints]:
    fields = ActionSpan._fields
    spans = np.fromiter(chain.from_iterable(span for tokens in recorded for span in tokens.spans), dtype=np.int64)
    table = dict(zip(fields, spans.reshape(-1, len(fields)).T, strict=True))
    actors = np.repeat(np.arange(len(recorded)), [len(tokens.spans) for tokens in recorded])
    known = np.diff(columns.step_starts_E)
    wrong = np.flatnonzero((table["step"] < 0) | (table["step"] >= known[actors]))
    if len(wrong):
        owner, step = int(actors[wrong[0]]), int(table["step"][wrong[0]])
        rollout_id = columns.episodes[owner].id_
        raise EpisodeError(
            f"episode {rollout_id} has tokens for step {step}, but only {known[owner]} of its steps were passed"
        )
    return {
        "step": table["step"],
        "index": table["step"] + columns.step_starts_E[actors],
        "start": table["start"] + offsets[actors],
        "stop": table["stop"] + offsets[actors],
        "row": table["segment"] + first_rows[actors],
        "version": table["policy_version"],
    }


def _sampled(recorded: list[EpisodeTokens], actions: dict[str, Ints]) -> dict[str, Array]:
    """Return the token columns (N,) of all episodes."""
    # `np.concatenate` copies. With a view, the episode's arrays could not grow.
    ids = np.concatenate([np.zeros(0, np.int32), *(np.asarray(tokens.ids) for tokens in recorded)])
    logprobs = np.concatenate([np.zeros(0), *(np.asarray(tokens.logprobs) for tokens in recorded)])
    # A version may be a timestamp in milliseconds.
    kind = np.int32 if actions["version"].max(initial=0) < 2**31 else np.int64
    step, versions = np.full(len(ids), -1, dtype=np.int32), np.full(len(ids), -1, dtype=kind)
    lengths = actions["stop"] - actions["start"]
    positions = ranges(actions["start"], lengths)
    step[positions] = np.repeat(actions["index"].astype(np.int32), lengths)
    versions[positions] = np.repeat(actions["version"].astype(kind), lengths)
    action_mask = (step >= 0).astype(np.int8)
    tokens = {"input_ids": ids, "action_mask": action_mask, "logprobs": logprobs, "policy_versions": versions}
    return {**tokens, "step": step}


def step_values(columns: Columns) -> Columns:
    """Add the step columns `advantage`, `return_to_go` and `base_reward`. NaN marks a missing value.

    If a critic estimated the value of any step, the connector also adds `policy_value_estimate`.
    """
    keys: tuple[str, ...] = ("advantage", "return_to_go", "base_reward")
    if columns.step_data is None:
        return columns.with_columns(steps={key: np.full(int(columns.step_starts_E[-1]), np.nan) for key in keys})
    steps = [step for steps in columns.step_data for step in steps]
    if any(step.policy_value_estimate is not None for step in steps):
        keys += ("policy_value_estimate",)
    # float64 converts None to NaN.
    return columns.with_columns(
        steps={key: np.array([getattr(step, key) for step in steps], dtype=np.float64) for key in keys}
    )


def standardized_advantages(columns: Columns) -> Columns:
    """Standardize the step column `advantage` to a mean of 0 and a standard deviation of 1.

    The advantages are divided by their unbiased standard deviation plus 1e-6. If all advantages are equal, they become
    0.

    This connector is not in the default pipeline, because most advantage estimators already normalize advantages.
    Insert it after `step_values`. There, each action counts once, regardless of its number of tokens.
    """
    advantages_S = columns.steps["advantage"]
    known_S = advantages_S[~np.isnan(advantages_S)]
    if not len(known_S):
        return columns
    if known_S.min() == known_S.max():
        return columns.with_columns(steps={"advantage": np.where(np.isnan(advantages_S), np.nan, 0.0)})
    scaled_S = (advantages_S - known_S.mean()) / (known_S.std(ddof=1) + STD_FLOOR)
    return columns.with_columns(steps={"advantage": scaled_S})


def credit_on_tokens(columns: Columns) -> Columns:
    """Copy the step columns to the tokens of each step, without normalizing them.

    The connector adds the following token columns:

    - `advantages` and `returns`, on all tokens of an action
    - `step_rewards`, on the last token of an action
    - `loss_mask`, which is 1 where `completion_mask` and `action_mask` are 1 and the action has an advantage

    If a critic estimated values, it also adds:

    - `values`, on all tokens of an action; NaN if the critic did not estimate the action's value
    - `value_mask`, which is 1 on the first token of each action that has a return, because the critic's estimate
      precedes the action
    """
    step = columns.tokens["step"]
    sampled = np.flatnonzero(step >= 0)
    acting = step[sampled]
    # An action's tokens are contiguous and belong to one row only.
    last = sampled[np.append(acting[1:], -1) != acting]
    advantages = columns.steps["advantage"][acting]
    loss_mask = np.zeros(len(step), dtype=np.int8)
    loss_mask[sampled] = ~np.isnan(advantages)
    loss_mask *= columns.tokens["completion_mask"] * columns.tokens["action_mask"]
    added: dict[str, Array] = {
        "advantages": _placed(len(step), sampled, advantages),
        "returns": _placed(len(step), sampled, columns.steps["return_to_go"][acting]),
        "step_rewards": _placed(len(step), last, columns.steps["base_reward"][step[last]]),
        "loss_mask": loss_mask,
    }
    if "policy_value_estimate" in columns.steps:
        first = sampled[(np.append(-1, acting[:-1]) != acting) & ~np.isnan(columns.steps["return_to_go"][acting])]
        added["values"], added["value_mask"] = np.zeros(len(step)), np.zeros(len(step), dtype=np.int8)
        added["values"][sampled] = columns.steps["policy_value_estimate"][acting]
        added["value_mask"][first] = 1
    return columns.with_columns(tokens=added)


def _placed(size: int, positions: Ints, values: Floats) -> Floats:
    placed = np.zeros(size)
    placed[positions] = np.where(np.isnan(values), 0.0, values)
    return placed


def identities(columns: Columns) -> Columns:
    """Add the ids of each row's episode.

    The row columns are:

    - `rollout_id` and `group_id`
    - `traj_uid` and `uid`, the same ids under the names that verl uses; if an episode has no group, its `uid` is its
      `rollout_id`
    - `ends_episode`, which is True on the last row of each episode that has a sampled token
    """
    owners = columns.episodes_B
    rollouts = _objects([episode.id_ for episode in columns.episodes])
    groups = _objects([get_facts(episode).get("group_id") for episode in columns.episodes])
    uids = _objects([group or rollout for group, rollout in zip(groups, rollouts, strict=True)])
    named = {"rollout_id": rollouts, "group_id": groups, "traj_uid": rollouts, "uid": uids}
    counted = np.cumsum(np.append(0, columns.tokens["action_mask"]), dtype=np.int64)
    acts = counted[columns.starts_B + columns.lengths_B] > counted[columns.starts_B]
    last = np.full(len(columns.episodes), -1, dtype=np.int64)
    last[owners[acts]] = np.flatnonzero(acts)  # of several rows, the last one takes precedence
    ends = np.arange(len(owners)) == last[owners]
    return columns.with_columns(rows={key: values[owners] for key, values in named.items()} | {"ends_episode": ends})


def episode_facts(columns: Columns) -> Columns:
    """Add the episode data that reward managers read.

    The row columns are:

    - `episode_rewards`: the score, or NaN if the episode is unscored
    - `episode_lengths`: the number of actions of the policy
    - `data_source`: the data source of the sample, or "unknown"
    - `extra_info`: the extra info of the sample, including `sample_id` and `stop_reason`
    - `reward_model`: a dict with the `ground_truth`
    - `success`: the last success flag that the environment reported, or None
    - `tool_callings`: the number of tool calls
    - `message_parts`: a dict that maps each type of non-text content in the messages to a list of that content
    """
    owners = columns.episodes_B
    lengths_E = np.array([len(episode) for episode in columns.episodes], dtype=np.int64)
    calls_E = np.zeros(len(lengths_E), dtype=np.int64)
    for index, episode in enumerate(columns.episodes):  # an episode built by hand may have actions of any type
        actions = [action for action in episode.get_actions() if isinstance(action, Mapping) and "type" in action]
        calls_E[index] = sum(len(get_tool_calls(action)) for action in actions)
    facts_E = [_facts(episode) for episode in columns.episodes]
    # Every row has separate dicts, so that setting a key in one does not affect the others.
    rows = [{key: dict(v) if isinstance(v, dict) else v for key, v in facts_E[owner].items()} for owner in owners]
    added = {key: _objects([row[key] for row in rows]) for key in _FACTS}
    added |= {"episode_rewards": columns.scores_E[owners]}
    added |= {"episode_lengths": lengths_E[owners], "tool_callings": calls_E[owners]}
    return columns.with_columns(rows=added)


_FACTS = ("data_source", "extra_info", "reward_model", "success", "message_parts")


def _facts(episode: SingleAgentEpisode) -> dict[str, Any]:
    facts = get_facts(episode)
    sample = facts.get("sample") or {}
    extra_info = sample.get("extra_info")
    ending = {"sample_id": facts.get("sample_id"), "stop_reason": facts.get("stop_reason")}
    infos = reversed(episode.get_infos() if episode.is_reset else [])
    outcomes = (info[key] for info in infos for key in ("success", "won") if info.get(key) is not None)
    others: dict[str, list[Any]] = {}
    for message in episode.messages:
        for part in message.content if isinstance(message.content, list) else ():
            if (kind := part.get("type")) not in (None, "text"):
                others.setdefault(kind, []).append(part.get(kind, part))
    return {
        "data_source": sample.get("data_source") or "unknown",
        "extra_info": {**(extra_info if isinstance(extra_info, Mapping) else {}), **ending},
        "reward_model": {"ground_truth": facts.get("ground_truth")},
        "success": next((bool(outcome) for outcome in outcomes), None),
        "message_parts": others,
    }


class ImageInputs:
    """A connector that adds `multi_modal_inputs`: the images of each row, as arrays for a vision model.

    The column contains, for each row, the image processor's output for the images in the messages before the row's last
    action, such as `pixel_values` and `image_grid_thw`. If there are no such images, it contains an empty dict. Append
    the connector to a pipeline. It requires Pillow.

    Args:
        image_processor: an image processor from `transformers`, or a function with the same signature.

    Raises:
        ConfigError: If an image is not a base64 data URL. HTTP URLs are not fetched.
    """

    name = "multi_modal_inputs"

    def __init__(self, image_processor: Callable[..., Mapping[str, Any]]) -> None:
        self._image_processor = image_processor

    def __call__(self, columns: Columns) -> Columns:
        last_B: Array = np.zeros(0, dtype=np.int64)
        if len(columns.lengths_B):
            last_B = np.maximum.reduceat(columns.tokens["step"], columns.starts_B)
        rows: list[Any] = []
        for owner, last in zip(columns.episodes_B.tolist(), last_B.tolist(), strict=True):
            episode = columns.episodes[owner]
            turns, step = episode.assistant_turns, last - int(columns.step_starts_E[owner])
            before = episode.messages[: turns[step]] if step < len(turns) else episode.messages
            parts = (part for message in before if isinstance(message.content, list) for part in message.content)
            urls = [part["image_url"]["url"] for part in parts if part.get("type") == "image_url"]
            images = [_image(url, episode.id_) for url in urls]
            rows.append(dict(self._image_processor(images=images, return_tensors="np")) if images else {})
        return columns.with_columns(rows={self.name: _objects(rows)})


def _image(url: str, rollout_id: str) -> Any:
    from PIL import Image

    head, _, data = url.partition(",")
    if not head.startswith("data:image/") or not head.endswith(";base64"):
        raise ConfigError(f"episode {rollout_id}: an image must be a base64 data URL, got {url!r:.80}")
    return Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB")


def _objects(values: list[Any]) -> Array:
    """Return a (B,) array of objects. `np.array` would split lists."""
    return np.fromiter(values, dtype=object, count=len(values))


def check_complete(columns: Columns) -> None:
    """Raise a ConfigError if a column that padding or packing requires is missing."""
    if not isinstance(columns, Columns):
        raise ConfigError(f"columns must be the Columns that a RowPipeline returns, got {type_name(columns)}")
    missing = [key for key in ("input_ids", "completion_mask") if key not in columns.tokens]
    if missing:
        raise ConfigError(
            f"the token column {missing[0]!r} is missing; add segment_rows or action_rows to the pipeline"
        )
