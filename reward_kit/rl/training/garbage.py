"""How often Python looks for cycles of garbage while training goes on: rarely, and not among what stays to the end."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_NEW_OBJECTS = 20_000


@contextmanager
def rare_garbage_collection() -> Iterator[None]:
    """Within the block what was there before is not looked through again, and the rest after 20,000 new objects.

    Loaded libraries and models are a million objects that a full collection walks through for nothing, and a batch of
    episodes is made of enough objects to have one start every few seconds: a seventh of the processor time of a small
    model's training. Afterwards everything is as it was, also where somebody else had frozen or switched off.
    """
    if not gc.isenabled():
        yield
        return
    thresholds, may_freeze = gc.get_threshold(), not gc.get_freeze_count()
    if may_freeze:
        gc.collect()  # or what is garbage already would stay with the rest
        gc.freeze()
    gc.set_threshold(max(_NEW_OBJECTS, thresholds[0]), *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        if may_freeze:
            gc.unfreeze()
