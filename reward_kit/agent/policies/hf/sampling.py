"""Sampling of the next token with a temperature, filters, constraints, and one uniform random number for each token.

A token is drawn by inverting the cumulative distribution: the first token at which the distribution, computed in
float64, exceeds a uniform number from the session's random generator. The samples of a session therefore depend only on
its seed and logits, not on the rest of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from reward_kit.errors import ConfigError
from reward_kit.torch_cpu import float64_device


class Sampling(NamedTuple):
    """The sampling options.

    They are applied in the order in which they are listed.

    Attributes:
        temperature: the divisor of the logits. If it is 0, the most likely token is selected.
        top_k: the number of most likely tokens to keep. Tokens that are as likely as the last of these are kept too. If
            it is 0, all tokens are kept.
        top_p: the total probability of the tokens to keep. The smallest number of most likely tokens that reaches it is
            kept. If it is 1.0, all tokens are kept.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0

    def check(self) -> Sampling:
        """Return this object if all of its values are valid.

        Raises:
            ConfigError: If a value is out of range.
        """
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError(
                f"temperature must be at least 0, got {self.temperature}; 0 selects the most likely token"
            )
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p must be in (0, 1], got {self.top_p}; 1 keeps all tokens")
        if self.top_k < 0:
            raise ConfigError(f"top_k must be at least 0, got {self.top_k}; 0 keeps all tokens")
        return self


class Drawn(NamedTuple):
    """One token for each row: the ids `ids_B` (int64) and the log-probabilities `logprobs_B` (float64).

    The log-probabilities are those under the sampling distribution. Both are on the CPU if the device of the logits has
    no float64.
    """

    ids_B: Tensor
    logprobs_B: Tensor


def draw(
    logits_BV: Tensor, uniforms_B: NDArray[np.float64], sampling: Sampling, allowed_BV: Tensor | None = None
) -> Drawn:
    """Sample one token for each row.

    `uniforms_B` contains numbers in [0, 1). `allowed_BV` is True for each allowed token. If `allowed_BV` is
    `None`, all tokens are allowed.
    """
    logits_BV, device = logits_BV.float(), float64_device(logits_BV.device)
    if allowed_BV is not None:
        logits_BV = logits_BV.masked_fill(~allowed_BV, -torch.inf)
    if sampling.temperature == 0:
        # One token has all the probability, regardless of the logits. Keep NaN so that it is noticed.
        best_B = logits_BV.max(dim=-1)
        return Drawn(best_B.indices.to(device), best_B.values.to(device).double() * 0)
    if sampling.temperature != 1:
        logits_BV = logits_BV / sampling.temperature
    if 0 < sampling.top_k < logits_BV.shape[-1]:
        least_B1 = logits_BV.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < least_B1, -torch.inf)
    if sampling.top_p < 1:
        sorted_BV, order_BV = logits_BV.sort(dim=-1, descending=True)
        probabilities_BV = sorted_BV.softmax(dim=-1)
        before_BV = probabilities_BV.cumsum(dim=-1) - probabilities_BV
        dropped_BV = torch.zeros_like(before_BV, dtype=torch.bool)
        dropped_BV.scatter_(1, order_BV, before_BV >= sampling.top_p)
        logits_BV = logits_BV.masked_fill(dropped_BV, -torch.inf)
    logprobs_BV = logits_BV.log_softmax(dim=-1).to(device)
    cumulative_BV = logprobs_BV.exp().cumsum(dim=-1, dtype=torch.float64)
    total_B1 = cumulative_BV[:, -1:]
    # Stay strictly below the total; otherwise rounding could select an index after the last possible token.
    uniforms_B1 = torch.from_numpy(uniforms_B).to(device, non_blocking=True)[:, None]
    targets_B1 = torch.minimum(uniforms_B1 * total_B1, torch.nextafter(total_B1, torch.zeros_like(total_B1)))
    ids_B1 = torch.searchsorted(cumulative_BV, targets_B1, right=True).clamp_(max=logits_BV.shape[-1] - 1)
    return Drawn(ids_B1[:, 0], logprobs_BV.gather(-1, ids_B1)[:, 0].double())


def allowed_mask(allowed: Sequence[NDArray[np.int64] | None], vocabulary: int) -> Tensor | None:
    """Return a (B, V) mask that is True for the allowed ids of each row, or None if no row is restricted.

    If an item of `allowed` is `None`, all ids are allowed in that row.
    """
    restricted = [row for row, ids in enumerate(allowed) if ids is not None]
    if not restricted:
        return None
    mask_BV = np.ones((len(allowed), vocabulary), dtype=bool)
    mask_BV[restricted] = False
    ids = [ids for ids in allowed if ids is not None]
    mask_BV[np.repeat(restricted, [len(part) for part in ids]), np.concatenate(ids)] = True
    return torch.from_numpy(mask_BV)


class Draws:
    """Uniform random numbers for many rows. Each row draws some numbers in advance from its random generator.

    Each turn begins with new numbers from the generator of its session. The result of a turn therefore depends neither
    on its row nor on numbers that the previous turn left unused.
    """

    AHEAD = 64

    def __init__(self, rows: int) -> None:
        self._uniforms_RN = np.zeros((rows, self.AHEAD))
        self._next_R = np.zeros(rows, dtype=np.int64)
        self._generators: list[np.random.Generator | None] = [None] * rows

    def begin(self, row: int, generator: np.random.Generator) -> None:
        """Use this generator for a row from now on."""
        self._generators[row] = generator
        self._next_R[row] = 0
        self._uniforms_RN[row] = generator.random(self.AHEAD)

    def take(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return a (B,) array with the next number for each row in `rows`."""
        for row in rows[self._next_R[rows] == self.AHEAD]:
            generator = self._generators[row]
            assert generator is not None, f"begin() was not called for row {row}"
            self.begin(int(row), generator)
        taken_B = self._uniforms_RN[rows, self._next_R[rows]]
        self._next_R[rows] += 1
        return taken_B
