"""Other packages in processes with their own Python, called over pipes; tensors are passed as files."""

from __future__ import annotations

import itertools
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from reward_kit.rl.loss_terms import Aggregation, GlobalBatch, Loss

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).parent / "learners"
PYTHON = ROOT / ".integrations/learners/bin/python"

MODES: tuple[Aggregation, ...] = (
    "token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)
ROWS, TOKENS = 7, 12
LONGEST = 16
"""The constant length of "seq-mean-token-sum-norm" and of Dr. GRPO."""


class Peer:
    """A script of `learners/`, started once and called many times.

    Args:
        script: its file name.
        folder: where questions and answers lie.
    """

    def __init__(self, script: str, folder: Path) -> None:
        self._folder, self._numbers = folder, itertools.count()
        self._process = subprocess.Popen(
            [PYTHON, SCRIPTS / script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.communicate(timeout=60)  # the end of its input is the end of its work

    def ask(self, function: str, **arguments: Any) -> dict[str, Any]:
        """Call a function of the script and return its result.

        Args:
            function: its name.
            arguments: tensors, numbers, texts, and lists and dicts of them.

        Raises:
            AssertionError: the script broke off; the reason stands in its error output.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        place = self._folder / f"{next(self._numbers)}.pt"
        torch.save({"function": function, **arguments}, place)
        print(place, file=self._process.stdin, flush=True)
        assert self._process.stdout.readline().strip() == str(place), f"{function} gave no answer"
        found: dict[str, Any] = torch.load(place, weights_only=True)
        return found


class Deviations:
    """The greatest difference of each compared value, printed as a table at the end (`pytest -s`)."""

    def __init__(self) -> None:
        self._greatest: dict[str, tuple[float, int]] = {}

    def hold(self, name: str, ours: Tensor, theirs: Tensor, tolerance: float = 1e-6) -> None:
        """Assert that the two are equal, with a tolerance that is absolute up to 1 and relative beyond.

        Args:
            name: the row of the table.
            ours: what reward-kit computes.
            theirs: what the other software does.
            tolerance: the greatest difference allowed.

        Raises:
            AssertionError: they differ in shape or by more.
        """
        assert ours.shape == theirs.shape, f"{name}: {tuple(ours.shape)} is not {tuple(theirs.shape)}"
        theirs = theirs.detach().to(torch.float64)
        difference = (ours.detach().to(torch.float64) - theirs).abs() / theirs.abs().clamp(min=1.0)
        found = float(difference.max()) if difference.numel() else 0.0
        assert found <= tolerance, f"{name}: differs by {found:.3g}"
        greatest, count = self._greatest.get(name, (0.0, 0))
        self._greatest[name] = max(greatest, found), count + 1

    def show(self) -> None:
        """Prints the table."""
        print("\n| compared | cases | greatest difference |\n|---|---|---|")
        for name, (greatest, count) in self._greatest.items():
            print(f"| {name} | {count} | {greatest:.1e} |")


class Case(NamedTuple):
    """Random numbers (B,T) of one batch; the mask has holes, and one row is fully masked."""

    logprobs: Tensor
    old: Tensor
    advantages: Tensor
    mask: Tensor

    @property
    def whole(self) -> GlobalBatch:
        return GlobalBatch.of(self.mask, norm_length=LONGEST)


def generator(seed: int) -> torch.Generator:
    """Return a generator whose numbers a test can draw again."""
    return torch.Generator().manual_seed(seed)


def random_case(seed: int, spread: float = 0.8) -> Case:
    """Return a batch whose ratios are exp(±spread), so that every bound of every loss is reached."""
    drawn = torch.randn((3, ROWS, TOKENS), generator=generator(seed), dtype=torch.float64)
    mask = (torch.rand((ROWS, TOKENS), generator=generator(seed)) < 0.7).double()
    mask[:, 0], mask[3] = 1.0, 0.0
    old = -drawn[0].abs() - 0.5
    return Case(old + spread * drawn[1], old, drawn[2], mask)


def with_gradient(loss: Callable[..., Loss], case: Case, **options: Any) -> tuple[Loss, Tensor]:
    """Return a policy loss of a batch and its gradient with respect to the log-probabilities."""
    return differentiated(lambda leaf: loss(leaf, case.old, case.advantages, case.mask, **options), case.logprobs)


def differentiated(loss: Callable[[Tensor], Loss], values: Tensor) -> tuple[Loss, Tensor]:
    """Return a loss and its gradient with respect to its input."""
    leaf = values.clone().requires_grad_()
    found = loss(leaf)
    found.loss.backward()
    assert leaf.grad is not None
    return found, leaf.grad


def said(loss: Loss, name: str) -> Tensor:
    """Return one of the diagnostics."""
    return torch.as_tensor(float(loss.diagnostics[name]), dtype=torch.float64)
