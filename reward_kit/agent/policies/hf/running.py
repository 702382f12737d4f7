"""The turns that are being sampled: who gets a row, what is computed next, when a turn is over."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from reward_kit.agent.policies.hf.forward import RowModel
from reward_kit.agent.policies.hf.kv_slots import Ints
from reward_kit.agent.policies.hf.sampling import Draws, Sampling, allowed_mask, draw
from reward_kit.agent.policies.hf.turns import Generated, Slot, Turn
from reward_kit.errors import PolicyError, RewardKitError, boundary

WORTH_SHARING = 16
"""Tokens that another row must hold beyond one's own before they are copied."""
MASK_CELLS = 2**25
"""Cells of the mask of one forward pass, about, before long prompts are taken in smaller pieces."""


class Running:
    """All running turns, one row each. Used by one thread at a time.

    Args:
        model: computes, and holds keys and values.
        stop_ids: tokens that end a turn.
        value_head: gives (B,) or (B, 1) values from (B, H) last hidden states.
        tokens_per_forward: how many new tokens one forward pass takes at most; longer prompts take several.
    """

    def __init__(
        self, model: RowModel, stop_ids: Sequence[int], value_head: nn.Module | None, tokens_per_forward: int
    ) -> None:
        self._model, self._slots, self._value_head = model, model.slots, value_head
        self._is_stop_V = np.zeros(model.vocabulary, dtype=bool)
        self._is_stop_V[list(stop_ids)] = True
        self._budget = tokens_per_forward
        rows, capacity = self._slots.rows, self._slots.capacity
        self._draws = Draws(rows)
        self._counts_R: Ints = np.zeros(rows, dtype=np.int64)  # tokens known, prompt and sampled
        self._prompts_R: Ints = np.zeros(rows, dtype=np.int64)
        self._limits_R: Ints = np.zeros(rows, dtype=np.int64)
        self._stops_R: Ints = np.zeros(rows, dtype=np.int64)  # where a prompt rests until others have copied it
        self._kinds_R: Ints = np.zeros(rows, dtype=np.int64)
        self._kinds: dict[Sampling, int] = {}
        self._logprobs_RC = np.zeros((rows, capacity))
        self._owners: list[Slot | None] = [None] * rows
        self._ended: list[Turn] = []
        self._running: dict[int, Turn] = {}
        self._clock = 0
        self.version = 0

    def __len__(self) -> int:
        return len(self._running)

    def turns(self) -> list[Turn]:
        """The turns that have a row and are not over."""
        return list(self._running.values())

    def admit(self, waiting: list[Turn]) -> list[Turn]:
        """Give rows to as many waiting turns as can have one, in order; those that must go on waiting are left."""
        left: list[Turn] = []
        for turn in waiting:
            row = -1 if self._is_worth_waiting(turn) else self._row_for(turn.slot)
            if row < 0:
                left.append(turn)
            else:
                self._begin(turn, row)
        return left

    def _is_worth_waiting(self, turn: Turn) -> bool:
        """A running turn is about to compute what this prompt begins with; it rests there, so that both go on."""
        if self._missing(turn) <= WORTH_SHARING or not self._running:
            return False
        common_R = self._slots.common_R(turn.prompt)
        promised_R = self._slots.held_R.copy()
        running = list(self._running)
        promised_R[running] = self._prompts_R[running] - 1
        promised_R = np.minimum(common_R, promised_R)
        leader = int(promised_R.argmax())
        if promised_R[leader] < np.minimum(common_R, self._slots.held_R).max() + WORTH_SHARING:
            return False
        self._stops_R[leader] = max(self._stops_R[leader], promised_R[leader])
        return True

    def _missing(self, turn: Turn) -> int:
        """Tokens of a prompt that its session's row does not hold."""
        own = self._slots.common(turn.slot.row, turn.prompt) if turn.slot.row >= 0 else 0
        return len(turn.prompt) - own

    def _row_for(self, slot: Slot) -> int:
        if slot.row >= 0:
            return slot.row
        free = [row for row, owner in enumerate(self._owners) if owner is None]
        if not free:
            idle = [owner for row, owner in enumerate(self._owners) if owner is not None and row not in self._running]
            if not idle:
                return -1
            oldest = min(idle, key=lambda owner: owner.last_used)
            free = [oldest.row]
            self.release(oldest)
        return free[0]

    def release(self, slot: Slot) -> None:
        """Take its row from a session. What it holds stays until another context needs the place."""
        if slot.row >= 0:
            self._owners[slot.row], slot.row = None, -1

    def _begin(self, turn: Turn, row: int) -> None:
        slots, prompt, count = self._slots, turn.prompt, len(turn.prompt)
        self._owners[row], turn.slot.row = turn.slot, row
        self._clock += 1
        turn.slot.last_used = self._clock
        held = self._share(row, prompt)
        slots.held_R[row] = min(held, count - 1)  # the last one is computed, for its logits
        slots.ids_RC[row, :count] = prompt
        self._counts_R[row] = self._prompts_R[row] = count
        self._limits_R[row], self._stops_R[row] = count + turn.max_new_tokens, 0
        self._kinds_R[row] = self._kinds.setdefault(turn.sampling, len(self._kinds))
        self._draws.begin(row, turn.slot.generator)
        self._running[row] = turn
        if turn.constraint is not None:
            # With a value head the prompt is computed by itself, even where all that follows is forced.
            self._follow(row, may_force=self._value_head is None)

    def _share(self, row: int, prompt: Ints) -> int:
        """How much of a prompt its row holds, after what another row holds more of it was copied."""
        held = self._slots.common(row, prompt)
        if len(prompt) - held > WORTH_SHARING:
            held_R = np.minimum(self._slots.common_R(prompt), self._slots.held_R)
            other = int(held_R.argmax())
            if held_R[other] >= held + WORTH_SHARING:
                held = int(held_R[other])
                self._slots.copy_row(other, row, held)
        return held

    def step(self) -> list[Turn]:
        """One forward pass, and a token for every row whose context is complete; the turns that are over."""
        if self._running and not self._ended:
            self._compute()
        ended, self._ended = self._ended, []
        return ended

    def _compute(self) -> None:
        rows_B, counts_B = self._due()
        is_ready_B = self._slots.held_R[rows_B] + counts_B == self._counts_R[rows_B]
        ready_P = np.flatnonzero(is_ready_B)
        outcome = self._model.run(rows_B, counts_B, (ready_P, counts_B[ready_P] - 1))
        if len(ready_P):
            self._sample(rows_B[ready_P], outcome.logits_PV, outcome.hidden_PH)

    def _due(self) -> tuple[Ints, Ints]:
        """Rows and how many of their tokens are computed next; the shortest first where not all fit."""
        rows_B = np.array(sorted(self._running), dtype=np.int64)
        held_B, stops_B = self._slots.held_R[rows_B], self._stops_R[rows_B]
        counts_B = np.where(stops_B > held_B, stops_B, self._counts_R[rows_B]) - held_B
        # Attention pads rows to the longest piece, and every token looks at the positions of the longest row.
        cells = max(1, int((counts_B > 1).sum())) * int((held_B + counts_B).max())
        counts_B = np.minimum(counts_B, max(1, MASK_CELLS // cells))
        if counts_B.sum() <= self._budget:
            return rows_B, counts_B
        order = np.argsort(counts_B, kind="stable")
        before_B = np.cumsum(counts_B[order]) - counts_B[order]
        counts_B[order] = np.clip(self._budget - before_B, 0, counts_B[order])
        return rows_B[counts_B > 0], counts_B[counts_B > 0]

    def _sample(self, rows_B: Ints, logits_BV: Tensor, hidden_BH: Tensor) -> None:
        self._estimate(rows_B, hidden_BH)
        uniforms_B = self._draws.take(rows_B)
        kinds_B = self._kinds_R[rows_B]
        ids_B, logprobs_B = np.zeros(len(rows_B), dtype=np.int64), np.zeros(len(rows_B))
        for sampling, kind in self._kinds.items():
            part = np.flatnonzero(kinds_B == kind)
            if len(part):
                logits = logits_BV if len(part) == len(rows_B) else logits_BV[self._model.tensor(part)]
                allowed = self._allowed(rows_B[part])
                drawn = draw(logits, self._model.tensor(uniforms_B[part]), sampling, allowed)
                # At once, since each transfer waits for the device; float64 holds every id.
                ids_B[part], logprobs_B[part] = torch.stack([drawn.ids_B.double(), drawn.logprobs_B]).cpu().numpy()
        self._append(rows_B, ids_B, logprobs_B)

    def _allowed(self, rows_B: Ints) -> Tensor | None:
        """(B, V) True where a token may come, None where no row is restricted."""
        mask = allowed_mask([self._running[row].allowed for row in rows_B.tolist()], len(self._is_stop_V))
        return None if mask is None else self._model.tensor(mask)

    def _estimate(self, rows_B: Ints, hidden_BH: Tensor) -> None:
        if self._value_head is None:
            return
        first = np.flatnonzero(self._counts_R[rows_B] == self._prompts_R[rows_B])
        if len(first):
            values_B = self._value_head(hidden_BH[self._model.tensor(first)]).flatten()
            for row, value in zip(rows_B[first].tolist(), values_B.tolist(), strict=True):
                self._running[row].value = value

    def _append(self, rows_B: Ints, ids_B: Ints, logprobs_B: NDArray[np.float64]) -> None:
        places_B = self._counts_R[rows_B]
        self._slots.ids_RC[rows_B, places_B] = ids_B
        self._logprobs_RC[rows_B, places_B] = logprobs_B
        self._counts_R[rows_B] += 1
        is_stop_B, is_number_B = self._is_stop_V[ids_B], np.isfinite(logprobs_B)
        is_over_B = is_stop_B | (places_B + 1 == self._limits_R[rows_B]) | ~is_number_B
        for index in np.flatnonzero(is_over_B).tolist():
            turn = self._running[int(rows_B[index])]
            turn.finish_reason = "stop" if is_stop_B[index] else "length"
            if not is_number_B[index]:
                turn.error = PolicyError("the model's logits are not finite: nothing can be sampled")
        for row, token in zip(rows_B.tolist(), ids_B.tolist(), strict=True):
            if self._running[row].constraint is not None:
                self._follow(row, token)
        for row in [row for row in rows_B[is_over_B].tolist() if row in self._running]:
            self._end(row)

    def _follow(self, row: int, sampled: int | None = None, *, may_force: bool = True) -> None:
        """Tell the constraint what was sampled, ask what may come next, and append what must come."""
        turn, size = self._running[row], len(self._is_stop_V)
        try:
            with boundary(PolicyError, "the constraint"):
                if sampled is not None:
                    turn.allowed_ids.append(turn.allowed)
                    turn.advance(sampled)
                while not turn.is_over and (forced := turn.ask(size)) is not None and may_force:
                    self._force(turn, row, forced)
                    turn.advance(forced)
        except RewardKitError as error:
            turn.error = error
        if turn.is_over:
            self._end(row)

    def _force(self, turn: Turn, row: int, token: int) -> None:
        place = int(self._counts_R[row])
        self._slots.ids_RC[row, place], self._logprobs_RC[row, place] = token, 0.0
        self._counts_R[row] = place + 1
        turn.allowed_ids.append(turn.allowed)
        if self._is_stop_V[token]:
            turn.finish_reason = "stop"
        elif place + 1 == self._limits_R[row]:
            turn.finish_reason = "length"

    def _end(self, row: int) -> None:
        """The row's turn is over; its session keeps the row."""
        turn = self._running[row]
        start, end = int(self._prompts_R[row]), int(self._counts_R[row])
        turn.generated = Generated(
            token_ids=self._slots.ids_RC[row, start:end].tolist(),
            logprobs=self._logprobs_RC[row, start:end].tolist(),
            policy_version=self.version,
            finish_reason=turn.finish_reason,
            value=turn.value,
            allowed_ids=None if turn.constraint is None else turn.allowed_ids,
        )
        self._ended.append(turn)
        self.drop(turn)

    def drop(self, turn: Turn) -> None:
        """Go on without this turn; its session keeps the row."""
        if self._running.get(turn.slot.row) is turn:
            del self._running[turn.slot.row]

    def fail(self, error: RewardKitError) -> list[Turn]:
        """End all running turns with `error`; what their rows hold is not trusted any more."""
        failed = [*self._running.values()]
        for turn in failed:
            turn.error = error
            self._slots.held_R[turn.slot.row] = 0
        self._running = {}
        failed, self._ended = [*self._ended, *failed], []
        return failed

    def publish(self, version: int) -> None:
        """The weights have changed: nothing that older ones computed is used again."""
        assert not self._running, "a turn has one version"
        self._slots.forget()
        self.version = version
