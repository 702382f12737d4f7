"""A small model server for tests: it speaks the HTTP API of vLLM or SGLang over a real model of `transformers`.

It was written from the sources of vLLM 0.33.0 and SGLang 0.5.23:

    vLLM    vllm/entrypoints/rl/online/api_router.py (pause, resume, update_weight_version, weight_info),
            vllm/entrypoints/serve/dev/{rpc,cache}/api_router.py (collective_rpc, reset_prefix_cache),
            vllm/v1/engine/core.py (new requests are rejected while paused; the initial label is "default"),
            vllm/model_executor/model_loader/reload/inplace.py (weights are loaded in place, one after another),
            vllm/entrypoints/openai/chat_completion/protocol.py (token_ids, weight_versions)
    SGLang  sglang/srt/entrypoints/http_server.py and sglang/srt/managers/io_struct.py (routes and bodies),
            sglang/srt/managers/tokenizer_manager.py (new requests wait while paused),
            sglang/srt/managers/scheduler_components/weight_updater.py (a refused flush fails the update),
            sglang/srt/model_executor/model_runner_components/weight_updater.py (after an error, the weights are loaded
            again from the *new* path), sglang/srt/entrypoints/openai/protocol.py (response_token_ids, metadata)

It is stricter than both: it rejects unknown keys and parameters, and loading weights without a pause. Like both, it
filters the distribution by default (`generation_config.json`): unless `top_k` is sent, it samples greedily.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch
from aiohttp import web

from reward_kit.rl.model_kit.models import load_model

Kind = Literal["vllm", "sglang"]
Handler = Callable[[web.Request, dict[str, Any]], Awaitable[web.Response]]

_COMMON_CHAT = {
    *("messages", "model", "logprobs", "max_tokens", "seed", "stop", "temperature", "top_p", "tools", "tool_choice"),
    *("top_k", "min_p", "repetition_penalty", "return_token_ids", "parallel_tool_calls"),
}
_CHAT_KEYS: dict[Kind, set[str]] = {
    "vllm": {*_COMMON_CHAT, "return_weight_versions"},
    "sglang": {*_COMMON_CHAT, "return_prompt_token_ids", "return_meta_info"},
}
# The allowed keys of the body and of the query of each route.
_ROUTES: dict[Kind, dict[str, tuple[set[str], set[str]]]] = {
    "vllm": {
        "/pause": (set(), {"mode", "clear_cache"}),
        "/resume": (set(), set()),
        "/collective_rpc": ({"method", "args", "kwargs", "timeout"}, set()),
        "/reset_prefix_cache": (set(), {"reset_running_requests", "reset_external"}),
        "/update_weight_version": ({"new_version"}, set()),
    },
    "sglang": {
        "/pause_generation": ({"mode"}, set()),
        "/continue_generation": ({"torch_empty_cache"}, set()),
        "/update_weight_version": ({"new_version", "abort_all_requests"}, set()),
        "/update_weights_from_disk": ({"model_path", "load_format", "weight_version", "flush_cache"}, set()),
    },
}


class ModelServer:
    """A server for the model in `folder` on 127.0.0.1.

    Args:
        folder: the model that is loaded at the start.
        kind: the server whose API is spoken.
        has_admin: whether the routes for weights exist; in vLLM, only with VLLM_SERVER_DEV_MODE=1.
        says_ids: whether token ids are returned on request.
        says_versions: whether the labels of the weights are returned.
    """

    def __init__(
        self, folder: Path, kind: Kind, *, has_admin: bool = True, says_ids: bool = True, says_versions: bool = True
    ) -> None:
        self.folder, self.kind, self.has_admin = folder, kind, has_admin
        self.says_ids, self.says_versions = says_ids, says_versions
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.sampled_by: list[str] = []  # the label of each response
        self.most_busy_while_loading = self.stale_cache_hits = 0
        self.breaks_at = ""  # a path that is answered with status 500
        self.dies_at = ""  # a path at which the process ends without an answer
        self.dies_after: int | None = None  # the number of tensors after which the process ends while loading
        self.first_token_by = ""  # a label of other weights that sampled the first token of each response
        self.is_loaded, self.may_answer, self.is_busy = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.may_answer.set()
        self._port = 0
        self._start_state()

    def _start_state(self) -> None:
        self.model, self.tokenizer = load_model(self.folder)
        self.label, self.pause_mode, self.busy = "default", "", 0
        self._cached_by: object = None  # identifies the weights that filled the prefix cache
        self._weights: object = object()
        self._changed = asyncio.Condition()

    async def __aenter__(self) -> ModelServer:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._chat)
        for path, (keys, parameters) in _ROUTES[self.kind].items() if self.has_admin else ():
            app.router.add_post(path, self._checked(getattr(self, f"_{path[1:]}"), keys, parameters))
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self._port).start()
        self._port = self._runner.addresses[0][1]
        self.base_url = f"http://127.0.0.1:{self._port}/v1"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._runner.cleanup()

    async def restart(self) -> None:
        """Start again at the same address, with the initial weights and label."""
        await self._runner.cleanup()
        self.dies_at, self.dies_after = "", None
        self._start_state()
        await self.__aenter__()

    def _checked(self, handler: Handler, keys: set[str], parameters: set[str]) -> Callable[[web.Request], Any]:
        async def handle(request: web.Request) -> web.Response:
            body = await request.json()
            self.asked.append((request.path_qs, body))
            if unknown := (set(body) - keys) | (set(request.query) - parameters):
                return web.json_response({"detail": f"unknown: {sorted(unknown)}"}, status=422)
            if request.path == self.breaks_at:
                return web.json_response({"error": "broken"}, status=500)
            if request.path == self.dies_at:
                self._die(request)
            try:
                return await handler(request, body)
            except _DiedError:
                self._die(request)
                raise

        return handle

    def _die(self, request: web.Request) -> None:
        assert request.transport is not None
        request.transport.abort()
        raise asyncio.CancelledError

    # vLLM

    async def _pause(self, request: web.Request, _: dict[str, Any]) -> web.Response:
        mode = request.query.get("mode", "abort")
        if mode not in ("wait", "keep"):  # "abort" is not used here
            return web.json_response({"detail": f"mode: {mode!r}"}, status=422)
        self.pause_mode = mode
        async with self._changed:
            await self._changed.wait_for(lambda: self.busy == 0 or mode == "keep")
        if mode != "keep" and request.query.get("clear_cache", "true") == "true":
            self._cached_by = None
        return web.json_response({"status": "paused"})

    async def _resume(self, *_: Any) -> web.Response:
        await self._continue()
        return web.json_response({"status": "resumed"})

    async def _collective_rpc(self, _: web.Request, body: dict[str, Any]) -> web.Response:
        if body.get("method") != "reload_weights":
            return web.json_response({"detail": "Missing 'method' in request body"}, status=400)
        kwargs = body.get("kwargs", {})
        if set(kwargs) - {"weights_path", "is_checkpoint_format"}:
            return web.json_response({"error": {"message": f"unexpected arguments {sorted(kwargs)}"}}, status=500)
        try:
            await self._load(Path(kwargs.get("weights_path", self.folder)))
        except RuntimeError as error:  # the weights before the failing one are loaded
            return web.json_response({"error": {"message": str(error), "type": "InternalServerError"}}, status=500)
        return web.json_response({"results": [None]})

    async def _reset_prefix_cache(self, request: web.Request, _: dict[str, Any]) -> web.Response:
        is_free = self.busy == 0 or request.query.get("reset_running_requests") == "true"
        if is_free:
            self._cached_by = None
        return web.json_response({"success": is_free})

    # both

    async def _update_weight_version(self, _: web.Request, body: dict[str, Any]) -> web.Response:
        self.label = body["new_version"]
        return web.json_response({"success": True, "new_version": self.label})

    # SGLang

    async def _pause_generation(self, _: web.Request, body: dict[str, Any]) -> web.Response:
        if body.get("mode", "abort") not in ("retract", "in_place"):  # "abort" is not used here
            return web.json_response({"detail": "mode"}, status=422)
        self.pause_mode = body["mode"]
        return web.json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue_generation(self, *_: Any) -> web.Response:
        await self._continue()
        return web.json_response({"message": "Generation continued successfully.", "status": "ok"})

    async def _update_weights_from_disk(self, _: web.Request, body: dict[str, Any]) -> web.Response:
        path, is_loaded, message = Path(body["model_path"]), True, "Succeeded to update model weights."
        try:
            await self._load(path)
        except RuntimeError as error:
            is_loaded, message = False, f"Failed to update weights: {error}.\nRolling back to original weights."
        if is_loaded:
            self.label = body.get("weight_version") or self.label
            if body.get("flush_cache", True):
                self._cached_by = None
        answer = {"success": is_loaded, "message": message, "num_paused_requests": 0}
        return web.json_response(answer, status=200 if is_loaded else 400)

    # the model

    async def _load(self, folder: Path) -> None:
        """Copy the weights in a directory into the model, one after another."""
        self.most_busy_while_loading = max(self.most_busy_while_loading, self.busy)
        if not self.pause_mode:
            raise RuntimeError("weights are loaded without a pause")
        self._weights = object()
        own = self.model.state_dict()
        for number, (name, value) in enumerate(load_model(folder)[0].state_dict().items()):
            if number == self.dies_after:
                raise _DiedError
            own[name].copy_(value)
        self.is_loaded.set()
        await self.may_answer.wait()

    async def _continue(self) -> None:
        self.pause_mode = ""
        async with self._changed:
            self._changed.notify_all()

    async def _chat(self, request: web.Request) -> web.Response:
        body = await request.json()
        if unknown := set(body) - _CHAT_KEYS[self.kind]:
            return web.json_response({"error": {"message": f"unknown keys {sorted(unknown)}", "code": 400}}, status=400)
        if self.kind == "vllm" and self.pause_mode in ("wait", "abort"):
            message = "Generation is paused. Please retry after it resumes."
            error = {"message": message, "type": "ServiceUnavailableError", "code": 503}
            return web.json_response({"error": error}, status=503)
        async with self._changed:
            await self._changed.wait_for(lambda: not self.pause_mode)
        self.busy += 1
        self.is_busy.set()
        try:
            await asyncio.sleep(0.01)  # long enough for others to come meanwhile
            self.stale_cache_hits += self._cached_by not in (None, self._weights)
            self._cached_by = self._weights
            prompt = self.tokenizer.apply_chat_template(body["messages"], add_generation_prompt=True, return_dict=False)
            sampled, logprobs = self._sample(list(prompt), body)
        finally:
            self.busy -= 1
            async with self._changed:
                self._changed.notify_all()
        return web.json_response(self._answer(body, list(prompt), sampled, logprobs))

    def _answer(self, body: dict[str, Any], prompt: list[int], sampled: list[int], logprobs: list[float]) -> Any:
        self.sampled_by.append(self.label)
        choice: dict[str, Any] = {
            "index": 0,
            "finish_reason": "length",
            "message": {"role": "assistant", "content": self.tokenizer.decode(sampled)},
            "logprobs": {"content": [{"token": "", "logprob": value} for value in logprobs]},
        }
        answer = {"id": "1", "object": "chat.completion", "model": body["model"], "choices": [choice]}
        wants_ids = self.says_ids and body.get("return_token_ids")
        spans = [{"version": self.label, "start": 0, "end": len(sampled)}]
        if self.first_token_by:
            spans = [{"version": self.first_token_by, "start": 0, "end": 1}, {**spans[0], "start": 1}]
        if self.kind == "vllm":
            if wants_ids:
                choice["token_ids"], answer["prompt_token_ids"] = sampled, prompt
            if self.says_versions and body.get("return_weight_versions"):
                choice["weight_versions"] = spans
        else:
            if wants_ids:
                choice |= {"response_token_ids": sampled, "prompt_token_ids": prompt}
            if self.says_versions:
                answer["metadata"] = {"weight_version": self.label, "weight_versions": spans}
        return answer

    @torch.no_grad()
    def _sample(self, prompt: list[int], body: dict[str, Any]) -> tuple[list[int], list[float]]:
        """Return sampled ids and their log-probabilities: in vLLM before, in SGLang after the temperature."""
        generator = torch.Generator().manual_seed(body.get("seed", 0))
        ids, logprobs = list(prompt), []
        for _ in range(body["max_tokens"]):
            logits = self.model(torch.tensor([ids])).logits[0, -1]
            scaled = (logits / body["temperature"]).log_softmax(dim=-1)
            is_filtered = body.get("top_k", 1) == 1
            drawn = scaled.argmax() if is_filtered else torch.multinomial(scaled.exp(), 1, generator=generator)
            ids.append(int(drawn))
            reported = logits.log_softmax(dim=-1) if self.kind == "vllm" else scaled
            logprobs.append(float(reported[ids[-1]]))
        return ids[len(prompt) :], logprobs


class _DiedError(Exception):
    """The process of the server ends."""
