"""Diagnostics for a batch's credit, including warnings that name the likely causes of weak credit."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from reward_kit.credit.step_arrays import Batch, Codes, Flags, Floats, factorize
from reward_kit.credit.step_credit import StepCredit

FEW_SHARED = 0.05
"""Step-level credit has almost no effect if the share of steps that have a peer is below this value."""

# Each message states a problem, its likely cause and a fix.
_NOTHING_SCORED = "no trajectory is scored, so credit cannot be computed; inspect the failed scores"
_MOSTLY_UNSCORED = "{} of {} trajectories are unscored and excluded; inspect the failed scores"
_ALL_SINGLE = (
    "every group has only one scored trajectory, which cannot be compared with others; collect more rollouts "
    "per sample, or check the group ids"
)
_ALL_TIED = (
    "all scores are equal within every group, so no trajectory has an advantage; choose tasks that are solved only "
    "some of the time, or a reward with more levels"
)
_FEW_SHARED = (
    "only {:.1%} of the steps share their state with another step, so nearly all step advantages are 0; the "
    "state key or a tool result probably contains something that never repeats, such as a time, an id or the history; "
    "exclude that part or choose a different state_hash (regex, canonical_json, similarity)"
)
_NEVER_MEET = (
    "no two trajectories in a group share a state; check that all episodes in a group start in the same state and "
    "that the state key contains nothing that is specific to one episode"
)
_MERGED = (
    "{} of {} steps share their state with a step in the same episode before which the agent had seen different "
    "tool results, so credit compares actions that are not alternatives; remove state_hash, or set it to "
    "state_and_results"
)


def merged_states_warning(batch: Batch, anchors_S: Codes) -> str | None:
    """Return a warning if steps in one episode share an anchor even though the agent had seen different tool results.

    Only steps that record `state_and_results` are compared, because the state key of any other step covers the results.
    """
    anchors, merged = iter(anchors_S.tolist()), 0
    for steps in batch:
        known: dict[int, set[str]] = {}
        own = [next(anchors) for _ in steps]
        for anchor, step in zip(own, steps, strict=True):
            if anchor >= 0 and (key := step.step_info.get("state_and_results")) is not None:
                known.setdefault(anchor, set()).add(key)
        merged += sum(len(known.get(anchor, ())) > 1 for anchor in own)
    return _MERGED.format(merged, len(anchors_S)) if merged else None


@dataclass(frozen=True, slots=True)
class CreditDiagnostics:
    """Statistics about a batch's credit.

    All fields except `unscored` count only scored trajectories. Two steps are peers if they have the same anchor state,
    that is, if they were taken in the same state within the same group.

    Attributes:
        trajectories: the number of scored trajectories.
        unscored: the number of trajectories without a score.
        steps: the number of steps in the scored trajectories.
        groups: the number of groups with at least one scored trajectory.
        single_groups: the number of groups with exactly one scored trajectory. Such a trajectory has nothing to be
            compared with.
        tied_groups: the number of groups that have at least two scored trajectories, all of which have the same score.
        uses_states: True if the estimator uses states. If False, the counts of anchors and peers are 0.
        anchor_sizes: a mapping from a number of steps to the number of anchor states with that many steps.
        steps_with_peer: the number of steps that have a peer.
        steps_with_other_peer: the number of steps that have a peer in another trajectory. If a state is visited
            repeatedly but only by one trajectory, the steps in this state are compared only with each other.
        zero_advantages: the number of steps with an advantage of exactly 0.
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
        """Return the statistics, keyed by their names in logs.

        Shares are relative to the number of scored steps or groups. If this number is 0, the share is omitted.
        """
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
        """Return a message for each problem that weakens the credit. Each message names the likely cause and a fix."""
        if not self.trajectories:
            return [_NOTHING_SCORED]
        warnings = []
        if self.unscored > self.trajectories:
            warnings.append(_MOSTLY_UNSCORED.format(self.unscored, self.unscored + self.trajectories))
        # An estimator that does not compare trajectories within a group produces nonzero advantages even for such
        # groups.
        compares_groups = self.uses_states or self.zero_advantages == self.steps
        if compares_groups and self.single_groups == self.groups:
            warnings.append(_ALL_SINGLE)
        elif compares_groups and self.tied_groups and self.tied_groups + self.single_groups == self.groups:
            warnings.append(_ALL_TIED)
        if self.uses_states and self.steps:
            share = self.steps_with_peer / self.steps
            if share < FEW_SHARED:
                warnings.append(_FEW_SHARED.format(share))
            elif not self.steps_with_other_peer and self.groups > self.single_groups:
                warnings.append(_NEVER_MEET)
        return warnings


def credit_diagnostics(
    credit: StepCredit,
    lengths_B: Sequence[int] | Codes,
    scores: Sequence[float | None],
    group_ids: Sequence[Hashable] | None = None,
) -> CreditDiagnostics:
    """Compute the diagnostics for a batch's credit.

    Args:
        credit: the credit of the S steps.
        lengths_B: (B,) the number of steps in each trajectory.
        scores: (B,) the scores; None for an unscored trajectory.
        group_ids: (B,) the group of each trajectory. If None, all trajectories form a single group.
    """
    lengths_B = np.asarray(lengths_B, dtype=np.int64)
    # float64 converts None to NaN.
    scores_B = np.array(scores, dtype=np.float64)
    groups_B = factorize(group_ids) if group_ids is not None else np.zeros(len(scores_B), dtype=np.int64)
    is_scored_B = ~np.isnan(scores_B)
    scored_S = np.repeat(is_scored_B, lengths_B)
    anchors_S = credit.anchors_S[scored_S]
    scores_N = scores_B[is_scored_B]
    groups, codes_N, counts_G = np.unique(groups_B[is_scored_B], return_inverse=True, return_counts=True)
    lowest_G, highest_G = _extremes(codes_N, scores_N, len(groups))
    sizes, with_peer, with_other = _peers(anchors_S, np.repeat(np.arange(len(lengths_B)), lengths_B)[scored_S])
    return CreditDiagnostics(
        trajectories=int(is_scored_B.sum()),
        unscored=int((~is_scored_B).sum()),
        steps=int(scored_S.sum()),
        groups=len(groups),
        single_groups=int((counts_G == 1).sum()),
        tied_groups=int(((counts_G > 1) & (lowest_G == highest_G)).sum()),
        uses_states=bool((credit.anchors_S >= 0).any()),
        anchor_sizes=sizes,
        steps_with_peer=int(with_peer.sum()),
        steps_with_other_peer=int(with_other.sum()),
        zero_advantages=int((credit.advantages_S[scored_S] == 0.0).sum()),
    )


def _extremes(codes_N: Codes, values_N: Codes | Floats, size: int) -> tuple[Floats, Floats]:
    """Return the lowest and the highest value for each code."""
    lowest, highest = np.full(size, np.inf), np.full(size, -np.inf)
    np.minimum.at(lowest, codes_N, values_N)
    np.maximum.at(highest, codes_N, values_N)
    return lowest, highest


def _peers(anchors_S: Codes, trajectories_S: Codes) -> tuple[dict[int, int], Flags, Flags]:
    """Return a mapping from sizes to numbers of anchor states with that size, and two flags for each step.

    The first flag is True if the step has a peer, and the second is True if it has a peer in another trajectory.
    """
    if not len(anchors_S) or anchors_S[0] < 0:
        none_S = np.zeros(len(anchors_S), dtype=np.bool_)
        return {}, none_S, none_S
    _, codes, counts = np.unique(anchors_S, return_inverse=True, return_counts=True)
    lowest, highest = _extremes(codes, trajectories_S, len(counts))
    sizes, numbers = np.unique(counts, return_counts=True)
    return dict(zip(sizes.tolist(), numbers.tolist(), strict=True)), (counts > 1)[codes], (lowest < highest)[codes]
