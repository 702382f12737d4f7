"""A small task for clusters: a forkable resource, a policy that waits and draws, a reward, and runs of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
import yaml

from reward_kit.providers.session import ProviderSession
from reward_kit.runs.plan import Listener, RunArgs, RunPlan, plan_run
from reward_kit.runs.run_folder import RunFolder, RunHeader, read_episodes, read_scores
from reward_kit.runs.runner import Run, RunEngine
from reward_kit.runs.tasks import LoadedTask, load_task

WORLD = """
import copy, os, random
from reward_kit import ForkableResource, StepOutcome
from reward_kit.environments.base import hash_key, tool_spec

class Tally(ForkableResource):
    "A number that begins somewhere and is added to; `die` takes the process along."
    fork_kind = "native"

    async def setup(self, config): self.number = None
    async def reset(self, seed=None): self.number = random.Random(seed).randrange(1000)
    async def fork(self): return copy.copy(self)
    async def get_observation(self): return f"at {self.number}"
    async def get_tools_spec(self): return [tool_spec("add", "add one"), tool_spec("die", "end this process")]
    async def state_key(self): return hash_key(str(self.number))
    async def step(self, name, arguments):
        if name == "die":
            os._exit(1)
        self.number += 1
        return StepOutcome(f"at {self.number}", reward=0.1)
"""
POLICY = """
import logging, os, random
from pathlib import Path
import anyio
from reward_kit import AgentPolicy, PolicyOutput

class Adds(AgentPolicy):
    "Waits, then adds or is done, as its seed says."

    def __init__(self, wait_s=0.0, dies_in=None, marker=None, usage=None, seed=0):
        self.given = dict(wait_s=wait_s, dies_in=dies_in, marker=marker, usage=usage)
        self.random, self.sample = random.Random(seed), None

    is_free = True

    async def open(self, context):
        session = Adds(**self.given, seed=context.seed)
        session.sample = context.sample_id
        return session

    async def get_action(self, observation, available_tools_specs=None):
        await anyio.sleep(self.given["wait_s"])
        facts = {"usage": self.given["usage"]} if self.given["usage"] else None
        if self.sample == self.given["dies_in"] and self._is_to_die():
            return PolicyOutput({"type": "tool_call", "name": "die", "arguments": {}})
        if self.random.random() < 0.25:
            text = f"{self.random.random():.6f}"
            return PolicyOutput({"type": "text", "content": text, "is_final": True}, None, facts)
        return PolicyOutput({"type": "tool_call", "name": "add", "arguments": {}}, None, facts)

    def _is_to_die(self):
        "Always, or as often as the marker is not there."
        if self.given["marker"] is None:
            return True
        try:
            os.close(os.open(self.given["marker"], os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

class Tells(AgentPolicy):
    "Says what it has of a secret, and logs it; is where the others of its group are, or elsewhere."

    def __init__(self, variable="HOME"):
        self.variable = variable

    async def get_action(self, observation, available_tools_specs=None):
        await anyio.sleep(0.05)
        value = os.environ.get(self.variable, "")
        logging.getLogger("reward_kit.test").warning("the key is %s", value)
        return PolicyOutput({"type": "text", "content": f"it has {len(value)} letters", "is_final": True})
"""
REWARD = """
import os
from reward_kit import reward_function

def long_enough(messages, sample):
    return {"score": float(len(messages) > sample["number"] % 7)}

@reward_function(mode="batch")
def ranked(rollouts_messages):
    lengths = [len(messages) for messages in rollouts_messages]
    return [{"score": lengths.index(length) / len(lengths)} for length in lengths]
"""


class CountingTask:
    """The task in a folder, and runs of it in this process."""

    def __init__(self, folder: Path, samples: int = 8, policies: tuple[str, ...] = (), **keys: Any) -> None:
        self.folder, self.policies = folder, policies
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in (("world.py", WORLD), ("mine.py", POLICY), ("reward.py", REWARD)):
            (folder / name).write_text(text)
        rows = "".join(json.dumps({"id": f"s{number}", "number": number}) + "\n" for number in range(samples))
        (folder / "rows.jsonl").write_text(rows)
        self.write(**keys)

    def write(self, **keys: Any) -> None:
        """Write the task file."""
        task = {
            "name": "counting",
            "dataset_path": "rows.jsonl",
            "messages": [{"role": "user", "content": "count to {{ number }}"}],
            "num_rollouts_per_sample": 4,
            "resource_type": "world.py:Tally",
            "policy": {"type": "mine.py:Adds"},
            "reward_function_path": "reward.py:long_enough",
            "max_episode_steps": 12,
            **keys,
        }
        text = yaml.safe_dump({key: value for key, value in task.items() if value is not None})
        (self.folder / "task.yaml").write_text(text)

    def loaded(self) -> LoadedTask:
        """Return the loaded task."""
        return load_task(self.folder / "task.yaml")

    def request(self) -> RunArgs:
        """Return a request for the whole task."""
        return RunArgs(task_path=self.folder / "task.yaml", policies=self.policies)

    def plan(self, max_concurrency: int = 16) -> RunPlan:
        """Return the plan of a run."""
        return plan_run(self.loaded(), self.request(), max_concurrency=max_concurrency, traffic=ProviderSession())


async def carried_out(
    plan: RunPlan, path: Path, engine: RunEngine | None = None, listener: Listener | None = None
) -> Run:
    """Run a plan in a new directory."""
    with RunFolder.create(path, RunHeader(task_name=plan.definition.name)) as store:
        run = Run(plan, store, engine=engine, listener=listener)
        run.load_stored()
        with anyio.fail_after(240):
            await run.execute()
    return run


def without_the_clock(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the episodes and scores of a run by id, without their times: what two runs of one seed share."""
    return _of(read_episodes(path)), _of(read_scores(path))


def _of(records: Any) -> dict[str, Mapping[str, Any]]:
    found: dict[str, Mapping[str, Any]] = {}
    for record in records:
        assert record["rollout_id"] not in found, "twice"
        found[record["rollout_id"]] = {key: value for key, value in record.items() if key not in ("timing", "attempt")}
    return found
