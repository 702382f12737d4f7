"""The simulated user of a task, from its `user:` block."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from reward_kit.agent.policies import make_policy, option_names
from reward_kit.agent.simulated_user import ScriptedUser, SimulatedUser
from reward_kit.errors import ConfigError, did_you_mean, kind_of
from reward_kit.loading import load_object
from reward_kit.runs.overrides import keys_of_user
from reward_kit.runs.tasks import LoadedTask
from reward_kit.task_parts import UserModel

if TYPE_CHECKING:
    from reward_kit.providers.session import ProviderSession

_NO_USERS = {
    "expert": "it asks the world, which a user does not see",
    "random": "it calls tools, and a user has none",
    "replay": "it plays an agent; what the user of a recorded episode said comes from asking the user again",
}


def make_user(task: LoadedTask, traffic: ProviderSession | None = None) -> SimulatedUser | None:
    """The user of a task, None where it has none.

    Args:
        task: its `user` says who it is.
        traffic: what all requests of a run share.

    Raises:
        ConfigError: its policy cannot be made, or its templates do not fit a sample.
    """
    block = task.definition.user
    if block is None:
        return None
    try:
        _refuse_unknown(block, task)
        user = _user(block, task, traffic)
        for sample in task.samples:
            user.check(sample)
    except _UnknownKey:
        raise
    except ConfigError as error:
        if str(error).startswith("user.api_key_env: "):
            raise ConfigError(f"{task.located.where(('user', 'api_key_env'))}: {error}") from error
        raise ConfigError(f"{task.located.where(('user',))}: user: {error}") from error
    return user


class _UnknownKey(ConfigError):
    """A key that nothing reads, with its line."""


def _refuse_unknown(block: UserModel, task: LoadedTask) -> None:
    """Before anything else, since a misspelt key is also missed where it is needed."""
    taken = {"replies"} if block.type == "scripted" else option_names(block.type, task.folder)
    for key in block.options():
        if taken is not None and key not in taken:
            near = did_you_mean(key, {*UserModel.model_fields, *taken})
            where = task.located.where(("user", key))
            raise _UnknownKey(f"{where}: user.{key}: unknown key for a user of type {block.type!r}{near}")


def _user(block: UserModel, task: LoadedTask, traffic: ProviderSession | None) -> SimulatedUser:
    if block.type in _NO_USERS:
        raise ConfigError(f"the policy {block.type!r} cannot be a user: {_NO_USERS[block.type]}")
    options = block.options()
    if block.type == "scripted":
        return ScriptedUser(
            _replies(options, task.folder),
            instructions=block.instructions,
            stop_phrase=block.stop_phrase,
            opens=block.opens,
        )
    if block.type == "openai" and not block.instructions:
        raise ConfigError("a model has to be told who it is; give user.instructions")
    of_user = keys_of_user("user", options, task.of_user)
    policy = make_policy(block.type, options, task.folder, traffic, section="user", of_user=of_user)
    return SimulatedUser(policy, instructions=block.instructions, stop_phrase=block.stop_phrase, opens=block.opens)


def _replies(options: dict[str, Any], folder: Path) -> Any:
    """The one key of a scripted user: texts, or the function that `file.py:function` names."""
    replies = options.get("replies")
    if not isinstance(replies, str):
        return replies
    function = load_object(replies, folder)
    if not callable(function):
        raise ConfigError(f"user.replies: {replies} is {kind_of(function)}, not a function")
    return function
