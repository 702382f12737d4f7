"""A small model server for tests: loads a folder, samples chat completions, and reloads on request.

It speaks what vLLM and SGLang say of token ids, log-probabilities and new weights, over a real model of `transformers`.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from aiohttp import web

from reward_kit.rl.model_kit.models import load_model


class ModelServer:
    """A server for the model in `folder` on 127.0.0.1."""

    def __init__(self, folder: Path, *, says_ids: bool = True) -> None:
        self.folder, self.says_ids = folder, says_ids
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.busy = self.most_busy_while_loading = 0
        self.refuses_weights = False
        self.breaks_at = ""  # a path that is answered with an error
        self.is_loaded, self.may_answer = asyncio.Event(), asyncio.Event()
        self.may_answer.set()
        self._load(folder)

    def _load(self, folder: Path) -> None:
        self.most_busy_while_loading = max(self.most_busy_while_loading, self.busy)
        self.model, self.tokenizer = load_model(folder)

    async def __aenter__(self) -> ModelServer:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._chat)
        for path in ("/collective_rpc", "/reset_prefix_cache", "/update_weights_from_disk"):
            app.router.add_post(path, self._control)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.base_url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._runner.cleanup()

    async def _control(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.asked.append((request.path_qs, body))
        if request.path == self.breaks_at:
            return web.json_response({"error": "broken"}, status=500)
        if self.refuses_weights:
            return web.json_response({"success": False, "message": "shapes differ"})
        if body.get("method") == "reload_weights" or "model_path" in body:
            self._load(Path(body.get("model_path", self.folder)))
            self.is_loaded.set()
            await self.may_answer.wait()
        return web.json_response({"success": True, "message": "loaded"})

    async def _chat(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.busy += 1
        await asyncio.sleep(0.01)  # long enough for others to come meanwhile
        prompt = self.tokenizer.apply_chat_template(body["messages"], add_generation_prompt=True, return_dict=False)
        sampled, logprobs = self._sample(list(prompt), body)
        self.busy -= 1
        content = [{"token": "", "logprob": value} for value in logprobs]
        choice: dict[str, Any] = {
            "index": 0,
            "finish_reason": "length",
            "message": {"role": "assistant", "content": self.tokenizer.decode(sampled)},
            "logprobs": {"content": content},
        }
        if self.says_ids and body.get("return_token_ids"):
            choice |= {"token_ids": sampled, "prompt_token_ids": list(prompt)}
        return web.json_response({"id": "1", "object": "chat.completion", "choices": [choice]})

    @torch.no_grad()
    def _sample(self, prompt: list[int], body: dict[str, Any]) -> tuple[list[int], list[float]]:
        generator = torch.Generator().manual_seed(body.get("seed", 0))
        ids, logprobs = list(prompt), []
        for _ in range(body["max_tokens"]):
            distribution = self.model(torch.tensor([ids])).logits[0, -1].log_softmax(dim=-1)
            token = int(torch.multinomial(distribution.exp(), 1, generator=generator))
            ids.append(token)
            logprobs.append(float(distribution[token]))
        return ids[len(prompt) :], logprobs
