"""What is half done is undone where a block is left by an error or a cancellation."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import ParamSpec

_Arguments = ParamSpec("_Arguments")


class undone_on_error:
    """Calls `undo` where the block raises, whatever it raises, which goes on; not where it ends well.

    Args:
        undo: takes back what was begun.
        args, kwargs: for it.

    Example:
        ```python
        file = path.open("rb")
        with undone_on_error(file.close):
            read_header(file)
        return file
        ```
    """

    def __init__(self, undo: Callable[_Arguments, object], *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> None:
        self._undo = functools.partial(undo, *args, **kwargs)

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._undo()


class closed_on_error:
    """As `undone_on_error`, with what is awaited; nothing shields that from a cancellation.

    Args:
        close: takes back what was begun.
        args, kwargs: for it.
    """

    def __init__(
        self, close: Callable[_Arguments, Awaitable[object]], *args: _Arguments.args, **kwargs: _Arguments.kwargs
    ) -> None:
        self._close = functools.partial(close, *args, **kwargs)

    async def __aenter__(self) -> None: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            await self._close()
