"""A coroutine awaited as if it were a task of its own, without the cost of one."""

from __future__ import annotations

import contextvars
from collections.abc import Coroutine, Generator
from typing import Any, Generic, TypeVar

_Result = TypeVar("_Result")


class Turn(Generic[_Result]):
    """Awaits a coroutine as if it were a task: in a copy of a context, and others have their turn at least once."""

    __slots__ = ("_context", "_coroutine")

    def __init__(self, coroutine: Coroutine[Any, Any, _Result], context: contextvars.Context) -> None:
        self._coroutine, self._context = coroutine, context.copy()

    def __await__(self) -> Generator[Any, Any, _Result]:
        step, given, has_waited = self._coroutine.send, None, False
        while True:
            try:
                awaited = self._context.run(step, given)
            except StopIteration as end:
                if not has_waited:
                    yield None
                result: _Result = end.value
                return result
            has_waited = True
            try:
                step, given = self._coroutine.send, (yield awaited)
            except BaseException as error:  # noqa: BLE001 - thrown in from outside, and handed on
                step, given = self._coroutine.throw, error
