"""A policy that is trained in this process and sampled by a vLLM or SGLang server that the user runs.

`OpenAIAgentPolicy` requests responses that include token ids, log-probabilities, and the labels of the weights that
sampled them. `publish` writes the weights to a model directory, which the server then loads. While publishing, it waits
until no response is in flight and holds back new requests, so no response mixes two versions.

The requests follow the sources of vLLM 0.33.0 (`entrypoints/rl/online`, `entrypoints/serve/dev`, and
`entrypoints/openai/chat_completion/protocol.py`) and SGLang 0.5.23 (`srt/entrypoints/http_server.py`,
`srt/managers/io_struct.py`, and `srt/entrypoints/openai/protocol.py`). `_publish_requests` lists them in order.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import anyio

from reward_kit.agent.policies.hf.model import merged_model, parse_device
from reward_kit.agent.policies.hf.sampling import Sampling
from reward_kit.agent.policies.openai_policy import OpenAIAgentPolicy
from reward_kit.agent.policy_interface import AgentPolicy, EpisodeContext, PastTurn, PolicyOutput
from reward_kit.environments.base import ToolSpec
from reward_kit.errors import ConfigError, PolicyError, RewardKitError
from reward_kit.models import Message
from reward_kit.providers.faults import WrongEndpointError
from reward_kit.providers.keys import resolve_endpoint
from reward_kit.providers.transport import Transport
from reward_kit.rl.model_kit.models import load_model, save_model
from reward_kit.validation import check_choice

Server = Literal["vllm", "sglang"]
# Without these, both servers filter the distribution as the model's generation_config.json says.
_UNFILTERED = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
_RESUME_TIMEOUT_S = 10.0


class _ServerRequest(NamedTuple):
    """A POST request to the server: the path below its root, and the JSON body."""

    path: str
    body: dict[str, Any]


class _PublishRequests(NamedTuple):
    """The requests that publish a version: hold generation, replace the weights, and continue generation."""

    pause: _ServerRequest
    replace: tuple[_ServerRequest, ...]
    resume: _ServerRequest


def _publish_requests(server: Server, folder: Path, version: int) -> _PublishRequests:
    """Return the requests that make a server sample with the weights in a directory.

    Before the weights change, their label becomes "loading-VERSION". It becomes the version after all weights are
    loaded, so the label also identifies an incomplete set of weights if this process or the connection fails.
    """
    path, loading, label = str(folder), f"loading-{version}", str(version)
    if server == "sglang":
        return _PublishRequests(
            _ServerRequest("pause_generation", {"mode": "retract"}),
            (
                _ServerRequest("update_weight_version", {"new_version": loading, "abort_all_requests": False}),
                _ServerRequest(
                    "update_weights_from_disk", {"model_path": path, "weight_version": label, "flush_cache": True}
                ),
            ),
            _ServerRequest("continue_generation", {}),
        )
    return _PublishRequests(
        _ServerRequest("pause?mode=wait", {}),
        (
            _ServerRequest("update_weight_version", {"new_version": loading}),
            _ServerRequest("collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": path}}),
            _ServerRequest("reset_prefix_cache?reset_running_requests=true&reset_external=true", {}),
            _ServerRequest("update_weight_version", {"new_version": label}),
        ),
        _ServerRequest("resume", {}),
    )


class ServedPolicy(AgentPolicy):
    """A trainable policy that acts through a model server.

    The weights are published before the first action, so the server may have been started with any weights of this
    architecture. Each response must report the published version as the label of its weights.

    Args:
        folder: the model directory in the format of `transformers`. The weights are loaded and trained in this process.
        published: the directory, on a shared file system, from which the server reads weights.
        server: "vllm" or "sglang".
        base_url: the URL of the server's OpenAI API, such as "http://127.0.0.1:8000/v1".
        model: the name of the model on the server. If None, `published` is used.
        temperature: the sampling temperature. Filters such as top_p are rejected, because they are not recorded. At
            temperatures other than 1, a vLLM server must have been started with `--logprobs-mode processed_logprobs`.
        device: the device on which the weights are trained. "auto" selects the accelerator, if there is one.
        publish_timeout_s: the maximum time, in seconds, that the server may take to answer each request of a
            publication.
        api_key: the API key; see `OpenAIAgentPolicy`. The key is also sent when weights are published.
        **options: further options for `OpenAIAgentPolicy`.

    Raises:
        ConfigError: If the kind of server is unknown, the directory contains no model, or an option is invalid.
    """

    path_options = ("folder", "published")

    def __init__(
        self,
        folder: str | Path,
        published: str | Path,
        *,
        server: Server,
        base_url: str,
        model: str | None = None,
        temperature: float = 1.0,
        device: str = "auto",
        publish_timeout_s: float = 600.0,
        api_key: str | None = None,
        **options: Any,
    ) -> None:
        check_choice("server", server, get_args(Server))
        extra = dict(options.pop("extra_body", None) or {})
        if refused := sorted(({"top_p", "logprobs", "stream"} & set(options)) | (set(_UNFILTERED) & set(extra))):
            raise ConfigError(
                f"{refused[0]!r} is not allowed for a policy that is being trained, because it is not recorded; "
                "remove it"
            )
        self.module, tokenizer = load_model(Path(folder), device=parse_device(device))
        if tokenizer is None:
            raise ConfigError(f"{folder} has no tokenizer, but the server requires one; save it next to the weights")
        self.tokenizer, self._dtype = tokenizer, self.module.dtype
        self.published, self.sampling = Path(published).resolve(), Sampling(temperature=temperature)
        settings = resolve_endpoint(base_url, api_key, options.get("api_key_env"))
        extra |= {**_UNFILTERED, "return_token_ids": True}
        if server == "vllm":
            extra["return_weight_versions"] = True  # SGLang always reports them.

        def acting(temperature: float) -> OpenAIAgentPolicy:
            return OpenAIAgentPolicy(
                model or str(self.published),
                base_url=base_url,
                api_key=api_key,
                temperature=temperature,
                top_p=1.0,
                logprobs=True,
                extra_body=extra,
                **options,
            )

        self._link = _ServerLink(server, settings.base_url.removesuffix("/v1"), settings.api_key, publish_timeout_s)
        self._link.acting[temperature] = acting(temperature)
        self._make_acting = acting

    @property
    def version(self) -> int:
        """The version of the weights on the server."""
        return self._link.version

    @property
    def pad_token_id(self) -> int:
        """The token id for padding. If the tokenizer has no padding token, its end-of-text token is used."""
        pad = self.tokenizer.pad_token_id
        return int(pad if pad is not None else self.tokenizer.eos_token_id)

    async def open(self, context: EpisodeContext) -> AgentPolicy:
        """Open a session for an episode."""
        return _ServedSession(self, await self._acting().open(context))

    async def get_action(
        self, observation: Sequence[Message], available_tools_specs: list[ToolSpec] | None = None
    ) -> PolicyOutput:
        """Return an action outside of an episode."""
        return await _ServedSession(self, self._acting()).get_action(observation, available_tools_specs)

    def _acting(self) -> OpenAIAgentPolicy:
        """Return the endpoint at the temperature of `sampling`, which a copy for evaluation may have changed."""
        temperature = self.sampling.temperature
        if temperature not in self._link.acting:
            self._link.acting[temperature] = self._make_acting(temperature)
        return self._link.acting[temperature]

    async def publish(self, version: int) -> None:
        """Make the server sample with the current weights of `module`.

        If a request fails or is cancelled after the weights began to change, the server stays paused, and actions raise
        an error until weights are published successfully.

        Raises:
            PolicyError: If the server did not load the weights. The message contains the version that it samples with.
        """
        await self._link.publish(self._write, self.published, version)

    def _write(self) -> None:
        # Training widens the weights to float32, which the server does not need.
        save_model(self.published, merged_model(self.module, self._dtype), self.tokenizer)

    async def close(self) -> None:
        """Close the connections to the server. The server keeps running."""
        for acting in self._link.acting.values():
            await acting.close()
        await self._link.control.aclose()

    @asynccontextmanager
    async def answering(self) -> AsyncIterator[int]:
        """Prevent publishing while the server is responding, and yield the version of the server's weights."""
        link = self._link
        async with link.first:
            if not link.is_published and link.in_doubt is None:
                await self.publish(link.version)
        async with link.gate:
            while link.is_publishing:
                await link.gate.wait()
            if link.in_doubt is not None:
                raise PolicyError(
                    f"publishing version {link.in_doubt} did not finish, so the server's weights are "
                    "unknown; publish again"
                )
            link.in_flight += 1
            version = link.version
        try:
            yield version
        finally:
            with anyio.CancelScope(shield=True):
                async with link.gate:
                    link.in_flight -= 1
                    link.gate.notify_all()


class _ServerLink:
    """The state of a server, shared by the copies of a policy: its weights, and the requests in flight."""

    def __init__(self, server: Server, root: str, api_key: str | None, timeout_s: float) -> None:
        self.server, self.root = server, root
        self.headers = {"Content-Type": "application/json"}
        if api_key:
            self.headers["Authorization"] = f"Bearer {api_key}"
        self.control = Transport(idle_timeout_s=timeout_s, total_timeout_s=timeout_s)
        self.acting: dict[float, OpenAIAgentPolicy] = {}  # the endpoint for each temperature
        self.gate, self.first = anyio.Condition(), anyio.Lock()
        self.in_flight, self.is_publishing = 0, False
        self.version, self.is_published = 0, False
        self.in_doubt: int | None = None  # the version that the server may or may not have loaded

    async def publish(self, write: Callable[[], None], folder: Path, version: int) -> None:
        """Write the weights, and replace those of the server while no response is in flight."""
        async with self.gate:
            while self.is_publishing:
                await self.gate.wait()
            self.is_publishing = True  # no new request is sent
        try:
            async with self.gate:
                while self.in_flight:
                    await self.gate.wait()
            await anyio.to_thread.run_sync(write)
            await self._replace(_publish_requests(self.server, folder, version), version)
        except RewardKitError as error:
            state = f"the server continues with version {self.version}" if self.is_published else "nothing is published"
            if self.in_doubt is not None:
                state = "the server is paused, and its weights are unknown until weights are published successfully"
            raise PolicyError(f"version {version} was not published: {error}; {state}") from error
        finally:
            with anyio.CancelScope(shield=True):
                async with self.gate:
                    self.is_publishing = False
                    self.gate.notify_all()

    async def _replace(self, publication: _PublishRequests, version: int) -> None:
        try:
            await self._ask(publication.pause)
        except BaseException:
            if self.in_doubt is None:  # The weights are unchanged, so the server need not stay paused.
                with anyio.move_on_after(_RESUME_TIMEOUT_S, shield=True), suppress(RewardKitError):
                    await self._ask(publication.resume)
            raise
        self.in_doubt = version
        for request in (*publication.replace, publication.resume):
            await self._ask(request)
        self.version, self.is_published, self.in_doubt = version, True, None

    async def _ask(self, request: _ServerRequest) -> None:
        url = f"{self.root}/{request.path}"
        try:
            answer = await self.control.post(url, self.headers, json.dumps(request.body).encode())
        except WrongEndpointError as error:
            advice = "set VLLM_SERVER_DEV_MODE=1" if self.server == "vllm" else "update SGLang"
            raise PolicyError(f"{error}; {advice}, or check base_url") from error
        if isinstance(answer, dict) and answer.get("success") is False:
            raise PolicyError(f"{url} failed: {answer.get('message') or answer}")


class _ServedSession(AgentPolicy):
    def __init__(self, policy: ServedPolicy, acting: AgentPolicy) -> None:
        self._policy, self._acting = policy, acting

    async def resume(self, turns: Sequence[PastTurn]) -> None:
        """Resume the session of the endpoint."""
        await self._acting.resume(turns)

    async def get_action(
        self, observation: Sequence[Message], available_tools_specs: list[ToolSpec] | None = None
    ) -> PolicyOutput:
        """Request the next message from the server.

        Raises:
            PolicyError: If the response does not contain the sampled tokens, or weights other than the published ones
                sampled it.
        """
        async with self._policy.answering() as version:
            output = await self._acting.get_action(observation, available_tools_specs)
        recorded = dict(output.log_probs or {})
        if missing := [key for key in ("prompt_ids", "token_ids", "logprobs") if recorded.get(key) is None]:
            raise PolicyError(
                f"the server's response has no {missing[0]}, because `return_token_ids` is disabled or not supported; "
                "the policy requires vLLM 0.33 or SGLang 0.5.23, or a later version"
            )
        labels = recorded.pop("weight_versions", None)
        if labels != [str(version)]:
            sampled = f"labels its weights {', '.join(labels)}" if labels else "does not label its weights"
            raise PolicyError(
                f"the server's response {sampled}, but version {version} was published; if the server was "
                "restarted, or another program publishes to it, publish again"
            )
        return output._replace(log_probs={**recorded, "policy_version": version})
