"""What the credit of a batch looks like: how many steps have peers, how many earn nothing, and what is wrong if so."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from reward_kit.credit.step_arrays import Codes, Flags, Floats, codes_of
from reward_kit.credit.step_credit import StepCredit

FEW_SHARED = 0.05
"""Below this share of steps with a peer, step-level credit says next to nothing."""

# Each with its cause and what to do about it.
_NOTHING_SCORED = "no trajectory is scored, so nothing has credit: look at the scores' failures"
_MOSTLY_UNSCORED = "{} of {} trajectories are unscored and take no part: look at the scores' failures"
_ALL_SINGLE = (
    "every group has one scored trajectory, so there is nothing to compare it with: collect more rollouts of each "
    "sample, or check the group ids"
)
_ALL_TIED = (
    "in every group all scores are equal, so no trajectory has an advantage: choose tasks that are neither always "
    "solved nor never, or a reward with more levels"
)
_FEW_SHARED = (
    "{:.1%} of the steps share their state with another, so step advantages are nearly all 0: the state key holds "
    "something that never repeats (time, step count, id, history); leave it out, or choose another state_hash (regex, "
    "canonical_json, similarity)"
)
_NEVER_MEET = (
    "no two trajectories of a group share a state, each only meets itself: check that the group's episodes have the "
    "same start and that the state key holds nothing of the episode"
)


@dataclass(frozen=True, slots=True)
class CreditDiagnostics:
    """Counts over the scored part of a batch; unscored trajectories are counted once and take no part in the rest.

    A peer of a step is another step of the same anchor, that is, taken in the same state within the same group.

    Attributes:
        trajectories: scored ones.
        unscored: trajectories without a score.
        steps: of the scored trajectories.
        groups: with a scored trajectory.
        single_groups: groups with one scored trajectory, which has nothing to be compared with.
        tied_groups: groups of two and more whose scores are all equal.
        uses_states: the estimator looked at states; without it the anchors' numbers are 0.
        anchor_sizes: how many anchors have 1, 2, … steps: size -> anchors.
        steps_with_peer: steps with a peer.
        steps_with_other_peer: those with a peer of another trajectory; a state visited twice by one trajectory is
            compared with itself only.
        zero_advantages: steps whose advantage is exactly 0.
    """

    trajectories: int
    unscored: int
    steps: int
    groups: int
    single_groups: int
    tied_groups: int
    uses_states: bool
    anchor_sizes: dict[int, int]
    steps_with_peer: int
    steps_with_other_peer: int
    zero_advantages: int

    def summary(self) -> dict[str, float]:
        """The figures by the names that logs show; shares are of the scored steps or groups, and absent without any."""
        figures: dict[str, float] = {
            "credit/trajectories": self.trajectories,
            "credit/unscored": self.unscored,
            "credit/steps": self.steps,
            "credit/groups": self.groups,
        }
        if self.groups:
            figures["credit/tied_groups_share"] = self.tied_groups / self.groups
            figures["credit/single_groups_share"] = self.single_groups / self.groups
        if self.steps:
            figures["credit/zero_advantage_share"] = self.zero_advantages / self.steps
        if self.steps and self.uses_states:
            anchors = sum(self.anchor_sizes.values())
            figures["credit/anchors"] = anchors
            figures["credit/anchor_size_mean"] = self.steps / anchors
            figures["credit/anchor_size_max"] = max(self.anchor_sizes)
            figures["credit/peer_share"] = self.steps_with_peer / self.steps
            figures["credit/other_peer_share"] = self.steps_with_other_peer / self.steps
        return figures

    def warnings(self) -> list[str]:
        """What makes the credit worth less than it could be, each with its cause and what to do about it."""
        if not self.trajectories:
            return [_NOTHING_SCORED]
        found = []
        if self.unscored > self.trajectories:
            found.append(_MOSTLY_UNSCORED.format(self.unscored, self.unscored + self.trajectories))
        # Advantages without states and without groups that differ are of an estimator that compares otherwise.
        compares_groups = self.uses_states or self.zero_advantages == self.steps
        if compares_groups and self.single_groups == self.groups:
            found.append(_ALL_SINGLE)
        elif compares_groups and self.tied_groups and self.tied_groups + self.single_groups == self.groups:
            found.append(_ALL_TIED)
        return found + self._state_warnings()

    def _state_warnings(self) -> list[str]:
        if not self.uses_states or not self.steps:
            return []
        share = self.steps_with_peer / self.steps
        if share < FEW_SHARED:
            return [_FEW_SHARED.format(share)]
        if not self.steps_with_other_peer and self.groups > self.single_groups:
            return [_NEVER_MEET]
        return []


@dataclass(frozen=True, slots=True)
class AnchorValue:
    """What happened from one state on, within one group.

    Attributes:
        anchor: its number in `StepCredit.anchors_S`.
        first_step: the position of its first step in the batch, to look its state up by.
        count: scored steps taken in it.
        mean_return: the mean of their G_k, an estimate of the state's value.
    """

    anchor: int
    first_step: int
    count: int
    mean_return: float


def credit_diagnostics(
    credit: StepCredit,
    lengths_B: Sequence[int] | Codes,
    scores: Sequence[float | None],
    group_ids: Sequence[Hashable] | None = None,
) -> CreditDiagnostics:
    """The diagnostics of a batch's credit.

    Args:
        credit: of S steps.
        lengths_B: (B,) steps of each trajectory.
        scores: (B,) None where unscored.
        group_ids: (B,) the group of each trajectory; None is one group.
    """
    lengths_B = np.asarray(lengths_B, dtype=np.int64)
    # As float64, None is NaN.
    scores_B = np.array(scores, dtype=np.float64)
    groups_B = codes_of(group_ids) if group_ids is not None else np.zeros(len(scores_B), dtype=np.int64)
    is_scored_B = ~np.isnan(scores_B)
    scored_S = np.repeat(is_scored_B, lengths_B)
    anchors_S = credit.anchors_S[scored_S]
    single, tied = _single_and_tied(scores_B[is_scored_B], groups_B[is_scored_B])
    sizes, with_peer, with_other = _peers(anchors_S, np.repeat(np.arange(len(lengths_B)), lengths_B)[scored_S])
    return CreditDiagnostics(
        trajectories=int(is_scored_B.sum()),
        unscored=int((~is_scored_B).sum()),
        steps=int(scored_S.sum()),
        groups=len(np.unique(groups_B[is_scored_B])),
        single_groups=single,
        tied_groups=tied,
        uses_states=bool((credit.anchors_S >= 0).any()),
        anchor_sizes=sizes,
        steps_with_peer=int(with_peer.sum()),
        steps_with_other_peer=int(with_other.sum()),
        zero_advantages=int((credit.advantages_S[scored_S] == 0.0).sum()),
    )


def anchor_values(credit: StepCredit) -> list[AnchorValue]:
    """The mean return and the visits of every anchor with a scored step, in order of appearance."""
    counted_S = np.flatnonzero((credit.anchors_S >= 0) & ~np.isnan(credit.returns_S))
    anchors, first, codes, counts = np.unique(
        credit.anchors_S[counted_S], return_index=True, return_inverse=True, return_counts=True
    )
    means: Floats = np.bincount(codes, credit.returns_S[counted_S], minlength=len(anchors)) / np.maximum(counts, 1)
    order = np.argsort(first, kind="stable")
    rows = zip(anchors[order], counted_S[first[order]], counts[order], means[order], strict=True)
    return [AnchorValue(int(anchor), int(step), int(count), float(mean)) for anchor, step, count, mean in rows]


def _single_and_tied(scores_N: Floats, groups_N: Codes) -> tuple[int, int]:
    _, codes, counts = np.unique(groups_N, return_inverse=True, return_counts=True)
    lowest, highest = np.full(len(counts), np.inf), np.full(len(counts), -np.inf)
    np.minimum.at(lowest, codes, scores_N)
    np.maximum.at(highest, codes, scores_N)
    return int((counts == 1).sum()), int(((counts > 1) & (lowest == highest)).sum())


def _peers(anchors_S: Codes, trajectories_S: Codes) -> tuple[dict[int, int], Flags, Flags]:
    """How many anchors there are of each size, and which steps have a peer, and one of another trajectory."""
    if not len(anchors_S) or anchors_S[0] < 0:
        none_S = np.zeros(len(anchors_S), dtype=np.bool_)
        return {}, none_S, none_S
    _, codes, counts = np.unique(anchors_S, return_inverse=True, return_counts=True)
    lowest = np.full(len(counts), np.iinfo(np.int64).max)
    highest = np.full(len(counts), -1)
    np.minimum.at(lowest, codes, trajectories_S)
    np.maximum.at(highest, codes, trajectories_S)
    sizes, numbers = np.unique(counts, return_counts=True)
    return dict(zip(sizes.tolist(), numbers.tolist(), strict=True)), (counts > 1)[codes], (lowest < highest)[codes]
