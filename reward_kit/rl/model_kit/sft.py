"""Supervised training on the action tokens in episodes, which prepares small models for reinforcement learning.

The loss is the mean negative log-probability of the tokens whose `action_mask` is 1, with optional label smoothing.
`Demonstrations` converts the actions of an expert to the tokens that a model would have sampled. Prompts and actions
are built as in `HFAgentPolicy`, so a model sees the same tokens in training as when it acts.
"""

from __future__ import annotations

import copy
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from reward_kit.agent.actions import assistant_message
from reward_kit.agent.policies.hf.action_formats import (
    FORMATS,
    ActionFormat,
    Plain,
    find_action_format,
    tools_of,
)
from reward_kit.agent.policies.hf.chat_layout import ChatLayout, TokenConversation, tools_given
from reward_kit.agent.policies.hf.constraints import TurnConstraints
from reward_kit.agent.policy_interface import Action, AgentPolicy, EpisodeContext, PolicyOutput
from reward_kit.environments.base import ToolSpec
from reward_kit.episodes.segments import REWRITTEN, EpisodeTokens
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.errors import ConfigError, PolicyError, TrainingError, did_you_mean
from reward_kit.models import Message
from reward_kit.rl.learner.config import PPOConfig, Precision, lr_factor
from reward_kit.rl.learner.forward import LogprobModel, restrict_logits
from reward_kit.rl.learner.optimizer import clip_gradients, make_optimizer, set_lr, widen
from reward_kit.rl.learner.training_rows import Restriction, TrainingRows
from reward_kit.tokens import TokenBatch, micro_batches
from reward_kit.tokens.columns import Array, Ints
from reward_kit.torch_cpu import keep_freed_memory, no_denormals

logger = logging.getLogger("reward_kit.rl")
OnFailure = Callable[[TokenBatch, Mapping[str, Any]], object]
Specs = Sequence[ToolSpec] | None
ToolsFunction = Callable[[SingleAgentEpisode, int], Specs]
TaughtFunction = Callable[[SingleAgentEpisode, int], bool]
_TEXT = Plain()  # Without tools, every action is plain text.
_ANY_LENGTH = 2**31
_POOL = 64
"""The number of batches whose rows are sorted by length together, so that padding is low but batches still vary."""


class Demonstrations:
    """Writes actions as a model's tokens. Use the same options as for the `HFAgentPolicy` that will act later.

    Args:
        tokenizer: the model's tokenizer, which must have a chat template.
        action_format: the name of the tool-call format.
        constrain: whether to record, for each token, the ids that the policy's constraint would have allowed. If
            `use_allowed_ids` is set in `SFTConfig`, training then uses the same masks that the policy will use when it
            acts.
        tools_in_prompt: whether to pass the tools to the chat template.
        tool_role: the role of messages that contain tool results, "tool" or "user".
        chat_template: the chat template. If None, the tokenizer's chat template is used.
        template_options: variables for the chat template.
        max_context: the maximum number of tokens in a context. The first action that exceeds this number and all later
            actions are omitted. None means no limit.

    Raises:
        ConfigError: If the tokenizer has no chat template, or the format is unknown.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        action_format: str = "auto",
        constrain: bool = False,
        tools_in_prompt: bool = True,
        tool_role: str = "tool",
        chat_template: str | None = None,
        template_options: Mapping[str, Any] | None = None,
        max_context: int | None = None,
    ) -> None:
        self.layout = ChatLayout(tokenizer, chat_template, template_options)
        self._unknown = tokenizer.unk_token_id
        self.form = find_action_format(action_format, tokenizer, self.layout.source)
        end = self.layout.end_id if self.layout.end_id is not None else tokenizer.eos_token_id
        if not isinstance(end, int):
            raise ConfigError(
                "the model has no end-of-answer token; "
                "set eos_token in the tokenizer, or define it in the chat template"
            )
        self.end, self.max_context = end, max_context
        self.constraints = TurnConstraints(self.layout, tokenizer, end, _ANY_LENGTH) if constrain else None
        self._in_prompt = {"tools_in_prompt": tools_in_prompt, "tool_role": tool_role}

    def __call__(
        self,
        episodes: Iterable[SingleAgentEpisode],
        tools: Specs | ToolsFunction = None,
        *,
        taught: TaughtFunction | None = None,
    ) -> list[SingleAgentEpisode]:
        """Return copies of the episodes, with the tokens of every action added, for use in `build_rows`.

        Log-probabilities are unknown. An action that only ends the episode has no tokens. The number of tokens that are
        not in the vocabulary is logged.

        Args:
            episodes: the episodes, including messages as recorded by the rollout worker.
            tools: the tools returned by the resource's `get_tools_spec`. If the tools vary, pass a function that takes
                an episode and a step and returns the tools. If there are no tool calls, pass None.
            taught: a function that takes an episode and a step, and returns True if the action in the step should be
                learned. Other actions, such as mistakes, appear only in the context of later actions. If None, every
                action is learned.

        Raises:
            ConfigError: If an action, once written in this format, would be parsed as a different action.
        """
        made = []
        for episode in episodes:
            copied, writer = copy.copy(episode), self.begin()
            copied.tokens = EpisodeTokens()
            for step, turn in enumerate(episode.assistant_turns):
                specs = tools(episode, step) if callable(tools) else tools
                try:
                    facts = writer.write(episode.get_actions(step), episode.messages[:turn], specs)
                except PolicyError as error:
                    raise ConfigError(f"episode {episode.id_}, step {step}: {error}") from error
                if facts is None:
                    break
                reason = facts.pop("segment_reason", REWRITTEN)
                if taught is None or taught(episode, step):
                    copied.tokens.add_turn(step, **facts, reason=reason)
            made.append(copied)
        if self._unknown is not None:
            unknown = sum(episode.tokens.ids.count(self._unknown) for episode in made)
            total = sum(len(episode.tokens) for episode in made)
            log = logger.warning if unknown else logger.debug
            log("%d of the %d tokens in %d demonstrations are not in the vocabulary", unknown, total, len(made))
        return made

    def begin(self) -> DemonstrationWriter:
        """Return a writer for a new episode."""
        conversation = TokenConversation(self.layout, {self.end}, **self._in_prompt)  # type: ignore[arg-type]  # one dict of two types
        return DemonstrationWriter(self, conversation)


class DemonstrationWriter:
    """Converts the actions in one episode to tokens, in order. `conversation` is the context so far."""

    def __init__(self, demonstrations: Demonstrations, conversation: TokenConversation) -> None:
        self._options, self._conversation = demonstrations, conversation
        self._is_full = False

    def write(self, action: Action, seen: Sequence[Message], specs: Specs) -> dict[str, Any] | None:
        """Write the next action as tokens.

        Args:
            action: the action.
            seen: the whole conversation before the action.
            specs: the available tools.

        Returns:
            A dict with `prompt_ids`, `token_ids` and, if present, `segment_reason` and `allowed_ids`, as in
            `PolicyOutput.log_probs`; or None if the action only ends the episode or the context is full.

        Raises:
            PolicyError: If the written action would be parsed as a different action, or the constraint does not allow
                it.
        """
        if action["type"] == "terminate" or self._is_full:
            return None
        options, given, tools = self._options, tools_given(specs), tools_of(specs)
        form: ActionFormat = _TEXT
        if tools:
            if isinstance(options.form, PolicyError):
                raise PolicyError(str(options.form))
            form = options.form
            form.check(tools)
        text = form.write_action(action, tools)
        if _as_chat(read := form.action(text, tools)) != _as_chat(action):
            raise PolicyError(
                f"action_format {form.name} parses {text!r} as {read!r}, not as {action!r}; "
                "use a different action_format" + ("" if tools else ", or pass the tools that the action calls")
            )
        prompt = self._conversation.prompt(seen, given)
        answer = [*options.layout.encoded(text), options.end]
        if options.max_context is not None and len(prompt.ids) + len(answer) > options.max_context:
            self._is_full = True
            return None
        self._conversation.answered(answer, text)
        facts: dict[str, Any] = {"prompt_ids": prompt.ids, "token_ids": answer}
        if prompt.reason is not None:
            facts["segment_reason"] = prompt.reason
        if options.constraints is not None and tools:
            rule = options.constraints.start(given.key, tools, form)
            facts["allowed_ids"] = []
            for token in answer:
                if rule.is_done:
                    raise PolicyError("the constraint ends before the last token of this action")
                facts["allowed_ids"].append(rule.allowed())
                rule.advance(token)
        return facts


class DemonstratingPolicy(AgentPolicy):
    """A policy that acts like an expert and records the tokens that a model would have sampled.

    Use it for environments in which the tools vary, because episode records do not contain the tools.

    Args:
        expert: the policy that chooses the actions.
        demonstrations: the object that writes the actions.
        taught: a function that returns True if the expert's output should be learned. Other outputs, such as mistakes,
            appear only in the context of later outputs. If None, every output is learned.
    """

    is_free = True

    def __init__(
        self,
        expert: AgentPolicy,
        demonstrations: Demonstrations,
        *,
        taught: Callable[[PolicyOutput], bool] | None = None,
    ) -> None:
        self._expert, self._demonstrations, self._taught = expert, demonstrations, taught
        self._writer = demonstrations.begin()

    async def open(self, context: EpisodeContext) -> AgentPolicy:
        """Open an expert session that has a separate context."""
        return DemonstratingPolicy(await self._expert.open(context), self._demonstrations, taught=self._taught)

    async def get_action(
        self, observation: Sequence[Message], available_tools_specs: list[ToolSpec] | None = None
    ) -> PolicyOutput:
        """Return the expert's action and its tokens.

        Raises:
            PolicyError: If the action cannot be written as tokens.
        """
        output = await self._expert.get_action(observation, available_tools_specs)
        facts = self._writer.write(output.action_structured, observation, available_tools_specs)
        if self._taught is not None and not self._taught(output):
            facts = None
        return output._replace(log_probs={**(output.log_probs or {}), **(facts or {})} or None)

    async def on_episode_end(self, messages: Sequence[Message]) -> None:
        """Tell the expert that the episode has ended."""
        await self._expert.on_episode_end(messages)

    async def close(self) -> None:
        """Close the session of the expert."""
        await self._expert.close()


def episode_texts(
    episodes: Iterable[SingleAgentEpisode], *, action_format: str = "plain", tools: Specs = None
) -> list[str]:
    """Return all strings in episodes that a tokenizer's vocabulary should cover: messages and written actions.

    Args:
        episodes: the episodes, including messages.
        action_format: "hermes", "llama", "mistral", "plain" or "bare".
        tools: the tools that `get_tools_spec` of the resource returns.

    Raises:
        ConfigError: If the action format is unknown.
    """
    if action_format not in FORMATS:
        raise ConfigError(f"action_format: unknown format {action_format!r}{did_you_mean(action_format, FORMATS)}")
    form, known = FORMATS[action_format](), tools_of(tools)
    texts: list[str] = []
    for episode in episodes:
        turns = set(episode.assistant_turns)
        texts += (message.text for index, message in enumerate(episode.messages) if index not in turns)
        texts += (form.write_action(episode.get_actions(step), known) for step in range(len(episode)))
    return texts


def _as_chat(action: Action) -> dict[str, Any]:
    """Return the action as a message, without the ids of its tool calls."""
    chat = assistant_message(action, 0).to_chat()
    for call in chat.get("tool_calls", ()):
        del call["id"]
    return {**chat, "content": chat["content"] or ""}


@dataclass(frozen=True, slots=True, kw_only=True)
class SFTConfig:
    """The options for supervised training. The learning rate first rises, then falls along a cosine.

    Attributes:
        epochs: the number of passes over the rows.
        max_tokens_per_batch: the maximum number of tokens in an optimizer step, including padding. A row that is longer
            forms a batch by itself.
        max_tokens_per_micro_batch: the maximum number of tokens in one pass through the model. If None, each batch is a
            single pass.
        lr: the maximum learning rate.
        warmup_share: the fraction of all steps in which the learning rate rises.
        min_lr_share: the final learning rate, as a fraction of `lr`.
        betas: the betas of AdamW.
        weight_decay: the weight decay of AdamW, which is applied to matrices.
        max_grad_norm: the 2-norm to which the gradient is clipped. If None, the gradient is not clipped.
        use_allowed_ids: whether to compute the loss only over the ids that a constraint allowed, in rows that record
            them. A token without an alternative is then skipped, because its loss is always 0.
        label_smoothing: the fraction of the target that is distributed evenly over the possible tokens. If
            `use_allowed_ids` is set and there is a constraint, these are the tokens that the constraint allowed;
            otherwise, they are the whole vocabulary. Smoothing preserves the model's exploration.
        precision: "bfloat16" runs the model in autocast, while weights and loss are float32. If None, the model's type
            determines the precision.
        seed: the random seed for the order of rows.

    Raises:
        ConfigError: If a value is out of range.
    """

    epochs: int = 1
    max_tokens_per_batch: int = 8_192
    max_tokens_per_micro_batch: int | None = None
    lr: float = 1e-3
    warmup_share: float = 0.05
    min_lr_share: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.01
    max_grad_norm: float | None = 1.0
    use_allowed_ids: bool = False
    label_smoothing: float = 0.0
    precision: Precision | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_tokens_per_batch < 1:
            raise ConfigError(f"max_tokens_per_batch must be at least 1, got {self.max_tokens_per_batch}")
        for name in ("warmup_share", "label_smoothing"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ConfigError(f"{name} must be in [0, 1), got {getattr(self, name)}")
        self.learner_options(1)

    def learner_options(self, steps: int) -> PPOConfig:
        """Return the options for the optimizer, the schedule and the forward pass as a `PPOConfig`."""
        return PPOConfig(
            epochs=self.epochs,
            max_tokens_per_micro_batch=self.max_tokens_per_micro_batch,
            lr=self.lr,
            betas=self.betas,
            weight_decay=self.weight_decay,
            max_grad_norm=self.max_grad_norm,
            schedule="cosine",
            warmup=math.ceil(self.warmup_share * steps),
            min_lr_share=self.min_lr_share,
            precision=self.precision,
        )


class SFTProgress(NamedTuple):
    """The progress after an optimizer step. Steps are counted from 1 over all epochs."""

    epoch: int
    step: int
    steps: int
    loss: float
    lr: float
    tokens_per_second: float


class Evaluation(NamedTuple):
    """A model's accuracy when predicting each action token from the true tokens before it."""

    loss: float  # the mean negative log-probability of an action token, in nats
    token_accuracy: float  # The share of action tokens that have the highest probability
    action_accuracy: float  # The share of actions whose tokens all have the highest probability
    tokens: int  # The number of action tokens
    actions: int  # The number of actions


class EpochReport(NamedTuple):
    """The mean loss over one pass and, if there are held-out rows, their evaluation after that pass."""

    epoch: int
    loss: float
    seconds: float
    held_out: Evaluation | None


def fit(
    model: nn.Module,
    rows: TokenBatch,
    config: SFTConfig,
    *,
    held_out: TokenBatch | None = None,
    progress: Callable[[SFTProgress], object] | None = None,
    on_failure: OnFailure | None = None,
    device: torch.device | str | None = None,
) -> list[EpochReport]:
    """Train a model on the actions in episodes, in place and without dropout. The same seed produces the same weights.

    Half-precision weights are converted to float32, as in `PPOLearner`. On a CPU, denormal numbers are treated as 0
    during training, because they can make a badly initialized model 40 times slower. The process also keeps freed
    memory for reuse.

    Args:
        model: a causal language model of `transformers`.
        rows: the rows that `build_rows` returned.
        config: the options.
        held_out: rows to evaluate after each epoch; see `split_rows`.
        progress: a function that is called after each optimizer step.
        on_failure: a debugging function that is called with the rows and with facts about a non-finite loss or
            gradient.
        device: the device to which the model is moved. If None, the model stays on its device.

    Raises:
        ConfigError: If no row has an action token.
        TrainingError: If a loss or gradient is not finite. That optimizer step is skipped.
    """
    target = torch.device(device or next(model.parameters()).device)
    if target.type == "cpu":
        keep_freed_memory()
    flat = _flat(rows, config).without_forced(keep_firsts=False)
    _check_any(flat)
    generator = np.random.default_rng(config.seed)
    lengths = np.where(flat.counts_B > 0, flat.lengths_B, 0)
    epochs = [_batches(lengths, config.max_tokens_per_batch, generator) for _ in range(config.epochs)]
    steps = sum(map(len, epochs))
    options = config.learner_options(steps).for_weights(next(model.parameters()).dtype)
    model.to(target).eval()
    widen(model)
    scorer = (_SmoothingModel if config.label_smoothing else LogprobModel)(model, options)
    optimizer = make_optimizer(model, options)
    step, reports = 0, []
    with no_denormals():
        for epoch, batches in enumerate(epochs):
            began, total, tokens = time.perf_counter(), 0.0, 0
            for chosen in batches:
                factor = lr_factor(options, step, steps)
                set_lr(optimizer, factor)
                loss, norm = _gradient(scorer, optimizer, flat, chosen, config, target)
                if not (math.isfinite(loss) and math.isfinite(norm)):
                    optimizer.zero_grad(set_to_none=True)
                    facts = {"loss": loss, "grad_norm": norm, "optimizer_step": step}
                    kept = on_failure(rows[chosen], facts) if on_failure is not None else None
                    where = f"; the batch is saved in {kept}" if kept is not None else ""
                    raise TrainingError(f"step {step}: the loss is {loss:g}, and the gradient norm is {norm:g}{where}")
                optimizer.step()
                step += 1
                total += loss * int(flat.counts_B[chosen].sum())
                tokens += int(flat.lengths_B[chosen].sum())
                if progress is not None:
                    speed = tokens / (time.perf_counter() - began)
                    progress(SFTProgress(epoch, step, steps, loss, options.lr * factor, speed))
            seconds = time.perf_counter() - began
            measured = evaluate(model, held_out, config) if held_out is not None else None
            reports.append(EpochReport(epoch, total / flat.count, seconds, measured))
    return reports


def _gradient(
    scorer: LogprobModel,
    optimizer: torch.optim.Optimizer,
    flat: TrainingRows,
    chosen: Ints,
    config: SFTConfig,
    device: torch.device,
) -> tuple[float, float]:
    """Accumulate the gradient of a batch. Return the loss and the gradient norm before clipping."""
    optimizer.zero_grad(set_to_none=True)
    count, losses, smoothing = int(flat.counts_B[chosen].sum()), [], config.label_smoothing
    for part in _parts(flat, chosen, config.max_tokens_per_micro_batch):
        scores = scorer(flat.part(part, device), entropies=bool(smoothing))
        loss = -scores.logprobs_N.sum()
        if smoothing:
            assert scores.entropies_N is not None
            loss = (1.0 - smoothing) * loss - smoothing * scores.entropies_N.sum()
        loss = loss / count
        loss.backward()  # type: ignore[no-untyped-call]  # torch has no annotation for it
        losses.append(loss.detach())
    norm = clip_gradients([one for group in optimizer.param_groups for one in group["params"]], config.max_grad_norm)
    total, size = torch.stack([torch.stack(losses).sum(), norm.to(losses[0].dtype)]).tolist()
    return float(total), float(size)


def _check_any(flat: TrainingRows) -> None:
    if not flat.count:
        raise ConfigError("no row has an action token; build the rows from episodes with recorded tokens")


def _flat(rows: TokenBatch, config: SFTConfig) -> TrainingRows:
    if not config.use_allowed_ids:
        others = {key: values for key, values in rows.non_tensor_batch.items() if key != "allowed_ids"}
        rows = replace(rows, non_tensor_batch=others)
    return TrainingRows.of(rows, "action_mask")


def _batches(lengths_B: Ints, budget: int, generator: np.random.Generator) -> list[Ints]:
    """Divide all non-empty rows into batches of similar length, in random order."""
    order = generator.permutation(np.flatnonzero(lengths_B))
    pool = max(_POOL * budget // max(int(lengths_B[order].mean()), 1), 1)
    batches: list[Ints] = []
    for first in range(0, len(order), pool):
        rows = order[first : first + pool]
        rows = rows[np.argsort(lengths_B[rows], kind="stable")]
        start = 0
        for stop in range(1, len(rows) + 1):  # as many rows as fit, after padding to the longest
            if stop == len(rows) or (stop + 1 - start) * lengths_B[rows[stop]] > budget:
                batches.append(rows[start:stop])
                start = stop
    return [batches[index] for index in generator.permutation(len(batches))]


def _parts(flat: TrainingRows, chosen: Ints, budget: int | None) -> list[Ints]:
    """Divide rows into parts, each of which is one pass through the model.

    A row that exceeds the budget forms a part by itself.
    """
    if budget is None:
        return [chosen]
    lengths = flat.lengths_B[chosen]
    return [chosen[part] for part in micro_batches(lengths, max(budget, int(lengths.max())), padded=True)]


class _GradingModel(LogprobModel):
    """A model whose entropies are replaced with accuracies: 1 for the most likely token and 0 for other tokens."""

    def _statistics(
        self, logits_NV: Tensor, targets_N: Tensor, restriction: Restriction | None, entropies: bool
    ) -> tuple[Tensor, Tensor]:
        if restriction is not None:
            logits_NV = restrict_logits(logits_NV, restriction)
        logprobs_NV = logits_NV.float().log_softmax(dim=-1)
        chosen_N = logprobs_NV.gather(-1, targets_N.unsqueeze(-1)).squeeze(-1)
        return chosen_N, (chosen_N >= logprobs_NV.amax(dim=-1)).float()


class _SmoothingModel(LogprobModel):
    """A model whose entropies are replaced with the differentiable mean log-probability of the possible tokens."""

    def _statistics(
        self, logits_NV: Tensor, targets_N: Tensor, restriction: Restriction | None, entropies: bool
    ) -> tuple[Tensor, Tensor]:
        logits_NV = logits_NV.float()
        means_N = logits_NV.mean(dim=-1)
        if restriction is not None:
            # The mean logit over the ids allowed at each restricted token.
            weights_SV = logits_NV.new_zeros(restriction.sets, logits_NV.shape[1])
            weights_SV[restriction.owners_A, restriction.ids_A] = 1.0
            weights_SV /= weights_SV.sum(dim=-1, keepdim=True)
            rows_KV = logits_NV.index_select(0, restriction.tokens_K)
            means_K: Tensor = torch.linalg.vecdot(rows_KV, weights_SV.index_select(0, restriction.sets_K))
            means_N = means_N.index_copy(0, restriction.tokens_K, means_K)
            logits_NV = restrict_logits(logits_NV, restriction)
        sums_N = logits_NV.logsumexp(dim=-1)
        return logits_NV.gather(-1, targets_N.unsqueeze(-1)).squeeze(-1) - sums_N, means_N - sums_N


@torch.no_grad()
def evaluate(model: nn.Module, rows: TokenBatch, config: SFTConfig | None = None) -> Evaluation:
    """Measure how well a model predicts the actions in these rows.

    Args:
        model: a causal language model of `transformers`.
        rows: the rows returned by `build_rows`. At least one row must have an action token.
        config: the options. Only the precision, the batch sizes and `use_allowed_ids` are used.
    """
    config, device = config or SFTConfig(), next(model.parameters()).device
    flat, options = _flat(rows, config), config.learner_options(1)
    _check_any(flat)
    grading, budget = _GradingModel(model, options), config.max_tokens_per_micro_batch or config.max_tokens_per_batch
    logprobs, right = np.zeros(flat.count), np.zeros(flat.count, dtype=np.bool_)
    for chosen in _parts(flat, np.flatnonzero(flat.counts_B), budget):
        scores, indices = grading(flat.part(chosen, device)), flat.token_indices(chosen)
        logprobs[indices] = scores.logprobs_N.cpu().numpy()
        assert scores.entropies_N is not None
        right[indices] = scores.entropies_N.cpu().numpy() > 0.0
    actions = np.cumsum(flat.is_first_N) - 1
    whole = np.bincount(actions, weights=~right) == 0
    return Evaluation(-float(logprobs.mean()), float(right.mean()), float(whole.mean()), flat.count, len(whole))


def split_rows(rows: TokenBatch, share: float, *, seed: int = 0) -> tuple[TokenBatch, TokenBatch]:
    """Split rows by group into training and held-out rows, so that no initial state occurs in both.

    At least one group is held out, so there must be at least two groups. A rollout without a group is a
    group by itself.

    Args:
        rows: the rows to split.
        share: the fraction of groups to hold out, between 0 and 1 (exclusive).
        seed: the random seed that determines which groups are held out.
    """
    if not 0.0 < share < 1.0:
        raise ConfigError(f"share must be in (0, 1), got {share}")
    names, group_B = np.unique(rows.non_tensor_batch["uid"].astype(str), return_inverse=True)
    if len(names) < 2:
        raise ConfigError(
            "all rows belong to the same group, so no group can be held out; pass rows from at least two groups"
        )
    count = min(max(round(share * len(names)), 1), len(names) - 1)
    chosen = np.random.default_rng(seed).permutation(len(names))[:count]
    is_held_out: Array = np.isin(group_B, chosen)
    return rows[~is_held_out].trim(), rows[is_held_out].trim()
