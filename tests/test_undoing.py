"""What was begun is taken back where a block is left by an error or a cancellation, and only then."""

from __future__ import annotations

import asyncio

import pytest

from reward_kit.undoing import closed_on_error, undone_on_error


@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt(), GeneratorExit()])
def test_what_a_block_raises_goes_on_once_it_is_undone(error: BaseException) -> None:
    undone: list[str] = []
    with pytest.raises(type(error)) as caught, undone_on_error(lambda: undone.append("file")):
        assert not undone
        raise error
    assert caught.value is error and undone == ["file"]


def test_what_ends_well_stays() -> None:
    undone: list[str] = []
    with undone_on_error(lambda: undone.append("file")):
        pass
    assert not undone


async def test_a_cancelled_block_is_closed_and_one_that_ends_well_is_not() -> None:
    closed: list[str] = []

    async def block(name: str, seconds: float) -> None:
        async def close() -> None:
            await asyncio.sleep(0)
            closed.append(name)

        async with closed_on_error(close):
            await asyncio.sleep(seconds)

    await block("quick", 0)
    waiting = asyncio.create_task(block("slow", 60))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert closed == ["slow"]
