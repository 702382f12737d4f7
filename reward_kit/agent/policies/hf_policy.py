"""Options of the policy that a file may have wrong: of another kind, or too small."""

from __future__ import annotations

import copy
from array import array
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from reward_kit.agent.policies.hf.action_formats import ActionFormat, Plain, Tool, tools_of
from reward_kit.agent.policies.hf.action_formats import action_format as recognised
from reward_kit.agent.policies.hf.chat_layout import ChatLayout, Conversation, Tools, tools_given
from reward_kit.agent.policies.hf.constraints import Choices, JsonGrammar, TurnConstraints
from reward_kit.agent.policies.hf.engine import Engine, Generated, Slot
from reward_kit.agent.policies.hf.model import OPTIONS, Origin, PolicyWithValue, merged_state_dict, settled
from reward_kit.agent.policies.hf.sampling import Sampling
from reward_kit.agent.policy_interface import AgentPolicy, EpisodeContext, PolicyOutput
from reward_kit.environments.base import ToolSpec
from reward_kit.errors import ConfigError, PolicyError, kind_of
from reward_kit.models import Message


def check_options(
    *, numbers: Mapping[str, object], whole: Mapping[str, tuple[object, int]], switches: Mapping[str, object]
) -> None:
    """Refuse what is of another kind than it should be.

    Args:
        numbers: by their names.
        whole: whole numbers, each with its least value.
        switches: what is true or false.

    Raises:
        ConfigError: see above.
    """
    for name, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise ConfigError(f"{name}: expected a number, got {number!r}, {kind_of(number)}")
    for name, (count, least) in whole.items():
        if isinstance(count, bool) or not isinstance(count, int):
            raise ConfigError(f"{name}: expected a whole number, got {count!r}, {kind_of(count)}")
        if count < least:
            raise ConfigError(f"{name}: {count} is below {least}")
    for name, switch in switches.items():
        if not isinstance(switch, bool):
            raise ConfigError(f"{name}: expected true or false, got {switch!r}, {kind_of(switch)}")


def check_room(max_context: int, max_new_tokens: int) -> int:
    """The first of them, where an answer leaves room for a prompt.

    Raises:
        ConfigError: it does not, and every episode would end before its first step.
    """
    if max_new_tokens >= max_context:
        raise ConfigError(
            f"max_new_tokens: {max_new_tokens} leaves no room for a prompt in a context of {max_context} tokens"
        )
    return max_context


_TOOL_ROLES = ("tool", "user")

_TEXT = Plain()  # where there is no tool, everything is a text


class HFAgentPolicy(AgentPolicy):
    """Acts by a causal language model, and can be trained.

    Args:
        model: a folder that `save_pretrained` wrote, a name at the hub, or a model.
        tokenizer: the model's; a tokenizer, or where one is. By default it is with the model.
        action_format: how the model writes tool calls: hermes, llama, mistral, template, plain, bare; by default as it
            was trained, where that was kept with it, else as its tokenizer and chat template say.
        temperature: logits are divided by it; 0 takes the likeliest token.
        top_p: keep the fewest tokens that have this probability together. What it leaves out is not recorded, so that
            such episodes are not for training.
        top_k: keep so many of the likeliest tokens; 0 keeps all. Not for training either.
        max_new_tokens: of one answer.
        constrain: every answer is a tool call that is valid for its schema.
        tools_in_prompt: give the tools to the chat template; by default as the model was trained, else True.
        tool_role: the role under which results of tools appear in the prompt, "tool" or "user"; by default as the model
            was trained, else "tool".
        chat_template: Jinja, or a file of it, in place of the tokenizer's.
        template_options: variables of the chat template, such as `{enable_thinking: false}`.
        lockstep: sample for all open sessions at once, so that a run is the same bit for bit.
        max_sessions: contexts that are kept in memory at once.
        max_context: tokens of a context; by default what the model was made for.
        value_head: put a critic on the model.
        device: "auto" is the accelerator, where there is one. A model that is given stays where it is. "meta" reads no
            weights: the policy cannot act, but everything else is as it would be.
        dtype: "auto" is bfloat16 on an accelerator and float32 on the CPU. A model that is given keeps its own.
        download: fetch from the hub what is not here.

    Attributes:
        sampling: how tokens are drawn.
        taught: options that are kept with the model, for who saves it.
        lockstep: as given; who collects lets all sessions of a batch begin together.
        version: of the weights that act.

    Raises:
        ConfigError: there is no such model or tokenizer, or an option is wrong.
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
        value_head: bool = False,
        device: str = "auto",
        dtype: str = "auto",
        download: bool = False,
    ) -> None:
        if tool_role not in (None, *_TOOL_ROLES):
            raise ConfigError(f"tool_role: expected tool or user, got {tool_role!r}")
        context = {} if max_context is None else {"max_context": (max_context, 1)}
        check_options(
            numbers={"temperature": temperature, "top_p": top_p},
            whole={"top_k": (top_k, 0), "max_new_tokens": (max_new_tokens, 1), "max_sessions": (max_sessions, 1)}
            | context,
            switches={
                "constrain": constrain,
                "tools_in_prompt": True if tools_in_prompt is None else tools_in_prompt,
                "lockstep": lockstep,
                "value_head": value_head,
                "download": download,
            },
        )
        self.sampling = Sampling(temperature, top_p, top_k).check()
        self.lockstep = lockstep
        self._max_new_tokens, self._constrains = max_new_tokens, constrain
        self._has_value = value_head or isinstance(model, PolicyWithValue)
        self._origin = Origin.of(model, download, device, dtype) if isinstance(model, str | Path) else None
        self._given = None if isinstance(model, str | Path) else self._with_head(model)
        self.tokenizer = self._tokenizer(tokenizer)
        said = {"action_format": None if action_format == "auto" else action_format}
        self.taught = settled(self.tokenizer, {**said, "tools_in_prompt": tools_in_prompt, "tool_role": tool_role})
        counts = {**OPTIONS, **self.taught}
        self._tools_in_prompt, self._tool_role = bool(counts["tools_in_prompt"]), str(counts["tool_role"])
        acting = copy.deepcopy(self._given) if self._given is not None else self._loaded()
        _check_vocabulary(_plain(acting), self.tokenizer)
        self._layout = ChatLayout(self.tokenizer, _text_of(chat_template), template_options)
        self._form = recognised(counts["action_format"], self.tokenizer, self._layout.source, self._layout.opening)
        self._stop_ids = self._found_stop_ids(_plain(acting))
        room = check_room(max_context or _context_of(_plain(acting), self.tokenizer), max_new_tokens)
        # Without weights there is nothing to run; an engine tries its model out.
        self._started = None if _is_outline(acting) else self._engine_of(acting, room, max_sessions)
        self._constraints = TurnConstraints(self._layout, self.tokenizer, self._end_id(), max_new_tokens)

    def __repr__(self) -> str:
        name = self._origin.name if self._origin is not None else type(_plain(self.module)).__name__
        return f"HFAgentPolicy({name!r})"

    @cached_property
    def module(self) -> nn.Module:
        """The weights in training, a model of `transformers` or a `PolicyWithValue`; the engine has a copy.

        Those of a folder are read once more when they are first asked for: who only acts needs them once.
        """
        return self._given if self._given is not None else self._loaded()

    @property
    def _engine(self) -> Engine:
        if self._started is None:
            raise PolicyError("this policy was made without weights (device: meta), and cannot act")
        return self._started

    @property
    def pad_token_id(self) -> int:
        """What fills up rows; never attended to."""
        pad = self.tokenizer.pad_token_id
        return int(pad) if isinstance(pad, int) else self._end_id()

    @property
    def version(self) -> int:
        """Of the weights that act; 0 without weights."""
        return self._started.version if self._started is not None else 0

    @property
    def untrainable_reason(self) -> str | None:
        """Why what is recorded cannot be trained on; None where it can."""
        if self.sampling.temperature == 0:
            return "temperature 0 samples nothing: every token has probability one"
        if self.sampling.top_p < 1 or self.sampling.top_k > 0:
            return "top_p and top_k leave tokens out that are not recorded; set top_p: 1 and top_k: 0"
        return None

    async def open(self, context: EpisodeContext) -> AgentPolicy:
        """The session of one episode: its context, its random generator, its place in the engine."""
        rank = (context.sample_id, context.rollout_index, context.rollout_id)
        return HFSession(self, self._engine.open(rank, context.seed))

    async def get_action(
        self, observation: Sequence[Message], available_tools_specs: list[ToolSpec] | None = None
    ) -> PolicyOutput:
        """One action outside of any episode."""
        session = await self.open(EpisodeContext("", 0))
        try:
            return await session.get_action(observation, available_tools_specs)
        finally:
            await session.close()

    async def publish(self, version: int, state_dict: Mapping[str, Tensor] | None = None) -> None:
        """Act with new weights from the next turn on.

        Args:
            version: their name.
            state_dict: the weights, under the names that they have in `module`; by default those of `module` itself,
                with adapters that are trained in it added.

        Raises:
            PolicyError: they are not those of this model.
        """
        given = merged_state_dict(self.module) if state_dict is None else state_dict
        weights, head = _parted(given)
        await self._engine.publish(weights, version, value_head=head)

    async def close(self) -> None:
        """Stop the engine."""
        if self._started is not None:
            await self._started.close()

    def form_of(self, tools: Sequence[Tool]) -> ActionFormat:
        """How calls of these tools are written.

        Raises:
            PolicyError: nobody knows, or the format cannot call one of them.
        """
        if isinstance(self._form, PolicyError):
            raise PolicyError(str(self._form))
        self._form.check(tools)
        return self._form

    def conversation(self) -> Conversation:
        """An empty context."""
        return Conversation(
            self._layout, self._stop_ids, tools_in_prompt=self._tools_in_prompt, tool_role=self._tool_role
        )

    async def sample(self, slot: Slot, ids: Sequence[int], constraint: Choices | JsonGrammar | None) -> Generated:
        """One answer to a context.

        Raises:
            LimitError: the context is full.
            PolicyError: the model failed.
        """
        limit = self._max_new_tokens
        return await self._engine.generate(
            slot, ids, max_new_tokens=limit, sampling=self.sampling, constraint=constraint
        )

    async def release(self, slot: Slot) -> None:
        """Give a session's place back."""
        await self._engine.close_slot(slot)

    def constraint(self, given: Tools, tools: Sequence[Tool], form: ActionFormat) -> Choices | JsonGrammar | None:
        """What the next answer may be; None where it may be anything."""
        return self._constraints.start(given.key, tools, form) if self._constrains and tools else None

    def text_of(self, token_ids: Sequence[int]) -> str:
        """The text of an answer, without the token that ended it."""
        ended = bool(token_ids) and token_ids[-1] in self._stop_ids
        return self._layout.decode(token_ids[:-1] if ended else token_ids)

    def _engine_of(self, acting: nn.Module, context: int, sessions: int) -> Engine:
        return Engine(
            _plain(acting),
            stop_ids=sorted(self._stop_ids),
            max_context=context,
            max_slots=sessions,
            lockstep=self.lockstep,
            value_head=getattr(acting, "value_head", None),
        )

    def _loaded(self) -> nn.Module:
        assert self._origin is not None
        return self._with_head(self._origin.model())

    def _with_head(self, model: nn.Module) -> nn.Module:
        return PolicyWithValue(model) if self._has_value and not isinstance(model, PolicyWithValue) else model

    def _tokenizer(self, given: str | Path | PreTrainedTokenizerBase | None) -> PreTrainedTokenizerBase:
        if isinstance(given, PreTrainedTokenizerBase):
            return given
        if self._origin is None:
            raise ConfigError("tokenizer: a model that is given needs its tokenizer")
        return self._origin.tokenizer(str(given) if given is not None else None)

    def _end_id(self) -> int:
        """The token that ends an answer that is well formed."""
        end = self._layout.end_id if self._layout.end_id is not None else self.tokenizer.eos_token_id
        if not isinstance(end, int):
            raise ConfigError(
                "tokenizer: nothing ends an answer: it has no eos_token, and the chat template none either"
            )
        return end

    def _found_stop_ids(self, model: PreTrainedModel) -> Collection[int]:
        config = model.generation_config
        named = [config.eos_token_id if config is not None else None, self.tokenizer.eos_token_id, self._end_id()]
        listed = [ids if isinstance(ids, list | tuple) else [ids] for ids in named if ids is not None]
        return frozenset(int(each) for ids in listed for each in ids)


class HFSession(AgentPolicy):
    """One episode of an `HFAgentPolicy`."""

    def __init__(self, policy: HFAgentPolicy, slot: Slot) -> None:
        self._policy, self._slot = policy, slot
        self._conversation, self._turn = policy.conversation(), 0

    async def get_action(
        self, observation: Sequence[Message], available_tools_specs: list[ToolSpec] | None = None
    ) -> PolicyOutput:
        """Sample the next answer.

        Raises:
            LimitError: the context is full.
            PolicyError: the chat template refuses the messages, the tools cannot be called, or the model failed.
        """
        given, tools = tools_given(available_tools_specs), tools_of(available_tools_specs)
        form = self._policy.form_of(tools) if tools else None
        prompt = self._conversation.prompt(observation, given)
        ids = array("i", prompt.ids)  # read as a whole by everyone from here on
        constraint = self._policy.constraint(given, tools, form) if form is not None else None
        generated = await self._policy.sample(self._slot, ids, constraint)
        chosen = constraint.chosen if isinstance(constraint, Choices) else None
        text = self._policy.text_of(generated.token_ids) if chosen is None else chosen
        self._conversation.answered(generated.token_ids, text)
        action = (form or _TEXT).action(text, tools, self._turn, may_reason=constraint is None)
        self._turn += 1
        return PolicyOutput(action, text, _facts(ids, prompt.reason, generated), generated.value)

    async def close(self) -> None:
        """Give the place in the engine back."""
        await self._policy.release(self._slot)


def _facts(prompt_ids: Sequence[int], reason: str | None, generated: Generated) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "prompt_ids": prompt_ids,
        "token_ids": generated.token_ids,
        "logprobs": generated.logprobs,
        "policy_version": generated.policy_version,
        "usage": {"prompt_tokens": len(prompt_ids), "completion_tokens": len(generated.token_ids)},
        "finish_reason": generated.finish_reason,
        "segment_reason": reason,
        "allowed_ids": generated.allowed_ids,
    }
    return {key: value for key, value in facts.items() if value is not None}


def _plain(model: nn.Module) -> PreTrainedModel:
    """The language model alone."""
    found = model.policy if isinstance(model, PolicyWithValue) else model
    if not isinstance(found, PreTrainedModel):
        raise ConfigError(f"model: expected a folder, a name or a PreTrainedModel, got {type(found).__name__}")
    return found


def _parted(weights: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Those of the language model and those of the value head, each under its own names."""
    model, head = {}, {}
    for name, tensor in weights.items():
        if name.startswith("value_head."):
            head[name.removeprefix("value_head.")] = tensor
        else:
            model[name.removeprefix("policy.")] = tensor
    return model, head


def _is_outline(model: nn.Module) -> bool:
    return any(parameter.is_meta for parameter in model.parameters())


def _check_vocabulary(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    size = int(model.config.get_text_config(decoder=True).vocab_size)
    if len(tokenizer) > size:
        raise ConfigError(f"tokenizer: it has {len(tokenizer)} tokens and the model {size}; it is another model's")


def _context_of(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int:
    """What the model was made for."""
    config = model.config.get_text_config(decoder=True)
    known = [getattr(config, "max_position_embeddings", None), tokenizer.model_max_length]
    sizes = [int(size) for size in known if size is not None and size < 10**9]
    if not sizes:
        raise ConfigError("max_context: the model does not say how long a context it takes; give it")
    return min(sizes)


def _text_of(template: str | Path | None) -> str | None:
    """The template itself, read where a file is named."""
    if template is None or (isinstance(template, str) and "{" in template):
        return template
    try:
        return Path(template).read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"chat_template: cannot read {template}: {error}") from None
