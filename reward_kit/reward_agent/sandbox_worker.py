"""The worker side of a sandboxed reward call.

It loads the reward from its source, rebuilds the arguments, and calls the reward.

This code does not isolate anything, because it shares a process with the reward. The host checks every response. This
module is imported in the process from which workers are forked. On import, it calls a small reward once, so the workers
do not pay the cost of a first call.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import importlib
import inspect
import io
import linecache
import sys
from collections.abc import Callable, Coroutine, Mapping
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from reward_kit.errors import ConfigError, Failure, RewardError, RewardKitError, boundary
from reward_kit.loading import get_attribute, import_user_code, split_reference, user_module_name
from reward_kit.models import EvaluateResult, Message
from reward_kit.reward_agent.custom_rewards import build_spec
from reward_kit.reward_calls import OpenReward, fix_options, needs_host
from reward_kit.sandbox import harness
from reward_kit.typed_interface import RewardSpec, reward_spec


class _Texts(MetaPathFinder, Loader):
    """A finder and loader for modules whose source the host sent, because their directory cannot be read."""

    def __init__(self, modules: Mapping[str, list[Any]]) -> None:
        self._modules = modules

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name not in self._modules:
            return None
        filename, text, is_package = self._modules[name]
        spec = ModuleSpec(name, self, origin=filename, is_package=is_package)
        spec.has_location = text is not None
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Let importlib create the module."""
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Execute the source of a module. Tracebacks show its lines."""
        filename, text, _ = self._modules[module.__name__]
        if text is None:  # a directory without __init__.py
            return
        linecache.cache[filename] = (len(text), None, text.splitlines(True), filename)
        harness.OWN_FILES.add(filename)
        exec(compile(text, filename, "exec", dont_inherit=True), module.__dict__)  # noqa: S102 - what this is for


class WorkerCalls:
    """A worker that loads a reward from its source and calls it.

    `modules` contains the reward's file and the user's modules that it imports. It maps each name to the file name, the
    source, and whether the module is a package.
    """

    def __init__(
        self, modules: Mapping[str, list[Any]], reference: str, folder: str, options: Mapping[str, Any]
    ) -> None:
        # This finder comes first, because other finders read directories. The host has checked that no installed module
        # has one of these names.
        sys.meta_path.insert(0, _Texts(modules))
        self._modules, self._reference, self._folder, self._options = modules, reference, folder, options
        self._opened: OpenReward | None = None
        self._runner: asyncio.Runner | None = None
        self._spec: RewardSpec | None = None

    def prepare(self) -> WorkerCalls:
        """Load and open everything before the first call. If this fails, the calls report the failure."""
        # The output of the import was shown when the reward was described. It does not belong to a call.
        silent = io.StringIO()
        with (
            contextlib.suppress(RewardKitError),
            contextlib.redirect_stdout(silent),
            contextlib.redirect_stderr(silent),
        ):
            self._ready()
        return self

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Handle a request from the host: describe the reward, score one or more rollouts, or close the reward."""
        name = self._reference
        try:
            if "describe" in request:
                return {"facts": self._facts()}
            if "close" in request:
                return self._close()
            opened = self._ready()
            name = opened.spec.id
            return {"results": [_to_json(result, name) for result in self._score(opened, request)]}
        except RewardKitError as error:
            _raise_limit(error)
            if "describe" in request and isinstance(error, ConfigError):
                return {"refused": str(error)}
            return _to_json(error, name)
        except BaseException:  # This code does not raise unless the reward has tampered with it.
            harness.SPOILT.append("its own code")
            raise

    def _score(self, opened: OpenReward, request: dict[str, Any]) -> list[EvaluateResult | RewardKitError]:
        states: list[Any] = []
        results: list[EvaluateResult | RewardKitError]
        try:
            with boundary(RewardError, f"reward {opened.spec.id!r}"):
                if opened.spec.mode == "batch":
                    rollouts = [self._values_or_error(sent, states) for sent in request["rollouts"]]
                    results = self._run(opened.call_group(rollouts))
                else:
                    results = [self._run(opened.call(_values(sent, states))) for sent in request["rollouts"]]
        finally:
            for state in states:
                from reward_kit.environments.snapshots import close_state

                close_state(state)
        if request.get("is_last"):
            self._close()
        return results

    def _values_or_error(self, sent: Mapping[str, Any], states: list[Any]) -> dict[str, Any] | RewardKitError:
        """Return the values of a rollout in a group, or the error if its state cannot be opened."""
        try:
            with boundary(RewardError, f"reward {self._load().id!r}"):
                return _values(sent, states)
        except RewardKitError as error:
            _raise_limit(error)
            return error

    def _facts(self) -> dict[str, Any]:
        spec = self._load()
        return {
            "id": spec.id,
            "mode": spec.mode,
            "requirements": list(spec.requirements),
            "resources": sorted(spec.resources),
            "parameters": None if spec.parameters is None else sorted(spec.parameters),
            "required": sorted(spec.required),
            "is_async": spec.is_async,
            "sandbox": spec.sandbox,
            "calls_out": needs_host(spec),
            "has_end": bool(spec.resources) or (inspect.isclass(spec.function) and hasattr(spec.function, "close")),
        }

    def _close(self) -> dict[str, Any]:
        opened, self._opened = self._opened, None
        with boundary(RewardError, f"close of reward {self._reference!r}"):
            if opened is not None:
                self._run(opened.close())
        return {}

    def _ready(self) -> OpenReward:
        if self._opened is None:
            spec = self._load()
            if spec.is_async or spec.resources or isinstance(spec.function, type):
                # Created here, so that its descriptors do not look like leaks of a call.
                self._runner = self._runner or asyncio.Runner()
                self._runner.get_loop()

            async def directly(function: Callable[[], Any]) -> Any:
                return function()

            opened = OpenReward(spec, self._object, directly)
            with boundary(RewardError, f"reward {spec.id!r}, opened"):
                self._run(opened.open())
            self._opened = opened
        return self._opened

    def _load(self) -> RewardSpec:
        if self._spec is None:
            self._spec = fix_options(build_spec(self._object(self._reference)), self._options)
        return self._spec

    def _object(self, reference: str) -> Any:
        location, name = split_reference(reference)
        module, what = location, location
        if location.endswith(".py"):
            path = Path(self._folder, location)
            module, what = user_module_name(path), str(path)
            if module not in self._modules:
                raise ConfigError(f"no such file: {path}")
        return get_attribute(import_user_code(lambda: importlib.import_module(module), what), name, reference, location)

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        if self._runner is not None:
            return self._runner.run(coroutine)
        try:
            coroutine.send(None)
        except StopIteration as done:
            return done.value
        raise RewardError(f"reward {self._reference!r} uses await although it is not async")


def _to_json(result: EvaluateResult | RewardKitError, name: str) -> dict[str, Any]:
    """Return a result or a failure as JSON data for the host."""
    if isinstance(result, EvaluateResult):
        fields = {field: value for field, value in result.model_dump().items() if field in EvaluateResult.model_fields}
        return {"result": fields}
    error = RewardError(f"reward {name!r}: {result}") if isinstance(result, ConfigError) else result
    return {"failure": Failure.from_exception(error).to_json()}


def _raise_limit(error: RewardKitError) -> None:
    """Raise the cause of an error if a limit was exceeded. The harness and the host describe limits better."""
    cause = error.__cause__
    if isinstance(cause, MemoryError) or (isinstance(cause, OSError) and harness.errno_kind(cause) is not None):
        raise cause from None


def _values(sent: Mapping[str, Any], states: list[Any]) -> dict[str, Any]:
    """Rebuild the values of a rollout. If it has a state, open it and append it to `states`."""
    values = dict(sent)
    if "messages" in values:
        values["messages"] = [Message.model_validate(message) for message in values["messages"]]
    if "step_data" in values:
        values["step_data"] = _steps(values["step_data"])
    if (state := values.get("state")) is not None:
        from reward_kit.environments.base import StateSnapshot
        from reward_kit.environments.snapshots import open_snapshot

        values["state"] = open_snapshot(StateSnapshot(state["kind"], base64.b64decode(state["payload"])))
        states.append(values["state"])
    return values


def _steps(record: dict[str, Any] | None) -> list[Any]:
    if record is None:
        return []
    from reward_kit.agent.models import episode_steps
    from reward_kit.episodes.record import episode_from_record

    return list(episode_steps(episode_from_record(record)))


def _small_reward(messages: list[Message], ground_truth: str | None = None) -> EvaluateResult:
    return EvaluateResult.model_validate({"score": float(len(messages)), "reason": ground_truth})


# Pay the first-time costs here.
_spec = reward_spec(_small_reward)
_given = {"messages": [Message.model_validate({"role": "user", "content": "x"})], "ground_truth": "y"}
_spec.check(_spec.function(**_spec.arguments(_given))).model_dump()
