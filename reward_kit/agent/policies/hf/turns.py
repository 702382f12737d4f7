"""A turn: what a session asks the engine for, how far it has come, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from reward_kit.agent.policies.hf.kv_slots import Ints
from reward_kit.agent.policies.hf.sampling import Sampling
from reward_kit.errors import PolicyError, RewardKitError

if TYPE_CHECKING:
    from reward_kit.agent.policies.hf.constraints import TokenConstraint


class Generated(NamedTuple):
    """What one turn sampled.

    Attributes:
        token_ids: the stop token included, where one ended the turn.
        logprobs: of the distribution really sampled: temperature, filters and constraint applied. 0.0 for greedy and
            for forced tokens, which had probability one.
        policy_version: of the weights that computed all of it.
        finish_reason: "stop" (a stop token, or the constraint was done) or "length".
        value: V(s) at the last prompt token, where the engine has a value head.
        allowed_ids: for each token the ids that the constraint allowed, None for any; None without a constraint. One
            array stands at all tokens for which the constraint gave the same one.
    """

    token_ids: list[int]
    logprobs: list[float]
    policy_version: int
    finish_reason: str
    value: float | None = None
    allowed_ids: list[Ints | None] | None = None


@dataclass(eq=False, slots=True)
class Slot:
    """One session's place in the engine: its order, its random generator, its row while it has one."""

    rank: Any
    generator: np.random.Generator
    row: int = -1
    last_used: int = 0
    turn: Turn | None = None
    is_closed: bool = False


@dataclass(eq=False, slots=True)
class Turn:
    """One call of `generate`.

    Attributes:
        slot: whose turn it is.
        prompt: the whole context.
        max_new_tokens: at most so many are sampled.
        sampling: how.
        constraint: what may come, where not everything may.
        allowed: what the constraint allows next; None for any.
        allowed_ids: what it allowed at each token so far.
        value: of the state that the prompt ends in.
        finish_reason: "" while it goes on.
        generated: the result.
        error: what it failed with.
    """

    slot: Slot
    prompt: Ints
    max_new_tokens: int
    sampling: Sampling
    constraint: TokenConstraint | None
    allowed: Ints | None = None
    allowed_ids: list[Ints | None] = field(default_factory=list)
    value: float | None = None
    finish_reason: str = ""
    generated: Generated | None = None
    error: RewardKitError | None = None

    @property
    def is_over(self) -> bool:
        """Nothing more is to be sampled."""
        return bool(self.finish_reason) or self.error is not None

    def advance(self, token_id: int) -> None:
        """Tell the constraint what came; where nothing may follow, the turn is over, also at its last token."""
        assert self.constraint is not None
        self.constraint.advance(token_id)
        if self.constraint.is_done:
            self.finish_reason = "stop"

    def ask(self, vocabulary: int) -> int | None:
        """Ask the constraint what may come next.

        Args:
            vocabulary: how many tokens the model has.

        Returns:
            The token that must come, where it is only one.

        Raises:
            PolicyError: nothing may come, or a token that there is not.
        """
        assert self.constraint is not None
        if self.constraint.is_done:
            self.finish_reason = self.finish_reason or "stop"
            return None
        self.allowed = _checked(self.constraint.allowed(), vocabulary)
        return None if self.allowed is None or len(self.allowed) > 1 else int(self.allowed[0])


def _checked(allowed: Any, vocabulary: int) -> Ints | None:
    if allowed is None:
        return None
    ids = np.asarray(allowed, dtype=np.int64)
    if not len(ids):
        raise PolicyError("the constraint allows no token and is not done")
    if ids.view(np.uint64).max() >= vocabulary:  # a negative one is a very large one here
        raise PolicyError(f"the constraint allows a token outside of the {vocabulary} of the model")
    return ids
