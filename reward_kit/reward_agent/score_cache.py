"""A cache of scores for deterministic rewards. Its keys are hashes of the requests' content."""

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
from reward_kit.validation import check_positive

_NOT_HASHED = frozenset({"rollout_id", "step_data"})


class ScoreCache:
    """A cache of the scores of one reward. Failures are not cached.

    Multiple agents with the same reward can share the cache.

    The key covers everything in a request except `rollout_id` and the steps of the episode. A reward that uses either
    of these cannot be cached. A request with a value that JSON cannot represent, such as an object, is scored each
    time.

    Args:
        max_entries: the maximum number of entries. If it is exceeded, the least recently used entry is removed.

    Raises:
        ConfigError: If `max_entries` is not a positive integer.
    """

    def __init__(self, max_entries: int = 100_000) -> None:
        check_positive("max_entries", max_entries, is_integer=True)
        self._max_entries = max_entries
        self._entries: OrderedDict[str, tuple[Scored, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, key: str, requests: Sequence[ScoringRequest]) -> list[Scored] | None:
        """Return the cached results with these requests' rollout ids, or None if the key is not cached."""
        scored = self._entries.get(key)
        if scored is None:
            return None
        self._entries.move_to_end(key)
        return shared(scored, requests)

    def keep(self, key: str, scored: Sequence[Scored]) -> None:
        """Store the results of a call, unless a score is missing."""
        if any(result.score is None for result in scored):
            return
        self._entries[key] = tuple(shared(scored))
        if len(self._entries) > self._max_entries:
            self._entries.popitem(last=False)


def shared(scored: Sequence[Scored], requests: Sequence[ScoringRequest] | None = None) -> list[Scored]:
    """Return independent copies of results. If `requests` are passed, the copies get their rollout ids."""
    copies = [replace(one, result=one.result and one.result.model_copy(deep=True)) for one in scored]
    if requests is None:
        return copies
    names = [request.rollout_id for request in requests]
    return [replace(one, rollout_id=name, duration_s=0.0) for one, name in zip(copies, names, strict=True)]


def check_cacheable(spec: RewardSpec) -> None:
    """Raise an error if a reward uses a value that is not part of the cache key."""
    left_out = _NOT_HASHED | {BATCH_NAMES.get(name, name) for name in _NOT_HASHED}
    for name in sorted((spec.parameters or frozenset()) & left_out):
        raise ConfigError(f"reward {spec.id!r} uses {name!r}, which is not part of the cache key; remove cache=")


def content_hash(requests: Sequence[ScoringRequest]) -> str | None:
    """Return a 128-bit hash of a call's requests, or None if a value is not JSON or a rollout failed."""
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
    """Return the value if its JSON is unambiguous; otherwise, return an object that `json` rejects."""
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            return object()
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | int | float | None) else object()
