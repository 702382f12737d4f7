"""A module's log-probabilities, entropies and values, computed only for the tokens in the loss.

Most tokens in an episode are observations, for which no logits are needed. A hook before the module's head selects the
hidden states that predict tokens in the loss, so the head, which is the most expensive layer of a small model, runs
only on these states. If constraints allow only a small part of the vocabulary, the head computes only the logits of the
ids that some token of the micro-batch allows. In the last layer, only the keys and values are needed for all tokens.
`LastLayer` computes everything else only for the selected tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from reward_kit.errors import ConfigError, boundary
from reward_kit.rl.learner.attention import (
    CLOSE,
    attention_name,
    last_hidden,
    packed_inputs,
    use_attention,
    use_packed_attention,
)
from reward_kit.rl.learner.config import PPOConfig
from reward_kit.rl.learner.sharding import Processes, shardable_layers
from reward_kit.rl.learner.training_rows import MicroBatch, Restriction
from reward_kit.rl.loss_terms import widened

logger = logging.getLogger("reward_kit.rl")
AfterHead = Callable[[Tensor], Tensor]
FORBIDDEN = -1e30
"""The logit of a token that a constraint forbids. Its probability is 0 and, unlike with -inf, no entropy is NaN."""


class Scores(NamedTuple):
    """The log-probability and, if requested, the entropy of each token, and the critic's value for each action."""

    logprobs_N: Tensor
    entropies_N: Tensor | None
    values_M: Tensor | None


class LogprobModel:
    """A model that computes the scores of the tokens in a micro-batch.

    Args:
        module: a causal language model of `transformers`, with or without adapters or a value head, or any module that
            maps (ids_BT, attention_mask_BT) to logits_BTV.
        config: the options. Those of losses and of the optimizer have no effect.

    Attributes:
        is_packed: True if micro-batches must be packed.
    """

    def __init__(self, module: nn.Module, config: PPOConfig) -> None:
        self.module, self._config = module, config
        self._head: nn.Module | None = getattr(module, "get_output_embeddings", lambda: None)()
        self._after_head: AfterHead | None = None
        # Rows of a plain weight can be selected by id. Sharded weights exist only inside the module's forward pass.
        self._can_narrow = type(self._head) is nn.Linear and Processes.current().size == 1
        self._last_layer: LastLayer | None = None
        self.is_packed = False
        if self._head is None:
            for name in ("attention", "packed"):
                if getattr(config, name):
                    logger.warning("ppo.%s: %s is not a language model of transformers", name, type(module).__name__)
            return
        module.eval()  # Use evaluation mode, since two passes with dropout differ.
        with self._precision(next(module.parameters()).device):
            if config.attention is not None:
                use_attention(module, self._head, config.attention)
            self.is_packed = config.packed and use_packed_attention(module, self._head)
            # A checkpointed layer runs again in the backward pass, after its hooks are removed.
            if not config.gradient_checkpointing:
                self._last_layer = find_last_layer(module, self._head)

    @property
    def has_values(self) -> bool:
        """True if the module has a critic."""
        return self._head is not None and hasattr(self.module, "value_head")

    def __call__(self, part: MicroBatch, *, values_only: bool = False, entropies: bool = True) -> Scores:
        """Score a micro-batch. The result has a computation graph if gradients are enabled.

        If `values_only` is true, only values have a gradient, and the gradient does not reach the layers below the
        value head. Computing entropies is as expensive as computing log-probabilities.
        """
        with self._precision(part.ids_BT.device):
            if self._head is None:
                logits_BTV = self.module(part.ids_BT, part.mask_BT)
                if logits_BTV.shape[:-1] != part.ids_BT.shape:
                    expected = ", ".join(map(str, part.ids_BT.shape))
                    raise ConfigError(
                        f"{type(self.module).__name__} must return logits of shape ({expected}, V), got "
                        f"{tuple(logits_BTV.shape)}"
                    )
                logits_NV = logits_BTV.reshape(-1, logits_BTV.shape[-1]).index_select(0, part.before_N)
                return Scores(*self._statistics(logits_NV, part.targets_N, part.restriction, entropies), None)
            with torch.no_grad() if values_only else nullcontext():
                return self._by_head(part, self._head, values_only, entropies)

    def compile_layers(self) -> bool:
        """Compile the layers of the module with `torch.compile`, and return whether that works.

        The last layer is not compiled, because compiled code would ignore the hooks of `LastLayer`. A trial on a few
        tokens runs the compiler; if it fails, the layers stay uncompiled, and a warning is logged.
        """
        layers = shardable_layers(self.module)[:-1]
        if self._head is None or not layers:
            logger.warning("ppo.compile: %s has no layers that can be compiled", type(self.module).__name__)
            return False
        for layer in layers:
            layer.compile(dynamic=True)
        device = next(self.module.parameters()).device
        ids_BT = torch.zeros(2, 8, dtype=torch.long, device=device)
        try:
            with boundary(ConfigError, "torch.compile"), self._precision(device):
                self.module(input_ids=ids_BT, use_cache=False).logits.float().mean().backward()
        except ConfigError as error:
            for layer in layers:
                layer._compiled_call_impl = None
            reason = str(error).partition("\n")[0]
            logger.warning("ppo.compile: the layers run uncompiled, because the compiler failed: %s", reason)
            return False
        finally:
            self.module.zero_grad(set_to_none=True)
        return True

    def _precision(self, device: torch.device) -> AbstractContextManager[Any]:
        if self._config.precision != "bfloat16":
            return nullcontext()
        return torch.autocast(device.type, dtype=torch.bfloat16)

    def _by_head(self, part: MicroBatch, head: nn.Module, values_only: bool, entropies: bool) -> Scores:
        weight: Any = head.weight
        is_narrow = self._can_narrow and part.allowed_U is not None and 2 * len(part.allowed_U) <= weight.shape[0]
        width = len(part.allowed_U) if is_narrow and part.allowed_U is not None else int(weight.shape[0])
        chunk = max(self._config.max_logits // width, 1)
        is_whole = not is_narrow and len(part.before_N) <= chunk
        hidden_NH, values_M = part.mask_BT.new_zeros(0), None
        last = self._last_layer

        def pick(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            nonlocal hidden_NH, values_M
            hidden_NH = args[0].reshape(-1, args[0].shape[-1])
            hidden_NH = hidden_NH if last is not None else hidden_NH.index_select(0, part.before_N)
            # This runs inside the module's forward method, where sharded weights are gathered.
            with torch.set_grad_enabled(torch.is_grad_enabled() or values_only):
                values_M = self._values(hidden_NH, part.firsts_M)
            return ((hidden_NH if is_whole else hidden_NH[:1]).unsqueeze(0), *args[1:])

        handle = head.register_forward_pre_hook(pick)
        try:
            with nullcontext() if last is None else last.only_at(part.before_N):
                packed = {} if part.packing is None else packed_inputs(part.packing, attention_name(self.module))
                logits_NV = self.module(input_ids=part.ids_BT, use_cache=False, **packed).logits.squeeze(0)
        finally:
            handle.remove()
        if is_whole:
            return Scores(*self._statistics(logits_NV, part.targets_N, part.restriction, entropies), values_M)
        if self._after_head is None:
            try:
                self._after_head = _find_after_head(self.module, head, hidden_NH[:1], logits_NV)
            except ConfigError:
                if not is_narrow:
                    raise
                self._can_narrow = False
                return self._by_head(part, head, values_only, entropies)
        if is_narrow:
            part, compute = _narrowed(part, head)
            return Scores(*self._in_chunks(part, compute, hidden_NH, chunk, entropies), values_M)
        return Scores(*self._in_chunks(part, head, hidden_NH, chunk, entropies), values_M)

    def _values(self, hidden_NH: Tensor, firsts_M: Tensor) -> Tensor | None:
        if not self.has_values:
            return None
        value_head: Any = self.module.value_head
        hidden_MH = hidden_NH.index_select(0, firsts_M)
        # The head is trained in float32 even if the frozen model has a narrower type.
        first = next(value_head.parameters(), hidden_MH)
        values: Tensor = value_head(hidden_MH.to(first.dtype))
        return widened(values.flatten())

    def _in_chunks(
        self, part: MicroBatch, head: Callable[[Tensor], Tensor], hidden_NH: Tensor, chunk: int, entropies: bool
    ) -> tuple[Tensor, Tensor | None]:
        after = self._after_head or nn.Identity()

        def score(hidden: Tensor, targets: Tensor, restriction: Restriction | None) -> tuple[Tensor, Tensor | None]:
            return self._statistics(after(head(hidden)), targets, restriction, entropies)

        if len(part.targets_N) <= chunk:
            return score(hidden_NH, part.targets_N, part.restriction)
        chunks = []
        for start in range(0, len(part.targets_N), chunk):
            stop = min(start + chunk, len(part.targets_N))
            args = (hidden_NH[start:stop], part.targets_N[start:stop], _cut(part.restriction, start, stop))
            # Logits are recomputed for the gradient, so that only one chunk of them is in memory.
            chunks.append(checkpoint(score, *args, use_reentrant=False) if torch.is_grad_enabled() else score(*args))
        made = [one for _, one in chunks if one is not None]
        return torch.cat([one for one, _ in chunks]), torch.cat(made) if made else None

    def _statistics(
        self, logits_NV: Tensor, targets_N: Tensor, restriction: Restriction | None, entropies: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return log-probabilities and entropies in float32 or a wider type."""
        logits_NV = widened(logits_NV)
        if self._config.temperature != 1.0:
            logits_NV = logits_NV / self._config.temperature
        if restriction is not None:
            logits_NV = restrict_logits(logits_NV, restriction)
        logprobs_NV = logits_NV.log_softmax(dim=-1)
        chosen_N = logprobs_NV.gather(-1, targets_N.unsqueeze(-1)).squeeze(-1)
        if not entropies:
            return chosen_N, None
        with torch.set_grad_enabled(torch.is_grad_enabled() and self._config.entropy_coefficient != 0.0):
            # 0 · log 0 must count as 0, but is NaN in floating point.
            return chosen_N, -torch.linalg.vecdot(logprobs_NV.exp(), logprobs_NV.clamp(min=FORBIDDEN))


def _narrowed(part: MicroBatch, head: nn.Module) -> tuple[MicroBatch, Callable[[Tensor], Tensor]]:
    """Return a micro-batch whose vocabulary is `allowed_U`, and the head that computes its logits.

    A constraint allows every token that was sampled, so all targets are among these ids.
    """
    allowed_U, restriction, linear = part.allowed_U, part.restriction, cast(nn.Linear, head)
    assert allowed_U is not None and restriction is not None
    restriction = restriction._replace(ids_A=torch.searchsorted(allowed_U, restriction.ids_A))
    part = part._replace(targets_N=torch.searchsorted(allowed_U, part.targets_N), restriction=restriction)
    weight_UH = linear.weight.index_select(0, allowed_U)
    bias_U = None if linear.bias is None else linear.bias.index_select(0, allowed_U)
    return part, partial(functional.linear, weight=weight_UH, bias=bias_U)


def restrict_logits(logits_NV: Tensor, restriction: Restriction) -> Tensor:
    """Set the logits of all disallowed tokens to `FORBIDDEN`."""
    rows_KV = logits_NV.index_select(0, restriction.tokens_K)
    is_forbidden_SV = torch.ones(restriction.sets, rows_KV.shape[1], dtype=torch.bool, device=rows_KV.device)
    is_forbidden_SV[restriction.owners_A, restriction.ids_A] = False
    rows_KV = rows_KV.masked_fill(is_forbidden_SV.index_select(0, restriction.sets_K), FORBIDDEN)
    return logits_NV.index_copy(0, restriction.tokens_K, rows_KV)


def _cut(restriction: Restriction | None, start: int, stop: int) -> Restriction | None:
    """Return the restriction for the tokens from `start` to `stop`, including only the sets that these tokens use.

    Each set is as wide as the logits.
    """
    if restriction is None:
        return None
    first, last = torch.searchsorted(restriction.tokens_K, restriction.tokens_K.new_tensor([start, stop])).tolist()
    if first == last:
        return None
    used, sets_K = torch.unique(restriction.sets_K[first:last], return_inverse=True)
    indices_A = torch.searchsorted(used, restriction.owners_A).clamp(max=len(used) - 1)
    is_used_A = used[indices_A] == restriction.owners_A
    tokens_K = restriction.tokens_K[first:last] - start
    return Restriction(tokens_K, sets_K, indices_A[is_used_A], restriction.ids_A[is_used_A], len(used))


def _find_after_head(module: nn.Module, head: nn.Module, hidden_1H: Tensor, logits_1V: Tensor) -> AfterHead:
    """Return the operation between the head and the logits, such as a soft cap. A trial on one token determines it."""
    config = getattr(module, "config", None)
    known: list[AfterHead] = []
    # The configuration is read first: a cap has no visible effect on small logits, but matters once they grow.
    if cap := getattr(config, "final_logit_softcapping", None):
        known.append(lambda logits: cap * torch.tanh(logits / cap))
    if scale := getattr(config, "logit_scale", None):
        known.append(lambda logits: logits * scale)
    if divisor := getattr(config, "logits_scaling", None):
        known.append(lambda logits: logits / divisor)
    known.append(lambda logits: logits)
    with torch.no_grad():
        plain = head(hidden_1H)
        # Kernels of a GPU may differ in the last bit of a narrow type for another shape of the same input.
        last_bits = 2.0 * torch.finfo(logits_1V.dtype).eps * float(logits_1V.abs().max())
        for after in known:
            if torch.allclose(after(plain).float(), logits_1V.float(), rtol=1e-3, atol=max(last_bits, 1e-6)):
                return after
    raise ConfigError(
        f"{type(module).__name__} changes its logits after the head in an unsupported way; raise max_logits "
        "above tokens times vocabulary, or lower max_tokens_per_micro_batch, so that the head runs in one piece"
    )


@dataclass(frozen=True, slots=True)
class LastLayer:
    """The parts of a last layer that computes `x + attention(norm(x))`, followed by operations on single tokens.

    Keys and values are computed for all tokens. The attention output, the feed-forward part and the last norm are
    computed only for scored tokens. This saves a fifth of the work in a model with 2 layers, and a fiftieth in a model
    with 24 layers. Hooks apply this to one forward pass; the model's code is unchanged.
    """

    layer: nn.Module
    norm: nn.Module  # Before the attention
    out: nn.Module  # The last projection of the attention

    @contextmanager
    def only_at(self, indices_N: Tensor) -> Iterator[None]:
        """Reduce the hidden states in forward passes during this block to (1,N,H).

        The indices refer to the ids as a flat array of B·T tokens.
        """
        whole: list[Tensor] = []

        def pick(values: Tensor) -> Tensor:
            return values.reshape(-1, values.shape[-1]).index_select(0, indices_N).unsqueeze(0)

        def enter(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            whole[:] = args[:1]
            return (pick(args[0]), *args[1:])

        hooks: list[tuple[nn.Module, Callable[..., tuple[Any, ...]]]] = [
            (self.layer, enter),
            (self.norm, lambda _, args: (whole[0], *args[1:])),
            (self.out, lambda _, args: (pick(args[0]), *args[1:])),
        ]
        handles = [part.register_forward_pre_hook(hook) for part, hook in hooks]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


@torch.no_grad()
def find_last_layer(module: nn.Module, head: nn.Module) -> LastLayer | None:
    """Return the last layer of a causal language model, or None if a trial shows that its structure is different.

    The module must be in evaluation mode. `head` is the layer that computes logits from hidden states.
    """
    if not (layers := shardable_layers(module)):
        return None
    norm = getattr(layers[-1], "input_layernorm", None)
    out = getattr(getattr(layers[-1], "self_attn", None), "o_proj", None)
    if not (isinstance(norm, nn.Module) and isinstance(out, nn.Module)):
        return None
    last, device = LastLayer(layers[-1], norm, out), next(module.parameters()).device
    ids_1T = torch.arange(4, device=device).unsqueeze(0)
    indices = torch.tensor([1, 3], device=device)
    expected = last_hidden(module, head, input_ids=ids_1T)[:, indices]
    try:
        with last.only_at(indices):
            reduced = last_hidden(module, head, input_ids=ids_1T)
    except (RuntimeError, TypeError, ValueError, IndexError):  # The shapes do not match
        return None
    if reduced.shape != expected.shape:
        return None
    return last if bool((reduced - expected).abs().max() <= CLOSE * expected.abs().max()) else None
