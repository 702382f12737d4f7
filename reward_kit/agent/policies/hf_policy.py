"""`HFAgentPolicy`, which acts with any causal language model from `transformers` and uses exact token ids.

A session's context consists of the exact token ids of its episode so far and of the text that the chat template adds
for new messages. Sampled tokens are recorded with their log-probabilities, the version of the weights, and the ids that
a constraint allowed. All sessions share one engine, which uses a copy of the trained weights.
"""

from __future__ import annotations

import copy
from array import array
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from reward_kit.agent.policies.hf.action_formats import ActionFormat, Plain, ToolSchema, find_action_format, tools_of
from reward_kit.agent.policies.hf.chat_layout import ChatLayout, RecentResults, TokenConversation, tools_given
from reward_kit.agent.policies.hf.constraints import Choices, TurnConstraints
from reward_kit.agent.policies.hf.engine import Engine, Slot
from reward_kit.agent.policies.hf.model import OPTIONS, ModelSource, PolicyWithValue, merged_state_dict, settle_options
from reward_kit.agent.policies.hf.sampling import Sampling
from reward_kit.agent.policy_interface import AgentPolicy, EpisodeContext, PastTurn, PolicyOutput
from reward_kit.environments.base import ToolSpec
from reward_kit.errors import ConfigError, PolicyError, type_name
from reward_kit.models import Message
from reward_kit.validation import check_positive

_TOOL_SETS = 4096  # size of the cache of prepared tools
_TOOL_ROLES = ("tool", "user")
_TEXT = Plain()  # without tools, every answer is plain text


class HFAgentPolicy(AgentPolicy):
    """A trainable policy that acts with a causal language model.

    Args:
        model: a directory written by `save_pretrained`, a name on the hub, or a model object.
        tokenizer: a tokenizer, or the directory or name of one. The default is the tokenizer saved with the model.
        action_format: the format of tool calls: hermes, llama, mistral, template, plain or bare. The default is the
            format saved with the model. If none is saved, it is inferred from the tokenizer and the chat template.
        temperature: the divisor of the logits. If it is 0, the most likely token is selected.
        top_p: the total probability of the smallest set of tokens to sample from. If it is below 1, the episodes cannot
            be used for training, because the excluded tokens are not recorded.
        top_k: the number of most likely tokens to sample from. If it is 0, all tokens are used. Otherwise, the episodes
            cannot be used for training, for the same reason as with `top_p`.
        max_new_tokens: the maximum number of tokens in one answer.
        constrain: True to force every answer to be a tool call with arguments that are valid for its schema.
        tools_in_prompt: True to pass the tools to the chat template. The default is the value with which the model was
            trained. If none is saved, it is True.
        tool_role: the role of tool results in the prompt, "tool" or "user". The default is the role with which the
            model was trained. If none is saved, it is "tool".
        chat_template: a Jinja template that replaces the tokenizer's template, or a file that contains such a template.
        template_options: the variables for the chat template, such as `{enable_thinking: false}`.
        lockstep: True to sample for all open sessions together, which makes runs bitwise reproducible.
        max_sessions: the maximum number of contexts to keep in the cache.
        max_context: the maximum number of tokens in a context. The default is the model's limit.
        cuda_graphs: True to sample with CUDA graphs, which saves the time in which Python starts each operation. If
            that is impossible, a warning is logged and they are not used.
        value_head: True to add a critic to the model.
        device: the device for the weights. "auto" selects the accelerator, if there is one. A model object stays on its
            device. With "meta", no weights are loaded, so the policy cannot act, but everything else works.
        dtype: the dtype of the weights. "auto" selects bfloat16 on an accelerator and float32 on the CPU. A model
            object keeps its dtype.
        download: True to download missing files from the hub.

    Attributes:
        sampling: the sampling options.
        taught: the options that are saved with the model.
        lockstep: the argument with this name. If it is True, collectors open all sessions of a batch together.
        version: the version of the weights in use.

    Raises:
        ConfigError: If the model or the tokenizer is missing, or an option is invalid.
    """

    is_free = True
    maybe_path_options = ("model", "tokenizer", "chat_template")

    def __init__(
        self,
        model: str | Path | PreTrainedModel | PolicyWithValue,
        tokenizer: str | Path | PreTrainedTokenizerBase | None = None,
        *,
        action_format: str = "auto",
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        max_new_tokens: int = 512,
        constrain: bool = False,
        tools_in_prompt: bool | None = None,
        tool_role: str | None = None,
        chat_template: str | Path | None = None,
        template_options: Mapping[str, Any] | None = None,
        lockstep: bool = False,
        max_sessions: int = 64,
        max_context: int | None = None,
        cuda_graphs: bool = False,
        value_head: bool = False,
        device: str = "auto",
        dtype: str = "auto",
        download: bool = False,
    ) -> None:
        if tool_role not in (None, *_TOOL_ROLES):
            raise ConfigError(f"tool_role must be tool or user, got {tool_role!r}")
        check_positive("temperature", temperature, allow_zero=True)
        check_positive("top_p", top_p)
        check_positive("top_k", top_k, is_integer=True, allow_zero=True)
        counts = {"max_new_tokens": max_new_tokens, "max_sessions": max_sessions, "max_context": max_context}
        for name, count in counts.items():
            if name != "max_context" or count is not None:
                check_positive(name, count, is_integer=True)
        switches = {"constrain": constrain, "lockstep": lockstep, "cuda_graphs": cuda_graphs, "value_head": value_head}
        for name, switch in {**switches, "download": download, "tools_in_prompt": tools_in_prompt}.items():
            if not isinstance(switch, bool) and not (name == "tools_in_prompt" and switch is None):
                raise ConfigError(f"{name} must be true or false, got {switch!r}, {type_name(switch)}")
        self.sampling = Sampling(temperature, top_p, top_k).check()
        self.lockstep = lockstep
        self._max_new_tokens, self._constrains = max_new_tokens, constrain
        self._has_value = value_head or isinstance(model, PolicyWithValue)
        self._source = ModelSource.parse(model, download, device, dtype) if isinstance(model, str | Path) else None
        self._given = None if isinstance(model, str | Path) else self._with_head(model)
        if isinstance(tokenizer, PreTrainedTokenizerBase):
            self.tokenizer = tokenizer
        elif self._source is None:
            raise ConfigError("tokenizer: missing; pass the tokenizer that belongs to the model object")
        else:
            self.tokenizer = self._source.load_tokenizer(str(tokenizer) if tokenizer is not None else None)
        chosen = {"action_format": None if action_format == "auto" else action_format}
        self.taught = settle_options(
            self.tokenizer, {**chosen, "tools_in_prompt": tools_in_prompt, "tool_role": tool_role}
        )
        self._prompt_options = {**OPTIONS, **self.taught}
        format_name = self._prompt_options.pop("action_format")
        acting = copy.deepcopy(self._given) if self._given is not None else self._load()
        language_model = _language_model(acting)
        config = language_model.config.get_text_config(decoder=True)
        if len(self.tokenizer) > int(config.vocab_size):
            sizes = (
                f"the tokenizer has {len(self.tokenizer)} tokens, but the model's vocabulary has {config.vocab_size}"
            )
            raise ConfigError(f"tokenizer: {sizes}; use the tokenizer of this model")
        template = str(chat_template) if chat_template is not None else None
        if template is not None and (isinstance(chat_template, Path) or "{" not in template):
            try:
                template = Path(template).read_text(encoding="utf-8")
            except (OSError, UnicodeError) as error:
                raise ConfigError(f"chat_template: cannot read {template}: {error}") from None
        self._layout = ChatLayout(self.tokenizer, template, template_options)
        self._form = find_action_format(format_name, self.tokenizer, self._layout.source, self._layout.opening)
        end_id = self._layout.end_id if self._layout.end_id is not None else self.tokenizer.eos_token_id
        if not isinstance(end_id, int):
            raise ConfigError("tokenizer: neither eos_token nor the chat template defines an end-of-answer token")
        self._end_id = end_id
        self._stop_ids = _stop_ids(language_model, self.tokenizer, end_id)
        if max_context is None:
            known = (getattr(config, "max_position_embeddings", None), self.tokenizer.model_max_length)
            limits = [int(size) for size in known if size is not None and size < 10**9]
            if not limits:
                raise ConfigError("max_context: the model's configuration has no context length; set max_context")
            max_context = min(limits)
        if max_new_tokens >= max_context:
            raise ConfigError(
                f"max_new_tokens: {max_new_tokens} leaves no room for a prompt in a context of {max_context} tokens"
            )
        self._constraints = TurnConstraints(self._layout, self.tokenizer, end_id, max_new_tokens)
        self._prepared = RecentResults(_TOOL_SETS)
        self._started: Engine | None = None
        if not any(parameter.is_meta for parameter in acting.parameters()):
            self._started = Engine(
                language_model,
                stop_ids=sorted(self._stop_ids),
                max_context=max_context,
                max_slots=max_sessions,
                lockstep=lockstep,
                cuda_graphs=cuda_graphs,
                value_head=getattr(acting, "value_head", None),
            )

    def __repr__(self) -> str:
        name = self._source.name if self._source is not None else type(_language_model(self.module)).__name__
        return f"HFAgentPolicy({name!r})"

    @cached_property
    def module(self) -> nn.Module:
        """The weights to train: a `transformers` model or a `PolicyWithValue`. The engine uses a copy of these weights.

        Weights from a directory are loaded again when this property is first used, because a policy that only acts
        needs no second copy.
        """
        return self._given if self._given is not None else self._load()

    def _load(self) -> nn.Module:
        assert self._source is not None
        return self._with_head(self._source.load_model())

    def _with_head(self, model: nn.Module) -> nn.Module:
        return PolicyWithValue(model) if self._has_value and not isinstance(model, PolicyWithValue) else model

    @property
    def _engine(self) -> Engine:
        if self._started is None:
            raise PolicyError("this policy has no weights (device: meta) and cannot act")
        return self._started

    @property
    def pad_token_id(self) -> int:
        """The token id used to pad rows. No token attends to padding."""
        pad = self.tokenizer.pad_token_id
        return int(pad) if isinstance(pad, int) else self._end_id

    @property
    def version(self) -> int:
        """The version of the weights in use, or 0 without weights."""
        return self._started.version if self._started is not None else 0

    @property
    def untrainable_reason(self) -> str | None:
        """The reason why recorded episodes cannot be used for training, or None if they can be used."""
        if self.sampling.temperature == 0:
            return "with temperature 0, every token has probability one"
        if self.sampling.top_p < 1 or self.sampling.top_k > 0:
            return "top_p and top_k exclude tokens without recording them; set top_p: 1 and top_k: 0"
        return None

    async def open(self, context: EpisodeContext) -> AgentPolicy:
        """Open a session for one episode. The session has its own context, random generator and slot in the engine."""
        rank = (context.sample_id, context.rollout_index, context.rollout_id)
        return HFSession(self, self._engine.open(rank, context.seed))

    async def get_action(
        self, observation: Sequence[Message], available_tools_specs: list[ToolSpec] | None = None
    ) -> PolicyOutput:
        """Return one action outside of an episode."""
        session = await self.open(EpisodeContext("", 0))
        try:
            return await session.get_action(observation, available_tools_specs)
        finally:
            await session.close()

    def conversation_after(self, turns: Sequence[PastTurn]) -> TokenConversation:
        """Return the context of an episode after these turns; see `HFSession.resume`."""
        conversation, is_exact = self._new_conversation(), False
        for number, turn in enumerate(turns):
            prompt, tools = conversation.prompt(turn.observation, tools_given(turn.tools)), tools_of(turn.tools)
            facts, text = turn.output.log_probs or {}, turn.output.raw_policy_output
            recorded, token_ids = facts.get("prompt_ids"), facts.get("token_ids")
            is_equal = recorded is not None and token_ids is not None and list(recorded) == prompt.ids
            if is_exact and not is_equal:
                raise PolicyError(
                    f"the prompt of turn {number} has different tokens than in the recorded episode, although the "
                    "tokens before it are identical; the chat template or the tools have changed"
                )
            is_exact = is_equal
            if token_ids is None or text is None or not is_exact:
                form = self.form_of(tools) if tools else _TEXT
                text = form.write_action(turn.output.action_structured, tools)
                token_ids = [*self._layout.encoded(text), self._end_id]
            conversation.answered([int(token) for token in token_ids], text)
        return conversation

    def _new_conversation(self) -> TokenConversation:
        return TokenConversation(self._layout, self._stop_ids, **self._prompt_options)

    async def publish(self, version: int, state_dict: Mapping[str, Tensor] | None = None) -> None:
        """Act with new weights from the next turn on.

        The names of the weights must be those in `module`. By default, the current weights of `module` are used, with
        trained adapters merged.

        Raises:
            PolicyError: If the weights do not match the model.
        """
        given = merged_state_dict(self.module) if state_dict is None else state_dict
        weights: dict[str, Tensor] = {}
        head: dict[str, Tensor] = {}
        for name, tensor in given.items():
            if name.startswith("value_head."):
                head[name.removeprefix("value_head.")] = tensor
            else:
                weights[name.removeprefix("policy.")] = tensor
        await self._engine.publish(weights, version, value_head=head)

    async def close(self) -> None:
        """Stop the engine."""
        if self._started is not None:
            await self._started.close()

    def _prepare(self, specs: Sequence[ToolSpec] | None) -> tuple[list[ToolSchema], ActionFormat | None]:
        tools = tools_of(copy.deepcopy(specs))  # specifications may be modified in place
        return tools, self.form_of(tools) if tools else None

    def form_of(self, tools: Sequence[ToolSchema]) -> ActionFormat:
        """Return the action format for calls of these tools.

        Raises:
            PolicyError: If the format is unknown, or cannot express calls of these tools.
        """
        if isinstance(self._form, PolicyError):
            raise PolicyError(str(self._form))
        self._form.check(tools)
        return self._form


class HFSession(AgentPolicy):
    """A session of an `HFAgentPolicy` for one episode."""

    def __init__(self, policy: HFAgentPolicy, slot: Slot) -> None:
        self._policy, self._slot, self._turn = policy, slot, 0
        self._conversation = policy._new_conversation()

    async def resume(self, turns: Sequence[PastTurn]) -> None:
        """Restore the context of earlier turns.

        If this model and chat template produced the turns, the context consists of their exact tokens. Otherwise, the
        context is rendered again, with the actions in this policy's action format.

        Raises:
            PolicyError: If the chat template renders only some of the recorded prompts, or the action format cannot
                express an action.
        """
        self._conversation, self._turn = self._policy.conversation_after(turns), len(turns)

    async def get_action(
        self, observation: Sequence[Message], available_tools_specs: list[ToolSpec] | None = None
    ) -> PolicyOutput:
        """Sample the next answer.

        Raises:
            LimitError: If the context is full.
            PolicyError: If the chat template rejects the messages, the tools cannot be called, or the model failed.
        """
        policy, given = self._policy, tools_given(available_tools_specs)
        tools, form = policy._prepared.get(given.key, lambda: policy._prepare(available_tools_specs))
        prompt = self._conversation.prompt(observation, given)
        prompt_ids = array("i", prompt.ids)
        constraint = None
        if form is not None and policy._constrains:
            constraint = policy._constraints.start(given.key, tools, form)
        generated = await policy._engine.generate(
            self._slot,
            prompt_ids,
            max_new_tokens=policy._max_new_tokens,
            sampling=policy.sampling,
            constraint=constraint,
        )
        text = constraint.chosen if isinstance(constraint, Choices) else None
        token_ids = generated.token_ids
        if text is None:
            has_ended = bool(token_ids) and token_ids[-1] in policy._stop_ids
            text = policy._layout.decode(token_ids[:-1] if has_ended else token_ids)
        self._conversation.answered(token_ids, text)
        action = (form or _TEXT).action(text, tools, self._turn, may_reason=constraint is None)
        self._turn += 1
        log_probs = {
            "prompt_ids": prompt_ids,
            "token_ids": token_ids,
            "logprobs": generated.logprobs,
            "policy_version": generated.policy_version,
            "usage": {"prompt_tokens": len(prompt_ids), "completion_tokens": len(token_ids)},
            "finish_reason": generated.finish_reason,
            "segment_reason": prompt.reason,
            "allowed_ids": generated.allowed_ids,
        }
        known = {key: value for key, value in log_probs.items() if value is not None}
        return PolicyOutput(action, text, known, generated.value)

    async def close(self) -> None:
        """Free the slot that the session uses in the engine."""
        await self._policy._engine.close_slot(self._slot)


def _language_model(model: nn.Module) -> PreTrainedModel:
    """Return the language model without a value head."""
    inner = model.policy if isinstance(model, PolicyWithValue) else model
    if not isinstance(inner, PreTrainedModel):
        raise ConfigError(f"model must be a directory, a name or a PreTrainedModel, got {type(inner).__name__}")
    return inner


def _stop_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, end_id: int) -> Collection[int]:
    config = model.generation_config
    named = [config.eos_token_id if config is not None else None, tokenizer.eos_token_id, end_id]
    listed = [ids if isinstance(ids, list | tuple) else [ids] for ids in named if ids is not None]
    return frozenset(int(each) for ids in listed for each in ids)
