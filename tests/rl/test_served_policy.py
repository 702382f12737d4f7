"""A served policy samples with the latest published weights and returns token ids."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch

from reward_kit.agent.policy_interface import EpisodeContext
from reward_kit.errors import ConfigError, PolicyError, ProviderError
from reward_kit.models import Message
from reward_kit.rl.losses import token_logprobs
from reward_kit.rl.model_kit.models import build_decoder, build_tokenizer, save_model
from reward_kit.rl.served_policy import ServedPolicy
from reward_kit.rl.trainer import trainable
from tests.rl.model_server import ModelServer

HELLO = [Message(role="user", content="where is the key")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tokenizer = build_tokenizer(["where is the key", "it is here"])
    save_model(tmp_path / "model", build_decoder(tokenizer, layers=1, width=16, heads=2, context=64, seed=0), tokenizer)
    return tmp_path / "model"


@asynccontextmanager
async def served(folder: Path, kind: Any, **options: Any) -> AsyncIterator[tuple[ModelServer, ServedPolicy]]:
    published = folder.parent / "published"
    shutil.copytree(folder, published)
    says_ids = options.pop("says_ids", True)
    async with ModelServer(published, says_ids=says_ids) as server:
        policy = ServedPolicy(folder, published, server=kind, base_url=server.base_url, max_tokens=4, **options)
        try:
            yield server, policy
        finally:
            await policy.close()


def trainers_logprobs(policy: ServedPolicy, said: dict[str, Any]) -> torch.Tensor:
    ids = torch.tensor([[*said["prompt_ids"], *said["token_ids"]]])
    with torch.no_grad():
        return token_logprobs(policy.module(ids).logits, ids)[0, len(said["prompt_ids"]) :]


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_sampled_logprobs_match_the_trainer(folder: Path, kind: str) -> None:
    async with served(folder, kind) as (server, policy):
        assert trainable(policy) is policy
        for version in (0, 1):
            session = await policy.open(EpisodeContext("r-0", seed=3))
            log_probs = (await session.get_action(HELLO)).log_probs
            assert log_probs is not None and log_probs["policy_version"] == version
            torch.testing.assert_close(torch.tensor(log_probs["logprobs"]), trainers_logprobs(policy, log_probs))
            with torch.no_grad():
                for parameter in policy.module.parameters():
                    parameter.add_(torch.randn_like(parameter), alpha=0.3)
            # The trainer's weights are others now, and the server's are not until they are published.
            assert (torch.tensor(log_probs["logprobs"]) - trainers_logprobs(policy, log_probs)).abs().max() > 1e-3
            await policy.publish(version + 1)
        assert [path for path, _ in server.asked][: 1 if kind == "sglang" else 2] == {
            "vllm": ["/collective_rpc", "/reset_prefix_cache?reset_running_requests=true"],
            "sglang": ["/update_weights_from_disk"],
        }[kind]


async def test_weights_are_published_between_answers(folder: Path) -> None:
    versions: list[int] = []

    async def ask(policy: ServedPolicy) -> None:
        log_probs = (await policy.get_action(HELLO)).log_probs
        assert log_probs is not None
        versions.append(log_probs["policy_version"])

    async with served(folder, "sglang") as (server, policy):
        async with anyio.create_task_group() as tasks:
            for _ in range(5):
                tasks.start_soon(ask, policy)
            await anyio.sleep(0.002)
            tasks.start_soon(policy.publish, 1)
            await anyio.sleep(0.002)
            for _ in range(5):
                tasks.start_soon(ask, policy)
        assert sorted(versions) == [0] * 5 + [1] * 5
        assert server.most_busy_while_loading == 0


async def test_server_rejecting_the_weights_is_an_error(folder: Path) -> None:
    async with served(folder, "sglang") as (server, policy):
        server.refuses_weights = True
        with pytest.raises(PolicyError, match=r"did not load the weights in .*: shapes differ"):
            await policy.publish(1)
        assert policy.version == 0
        log_probs = (await policy.get_action(HELLO)).log_probs
        assert log_probs is not None and log_probs["policy_version"] == 0


async def in_doubt_until_published(policy: ServedPolicy) -> None:
    assert policy.version == 0
    with pytest.raises(PolicyError, match="publishing version 1 did not finish"):
        await policy.get_action(HELLO)
    await policy.publish(2)
    log_probs = (await policy.get_action(HELLO)).log_probs
    assert log_probs is not None and log_probs["policy_version"] == 2
    torch.testing.assert_close(torch.tensor(log_probs["logprobs"]), trainers_logprobs(policy, log_probs))


@pytest.mark.parametrize("path", ["/collective_rpc", "/reset_prefix_cache"])
async def test_failed_publication_makes_answers_unversioned(folder: Path, path: str) -> None:
    async with served(folder, "vllm") as (server, policy):
        server.breaks_at = path
        with pytest.raises(ProviderError):
            await policy.publish(1)
        server.breaks_at = ""
        await in_doubt_until_published(policy)


async def test_cancelled_publication_makes_answers_unversioned(folder: Path) -> None:
    async with served(folder, "sglang") as (server, policy):
        server.may_answer.clear()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(policy.publish, 1)
            await server.is_loaded.wait()
            tasks.cancel_scope.cancel()
        server.may_answer.set()
        await in_doubt_until_published(policy)


async def test_a_server_that_is_down_is_an_error_of_the_provider(folder: Path) -> None:
    async with served(folder, "vllm") as (server, policy):
        await server.__aexit__(None, None, None)
        with pytest.raises(ProviderError, match=r"127\.0\.0\.1"):
            await policy.publish(1)
        assert policy.version == 0


async def test_server_without_token_ids_is_an_error(folder: Path) -> None:
    async with served(folder, "vllm", says_ids=False) as (_, policy):
        with pytest.raises(PolicyError, match="no prompt_ids, because `return_token_ids` is disabled or not supported"):
            await policy.get_action(HELLO)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"server": "vlm"}, "server"),
        ({"server": "vllm", "top_p": 0.9}, "'top_p' is not allowed for a policy that is being trained"),
    ],
)
def test_invalid_options_are_rejected(folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ServedPolicy(folder, folder, base_url="http://127.0.0.1:9/v1", **options)
