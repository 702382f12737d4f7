"""Scores by the content of what was scored, for rewards that give the same answer to the same question."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from reward_kit.errors import ConfigError
from reward_kit.reward_agent.scoring import Scored, ScoringRequest
from reward_kit.reward_calls import BATCH_NAMES
from reward_kit.typed_interface import RewardSpec
from reward_kit.validation import check_number

_NOT_HASHED = frozenset({"rollout_id", "step_data"})


class ScoreCache:
    """The scores of one reward; failures are not kept. Give the same one to several agents of that reward, if you like.

    What counts is all that a request holds, but for its `rollout_id` and its episode's steps: a reward that asks for
    those cannot be cached. What is no JSON, such as a tuple key or an object, is scored each time.

    Args:
        max_entries: the least recently used are forgotten beyond that.

    Raises:
        ConfigError: `max_entries` is no positive whole number.
    """

    def __init__(self, max_entries: int = 100_000) -> None:
        check_number("max_entries", max_entries, whole=True)
        self._max_entries = max_entries
        self._entries: OrderedDict[str, tuple[Scored, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, key: str, requests: Sequence[ScoringRequest]) -> list[Scored] | None:
        """The results for requests of this content, under their own names."""
        found = self._entries.get(key)
        if found is None:
            return None
        self._entries.move_to_end(key)
        return shared(found, requests)

    def keep(self, key: str, scored: Sequence[Scored]) -> None:
        """Remember results, where all are scores."""
        if any(result.score is None for result in scored):
            return
        self._entries[key] = tuple(shared(scored))
        if len(self._entries) > self._max_entries:
            self._entries.popitem(last=False)


def shared(scored: Sequence[Scored], requests: Sequence[ScoringRequest] | None = None) -> list[Scored]:
    """Copies of results, so that whoever changes one changes no other; with `requests`, as if they had been scored."""
    copies = [replace(one, result=one.result and one.result.model_copy(deep=True)) for one in scored]
    if requests is None:
        return copies
    names = [request.rollout_id for request in requests]
    return [replace(one, rollout_id=name, duration_s=0.0) for one, name in zip(copies, names, strict=True)]


def check_cacheable(spec: RewardSpec) -> None:
    """Refuse to cache a reward that may look at what the key leaves out.

    Raises:
        ConfigError: it names such a value.
    """
    left_out = _NOT_HASHED | {BATCH_NAMES.get(name, name) for name in _NOT_HASHED}
    for name in sorted((spec.parameters or frozenset()) & left_out):
        raise ConfigError(f"reward {spec.id!r} asks for {name!r}, of which a cache knows nothing: leave out cache=")


def content_hash(requests: Sequence[ScoringRequest]) -> str | None:
    """A 128-bit hash of what a reward sees of a call; None where it cannot be told, or one of them broke."""
    digest = hashlib.blake2b(digest_size=16)
    for request in requests:
        if request.failure is not None:
            return None
        state = request.final_state
        values = (request.ground_truth, request.sample, request.extra, list(request.assistant_turns))
        facts = (request.environment_return, request.stop_reason, state and (state.kind, state.digest))
        try:
            messages = [message.model_dump(mode="json") for message in request.messages]
            text = json.dumps([messages, [_plain(value) for value in values], facts], sort_keys=True)
        except (TypeError, ValueError):
            return None
        digest.update(text.encode("utf-8", "surrogatepass") + b"\n")
    return digest.hexdigest()


def _plain(value: Any) -> Any:
    """The value where JSON tells it from every other; else something that JSON refuses."""
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            return object()
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | int | float | None) else object()
