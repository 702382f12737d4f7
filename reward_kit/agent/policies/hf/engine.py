"""The engine that samples from a `transformers` causal LM for many sessions at once.

Sessions ask for turns; one task owns the model and computes the waiting and the running turns together, in a worker
thread, one burst of forward passes after another. New turns join between two forward passes. Keys and values live on
between the turns of a session, so that only what is new is computed, and prompts that begin alike share what they have
in common. Weights are swapped when no turn is running: a turn, and the keys and values it looks at, have one version.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import anyio
import anyio.to_thread
import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from reward_kit.agent.policies.hf.cpu import no_denormals
from reward_kit.agent.policies.hf.forward import RowModel
from reward_kit.agent.policies.hf.kv_slots import Ints
from reward_kit.agent.policies.hf.running import Running
from reward_kit.agent.policies.hf.sampling import Sampling
from reward_kit.agent.policies.hf.turns import Generated, Slot, Turn
from reward_kit.errors import ConfigError, LimitError, PolicyError, RewardKitError, boundary

if TYPE_CHECKING:
    from reward_kit.agent.policies.hf.constraints import TokenConstraint

QUIET_PASSES = 8
"""Passes of the event loop without a new turn before a burst begins without those who have not asked."""


class _Publication(NamedTuple):
    state_dict: Mapping[str, Tensor]
    value_head: Mapping[str, Tensor]
    version: int
    done: asyncio.Future[None]


class Engine:
    """Samples turns for many sessions; see the module's docstring.

    Args:
        model: a causal LM that nothing else uses from here on; moved to no other device.
        stop_ids: tokens that end a turn.
        max_context: tokens of a context, prompt and answer together.
        max_slots: how many contexts are held at once. Of more sessions, those that waited longest compute theirs anew.
        lockstep: begin only when every open session has asked, rows in order of rank: the same sessions with the same
            seeds then give the same bits.
        value_head: gives values (B,) or (B, 1) from the last hidden states (B, H).
        tokens_per_forward: how many new tokens one forward pass takes at most.
        version: of the weights that the model has now.

    Raises:
        ConfigError: the model is no causal LM, or a number makes no sense.
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
        version: int = 0,
    ) -> None:
        for name, number in {"max_context": max_context, "max_slots": max_slots}.items():
            if number < 1:
                raise ConfigError(f"{name}: {number} is below 1")
        self._model = RowModel(model, max_slots, max_context)
        self._running = Running(self._model, stop_ids, value_head, tokens_per_forward)
        self._running.version = version
        self._lockstep, self._value_head = lockstep, value_head
        self._open: set[Slot] = set()
        self._callers: dict[Turn, asyncio.Event] = {}  # who waits for what
        self._waiting: list[Turn] = []  # the event loop adds to it at any time
        self._queue: list[Turn] = []  # what a burst may begin; belongs to the engine's task
        self._over: list[Turn] = []  # what a burst has ended
        self._given_back: list[Slot] = []
        self._published: list[_Publication] = []
        self._has_news = False  # ends a burst after the forward pass at hand
        self._is_batch_over = False  # in lockstep: all sessions were closed, and the next batch starts from nothing
        self._asked = 0
        self._alone = threading.Lock()  # a burst outlives the event loop that was torn down around it
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False

    @property
    def version(self) -> int:
        """Of the weights that act."""
        return self._running.version

    def open(self, rank: Any, seed: int) -> Slot:
        """A session's place.

        Args:
            rank: orders the rows in lockstep; of one sortable type for all.
            seed: of all that this session samples.
        """
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

        Args:
            slot: the session's; one call at a time.
            prompt_ids: the whole context. What the session's row holds of it is not computed again.
            max_new_tokens: at most so many.
            sampling: how.
            constraint: what may come; a fresh one for each turn.

        Raises:
            LimitError: prompt and answer do not fit `max_context`.
            PolicyError: the prompt is none, the engine is closed, or the model failed.
        """
        turn = Turn(slot, self._checked(slot, prompt_ids, max_new_tokens), max_new_tokens, sampling.check(), constraint)
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
        if turn.error is not None:
            raise _again(turn.error)
        assert turn.generated is not None
        return turn.generated

    def _checked(self, slot: Slot, prompt_ids: Sequence[int], max_new_tokens: int) -> Ints:
        self._check_open()
        if slot.is_closed or slot.turn is not None:
            state = "closed" if slot.is_closed else "in a turn already"
            raise PolicyError(f"the session of {slot.rank!r} is {state}")
        prompt = np.array(prompt_ids, dtype=np.int64)
        if not len(prompt) or max_new_tokens < 1:
            raise PolicyError(f"{len(prompt)} prompt tokens and {max_new_tokens} new ones: at least one of each")
        if prompt.view(np.uint64).max() >= self._model.vocabulary:  # a negative one is a very large one here
            raise PolicyError(f"a prompt token lies outside of the {self._model.vocabulary} of the model")
        capacity = self._model.slots.capacity
        if len(prompt) + max_new_tokens > capacity:
            raise LimitError(f"{len(prompt)} tokens and {max_new_tokens} new ones do not fit a context of {capacity}")
        return prompt

    def _check_open(self) -> None:
        if self._is_closed:
            raise PolicyError("the engine is closed")

    async def close_slot(self, slot: Slot) -> None:
        """Give the session's place back; a turn of it that still runs is dropped."""
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
        """Act with other weights from the next turn on; returns when they are in place.

        Turns that run are finished with the weights they began with, and none begins before the swap.

        Args:
            state_dict: all weights of the model; they may not change before this returns.
            version: their name.
            value_head: those of the value head; without them it stays as it is.

        Raises:
            PolicyError: the weights do not fit the model, or the engine is closed.
        """
        self._check_open()
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._published.append(_Publication(state_dict, value_head or {}, version, done))
        self._wake()
        await done

    async def close(self) -> None:
        """End every waiting call with an error, and leave the model as it was found."""
        if self._is_closed:
            return
        self._is_closed = self._has_news = True
        self._wake()
        if self._task is not None:
            await self._task
        self._model.close()

    def _wake(self) -> None:
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._work(), name="language model engine")

    async def _work(self) -> None:
        """Own the model until there is nothing to do; whoever brings something to do wakes it again."""
        try:
            with boundary(PolicyError, "the engine"):
                while await self._work_once():
                    continue
        except RewardKitError as error:  # a rank that cannot be sorted, say; nobody may wait for ever
            for turn in self._callers:
                turn.error = turn.error or error
                self._over.append(turn)
            self._deliver()

    async def _work_once(self) -> bool:
        """One burst, or one swap of the weights; False where there is nothing to do."""
        await self._settle()
        self._tidy()
        if self._is_closed:
            self._end_publications()
            return False
        if self._published and not self._is_busy:
            await self._swap(self._published.pop(0))
            return True
        if self._take_waiting() or self._is_busy:
            self._has_news = False
            await anyio.to_thread.run_sync(self._burst)
            self._deliver()
            return True
        return False

    @property
    def _is_busy(self) -> bool:
        return bool(len(self._running) or self._queue)

    async def _settle(self) -> None:
        """Let sessions ask that are about to, so that they are computed together."""
        asked, quiet = self._asked, 0
        if self._lockstep or not (self._waiting or self._is_busy):
            return
        while quiet < QUIET_PASSES and len(self._callers) < len(self._open):
            await asyncio.sleep(0)
            quiet = quiet + 1 if self._asked == asked else 0
            asked = self._asked

    def _tidy(self) -> None:
        """Drop the turns whose callers are gone, end those of closed sessions, and take the rows of these."""
        for turn in self._callers:
            if not turn.is_over and (self._is_closed or turn.slot.is_closed):
                closed = "the engine" if self._is_closed else f"the session of {turn.slot.rank!r}"
                turn.error = PolicyError(f"{closed} was closed in this turn")
                self._over.append(turn)
        self._deliver()
        for turn in self._running.turns():
            if turn not in self._callers:
                self._running.drop(turn)
        self._queue = [turn for turn in self._queue if turn in self._callers]
        self._waiting = [turn for turn in self._waiting if turn in self._callers]
        for slot in self._given_back:
            self._running.release(slot)
        self._given_back.clear()
        if self._is_batch_over:
            # Reusing keys and values of earlier sessions changes the shapes of what is computed, and with them, on some
            # CPUs, the last bits: a resumed run, which has no earlier sessions, would differ from an unbroken one.
            self._model.slots.forget()
            self._is_batch_over = False
        self._published = [publication for publication in self._published if not publication.done.done()]

    def _deliver(self) -> None:
        for turn in self._over:
            caller = self._callers.pop(turn, None)
            if caller is not None:
                caller.set()
        self._over = []

    def _take_waiting(self) -> bool:
        """Let the next burst begin the waiting turns, if now is the time."""
        if not self._waiting or self._published:
            return False
        if self._lockstep and (self._is_busy or len(self._waiting) < len(self._open)):
            return False
        arrived, self._waiting = self._waiting, []
        self._queue += sorted(arrived, key=lambda turn: turn.slot.rank) if self._lockstep else arrived
        return True

    def _burst(self) -> None:
        """Forward passes until a turn is over or there is news; runs in the worker thread."""
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
        try:
            with boundary(PolicyError, "publish"):
                await anyio.to_thread.run_sync(self._load, publication)
        except RewardKitError as error:
            if not publication.done.done():
                publication.done.set_exception(error)
        if not publication.done.done():
            publication.done.set_result(None)

    def _load(self, publication: _Publication) -> None:
        with self._alone:
            self._model.load(publication.state_dict, self._value_head, publication.value_head)
            self._running.publish(publication.version)

    def _end_publications(self) -> None:
        for publication in self._published:
            if not publication.done.done():
                publication.done.set_exception(PolicyError("the engine was closed"))
        self._published.clear()


def _again(error: RewardKitError) -> RewardKitError:
    """The error once more, for a caller of its own: several may have met the same one."""
    copy = type(error)(str(error))
    copy.__cause__ = error.__cause__
    return copy
