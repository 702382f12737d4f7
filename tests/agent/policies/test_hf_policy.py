"""Test language models in real environments, with recorded log-probabilities recomputed from the tokens."""

import json
from contextlib import asynccontextmanager

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from reward_kit.agent.policies import make_policy
from reward_kit.agent.policies.hf.action_formats import tools_of
from reward_kit.agent.policies.hf.chat_layout import TOOLS_CHANGED
from reward_kit.agent.policies.hf.graphs import RECORDERS
from reward_kit.agent.policies.hf.model import PolicyWithValue, remember, remembered
from reward_kit.agent.policies.hf_policy import HFAgentPolicy
from reward_kit.agent.policies.simple_policies import ExpertPolicy
from reward_kit.agent.rl_rollout_worker import RLRolloutWorker, collect_group
from reward_kit.agent.samples import Sample
from reward_kit.checks import check_episode
from reward_kit.environments.household_problems import HOLDS
from reward_kit.episodes.record import episode_from_record, episode_to_record, get_facts
from reward_kit.errors import ConfigError, PolicyError
from reward_kit.models import Message, TaskDefinitionModel
from reward_kit.rl.model_kit.models import load_model, save_model
from reward_kit.rl.model_kit.sft import DemonstratingPolicy, Demonstrations
from reward_kit.rl.training.rollouts import LockstepBarrier
from reward_kit.rl.training.session import save_weights
from reward_kit.tokens import build_rows
from tests.agent.policies.hf.small_models import CHATML, PLAIN_TEXT, byte_tokenizer, small_llama, word_tokenizer
from tests.agent.policies.hf.tape import TapeRecorder
from tests.devices import DEVICE, randomize

pytestmark = pytest.mark.device

BYTES = byte_tokenizer()
VERBS = "act go to open close take from move clean heat cool with slice use examine look inventory help"
HOUSEHOLD_WORDS = sorted({*VERBS.split(), *HOLDS, *(thing for held in HOLDS.values() for thing in held)})
WORDS = word_tokenizer([*HOUSEHOLD_WORDS, *map(str, range(1, 30))])
LAKE = TaskDefinitionModel(
    name="lake",
    resource_type="gymnasium",
    base_resource_config={"env_id": "FrozenLake-v1", "env_kwargs": {"is_slippery": False}},
    max_episode_steps=5,
)
CHORES = TaskDefinitionModel(
    name="chores",
    resource_type="alfworld",
    base_resource_config={"action_form": "choice", "index": 3},
    max_episode_steps=6,
)


@asynccontextmanager
async def open_policy(tokenizer=BYTES, model=None, **options):
    policy = HFAgentPolicy(model or small_llama(len(tokenizer), context=4096), tokenizer, **options)
    try:
        yield policy
    finally:
        await policy.close()


def undecided(tokenizer):
    """Return a model with a nearly uniform distribution."""
    return small_llama(len(tokenizer), context=4096, scale=0.02)


async def episodes_of(policy, task, size=3, run_seed=0):
    episodes = await collect_group(RLRolloutWorker(task, policy), Sample(task.name), size, run_seed=run_seed)
    for episode in episodes:
        assert episode.custom_data["failure"] is None
        assert [finding for finding in check_episode(episode) if finding.level == "error"] == []
    return episodes


@torch.no_grad()
def gap(policy, episodes, padding, temperature=1.0):
    """Return the largest difference of recorded log-probabilities from a plain forward pass under equal masks."""
    rows = build_rows(episodes, pad_token_id=policy.pad_token_id, padding=padding)
    model, worst = getattr(policy.module, "policy", policy.module).eval(), 0.0
    for row in range(len(rows)):
        columns = np.flatnonzero(rows.batch["attention_mask"][row])
        ids = torch.as_tensor(rows.batch["input_ids"][row, columns]).long()
        logits_TV = model(ids[None]).logits[0] / temperature
        allowed = rows.non_tensor_batch["allowed_ids"][row]
        if allowed is not None:
            mask_MV = torch.as_tensor(allowed.mask(logits_TV.shape[1]))
            places = torch.as_tensor(allowed.places.astype(np.int64)) - 1
            logits_TV[places] = logits_TV[places].masked_fill(~mask_MV, -torch.inf)
        logprobs_TV = logits_TV.log_softmax(dim=-1)
        for place in np.flatnonzero(rows.batch["action_mask"][row, columns]):
            recorded = rows.batch["logprobs"][row, columns[place]]
            worst = max(worst, abs(float(logprobs_TV[place - 1, ids[place]]) - recorded))
    return worst


@pytest.mark.parametrize("padding", ["right", "left", "outer"])
async def test_recorded_logprobs_match_the_model_on_the_exact_tokens(padding):
    async with open_policy(max_new_tokens=8, temperature=0.7, action_format="plain") as policy:
        episodes = await episodes_of(policy, LAKE)
        assert gap(policy, episodes, padding, 0.7) < 1e-4
        assert all(len(episode.tokens.segments) == 1 for episode in episodes)
        assert gap(policy, episodes, padding, 1.0) > 1e-2


@pytest.mark.parametrize("form", ["hermes", "llama", "mistral", "plain", "bare"])
async def test_constrained_policy_makes_only_valid_calls_and_records_masks(form):
    async with open_policy(constrain=True, action_format=form, max_new_tokens=80) as policy:
        episodes = await episodes_of(policy, LAKE)
        for episode in episodes:
            assert all(episode.get_infos(t + 1)["is_action_valid"] for t in range(len(episode)))
            assert {action["arguments"]["action"] for action in episode.get_actions()} <= {
                "left",
                "down",
                "right",
                "up",
            }
            record = json.loads(json.dumps(episode_to_record(episode)))
            assert episode_from_record(record).tokens == episode.tokens
        assert len({str(episode.get_actions()) for episode in episodes}) > 1
        assert gap(policy, episodes, "right") < 1e-4


@pytest.mark.parametrize("cuda_graphs", [False, True])
async def test_listed_commands_constrain_every_step(cuda_graphs, monkeypatch):
    if DEVICE.type != "cuda":
        monkeypatch.setitem(RECORDERS, DEVICE.type, TapeRecorder)
    options = {"constrain": True, "action_format": "bare", "tools_in_prompt": False, "max_new_tokens": 12}
    async with open_policy(WORDS, undecided(WORDS), cuda_graphs=cuda_graphs, **options) as policy:
        episodes = await episodes_of(policy, CHORES, size=4)
        assert len({action["arguments"]["command"] for e in episodes for action in e.get_actions()}) > 3
        infos = [episode.get_infos(t + 1) for episode in episodes for t in range(len(episode))]
        assert all(info["is_action_valid"] for info in infos)
        assert gap(policy, episodes, "left") < 1e-4
        assert policy.untrainable_reason is None
        assert [segment.reason for segment in episodes[0].tokens.segments] == ["start"]
        assert policy._engine.has_graphs is cuda_graphs


async def test_free_text_follows_the_grammar_and_records_masks():
    task = CHORES.model_copy(
        update={"base_resource_config": {"action_form": "text", "index": 3}, "max_episode_steps": 2}
    )
    async with open_policy(constrain=True, action_format="plain", max_new_tokens=24, tools_in_prompt=False) as policy:
        episodes = await episodes_of(policy, task, size=2)
        assert {action["name"] for episode in episodes for action in episode.get_actions()} == {"act"}
        first = next(ids for ids in episodes[0].tokens.turns()[0].allowed_ids if len(ids) > 1)
        # A text begins with any byte that begins a character and is neither blank nor a brace.
        assert BYTES.encode("x")[0] in first and len(first) > 100
        assert not {BYTES.encode(sign)[0] for sign in " \n{"} & set(first)
        assert gap(policy, episodes, "outer") < 1e-4


async def test_changed_tools_in_the_prompt_begin_segments_with_a_reason():
    options = {"constrain": True, "action_format": "plain", "max_new_tokens": 12}
    async with open_policy(WORDS, undecided(WORDS), **options) as policy:
        episodes = await episodes_of(policy, CHORES, size=4)
        reasons = {segment.reason for episode in episodes for segment in episode.tokens.segments[1:]}
        assert reasons == {TOOLS_CHANGED}
        assert gap(policy, episodes, "right") < 1e-4


async def test_usage_version_value_and_end_token_are_recorded():
    module = PolicyWithValue(small_llama(len(BYTES), context=4096))
    randomize(module.value_head.weight, seed=1)
    async with open_policy(model=module, constrain=True, action_format="plain") as policy:
        (episode,) = await episodes_of(policy, LAKE, size=1)
        first = episode.tokens.turns()[0]
        with torch.no_grad():
            ids = torch.as_tensor(first.prompt_ids)[None]
            hidden = module.policy.model(ids).last_hidden_state[0, -1]
            expected = module.value_head(hidden).item()
        assert episode.get_extra_model_outputs("value_estimate", 0) == pytest.approx(expected, abs=1e-4)
        info = episode.get_infos(1)
        assert info["finish_reason"] == "stop"
        assert info["usage"] == {"prompt_tokens": len(first.prompt_ids), "completion_tokens": len(first.token_ids)}
        assert first.policy_version == 0
        assert first.token_ids[-1] == BYTES.eos_token_id


async def test_cut_answer_is_closed_by_unsampled_tokens():
    async with open_policy(model=undecided(BYTES), max_new_tokens=3, action_format="plain") as policy:
        (episode,) = await episodes_of(policy, LAKE, size=1)
        assert episode.get_infos(1)["finish_reason"] == "length"
        first, second = (episode.tokens.turns()[t] for t in (0, 1))
        assert BYTES.eos_token_id not in first.token_ids
        assert second.segment_reason is None
        assert second.prompt_ids[len(first.prompt_ids) + 3] == BYTES.eos_token_id


async def test_full_context_ends_the_episode_as_a_limit():
    async with open_policy(max_new_tokens=50, max_context=700, action_format="plain") as policy:
        (episode,) = await episodes_of(policy, LAKE.model_copy(update={"max_episode_steps": 50}), size=1)
        assert episode.custom_data["stop_reason"] == "context_limit"
        assert len(episode) > 0


async def test_episodes_depend_only_on_the_seed():
    async def play(run_seed):
        async with open_policy(max_new_tokens=6, action_format="plain", lockstep=True) as policy:
            episodes = await episodes_of(policy, LAKE, run_seed=run_seed)
            return [episode.tokens.get_state() for episode in episodes]

    first = await play(0)
    assert await play(0) == first
    assert await play(1) != first
    assert len({str(state["ids"]) for state in first}) == 3


async def test_new_weights_act_after_publication():
    async with open_policy(constrain=True, action_format="bare", max_new_tokens=20, temperature=0) as policy:
        before = (await episodes_of(policy, LAKE, size=1))[0].get_actions()
        with torch.no_grad():
            policy.module.lm_head.weight.neg_()
        assert (await episodes_of(policy, LAKE, size=1))[0].get_actions() == before
        await policy.publish(3)
        episode = (await episodes_of(policy, LAKE, size=1))[0]
        assert episode.get_actions() != before
        assert {span.policy_version for span in episode.tokens.spans} == {3}
        assert policy.version == 3


async def test_critic_and_model_are_published_together():
    module = PolicyWithValue(small_llama(len(BYTES), context=4096))
    async with open_policy(model=module, constrain=True, action_format="bare", max_new_tokens=20) as policy:

        async def value():
            (episode,) = await episodes_of(policy, LAKE, size=1)
            return episode.get_extra_model_outputs("value_estimate", 0)

        assert await value() == 0.0
        with torch.no_grad():
            module.value_head.bias.fill_(7.0)
            module.policy.lm_head.weight.neg_()
        for wrong, message in (("value_head.bias", "missing bias of the value head"), ("policy.lm_head.weight", "")):
            partial = {name: weight for name, weight in module.state_dict().items() if name != wrong}
            with pytest.raises(PolicyError, match=message or "missing lm_head.weight"):
                await policy.publish(1, partial)
            assert await value() == 0.0
            assert policy.version == 0
        await policy.publish(1)
        assert await value() == pytest.approx(7.0)


async def test_weights_of_a_missing_critic_are_rejected():
    async with open_policy() as policy:
        weights = {**policy.module.state_dict(), "value_head.bias": torch.zeros(1)}
        with pytest.raises(PolicyError, match="unknown bias of the value head"):
            await policy.publish(1, weights)


def test_loading_hides_progress_bars_and_restores_the_user_setting(folder, capfd):
    from transformers.utils import logging

    hook = logging.set_tqdm_hook(None)
    logging.set_tqdm_hook(hook)
    was_enabled = logging.is_progress_bar_enabled()
    HFAgentPolicy(folder, action_format="plain").module  # noqa: B018
    assert "Loading" not in capfd.readouterr().err
    assert logging.is_progress_bar_enabled() == was_enabled
    assert logging.set_tqdm_hook(hook) is hook


async def test_text_task_needs_no_action_format():
    task = TaskDefinitionModel(name="talk", initial_user_prompt="Say something.")
    async with open_policy(byte_tokenizer(PLAIN_TEXT), max_new_tokens=4) as policy:
        (episode,) = await episodes_of(policy, task, size=1)
        assert episode.get_actions(0)["type"] == "text"
        output = await policy.get_action([Message(role="user", content="And alone?")])
        assert len(output.log_probs["token_ids"]) <= 4


async def test_untrainable_sampling_options_report_the_reason():
    for options, reason in (
        ({"temperature": 0}, "temperature 0"),
        ({"top_p": 0.9}, "top_p and top_k"),
        ({"top_k": 5}, "top_p and top_k"),
    ):
        async with open_policy(**options) as policy:
            assert reason in policy.untrainable_reason


async def test_undetectable_format_fails_the_episode_with_the_options():
    async with open_policy(byte_tokenizer(PLAIN_TEXT)) as policy:
        (episode,) = await collect_group(RLRolloutWorker(LAKE, policy), Sample("lake"), 1)
        assert "set action_format to hermes, llama, mistral, plain or bare" in episode.custom_data["failure"]["message"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "small"
    small_llama(len(BYTES), context=4096).save_pretrained(path)
    byte_tokenizer(CHATML).save_pretrained(path)
    return path


async def test_model_folder_is_loaded_and_its_module_can_be_trained(folder):
    options = {"model": "small", "max_new_tokens": 4, "action_format": "plain"}
    policy = make_policy("hf", {**options, "device": str(DEVICE), "dtype": "float32"}, folder.parent)
    assert isinstance(policy, HFAgentPolicy)
    episodes = await episodes_of(policy, LAKE, size=1)
    assert gap(policy, episodes, "right") < 1e-4
    with torch.no_grad():
        policy.module.lm_head.weight.zero_()
    assert gap(policy, await episodes_of(policy, LAKE, size=1), "right") > 1e-2
    await policy.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "./smal"}, r"model: directory .*/smal does not exist; did you mean 'small'\?"),
        ({"model": "/nowhere/model"}, "model: directory /nowhere/model does not exist"),
        ({"model": "."}, "has no config.json"),
        ({"model": "nobody/no-such-model"}, "neither a directory nor a model in the local hub cache"),
        (
            {"model": "smal"},
            r"model 'smal': it is neither a directory.* It was looked up in .*; did you mean 'small'\?",
        ),
        ({"model": "runs/mine/model"}, r"model: directory runs/mine/model does not exist\. It was looked up in /"),
        ({"model": "small", "tokenizer": "nobody/none"}, "tokenizer 'nobody/none'"),
        ({"model": "small", "temperature": -1}, "temperature: .*, got -1"),
        ({"model": "small", "dtype": "float31"}, "dtype: unknown type 'float31'; did you mean 'float32'"),
        (
            {"model": "small", "device": "abacus"},
            "device: 'abacus' cannot be used; on this machine, torch supports (only cpu|cpu and )",
        ),
        ({"model": "small", "tool_role": "robot"}, "tool_role must be tool or user"),
        ({"model": "small", "max_new_tokens": 0}, "max_new_tokens: expected a whole number above 0, got 0"),
        ({"model": "small", "max_new_tokens": "6"}, "max_new_tokens: expected a whole number above 0, got '6'"),
        ({"model": "small", "max_new_tokens": True}, "max_new_tokens: expected a whole number above 0, got True"),
        ({"model": "small", "max_sessions": 0}, "max_sessions: expected a whole number above 0, got 0"),
        ({"model": "small", "max_context": 0}, "max_context: expected a whole number above 0, got 0"),
        ({"model": "small", "max_context": 5000}, "max_context: 5000 exceeds the 4096 positions"),
        ({"model": "small", "temperature": "hot"}, "temperature: expected a number of at least 0, got 'hot'"),
        ({"model": "small", "lockstep": "yes"}, "lockstep must be true or false, got 'yes'"),
        ({"model": "small", "cuda_graphs": 1}, "cuda_graphs must be true or false, got 1"),
        ({"model": "small", "max_new_tokens": 4096}, "max_new_tokens: 4096 leaves no room for a prompt in a context"),
        ({"model": "small", "tokenizer": "."}, r"tokenizer: .* has no tokenizer; save it there with save_pretrained"),
        (
            {"model": "small", "action_format": "hermess"},
            "action_format: unknown format 'hermess'; did you mean 'hermes'",
        ),
        ({"model": "small", "chat_template": "./none.jinja"}, "chat_template: cannot read"),
        ({"model": "small", "chat_template": "{{ 1 +" + " " * 300}, "chat_template: "),
        (
            {"model": "small", "temprature": 1},
            "policy.temprature: unknown key for policy 'hf'; did you mean 'temperature'",
        ),
        ({}, "policy 'hf' needs policy.model"),
    ],
)
def test_invalid_option_raises_one_config_error(folder, options, message):
    with pytest.raises(ConfigError, match=message):
        make_policy("hf", options, folder.parent)


def test_model_with_missing_weights_is_rejected(tmp_path):
    # transformers draws missing weights at random, so the acting weights would differ from the trained weights.
    model = small_llama(len(BYTES))
    weights = {name: value for name, value in model.state_dict().items() if ".1." not in name and "lm_head" not in name}
    model.save_pretrained(tmp_path, state_dict=weights)
    byte_tokenizer(CHATML).save_pretrained(tmp_path)
    message = r"weights of \d+ parameters are missing: lm_head\.weight, model\.layers\.1\..* and \d+ more; save"
    for load in (HFAgentPolicy, load_model):
        with pytest.raises(ConfigError, match=message):
            load(tmp_path)
    assert HFAgentPolicy(tmp_path, device="meta").version == 0, "only the configuration is read"


def test_model_object_without_tokenizer_is_rejected():
    with pytest.raises(ConfigError, match="tokenizer: missing; pass the tokenizer"):
        HFAgentPolicy(small_llama(10))


def test_tokenizer_larger_than_the_model_is_rejected():
    with pytest.raises(
        ConfigError, match=r"tokenizer: the tokenizer has \d+ tokens, but the model's vocabulary has 10"
    ):
        HFAgentPolicy(small_llama(10), BYTES)


async def test_weights_of_another_model_are_rejected():
    async with open_policy() as policy:
        with pytest.raises(PolicyError, match="do not match the model"):
            await policy.publish(1, {"nothing": torch.zeros(1)})


def test_unavailable_device_is_reported_with_available_devices(folder):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    message = r"^device: 'cuda' cannot be used; on this machine, torch supports (only cpu|cpu and \w+) \("
    with pytest.raises(ConfigError, match=message) as told:
        make_policy("hf", {"model": "small", "device": "cuda"}, folder.parent)
    assert "AssertionError" not in str(told.value)


class TestStoredOptions:
    """Options stored with a model are applied again, and contradicting options are rejected."""

    async def test_options_are_saved_with_the_tokenizer(self, tmp_path):
        async with open_policy(byte_tokenizer(), action_format="bare", tools_in_prompt=False) as policy:
            assert policy.taught == {"action_format": "bare", "tools_in_prompt": False}
            assert save_weights(tmp_path / "model", policy)
        # By our own tools, and by nothing but transformers.
        AutoTokenizer.from_pretrained(tmp_path / "model").save_pretrained(tmp_path / "model")
        read = make_policy("hf", {"model": "model"}, tmp_path)
        assert isinstance(read, HFAgentPolicy)
        assert read.taught == {"action_format": "bare", "tools_in_prompt": False}
        one_text = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
        act = {"type": "function", "function": {"name": "act", "description": "", "parameters": one_text}}
        assert read.form_of(tools_of([act])).name == "bare"
        again = make_policy("hf", {"model": "model", "action_format": "bare", "tool_role": "user"}, tmp_path)
        assert again.taught == {"action_format": "bare", "tools_in_prompt": False, "tool_role": "user"}

    @pytest.mark.parametrize(
        ("options", "told"),
        [
            (
                {"action_format": "plain"},
                "action_format: the model was trained with bare .* the option is plain; remove",
            ),
            ({"tools_in_prompt": True}, "tools_in_prompt: the model was trained with false .* the option is true"),
        ],
    )
    def test_contradicting_options_are_rejected(self, tmp_path, options, told):
        tokenizer = byte_tokenizer()
        remember(tokenizer, action_format="bare")
        remember(tokenizer, tools_in_prompt=False)
        save_model(tmp_path / "model", small_llama(len(tokenizer), context=4096), tokenizer)
        with pytest.raises(ConfigError, match=told):
            make_policy("hf", {"model": "model", **options}, tmp_path)

    def test_unknown_stored_options_are_ignored_and_cannot_be_saved(self):
        tokenizer = byte_tokenizer()
        with pytest.raises(ConfigError, match="unknown option temperature"):
            remember(tokenizer, temperature=1.0)
        tokenizer.init_kwargs["reward_kit"] = {"of_a_later_release": 1, "tool_role": "user"}
        assert remembered(tokenizer) == {"tool_role": "user"}


def test_meta_device_builds_the_policy_without_weights(folder):
    policy = make_policy("hf", {"model": "small", "device": "meta", "value_head": True}, folder.parent)
    assert {one.device.type for one in policy.module.parameters()} == {"meta"}
    assert "value_head.weight" in dict(policy.module.named_parameters())
    assert policy.pad_token_id == make_policy("hf", {"model": "small"}, folder.parent).pad_token_id


@pytest.mark.parametrize("lockstep", [False, True])
@pytest.mark.parametrize(("task", "form"), [(LAKE, "hermes"), (CHORES, "bare")], ids=["lake", "chores"])
async def test_continuation_begins_with_the_exact_tokens(task, form, lockstep):
    tokenizer = BYTES if form == "hermes" else WORDS
    options = {"action_format": form, "constrain": True, "max_new_tokens": 90, "lockstep": lockstep}
    async with open_policy(tokenizer, undecided(tokenizer), **options) as policy:
        acting = LockstepBarrier(policy) if lockstep else policy
        worker = RLRolloutWorker(task, acting)
        if lockstep:
            acting.expect(1)
        episode = await worker.collect_episode()
        assert get_facts(episode)["failure"] is None
        turns = episode.tokens.turns()
        for step in range(len(episode)):
            continued = await worker.continue_from(episode, step, 2)
            for one in continued:
                own = one.tokens.turns()
                assert all(own[t].token_ids.tolist() == turns[t].token_ids.tolist() for t in range(step))
                assert own[step].prompt_ids.tolist() == turns[step].prompt_ids.tolist()
                assert own[step].segment_reason == turns[step].segment_reason
                assert [finding for finding in check_episode(one) if finding.level == "error"] == []
        assert len({str(one.tokens.ids) for one in continued}) == 2  # each draws its own random numbers
        rows = build_rows(continued, pad_token_id=policy.pad_token_id)
        sampled = sum(len(turn.token_ids) for one in continued for turn in one.tokens.turns().values())
        assert rows.batch["action_mask"].sum() == sampled


async def test_greedy_continuation_repeats_the_episode():
    async with open_policy(WORDS, undecided(WORDS), action_format="bare", constrain=True, temperature=0.0) as policy:
        worker = RLRolloutWorker(CHORES, policy)
        episode = await worker.collect_episode()
        for step in range(len(episode)):
            (again,) = await worker.continue_from(episode, step)
            assert again.tokens.ids == episode.tokens.ids and again.messages == episode.messages


async def test_actions_of_a_different_policy_are_written_in_the_format_of_this_one():
    options = {"action_format": "bare", "constrain": True}
    episode = await RLRolloutWorker(CHORES, ExpertPolicy()).collect_episode()
    writing = DemonstratingPolicy(ExpertPolicy(), Demonstrations(WORDS, **options))
    written = (await RLRolloutWorker(CHORES, writing).collect_episode()).tokens.turns()
    async with open_policy(WORDS, undecided(WORDS), max_new_tokens=90, **options) as policy:
        (continued,) = await RLRolloutWorker(CHORES, policy).continue_from(episode, 3)
    own = continued.tokens.turns()
    assert min(own) == 3 and own[3].prompt_ids.tolist() == written[3].prompt_ids.tolist()
