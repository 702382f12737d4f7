"""Environments written with the `openenv` package and served by its server; runs in OpenEnv's Python.

    python environments.py NAME --port 8000 [--sessions 4]

`counter` has a typed action, `workshop` has tools over MCP, `moody` is not deterministic and breaks on demand.
"""

from __future__ import annotations

import argparse
import random
import uuid
from typing import Any, Literal

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server import Action, CallToolAction, Environment, Observation, State, create_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolObservation
from pydantic import Field


class Move(Action):
    """Add an amount to the counter, or clear it."""

    kind: Literal["add", "clear"] = Field(description="what to do")
    amount: int = Field(default=1, ge=1, le=3, description="how much to add")


class Counted(Observation):
    value: int
    target: int
    text: str


class CounterState(State):
    value: int = 0
    target: int = 0
    over: bool = False


class Counter(Environment[Move, Counted, CounterState]):
    """A counter with a target drawn from the seed; exceeding it loses."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = CounterState()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **given: Any) -> Counted:
        rng = random.Random(seed)
        self._state = CounterState(
            episode_id=episode_id or uuid.uuid4().hex, target=given.get("target", rng.randint(5, 9))
        )
        return self._shown(None)

    def step(self, action: Move, timeout_s: float | None = None, **_: Any) -> Counted:
        state = self._state
        state.step_count += 1
        state.value = 0 if action.kind == "clear" else state.value + action.amount
        state.over = state.value >= state.target
        return self._shown(1.0 if state.value == state.target else 0.0)

    def _shown(self, reward: float | None) -> Counted:
        state = self._state
        return Counted(
            value=state.value,
            target=state.target,
            text=f"{state.value} of {state.target}",
            reward=reward,
            done=state.over,
            metadata={"success": state.value == state.target, "steps": state.step_count},
        )

    @property
    def state(self) -> CounterState:
        return self._state


class Moody(Counter):
    """An environment with unseeded randomness, which fails on an amount of three."""

    def step(self, action: Move, timeout_s: float | None = None, **given: Any) -> Counted:
        if action.amount == 3:
            raise RuntimeError("the counter is jammed")
        seen = super().step(action, timeout_s, **given)
        seen.metadata = {**seen.metadata, "truncated": self._state.step_count >= 4}
        return seen.model_copy(update={"text": uuid.uuid4().hex})


class Workshop(MCPEnvironment):
    """A shelf and a bench behind MCP tools, with a reward for the correct part on the bench."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        server = FastMCP("workshop")
        self._parts: list[str] = []
        self._state = State()

        @server.tool
        def look() -> dict[str, Any]:
            """Look at the shelf and the bench."""
            return {"shelf": self._shelf, "bench": self._parts}

        @server.tool
        def take(part: str) -> str:
            """Put a part from the shelf on the bench."""
            if part not in self._shelf:
                raise ValueError(f"there is no {part} on the shelf")
            self._parts.append(part)
            return f"{part} is on the bench"

        super().__init__(server)
        self._shelf: list[str] = []
        self._wanted = ""

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Observation:
        self._shelf = ["bolt", "gear", "nut", "spring"]
        self._wanted = random.Random(seed).choice(self._shelf)
        self._parts = []
        self._state = State(episode_id=episode_id or uuid.uuid4().hex)
        return Observation(metadata={"task": f"Put the {self._wanted} on the bench."})

    def _step_impl(self, action: Action, timeout_s: float | None = None, **_: Any) -> Observation:
        return Observation(metadata={"error": f"no such action: {type(action).__name__}"})

    def step(self, action: Action, timeout_s: float | None = None, **given: Any) -> Observation:
        return self._rewarded(super().step(action, timeout_s, **given))

    async def step_async(self, action: Action, timeout_s: float | None = None, **given: Any) -> Observation:
        return self._rewarded(await super().step_async(action, timeout_s, **given))

    def _rewarded(self, seen: Observation) -> Observation:
        if isinstance(seen, CallToolObservation):
            self._state.step_count += 1
            seen.done = bool(self._parts)
            seen.reward = float(self._parts == [self._wanted])
        return seen

    @property
    def state(self) -> State:
        return self._state


WORLDS = {
    "counter": (Counter, Move, Counted),
    "moody": (Moody, Move, Counted),
    "workshop": (Workshop, CallToolAction, CallToolObservation),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("world", choices=WORLDS)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--sessions", type=int, default=8)
    given = parser.parse_args()
    app = create_app(*WORLDS[given.world], env_name=given.world, max_concurrent_envs=given.sessions)
    uvicorn.run(app, host="127.0.0.1", port=given.port, log_level="warning")


if __name__ == "__main__":
    main()
