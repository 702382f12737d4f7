"""A served policy samples with the latest published weights and returns token ids."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import torch

from reward_kit.agent.policies.hf.model import merged_state_dict
from reward_kit.agent.policy_interface import EpisodeContext
from reward_kit.errors import ConfigError, PolicyError
from reward_kit.models import Message
from reward_kit.rl.learner.config import LoRAOptions, PPOConfig
from reward_kit.rl.losses import token_logprobs
from reward_kit.rl.model_kit.models import build_decoder, build_tokenizer, load_model, save_model
from reward_kit.rl.ppo import PPOLearner
from reward_kit.rl.served_policy import ServedPolicy
from reward_kit.rl.training.rollouts import evaluation_policy
from reward_kit.rl.training.trainer import trainable
from reward_kit.tokens import TokenBatch
from tests.rl.model_server import Kind, ModelServer

HELLO = [Message(role="user", content="where is the key")]
KINDS: tuple[Kind, ...] = ("vllm", "sglang")
TEXTS = ["where is the key", "it is here"]
# The order of the requests that publish version 1, with their bodies, except for the path of the weights.
PUBLICATION: dict[Kind, list[tuple[str, dict[str, Any]]]] = {
    "vllm": [
        ("/pause?mode=wait", {}),
        ("/update_weight_version", {"new_version": "loading-1"}),
        ("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": "PUBLISHED"}}),
        ("/reset_prefix_cache?reset_running_requests=true&reset_external=true", {}),
        ("/update_weight_version", {"new_version": "1"}),
        ("/resume", {}),
    ],
    "sglang": [
        ("/pause_generation", {"mode": "retract"}),
        ("/update_weight_version", {"new_version": "loading-1", "abort_all_requests": False}),
        ("/update_weights_from_disk", {"model_path": "PUBLISHED", "weight_version": "1", "flush_cache": True}),
        ("/continue_generation", {}),
    ],
}
AFTER_THE_PAUSE = [(kind, path.partition("?")[0]) for kind in KINDS for path, _ in PUBLICATION[kind][1:]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tokenizer = build_tokenizer(TEXTS)
    save_model(tmp_path / "model", build_decoder(tokenizer, layers=1, width=16, heads=2, context=64, seed=0), tokenizer)
    return tmp_path / "model"


@asynccontextmanager
async def served(folder: Path, kind: Kind, **options: Any) -> AsyncIterator[tuple[ModelServer, ServedPolicy]]:
    """Start a server with weights other than those of `folder`, and a policy that trains `folder`."""
    of_server = {name: options.pop(name) for name in ("says_ids", "says_versions", "has_admin") if name in options}
    started = folder.parent / "started"
    tokenizer = build_tokenizer(TEXTS)
    width = options.pop("server_width", 16)
    save_model(started, build_decoder(tokenizer, layers=1, width=width, heads=2, context=64, seed=9), tokenizer)
    async with ModelServer(started, kind, **of_server) as server:
        policy = a_policy(folder, server, **options)
        try:
            yield server, policy
        finally:
            await policy.close()
        assert server.most_busy_while_loading == server.stale_cache_hits == 0


def a_policy(folder: Path, server: ModelServer, **options: Any) -> ServedPolicy:
    """Return a policy that gives up soon, so that failures are quick."""
    options = {"max_tokens": 4, "max_attempts": 2, "retry_base_s": 0.01, **options}
    return ServedPolicy(folder, folder.parent / "published", server=server.kind, base_url=server.base_url, **options)


async def answer(policy: ServedPolicy, seed: int = 3) -> dict[str, Any]:
    session = await policy.open(EpisodeContext("r-0", seed=seed))
    log_probs = (await session.get_action(HELLO)).log_probs
    assert log_probs is not None
    return log_probs


def change_weights(policy: ServedPolicy) -> None:
    with torch.no_grad():
        for parameter in policy.module.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)


def trainers_logprobs(policy: ServedPolicy, said: dict[str, Any], temperature: float = 1.0) -> torch.Tensor:
    ids = torch.tensor([[*said["prompt_ids"], *said["token_ids"]]])
    with torch.no_grad():
        return token_logprobs(policy.module(ids).logits / temperature, ids)[0, len(said["prompt_ids"]) :]


def assert_sampled_by_module(policy: ServedPolicy, said: dict[str, Any]) -> None:
    torch.testing.assert_close(torch.tensor(said["logprobs"]), trainers_logprobs(policy, said))


@pytest.mark.parametrize("kind", KINDS)
async def test_sampled_logprobs_match_the_trainer(folder: Path, kind: Kind) -> None:
    async with served(folder, kind) as (server, policy):
        assert trainable(policy) is policy
        for version in (0, 1, 2):
            log_probs = await answer(policy)
            assert log_probs["policy_version"] == version
            assert "weight_versions" not in log_probs
            assert_sampled_by_module(policy, log_probs)
            change_weights(policy)
            # The trainer's weights are others now, and the server's are not until they are published.
            assert (torch.tensor(log_probs["logprobs"]) - trainers_logprobs(policy, log_probs)).abs().max() > 1e-3
            await policy.publish(version + 1)
        assert server.sampled_by == ["0", "1", "2"]


@pytest.mark.parametrize("kind", KINDS)
async def test_publication_sends_its_requests_in_order(folder: Path, kind: Kind) -> None:
    async with served(folder, kind) as (server, policy):
        await policy.publish(1)
        published = str(policy.published)
        assert [(path, _without(body, published)) for path, body in server.asked] == PUBLICATION[kind]
        assert server.label == "1"


def _without(value: Any, published: str) -> Any:
    if isinstance(value, dict):
        return {key: _without(one, published) for key, one in value.items()}
    return "PUBLISHED" if value == published else value


async def test_trained_weights_are_published_in_the_type_of_the_model(folder: Path) -> None:
    """Training converts the weights to float32 and adds adapters; the server loads neither."""
    policy = ServedPolicy(folder, folder.parent / "published", server="vllm", base_url="http://127.0.0.1:9/v1")
    names = policy.module.state_dict().keys()
    policy._dtype = torch.bfloat16
    learner = PPOLearner(policy.module, PPOConfig(lr=0.1, lora=LoRAOptions(rank=2)))
    learner.update(a_sampled_row(), version=0)
    policy._write()
    loaded = load_model(policy.published).model
    assert loaded.state_dict().keys() == names
    assert {value.dtype for value in loaded.state_dict().values()} == {torch.bfloat16}
    for name, value in merged_state_dict(policy.module).items():
        torch.testing.assert_close(loaded.state_dict()[name], value.bfloat16())
    before = load_model(folder).model.state_dict()
    assert any((value.float() - before[name]).abs().max() > 0.01 for name, value in loaded.state_dict().items())
    await policy.close()


def a_sampled_row() -> TokenBatch:
    """Return a row whose last two tokens were sampled."""
    mask = np.array([[0, 0, 1, 1]], dtype=np.int8)
    return TokenBatch(
        {
            "input_ids": np.array([[3, 4, 5, 6]], dtype=np.int32),
            "attention_mask": np.ones((1, 4), dtype=np.int8),
            **{"action_mask": mask, "loss_mask": mask},
            **{"logprobs": np.full((1, 4), -3.0), "advantages": np.ones((1, 4))},
        }
    )


@pytest.mark.parametrize("kind", KINDS)
async def test_first_action_publishes_the_initial_weights_once(folder: Path, kind: Kind) -> None:
    async with served(folder, kind) as (server, policy):
        async with anyio.create_task_group() as tasks:
            for seed in range(4):
                tasks.start_soon(answer, policy, seed)
        assert server.sampled_by == ["0"] * 4
        assert len(server.asked) == len(PUBLICATION[kind])


@pytest.mark.parametrize("kind", KINDS)
async def test_samples_are_not_filtered_by_the_servers_defaults(folder: Path, kind: Kind) -> None:
    async with served(folder, kind) as (_, policy):
        said = [(await answer(policy, seed))["token_ids"][0] for seed in range(20)]
        assert len(set(said)) > 1  # the server's default is the most probable token


@pytest.mark.parametrize("kind", KINDS)
async def test_evaluation_uses_its_temperature_and_the_current_version(folder: Path, kind: Kind) -> None:
    async with served(folder, kind) as (_, policy):
        greedy = evaluation_policy(policy, 1e-6)
        for version in (0, 1):
            said = {tuple((await answer(greedy, seed))["token_ids"]) for seed in range(8)}
            assert len(said) == 1
            assert (await answer(greedy))["policy_version"] == version
            change_weights(policy)
            await policy.publish(version + 1)


async def until(is_true: Callable[[], bool]) -> None:
    with anyio.fail_after(60):
        while not is_true():  # noqa: ASYNC110
            await anyio.sleep(0.001)


async def test_weights_are_published_between_answers(folder: Path) -> None:
    versions: list[int] = []

    async def ask(policy: ServedPolicy, seed: int) -> None:
        versions.append((await answer(policy, seed))["policy_version"])

    for kind in KINDS:
        versions.clear()
        async with served(folder, kind) as (server, policy):
            await answer(policy)
            async with anyio.create_task_group() as tasks:
                for seed in range(5):
                    tasks.start_soon(ask, policy, seed)
                await until(lambda: policy._link.in_flight + len(versions) == 5)
                tasks.start_soon(policy.publish, 1)
                await until(lambda: policy._link.is_publishing)
                for seed in range(5):
                    tasks.start_soon(ask, policy, seed)
            assert sorted(versions) == [0] * 5 + [1] * 5
            assert sorted(server.sampled_by) == ["0"] * 6 + ["1"] * 5


@pytest.mark.parametrize("kind", KINDS)
async def test_turns_of_an_episode_record_the_version_that_sampled_them(folder: Path, kind: Kind) -> None:
    async with served(folder, kind) as (server, policy):
        session, versions = await policy.open(EpisodeContext("r-0", seed=1)), []
        for version in range(3):
            log_probs = (await session.get_action(HELLO)).log_probs
            assert log_probs is not None
            assert_sampled_by_module(policy, log_probs)
            versions.append(log_probs["policy_version"])
            change_weights(policy)
            await policy.publish(version + 1)
        assert versions == [0, 1, 2] == [int(label) for label in server.sampled_by]


async def test_requests_of_another_client_finish_before_the_weights_change(folder: Path) -> None:
    """`served` asserts that no request was running; here, one of a second policy is."""
    async with served(folder, "vllm") as (server, policy):
        await answer(policy)
        other = a_policy(folder, server)
        other._link.is_published = True  # it only samples
        server.is_busy.clear()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(answer, other)
            await server.is_busy.wait()
            await policy.publish(1)
        assert server.sampled_by == ["0", "0"]
        await other.close()


async def in_doubt_until_published(policy: ServedPolicy) -> None:
    assert policy.version == 0
    with pytest.raises(PolicyError, match="publishing version 1 did not finish"):
        await policy.get_action(HELLO)
    await policy.publish(2)
    log_probs = await answer(policy)
    assert log_probs["policy_version"] == 2
    assert_sampled_by_module(policy, log_probs)


@pytest.mark.parametrize(("kind", "path"), AFTER_THE_PAUSE)
async def test_failed_publication_pauses_the_server_until_one_succeeds(folder: Path, kind: Kind, path: str) -> None:
    async with served(folder, kind) as (server, policy):
        await answer(policy)
        server.breaks_at = path
        change_weights(policy)
        with pytest.raises(PolicyError, match=r"version 1 was not published: .*500.*; the server is paused, and its"):
            await policy.publish(1)
        assert server.pause_mode
        server.breaks_at = ""
        await in_doubt_until_published(policy)


@pytest.mark.parametrize("kind", KINDS)
async def test_failed_pause_leaves_the_server_with_its_weights(folder: Path, kind: Kind) -> None:
    async with served(folder, kind) as (server, policy):
        before = await answer(policy)
        server.breaks_at = PUBLICATION[kind][0][0].partition("?")[0]
        change_weights(policy)
        with pytest.raises(PolicyError, match=r"version 1 was not published: .*; the server continues with version 0"):
            await policy.publish(1)
        assert await answer(policy) == before
        assert server.label == "0" and not server.pause_mode


@pytest.mark.parametrize("kind", KINDS)
async def test_partly_loaded_weights_are_never_used(folder: Path, kind: Kind) -> None:
    """The server ends in the middle of loading; a server with the same address then has its initial weights."""
    async with served(folder, kind) as (server, policy):
        await answer(policy)
        server.dies_after = 2
        with pytest.raises(PolicyError, match="its weights are unknown until weights are published"):
            await policy.publish(1)
        assert server.label == "loading-1"
        await server.restart()
        await in_doubt_until_published(policy)
        assert server.sampled_by == ["0", "2"]


@pytest.mark.parametrize("kind", KINDS)
async def test_weights_of_a_different_shape_are_an_error(folder: Path, kind: Kind) -> None:
    async with served(folder, kind, server_width=8) as (server, policy):
        with pytest.raises(PolicyError, match=r"version 0 was not published: .*size of tensor"):
            await policy.get_action(HELLO)
        assert server.label == "loading-0" and server.pause_mode
        assert server.sampled_by == []


@pytest.mark.parametrize("kind", KINDS)
async def test_slow_server_is_a_timeout(folder: Path, kind: Kind) -> None:
    async with served(folder, kind, publish_timeout_s=0.5) as (server, policy):
        await answer(policy)
        server.may_answer.clear()
        with pytest.raises(PolicyError, match=r"version 1 was not published: .*; the server is paused"):
            await policy.publish(1)
        server.may_answer.set()
        await in_doubt_until_published(policy)


async def test_cancelled_publication_makes_answers_unversioned(folder: Path) -> None:
    async with served(folder, "sglang") as (server, policy):
        await answer(policy)
        server.may_answer.clear()
        server.is_loaded.clear()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(policy.publish, 1)
            await server.is_loaded.wait()
            tasks.cancel_scope.cancel()
        server.may_answer.set()
        await in_doubt_until_published(policy)


@pytest.mark.parametrize("kind", KINDS)
async def test_restarted_server_is_detected_by_its_label(folder: Path, kind: Kind) -> None:
    async with served(folder, kind) as (server, policy):
        await policy.publish(1)
        await server.restart()
        with pytest.raises(PolicyError, match="labels its weights default, but version 1 was published"):
            await policy.get_action(HELLO)
        await policy.publish(1)
        assert_sampled_by_module(policy, await answer(policy))


@pytest.mark.parametrize("kind", KINDS)
async def test_resumed_run_replaces_the_weights_of_the_earlier_run(folder: Path, kind: Kind) -> None:
    async with served(folder, kind) as (server, policy):
        await policy.publish(7)
        change_weights(policy)
        await policy.publish(8)  # not in a checkpoint
        resumed = a_policy(folder, server)
        await resumed.publish(7)
        log_probs = await answer(resumed)
        assert log_probs["policy_version"] == 7
        assert_sampled_by_module(resumed, log_probs)
        with pytest.raises(PolicyError, match="labels its weights 7, but version 8 was published"):
            await policy.get_action(HELLO)
        await resumed.close()


@pytest.mark.parametrize("kind", KINDS)
async def test_response_of_two_versions_is_rejected(folder: Path, kind: Kind) -> None:
    """Another program has published to the server during the response."""
    async with served(folder, kind) as (server, policy):
        server.first_token_by = "41"
        with pytest.raises(PolicyError, match="labels its weights 41, 0, but version 0 was published"):
            await policy.get_action(HELLO)


async def test_a_server_that_is_down_is_an_error(folder: Path) -> None:
    async with served(folder, "vllm") as (server, policy):
        await server.__aexit__(None, None, None)
        with pytest.raises(PolicyError, match=r"version 1 was not published: .*127\.0\.0\.1.*; nothing is published"):
            await policy.publish(1)
        assert policy.version == 0


async def test_missing_routes_are_an_error_with_the_fix(folder: Path) -> None:
    async with served(folder, "vllm", has_admin=False) as (_, policy):
        with pytest.raises(PolicyError, match=r"HTTP 404.*; set VLLM_SERVER_DEV_MODE=1, or check base_url"):
            await policy.publish(1)


@pytest.mark.parametrize("kind", KINDS)
async def test_response_without_token_ids_or_labels_is_an_error(folder: Path, kind: Kind) -> None:
    async with served(folder, kind, says_ids=False) as (_, policy):
        with pytest.raises(PolicyError, match="no prompt_ids, because `return_token_ids` is disabled or not supported"):
            await policy.get_action(HELLO)
    async with served(folder, kind, says_versions=False) as (_, policy):
        with pytest.raises(PolicyError, match="does not label its weights, but version 0 was published"):
            await policy.get_action(HELLO)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"server": "vlm"}, "server"),
        ({"server": "vllm", "top_p": 0.9}, "'top_p' is not allowed for a policy that is being trained"),
        ({"server": "vllm", "extra_body": {"top_k": 5}}, "'top_k' is not allowed for a policy that is being trained"),
    ],
)
def test_invalid_options_are_rejected(folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ServedPolicy(folder, folder, base_url="http://127.0.0.1:9/v1", **options)
