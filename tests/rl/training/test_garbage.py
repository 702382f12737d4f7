"""Garbage is looked for rarely while training goes on, and everything is as it was afterwards."""

from __future__ import annotations

import gc
import weakref

import pytest

from reward_kit.rl.training.garbage import rare_garbage_collection


class Knot:
    """Keeps itself alive."""

    def __init__(self) -> None:
        self.itself = self


def test_what_was_there_is_left_alone_and_what_comes_is_still_collected() -> None:
    before = gc.get_threshold()
    assert gc.get_freeze_count() == 0
    old = Knot()
    with rare_garbage_collection():
        assert gc.get_freeze_count() > 10_000
        assert gc.get_threshold() == (20_000, *before[1:])
        new = Knot()
        seen_old, seen_new = weakref.ref(old), weakref.ref(new)
        del old, new
        gc.collect()
        assert seen_new() is None
        assert seen_old() is not None
    assert (gc.get_freeze_count(), gc.get_threshold()) == (0, before)
    gc.collect()
    assert seen_old() is None


def test_an_error_in_the_block_changes_nothing_of_that() -> None:
    before = gc.get_threshold()
    with pytest.raises(ValueError, match="in the block"), rare_garbage_collection():
        raise ValueError("in the block")
    assert (gc.get_freeze_count(), gc.get_threshold()) == (0, before)


def test_who_switched_it_off_or_froze_keeps_it_so() -> None:
    gc.disable()
    try:
        with rare_garbage_collection():
            assert (gc.isenabled(), gc.get_freeze_count()) == (False, 0)
    finally:
        gc.enable()
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        with rare_garbage_collection():
            pass
        assert gc.get_freeze_count() > frozen / 2  # what nothing refers to any more is freed all the same
    finally:
        gc.unfreeze()
