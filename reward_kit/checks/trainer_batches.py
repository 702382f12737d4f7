"""Enumerated batches of token rows for each scenario, and the gradient that a trainer should compute for them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from reward_kit.checks.tabular import Floats, Path, PossibleOutcome, TabularTask

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

SAMPLED, OBSERVATION, PADDING, ABSENT = range(4)
"""The kinds of tokens. Rows and tokens that only larger batches of a scenario have are marked as absent."""
_TOKENS_OF_OBSERVATION = 2
_LONGEST = 6  # three steps of two tokens


@dataclass(frozen=True, slots=True)
class Scenario:
    """The layout of a batch.

    Attributes:
        name: the name in the report.
        sizes: the number of episodes in each group. Each group has a separate prompt and separate parameters.
        lengths: True if the episodes differ in their number of sampled tokens and shorter rows are padded.
        observations: True if there are observation tokens, which have mask 0, between the steps.
        rows_per_step: True if there is one row per step. Such a row begins with the observations and has the episode's
            score. If False, there is one row per episode.
        step_rewards: True if every step has its own reward. If False, the last token has the sum of the rewards.
        unscored: True if the last episode of the first group has no score.
        interleaved: True if the rows of the groups alternate.
        masked_rewards: True if each row ends with a token that has mask 0 and a reward.
        micro_batches: the number of micro-batches.
    """

    name: str
    sizes: tuple[int, ...] = (2, 2)
    lengths: bool = False
    observations: bool = False
    rows_per_step: bool = False
    step_rewards: bool = False
    unscored: bool = False
    interleaved: bool = False
    masked_rewards: bool = False
    micro_batches: int = 1


SCENARIOS = (
    Scenario("groups of 2"),
    Scenario("group of 3", sizes=(3,)),
    Scenario("interleaved groups", interleaved=True),
    Scenario("group of 1", sizes=(2, 1)),
    Scenario("unscored episode", sizes=(3,), unscored=True),
    Scenario("lengths", lengths=True),
    Scenario("micro-batches", lengths=True, micro_batches=2),
    Scenario("observations", observations=True),
    Scenario("step rewards", observations=True, step_rewards=True),
    Scenario("masked rewards", masked_rewards=True),
    Scenario("rows per step", rows_per_step=True, lengths=True),
)


def _task(rewards: Sequence[float], chances: Sequence[float]) -> TabularTask:
    """Return a task of up to three steps. Action 0 ends the task, and action 1 leads to the next state."""
    states = "abc"
    branches = {}
    for number, state in enumerate(states):
        branches[state, 0] = [PossibleOutcome(1.0, rewards[2 * number], None)]
        branches[state, 1] = [PossibleOutcome(1.0, rewards[2 * number + 1], states[number + 1] if number < 2 else None)]
    return TabularTask(branches, {s: (p, 1.0 - p) for s, p in zip(states, chances, strict=True)}, "a", horizon=3)


_TASKS = (
    _task((0.5, 0.25, 0.75, -0.5, 1.0, -0.25), (0.25, 0.5, 0.75)),
    _task((2.0, 1.0, 0.5, 1.0, 2.0, -1.0), (0.5, 0.25, 0.5)),
)
_LOGITS = len(_TASKS[0].logits_P)
_PARAMETERS = len(_TASKS) * _LOGITS + 2  # the last two are the parameters of observation tokens and of padding
_PATHS = [task.paths() for task in _TASKS]


@dataclass(frozen=True, slots=True)
class _BatchRow:
    kinds: list[int]
    logprobs: list[float]
    rewards: list[float]
    steps: list[int]
    directions_TP: Floats
    is_last: bool
    state: str
    reward: float


def _rows(prompt: int, path: Path, scenario: Scenario, is_scored: bool) -> list[_BatchRow]:
    """Return the rows of an episode.

    The first token of a step is the policy's choice. If there is a second token, it is determined by the first.
    """
    task, start = _TASKS[prompt], prompt * _LOGITS
    directions_KP = np.zeros((len(path.turns), _PARAMETERS))
    directions_KP[:, start : start + _LOGITS] = task.score_functions(path)
    tokens: list[list[tuple[int, float, float, int, Floats]]] = [[]]
    outside, total = _direction(OBSERVATION), 0
    for k, turn in enumerate(path.turns):
        is_last = k == len(path.turns) - 1
        if scenario.rows_per_step and k:
            tokens.append([])
        if scenario.observations or scenario.rows_per_step:
            count = _TOKENS_OF_OBSERVATION * (k if scenario.rows_per_step else min(k, 1))
            tokens[-1] += [(OBSERVATION, -2.0, 0.0, k, outside)] * count
        size = 1 + turn.action
        if is_last and not scenario.lengths:
            size = _LONGEST - total
        total += size
        reward = turn.reward if scenario.step_rewards else path.score
        if not (is_last or scenario.step_rewards or scenario.rows_per_step):
            reward = 0.0
        if not is_scored and is_last:
            reward = math.nan
        chosen = (SAMPLED, math.log(task.chances(turn.state)[turn.action]), 0.0, k, directions_KP[k])
        tokens[-1] += [chosen, *[(SAMPLED, 0.0, 0.0, k, np.zeros(_PARAMETERS))] * (size - 1)]
        tokens[-1][-1] = (*tokens[-1][-1][:2], reward, *tokens[-1][-1][3:])
        if scenario.masked_rewards and is_last:
            tokens[-1].append((OBSERVATION, -2.0, 2.0 * path.turns[0].action, k, outside))
    made = []
    for number, row in enumerate(tokens):
        kinds, logprobs, rewards, steps, directions = zip(*row, strict=True)
        directions_TP = np.array(directions)
        turns = path.turns[number : number + 1] if scenario.rows_per_step else path.turns
        made.append(
            _BatchRow(
                [*kinds],
                [*logprobs],
                [*rewards],
                [*steps],
                directions_TP,
                number == len(tokens) - 1,
                f"{prompt}-{turns[0].state}",
                math.fsum(turn.reward for turn in turns) if is_scored else math.nan,
            )
        )
    return made


def _direction(kind: int) -> Floats:
    """Return the score function of a token outside the actions. Each kind of token has one parameter."""
    direction_P = np.zeros(_PARAMETERS)
    direction_P[kind - 3] = 1.0
    return direction_P


class Enumeration:
    """All batches of a scenario and their probabilities, as (N, B, T) arrays over batches, rows and tokens."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        members = [(prompt, member) for prompt, size in enumerate(scenario.sizes) for member in range(size)]
        if scenario.interleaved:
            members.sort(key=lambda one: one[1])
        is_scored = [not (scenario.unscored and one == (0, scenario.sizes[0] - 1)) for one in members]
        rows_of = {
            (prompt, number, scored): _rows(prompt, path, scenario, scored)
            for prompt in range(len(scenario.sizes))
            for number, path in enumerate(_PATHS[prompt])
            for scored in (True, False)
        }
        choices = list(itertools.product(range(len(_PATHS[0])), repeat=len(members)))
        batches, probabilities = [], []
        for choice in choices:
            parts = [(p, path, scored) for (p, _), path, scored in zip(members, choice, is_scored, strict=True)]
            batches.append([(*part, episode, row) for episode, part in enumerate(parts) for row in rows_of[part]])
            probabilities.append(math.prod(_PATHS[p][path].probability for p, path, _ in parts))
        self.probabilities_N = np.array(probabilities)
        n, b = len(batches), max(map(len, batches))
        t = max(len(row.kinds) for rows in rows_of.values() for row in rows)
        self.kinds_NBT = np.full((n, b, t), ABSENT)
        self.steps_NBT = np.full((n, b, t), -1)
        self.logprobs_NBT, self.rewards_NBT = np.zeros((n, b, t)), np.zeros((n, b, t))
        self.directions_NBTP = np.zeros((n, b, t, _PARAMETERS))
        self.scores_NB, self.own_rewards_NB = np.full((n, b), np.nan), np.full((n, b), np.nan)
        self.states_NB = np.full((n, b), "", dtype=object)
        self.groups_NB, self.episodes_NB, self.parts_NB = (np.full((n, b), -1) for _ in range(3))
        self.is_last_NB, self.is_first_NB = np.zeros((n, b), np.bool_), np.zeros((n, b), np.bool_)
        for i, batch in enumerate(batches):
            longest = max(len(row.kinds) for *_, row in batch)
            self.kinds_NBT[i, : len(batch), :longest] = PADDING
            self.logprobs_NBT[i, : len(batch), :longest] = -1.5
            self.directions_NBTP[i, : len(batch), :longest] = _direction(PADDING)
            for part, indices in enumerate(np.array_split(np.arange(len(batch)), scenario.micro_batches)):
                self.parts_NB[i, indices] = part
            for j, (prompt, path, scored, episode, row) in enumerate(batch):
                own = (i, j, slice(len(row.kinds)))
                self.kinds_NBT[own], self.logprobs_NBT[own], self.rewards_NBT[own] = (
                    row.kinds,
                    row.logprobs,
                    row.rewards,
                )
                self.steps_NBT[own], self.directions_NBTP[own] = row.steps, row.directions_TP
                self.groups_NB[i, j], self.episodes_NB[i, j] = prompt, episode
                self.scores_NB[i, j] = _PATHS[prompt][path].score if scored else np.nan
                self.is_last_NB[i, j], self.states_NB[i, j], self.own_rewards_NB[i, j] = (
                    row.is_last,
                    row.state,
                    row.reward,
                )
                self.is_first_NB[i, j] = j == 0 or batch[j - 1][3] != episode

    @cached_property
    def exact_P(self) -> Floats:
        """Return the gradient of the expected score, averaged over the episodes of a batch."""
        gradient_P = np.zeros(_PARAMETERS)
        for prompt, size in enumerate(self.scenario.sizes):
            share = size / sum(self.scenario.sizes)
            gradient_P[prompt * _LOGITS : (prompt + 1) * _LOGITS] = share * _TASKS[prompt].policy_gradient()
        return gradient_P

    @property
    def first_group_P(self) -> Bools:
        """Return a mask of the parameters that do not belong to the second group."""
        return np.asarray(np.arange(_PARAMETERS) // _LOGITS != 1)

    def expected_P(self, coefficients_NBT: Floats) -> Floats:
        """Return the expected sum of the score functions, each multiplied by its coefficient."""
        return np.asarray(np.einsum("n,nbt,nbtp->p", self.probabilities_N, coefficients_NBT, self.directions_NBTP))

    def batches(self) -> Iterator[dict[str, Any]]:
        """Yield the batches as NumPy arrays and lists. Rows and tokens that are absent from a batch are removed."""
        for i in range(len(self.probabilities_N)):
            rows = int((self.groups_NB[i] >= 0).sum())
            own = (i, slice(rows), slice(int((self.kinds_NBT[i, 0] != ABSENT).sum())))
            parts = self.parts_NB[i, :rows]
            yield {
                "log_probs": self.logprobs_NBT[own],
                "response_mask": (self.kinds_NBT[own] == SAMPLED).astype(np.float64),
                "attention_mask": (self.kinds_NBT[own] != PADDING).astype(np.float64),
                "token_level_rewards": self.rewards_NBT[own],
                "episode_rewards": self.scores_NB[i, :rows],
                "rewards": self.own_rewards_NB[i, :rows],
                "is_last_step": self.is_last_NB[i, :rows],
                "anchor_obs": self.states_NB[i, :rows],
                "uid": np.array([f"group-{number}" for number in self.groups_NB[i, :rows]], dtype=object),
                "traj_uid": np.array([f"episode-{number}" for number in self.episodes_NB[i, :rows]], dtype=object),
                "micro_batches": [np.flatnonzero(parts == part) for part in range(self.scenario.micro_batches)],
            }
