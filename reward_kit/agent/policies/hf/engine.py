"""`Engine`, which samples from a `transformers` causal LM for many sessions at the same time.

Sessions request turns. A single task owns the model and computes all waiting and running turns together in a worker
thread, in bursts of forward passes. A new turn can join between two forward passes. A session's keys and values are
cached between its turns, so only new tokens are computed. Prompts with a common prefix share the cached keys and values
of that prefix. Weights are swapped only while no turn is running. A turn and all keys and values that it attends to
therefore come from the same version of the weights.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import anyio
import anyio.to_thread
import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from reward_kit.agent.policies.hf.forward import Ints, RowModel
from reward_kit.agent.policies.hf.sampling import Draws, Sampling, allowed_mask, draw
from reward_kit.errors import ConfigError, LimitError, PolicyError, RewardKitError, boundary
from reward_kit.torch_cpu import no_denormals

if TYPE_CHECKING:
    from reward_kit.agent.policies.hf.constraints import TokenConstraint

QUIET_PASSES = 8
"""Number of event loop passes without a new turn after which a burst begins without the idle sessions."""
WORTH_SHARING = 16
"""Number of additional cached tokens that another row must offer before they are copied."""
MASK_CELLS = 2**25
"""Approximate maximum number of cells in the mask of one forward pass; longer prompts are split into pieces."""


class Generated(NamedTuple):
    """The tokens sampled in one turn, including the stop token.

    The log-probabilities are those of the sampling distribution, after the temperature, the filters and the constraint.
    They are 0.0 for greedy and forced tokens, because such tokens have a probability of one.
    """

    token_ids: list[int]
    logprobs: list[float]
    policy_version: int
    finish_reason: str  # "stop" (a stop token, or the constraint is complete) or "length"
    value: float | None = None  # V(s) at the last prompt token, if the engine has a value head
    allowed_ids: list[Ints | None] | None = None  # the allowed ids at each token, or None if any id is allowed


@dataclass(eq=False, slots=True)
class Slot:
    """A session in the engine: its rank, its random generator, and its current row, if any."""

    rank: Any
    generator: np.random.Generator
    row: int = -1
    last_used: int = 0
    turn: GeneratedTurn | None = None
    is_closed: bool = False


@dataclass(eq=False, slots=True)
class GeneratedTurn:
    """A call of `generate`. Once the turn is over, it contains the result or the error."""

    slot: Slot
    prompt: Ints
    max_new_tokens: int
    sampling: Sampling
    constraint: TokenConstraint | None
    allowed: Ints | None = None  # the ids that the constraint allows next, or None if any id is allowed
    allowed_ids: list[Ints | None] = field(default_factory=list)  # the allowed ids at each token so far
    value: float | None = None
    finish_reason: str = ""  # "" while the turn is running
    generated: Generated | None = None
    error: RewardKitError | None = None

    @property
    def is_over(self) -> bool:
        """True if no more tokens will be sampled."""
        return bool(self.finish_reason) or self.error is not None

    def advance(self, token_id: int) -> None:
        """Pass a token to the constraint. If no token may follow, end the turn."""
        assert self.constraint is not None
        self.constraint.advance(token_id)
        if self.constraint.is_done:
            self.finish_reason = "stop"

    def ask(self, vocabulary: int) -> int | None:
        """Request the allowed ids from the constraint. If exactly one id is allowed, return it."""
        assert self.constraint is not None
        if self.constraint.is_done:
            self.finish_reason = self.finish_reason or "stop"
            return None
        allowed = self.constraint.allowed()
        if allowed is None:
            self.allowed = None
            return None
        ids = np.asarray(allowed, dtype=np.int64)
        if not len(ids):
            raise PolicyError("the constraint allows no token but is not complete")
        if ids.view(np.uint64).max() >= vocabulary:  # a negative id wraps to a very large one
            raise PolicyError(f"the constraint allows a token id outside the model's vocabulary of {vocabulary}")
        self.allowed = ids
        return None if len(ids) > 1 else int(ids[0])


class _Publication(NamedTuple):
    state_dict: Mapping[str, Tensor]
    value_head: Mapping[str, Tensor]
    version: int
    done: asyncio.Future[None]


class Engine:
    """Samples turns for many sessions concurrently.

    Args:
        model: a causal LM. Nothing else may use it from now on. It stays on its device.
        stop_ids: the tokens that end a turn.
        max_context: the maximum number of tokens in a context, including the answer.
        max_slots: the maximum number of contexts in the cache. If there are more sessions, those that have been idle
            longest lose their cached contexts, which are recomputed when needed.
        lockstep: True to start a batch only when every open session has requested a turn, and to order the rows by
            rank. The same sessions with the same seeds then produce bitwise identical results.
        value_head: a module that maps the last hidden states (B, H) to values (B,) or (B, 1).
        tokens_per_forward: the maximum number of new tokens in one forward pass.
        cuda_graphs: True to replay forward passes that compute one token in each row as CUDA graphs. If that is
            impossible, a warning is logged and they are not used.
        version: the version of the model's current weights.

    Raises:
        ConfigError: If the model is not a causal LM, or a numeric option is invalid.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        stop_ids: Sequence[int],
        max_context: int,
        max_slots: int = 64,
        lockstep: bool = False,
        value_head: nn.Module | None = None,
        tokens_per_forward: int = 4096,
        cuda_graphs: bool = False,
        version: int = 0,
    ) -> None:
        for name, number in {"max_context": max_context, "max_slots": max_slots}.items():
            if number < 1:
                raise ConfigError(f"{name} must be at least 1, got {number}")
        self._model = RowModel(model, max_slots, max_context, cuda_graphs=cuda_graphs)
        self._running = _Running(self._model, stop_ids, value_head, tokens_per_forward)
        self._running.version = version
        self._lockstep, self._value_head = lockstep, value_head
        self._open: set[Slot] = set()
        self._callers: dict[GeneratedTurn, asyncio.Event] = {}
        self._waiting: list[GeneratedTurn] = []  # the event loop may add to it at any time
        self._queue: list[GeneratedTurn] = []  # turns that a burst may begin; belongs to the engine's task
        self._over: list[GeneratedTurn] = []  # turns ended by a burst
        self._given_back: list[Slot] = []
        self._published: list[_Publication] = []
        self._has_news = False  # ends a burst after the current forward pass
        self._is_batch_over = False  # in lockstep: all sessions were closed, and the next batch starts empty
        self._asked = 0
        self._alone = threading.Lock()  # a burst may outlive its event loop
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False

    @property
    def version(self) -> int:
        """The version of the weights in use."""
        return self._running.version

    @property
    def has_graphs(self) -> bool:
        """True if forward passes are replayed as CUDA graphs where possible."""
        return self._model.has_graphs

    def open(self, rank: Any, seed: int) -> Slot:
        """Open a session. In lockstep, its rank determines the order of the rows, so all ranks must be comparable."""
        self._check_open()
        slot = Slot(rank, np.random.default_rng(seed))
        self._open.add(slot)
        return slot

    async def generate(
        self,
        slot: Slot,
        prompt_ids: Sequence[int],
        *,
        max_new_tokens: int,
        sampling: Sampling,
        constraint: TokenConstraint | None = None,
    ) -> Generated:
        """Sample one turn.

        A session runs one turn at a time. Each turn needs a new constraint. The prompt is the whole context, but the
        prefix that is cached in the session's row is not recomputed.

        Raises:
            LimitError: If the prompt and the answer do not fit into `max_context` tokens.
            PolicyError: If the prompt is invalid, the engine is closed, or the model failed.
        """
        self._check_open()
        if slot.is_closed or slot.turn is not None:
            state = "closed" if slot.is_closed else "already sampling a turn"
            raise PolicyError(f"the session of {slot.rank!r} is {state}")
        prompt = np.array(prompt_ids, dtype=np.int64)
        if not len(prompt) or max_new_tokens < 1:
            raise PolicyError(
                f"prompt and max_new_tokens must be at least 1 token, got {len(prompt)} and {max_new_tokens}"
            )
        if prompt.view(np.uint64).max() >= self._model.vocabulary:  # a negative id wraps to a very large one
            raise PolicyError(f"a prompt token is outside the model's vocabulary of {self._model.vocabulary}")
        capacity = self._model.slots.capacity
        if len(prompt) + max_new_tokens > capacity:
            raise LimitError(
                f"{len(prompt)} prompt tokens and {max_new_tokens} new tokens do not fit into a context of {capacity}"
            )
        turn = GeneratedTurn(slot, prompt, max_new_tokens, sampling.check(), constraint)
        slot.turn = turn
        event = self._callers[turn] = asyncio.Event()
        self._waiting.append(turn)
        self._asked += 1
        self._has_news |= not self._lockstep
        self._wake()
        try:
            await event.wait()
        finally:
            slot.turn = None
            if self._callers.pop(turn, None) and not turn.is_over:
                self._has_news = True
                self._wake()
        if turn.error is not None:  # a copy, since several callers may share the error
            copy = type(turn.error)(str(turn.error))
            copy.__cause__ = turn.error.__cause__
            raise copy
        assert turn.generated is not None
        return turn.generated

    async def close_slot(self, slot: Slot) -> None:
        """Close a session. If it has a running turn, cancel that turn."""
        if slot.is_closed:
            return
        slot.is_closed = True
        self._open.discard(slot)
        self._is_batch_over |= self._lockstep and not self._open
        self._given_back.append(slot)
        self._has_news |= slot.turn is not None
        self._wake()

    async def publish(
        self, state_dict: Mapping[str, Tensor], version: int, *, value_head: Mapping[str, Tensor] | None = None
    ) -> None:
        """Use new weights from the next turn on, and return once they are in use.

        The caller must not change the weights before this returns. Running turns finish with the weights with which
        they began, and no new turn begins before the swap.

        Raises:
            PolicyError: If the weights do not match the model, or the engine is closed.
        """
        self._check_open()
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._published.append(_Publication(state_dict, value_head or {}, version, done))
        self._wake()
        await done

    async def close(self) -> None:
        """End every waiting call with an error, and restore the original state of the model."""
        if self._is_closed:
            return
        self._is_closed = self._has_news = True
        self._wake()
        if self._task is not None:
            await self._task
        self._model.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise PolicyError("the engine is closed")

    def _wake(self) -> None:
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._work(), name="language model engine")

    async def _work(self) -> None:
        """Run bursts and swap weights until all work is done. New work restarts this task."""
        try:
            with boundary(PolicyError, "the engine"):
                while True:
                    await self._settle()
                    self._tidy()
                    if self._is_closed:
                        for publication in self._published:
                            if not publication.done.done():
                                publication.done.set_exception(PolicyError("the engine was closed"))
                        self._published.clear()
                        return
                    if self._published and not self._is_busy:
                        await self._swap(self._published.pop(0))
                        continue
                    is_batch_complete = not self._is_busy and len(self._waiting) >= len(self._open)
                    if self._waiting and not self._published and (not self._lockstep or is_batch_complete):
                        arrived, self._waiting = self._waiting, []
                        if self._lockstep:
                            arrived.sort(key=lambda turn: turn.slot.rank)
                        self._queue += arrived
                    if not self._is_busy:
                        return
                    self._has_news = False
                    await anyio.to_thread.run_sync(self._burst)
                    self._deliver()
        except RewardKitError as error:  # for example, ranks that cannot be sorted; no caller may wait forever
            for turn in self._callers:
                turn.error = turn.error or error
                self._over.append(turn)
            self._deliver()

    @property
    def _is_busy(self) -> bool:
        return bool(self._running.turns or self._queue)

    async def _settle(self) -> None:
        """Wait for sessions that are about to request a turn, so that all of the turns are computed together."""
        asked, quiet = self._asked, 0
        if self._lockstep or not (self._waiting or self._is_busy):
            return
        while quiet < QUIET_PASSES and len(self._callers) < len(self._open):
            await asyncio.sleep(0)
            quiet = quiet + 1 if self._asked == asked else 0
            asked = self._asked

    def _tidy(self) -> None:
        """Drop turns whose caller is gone, end the turns of closed sessions, and free the rows of these sessions."""
        for turn in self._callers:
            if not turn.is_over and (self._is_closed or turn.slot.is_closed):
                closed = "the engine" if self._is_closed else f"the session of {turn.slot.rank!r}"
                turn.error = PolicyError(f"{closed} was closed during this turn")
                self._over.append(turn)
        self._deliver()
        for turn in [*self._running.turns.values()]:
            if turn not in self._callers:
                self._running.drop(turn)
        self._queue = [turn for turn in self._queue if turn in self._callers]
        self._waiting = [turn for turn in self._waiting if turn in self._callers]
        for slot in self._given_back:
            self._running.release(slot)
        self._given_back.clear()
        if self._is_batch_over:
            # Reusing the keys and values of earlier sessions changes the shapes of the computation and, on some CPUs,
            # the last bits: a resumed run, which has no earlier sessions, would differ from an uninterrupted one.
            self._model.slots.forget()
            self._is_batch_over = False
        self._published = [publication for publication in self._published if not publication.done.done()]

    def _deliver(self) -> None:
        for turn in self._over:
            caller = self._callers.pop(turn, None)
            if caller is not None:
                caller.set()
        self._over = []

    def _burst(self) -> None:
        """Run forward passes in the worker thread until a turn is over or `_has_news` is set."""
        try:
            with self._alone, boundary(PolicyError, "the model"), no_denormals(), torch.inference_mode():
                while not self._over:
                    self._queue = self._running.admit(self._queue)
                    self._over = self._running.step()
                    if self._has_news:
                        break
        except RewardKitError as error:
            for turn in self._queue:
                turn.error = error
            self._over, self._queue = [*self._running.fail(error), *self._queue], []

    async def _swap(self, publication: _Publication) -> None:
        def load() -> None:
            with self._alone:
                self._model.load(publication.state_dict, self._value_head, publication.value_head)
                self._running.publish(publication.version)

        try:
            with boundary(PolicyError, "publish"):
                await anyio.to_thread.run_sync(load)
        except RewardKitError as error:
            if not publication.done.done():
                publication.done.set_exception(error)
        if not publication.done.done():
            publication.done.set_result(None)


class _Running:
    """The running turns, keyed by row. Each row has at most one turn. Only one thread may use this object at a time."""

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
        self._stops_R: Ints = np.zeros(
            rows, dtype=np.int64
        )  # the position at which a prompt pauses until other rows have copied it
        self._kinds_R: Ints = np.zeros(rows, dtype=np.int64)
        self._kinds: dict[Sampling, int] = {}
        self._is_constrained_R = np.zeros(rows, dtype=bool)
        self._logprobs_RC = np.zeros((rows, capacity))
        self._owners: list[Slot | None] = [None] * rows
        self._ended: list[GeneratedTurn] = []
        self.turns: dict[int, GeneratedTurn] = {}
        self._rows: Ints | None = None  # the sorted keys of `turns`, or None if they may have changed
        self._clock = 0
        self.version = 0

    def admit(self, waiting: list[GeneratedTurn]) -> list[GeneratedTurn]:
        """Assign rows to as many waiting turns as possible, in order, and return the turns without a row."""
        left: list[GeneratedTurn] = []
        for turn in waiting:
            row = -1 if self._is_worth_waiting(turn) else self._row_for(turn.slot)
            if row < 0:
                left.append(turn)
            else:
                self._begin(turn, row)
        return left

    def _row_for(self, slot: Slot) -> int:
        """Return a row for a session, or -1 if all rows are busy.

        If the session already has a row, that row is returned. Otherwise, a free row is returned or, if there is none,
        the row of the session that has been idle longest.
        """
        if slot.row >= 0:
            return slot.row
        if None in self._owners:
            return self._owners.index(None)
        idle = [owner for row, owner in enumerate(self._owners) if owner is not None and row not in self.turns]
        if not idle:
            return -1
        oldest = min(idle, key=lambda owner: owner.last_used)
        row = oldest.row
        self.release(oldest)
        return row

    def _is_worth_waiting(self, turn: GeneratedTurn) -> bool:
        """Return True if a running turn will soon cache a prefix of this prompt.

        In that case, pause that turn after the prefix.
        """
        own = self._slots.common(turn.slot.row, turn.prompt) if turn.slot.row >= 0 else 0
        if len(turn.prompt) - own <= WORTH_SHARING or not self.turns:
            return False
        common_R = self._slots.common_R(turn.prompt)
        promised_R = self._slots.held_R.copy()
        running = list(self.turns)
        promised_R[running] = self._prompts_R[running] - 1
        promised_R = np.minimum(common_R, promised_R)
        leader = int(promised_R.argmax())
        if promised_R[leader] < np.minimum(common_R, self._slots.held_R).max() + WORTH_SHARING:
            return False
        self._stops_R[leader] = max(self._stops_R[leader], promised_R[leader])
        return True

    def release(self, slot: Slot) -> None:
        """Free the row of a session. The row keeps its content until another context needs the row."""
        if slot.row >= 0:
            self._owners[slot.row], slot.row = None, -1

    def _begin(self, turn: GeneratedTurn, row: int) -> None:
        slots, prompt, count = self._slots, turn.prompt, len(turn.prompt)
        self._owners[row], turn.slot.row = turn.slot, row
        self._clock += 1
        turn.slot.last_used = self._clock
        held = slots.common(row, prompt)
        if count - held > WORTH_SHARING:  # another row may cache more of the prompt
            held_R = np.minimum(slots.common_R(prompt), slots.held_R)
            other = int(held_R.argmax())
            if held_R[other] >= held + WORTH_SHARING:
                held = int(held_R[other])
                slots.copy_row(other, row, held)
        slots.held_R[row] = min(held, count - 1)  # compute the last token again, for its logits
        slots.ids_RC[row, :count] = prompt
        self._counts_R[row] = self._prompts_R[row] = count
        self._limits_R[row], self._stops_R[row] = count + turn.max_new_tokens, 0
        self._kinds_R[row] = self._kinds.setdefault(turn.sampling, len(self._kinds))
        self._draws.begin(row, turn.slot.generator)
        self.turns[row], self._rows = turn, None
        self._is_constrained_R[row] = turn.constraint is not None
        if turn.constraint is not None:
            # With a value head, compute the prompt separately, even if all following tokens are forced.
            self._follow(row, may_force=self._value_head is None)

    def step(self) -> list[GeneratedTurn]:
        """Run one forward pass, add a token to each row whose context is complete, and return the turns that ended."""
        if self.turns and not self._ended:
            rows_B, counts_B = self._due()
            is_ready_B = self._slots.held_R[rows_B] + counts_B == self._counts_R[rows_B]
            ready_P = np.flatnonzero(is_ready_B)
            logits_PV, hidden_PH = self._model.run(rows_B, counts_B, (ready_P, counts_B[ready_P] - 1))
            if len(ready_P):
                self._sample(rows_B[ready_P], logits_PV, hidden_PH)
        ended, self._ended = self._ended, []
        return ended

    def _due(self) -> tuple[Ints, Ints]:
        """Return the rows to compute next, and the number of tokens for each row.

        If not all rows fit into one forward pass, the shortest rows come first.
        """
        if self._rows is None:
            self._rows = np.array(sorted(self.turns), dtype=np.int64)
        rows_B = self._rows
        held_B, stops_B = self._slots.held_R[rows_B], self._stops_R[rows_B]
        counts_B = np.where(stops_B > held_B, stops_B, self._counts_R[rows_B]) - held_B
        if len(rows_B) == counts_B.sum() <= self._budget:
            return rows_B, counts_B
        # Attention pads rows to the longest piece, and every token attends to the positions of the longest row.
        cells = max(1, int((counts_B > 1).sum())) * int((held_B + counts_B).max())
        counts_B = np.minimum(counts_B, max(1, MASK_CELLS // cells))
        if counts_B.sum() <= self._budget:
            return rows_B, counts_B
        order = np.argsort(counts_B, kind="stable")
        before_B = np.cumsum(counts_B[order]) - counts_B[order]
        counts_B[order] = np.clip(self._budget - before_B, 0, counts_B[order])
        return rows_B[counts_B > 0], counts_B[counts_B > 0]

    def _sample(self, rows_B: Ints, logits_BV: Tensor, hidden_BH: Tensor) -> None:
        if self._value_head is not None:
            first = np.flatnonzero(self._counts_R[rows_B] == self._prompts_R[rows_B])
            if len(first):
                values_B = self._value_head(hidden_BH[self._model.tensor(first)]).flatten()
                for row, value in zip(rows_B[first].tolist(), values_B.tolist(), strict=True):
                    self.turns[row].value = value
        uniforms_B = self._draws.take(rows_B)
        kinds_B, is_constrained_B = self._kinds_R[rows_B], self._is_constrained_R[rows_B]
        ids_B, logprobs_B = np.zeros(len(rows_B), dtype=np.int64), np.zeros(len(rows_B))
        for sampling, kind in self._kinds.items():
            part = np.flatnonzero(kinds_B == kind)
            if len(part):
                logits, allowed = logits_BV, None
                if len(part) < len(rows_B):
                    logits = logits_BV[self._model.tensor(part)]
                if is_constrained_B[part].any():
                    ids = [self.turns[row].allowed for row in rows_B[part].tolist()]
                    mask = allowed_mask(ids, len(self._is_stop_V))
                    allowed = None if mask is None else self._model.tensor(mask)
                drawn = draw(logits, uniforms_B[part], sampling, allowed)
                # Each transfer waits for the device, so the values are combined. float64 represents every id exactly.
                ids_B[part], logprobs_B[part] = torch.stack([drawn.ids_B.double(), drawn.logprobs_B]).cpu().numpy()
        positions_B = self._counts_R[rows_B]
        self._slots.ids_RC[rows_B, positions_B] = ids_B
        self._logprobs_RC[rows_B, positions_B] = logprobs_B
        self._counts_R[rows_B] += 1
        is_stop_B, is_number_B = self._is_stop_V[ids_B], np.isfinite(logprobs_B)
        is_over_B = is_stop_B | (positions_B + 1 == self._limits_R[rows_B]) | ~is_number_B
        for index in np.flatnonzero(is_over_B).tolist():
            turn = self.turns[int(rows_B[index])]
            turn.finish_reason = "stop" if is_stop_B[index] else "length"
            if not is_number_B[index]:
                turn.error = PolicyError("the model's logits are not finite, so no token can be sampled")
                self._slots.clear_row(int(rows_B[index]))
        for index in np.flatnonzero(is_constrained_B & is_number_B).tolist():
            self._follow(int(rows_B[index]), int(ids_B[index]))
        for row in [row for row in rows_B[is_over_B].tolist() if row in self.turns]:
            self._end(row)

    def _follow(self, row: int, sampled: int | None = None, *, may_force: bool = True) -> None:
        """Pass the sampled token to the constraint, request the allowed tokens, and append forced tokens."""
        turn, size = self.turns[row], len(self._is_stop_V)
        try:
            with boundary(PolicyError, "the constraint"):
                if sampled is not None:
                    turn.allowed_ids.append(turn.allowed)
                    turn.advance(sampled)
                while not turn.is_over and (forced := turn.ask(size)) is not None and may_force:
                    position = int(self._counts_R[row])
                    self._slots.ids_RC[row, position], self._logprobs_RC[row, position] = forced, 0.0
                    self._counts_R[row] = position + 1
                    turn.allowed_ids.append(turn.allowed)
                    if self._is_stop_V[forced]:
                        turn.finish_reason = "stop"
                    elif position + 1 == self._limits_R[row]:
                        turn.finish_reason = "length"
                    turn.advance(forced)
        except RewardKitError as error:
            turn.error = error
        if turn.is_over:
            self._end(row)

    def _end(self, row: int) -> None:
        """End the turn of a row. The session keeps the row."""
        turn = self.turns[row]
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

    def drop(self, turn: GeneratedTurn) -> None:
        """Drop a turn without a result. The session keeps the row."""
        if self.turns.get(turn.slot.row) is turn:
            del self.turns[turn.slot.row]
            self._rows = None

    def fail(self, error: RewardKitError) -> list[GeneratedTurn]:
        """End all running turns with an error, and discard the content of their rows."""
        for turn in self.turns.values():
            turn.error = error
            self._slots.held_R[turn.slot.row] = 0
        failed = [*self._ended, *self.turns.values()]
        self.turns, self._rows, self._ended = {}, None, []
        return failed

    def publish(self, version: int) -> None:
        """Set the version of the weights, and discard everything that was computed with older weights."""
        assert not self.turns, "weights must not change during a turn"
        self._slots.forget()
        self.version = version
