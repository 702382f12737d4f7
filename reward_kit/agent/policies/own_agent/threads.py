"""Plain functions beside the event loop, each in a thread of its own.

A pool would hold episodes back where all its threads wait for a model, and would keep the program from ending while one
of them hangs.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from reward_kit.errors import PolicyError, RewardKitError, boundary

logger = logging.getLogger("reward_kit.agent")


async def in_thread(what: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """The function's result. A thread cannot be ended: where this is cancelled, it goes on and nobody listens.

    Args:
        what: whose function it is, for the message.
        function: called with the arguments.
        arguments: as given.

    Raises:
        PolicyError: the function raised.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is None:
            done.set_result(result)
        else:
            done.set_exception(error)

    def work() -> None:
        result, failure = None, None
        try:
            with boundary(PolicyError, what):
                result = function(*arguments)
        except (RewardKitError, asyncio.CancelledError) as error:
            failure = error
        try:
            loop.call_soon_threadsafe(settle, result, failure)
        except RuntimeError as error:
            logger.debug("a thread ended after its event loop: %s", error)

    threading.Thread(target=work, name=f"reward-kit {function!r}", daemon=True).start()
    return await done


def from_thread(function: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Any]:
    """A coroutine function of the running loop as a plain function for another thread, which waits for its result."""
    loop = asyncio.get_running_loop()

    def call(*arguments: Any, **named: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(function(*arguments, **named), loop).result()

    return call
