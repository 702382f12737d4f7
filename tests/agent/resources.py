"""Small resources and helpers for the tests of the rollout worker."""

import asyncio

from reward_kit.agent.policies.simple_policies import ScriptedPolicy
from reward_kit.agent.policy_interface import AgentPolicy
from reward_kit.agent.rl_rollout_worker import RLRolloutWorker
from reward_kit.environments.base import ForkableResource, StateSnapshot, StepOutcome, tool_spec
from reward_kit.errors import ToolError
from reward_kit.models import TaskDefinitionModel

COUNTER = f"{__name__}:Counter"


def text(content):
    return {"type": "text", "content": content}


def call(name="add", **arguments):
    return {"type": "tool_call", "name": name, "arguments": arguments}


def calls(*items):
    return {"type": "tool_calls", "calls": [{"name": name, "arguments": arguments} for name, arguments in items]}


def task_of(**fields):
    return TaskDefinitionModel.model_validate({"name": "task", **fields})


def worker_of(actions, *, tools=None, environment=None, offered=None, **fields):
    """Return a worker that plays `actions` on a task with these fields and `offered` as its `tools`."""
    fields = fields if offered is None else {**fields, "tools": offered}
    policy = actions if isinstance(actions, AgentPolicy) else ScriptedPolicy(actions)
    return RLRolloutWorker(task_of(**fields), policy, tools=tools, environment=environment)


async def collected(actions, **kwargs):
    return await worker_of(actions, **kwargs).collect_episode()


def reason(episode):
    return episode.custom_data["stop_reason"]


def failure(episode):
    return episode.custom_data["failure"]


def tool_answers(episode):
    return [message.text for message in episode.messages if message.role == "tool"]


class Counter(ForkableResource):
    """A counter; `open_instances` holds every instance that is not closed."""

    fork_kind = "native"
    per_sample_keys = frozenset({"greeting"})
    open_instances: set = set()  # noqa: RUF012 - shared on purpose
    made: list = []  # noqa: RUF012

    def __init__(self):
        self.total, self.seed, self.noise = 0, None, None
        self.config = {}
        self.open_instances.add(self)
        self.made.append(self)

    async def setup(self, config):
        self.config = dict(config)

    async def reset(self, seed=None):
        self.total, self.seed = 0, seed

    async def fork(self):
        twin = type(self)()
        twin.total, twin.seed, twin.config = self.total, self.seed, self.config
        return twin

    async def get_tools_spec(self):
        names = ("add", "win", "cut", "crash", "slow", "long", "invalid", "bad", "value")
        return [tool_spec(name, name) for name in names]

    async def get_observation(self):
        return self.config.get("greeting", "the count is 0")

    async def state_key(self):
        return f"count {self.total}"

    async def step(self, action_name, action_params):
        if action_name == "add":
            self.total += action_params.get("by", 1)
            return StepOutcome(f"the count is {self.total}", float(action_params.get("by", 1)))
        return await getattr(self, f"do_{action_name}", self.unknown)(action_params)

    async def unknown(self, params):
        raise ToolError("no such thing here")

    async def do_win(self, params):
        return StepOutcome("won", 5.0, terminated=True)

    async def do_cut(self, params):
        return StepOutcome("time over", truncated=True)

    async def do_crash(self, params):
        raise ZeroDivisionError("the world broke")

    async def do_slow(self, params):
        await asyncio.sleep(params.get("seconds", 30))
        return StepOutcome("at last")

    async def do_long(self, params):
        return StepOutcome("a" * 500 + "b" * 500)

    async def do_invalid(self, params):
        return StepOutcome("you cannot", info={"is_action_valid": False, "name": "overwritten", "why": "wall"})

    async def do_bad(self, params):
        return {"observation": "no StepOutcome"}

    async def do_value(self, params):
        observation = {(1, 2): 3} if params["observation"] == "odd keys" else params["observation"]
        return StepOutcome(observation, params.get("reward"))

    async def reseed_noise(self, seed):
        self.noise = seed

    async def expert_action(self):
        return {"type": "tool_call", "name": "add", "arguments": {"by": 1}} if self.total < 2 else None

    async def final_state(self):
        return StateSnapshot.from_json({"total": self.total})

    async def close(self):
        self.open_instances.remove(self)
