"""A policy that is trained in this process and sampled by a vLLM or SGLang server that the user runs.

`OpenAIAgentPolicy` requests responses that include token ids and log-probabilities. `publish` writes the weights to a
model directory, which the server then loads. While publishing, it waits until no response is in flight and holds back
new requests, so no response mixes two versions.

The requests to the servers follow the documentation of sleep mode in vLLM and "SGLang for RL Systems":

    vLLM    POST /collective_rpc {"method": "reload_weights"}, POST /reset_prefix_cache?reset_running_requests=true;
            requires VLLM_SERVER_DEV_MODE=1 and a server started on the published directory
    SGLang  POST /update_weights_from_disk {"model_path", "weight_version", "flush_cache": true}
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal, get_args

import anyio

from reward_kit.agent.policies.hf.sampling import Sampling
from reward_kit.agent.policies.openai_policy import OpenAIAgentPolicy
from reward_kit.agent.policy_interface import AgentPolicy, EpisodeContext, PastTurn, PolicyOutput
from reward_kit.credit.options import check_choice
from reward_kit.environments.base import ToolSpec
from reward_kit.errors import ConfigError, PolicyError
from reward_kit.models import Message
from reward_kit.providers.keys import resolve_endpoint
from reward_kit.providers.transport import Transport
from reward_kit.rl.model_kit.models import load_model, save_model

Server = Literal["vllm", "sglang"]


class ServedPolicy(AgentPolicy):
    """A trainable policy that acts through a model server.

    Args:
        folder: the model directory in the format of `transformers`. The weights are loaded and trained in this process.
        published: the directory, on a shared file system, from which the server reads weights. A vLLM server must have
            been started with this directory as its model.
        server: "vllm" or "sglang".
        base_url: the URL of the server's OpenAI API, such as "http://127.0.0.1:8000/v1".
        model: the name of the model on the server. If None, `published` is used.
        temperature: the sampling temperature. Filters such as top_p are rejected, because they are not recorded.
        publish_timeout_s: the maximum time, in seconds, that the server may take to load the weights.
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
        publish_timeout_s: float = 600.0,
        api_key: str | None = None,
        **options: Any,
    ) -> None:
        check_choice("server", server, get_args(Server))
        if refused := sorted({"top_p", "logprobs", "stream"} & set(options)):
            raise ConfigError(
                f"{refused[0]!r} is not allowed for a policy that is being trained, because it is not recorded; "
                "remove it"
            )
        self.module, tokenizer = load_model(Path(folder))
        if tokenizer is None:
            raise ConfigError(f"{folder} has no tokenizer, but the server requires one; save it next to the weights")
        self.tokenizer = tokenizer
        self.published, self.version = Path(published).resolve(), 0
        self.sampling = Sampling(temperature=temperature)
        self._server, self._gate = server, anyio.Condition()
        self._in_flight, self._is_publishing = 0, False
        self._in_doubt: int | None = None  # the version that the server may or may not have loaded
        extra = {**(options.pop("extra_body", None) or {}), "return_token_ids": True}
        self._acting = OpenAIAgentPolicy(
            model or str(self.published),
            base_url=base_url,
            api_key=api_key,
            temperature=temperature,
            logprobs=True,
            extra_body=extra,
            **options,
        )
        settings = resolve_endpoint(base_url, api_key, options.get("api_key_env"))
        self._root = settings.base_url.removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"}
        if settings.api_key:
            self._headers["Authorization"] = f"Bearer {settings.api_key}"
        self._control = Transport(idle_timeout_s=publish_timeout_s, total_timeout_s=publish_timeout_s)

    @property
    def pad_token_id(self) -> int:
        """The token id for padding. If the tokenizer has no padding token, its end-of-text token is used."""
        pad = self.tokenizer.pad_token_id
        return int(pad if pad is not None else self.tokenizer.eos_token_id)

    async def open(self, context: EpisodeContext) -> AgentPolicy:
        """Open a session for an episode."""
        return _ServedSession(self, await self._acting.open(context))

    async def get_action(
        self, observation: Sequence[Message], available_tools_specs: list[ToolSpec] | None = None
    ) -> PolicyOutput:
        """Return an action outside of an episode."""
        return await _ServedSession(self, self._acting).get_action(observation, available_tools_specs)

    async def publish(self, version: int) -> None:
        """Make the server sample with the current weights of `module`.

        If this call fails or is cancelled after the request has been sent, it is unknown which weights the server has.
        Requests then raise an error until weights are published successfully.

        Raises:
            PolicyError: If the server rejects the weights. The server continues to sample with the old weights.
        """
        async with self._gate:
            while self._is_publishing:
                await self._gate.wait()
            self._is_publishing = True  # no new request is sent
        try:
            async with self._gate:
                while self._in_flight:
                    await self._gate.wait()
            await anyio.to_thread.run_sync(lambda: save_model(self.published, self.module, self.tokenizer))
            self._in_doubt = version
            if self._server == "sglang":
                body = {"model_path": str(self.published), "weight_version": str(version), "flush_cache": True}
                try:
                    await self._ask("update_weights_from_disk", body)
                except PolicyError:  # SGLang keeps its old weights.
                    self._in_doubt = None
                    raise
            else:
                await self._ask("collective_rpc", {"method": "reload_weights"})
                await self._ask("reset_prefix_cache?reset_running_requests=true", {})
            self.version, self._in_doubt = version, None
        finally:
            with anyio.CancelScope(shield=True):
                async with self._gate:
                    self._is_publishing = False
                    self._gate.notify_all()

    async def close(self) -> None:
        """Close the connections to the server. The server keeps running."""
        await self._acting.close()
        await self._control.aclose()

    @asynccontextmanager
    async def answering(self) -> AsyncIterator[int]:
        """Prevent publishing while the server is responding, and yield the version of the server's weights."""
        async with self._gate:
            while self._is_publishing:
                await self._gate.wait()
            if self._in_doubt is not None:
                raise PolicyError(
                    f"publishing version {self._in_doubt} did not finish, so the server's weights are "
                    "unknown; publish again"
                )
            self._in_flight += 1
            version = self.version
        try:
            yield version
        finally:
            with anyio.CancelScope(shield=True):
                async with self._gate:
                    self._in_flight -= 1
                    self._gate.notify_all()

    async def _ask(self, path: str, body: dict[str, Any]) -> None:
        url = f"{self._root}/{path}"
        answer = await self._control.post(url, self._headers, json.dumps(body).encode())
        if isinstance(answer, dict) and answer.get("success") is False:
            raise PolicyError(f"{url} did not load the weights in {self.published}: {answer.get('message')}")


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
            PolicyError: If the response does not contain the sampled tokens.
        """
        async with self._policy.answering() as version:
            output = await self._acting.get_action(observation, available_tools_specs)
        recorded = output.log_probs or {}
        if missing := [key for key in ("prompt_ids", "token_ids", "logprobs") if recorded.get(key) is None]:
            raise PolicyError(
                f"the server's response has no {missing[0]}, because `return_token_ids` is disabled or not "
                "supported (vLLM "
                "supports it since version 0.10.2, SGLang since July 2026)"
            )
        return output._replace(log_probs={**recorded, "policy_version": version})
