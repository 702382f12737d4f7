"""Progress bars of `transformers` are switched off while we load and save: a run has a display of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_one_at_a_time = threading.RLock()  # the setting is the whole process's, and is put back as it was found


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Models are read and written without a bar; those of downloads are shown, since these may take minutes."""
    # Imported here, since who writes a checkpoint without a model does not need it.
    from transformers.utils.logging import set_tqdm_hook

    with _one_at_a_time:
        found = set_tqdm_hook(_without_a_bar)
        try:
            yield
        finally:
            set_tqdm_hook(found)


def _without_a_bar(_: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    from transformers.utils.logging import EmptyTqdm

    return EmptyTqdm(*args, **options)  # type: ignore[no-untyped-call]
