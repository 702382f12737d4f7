"""How far two rewards agree: correlation, Cohen's kappa, and the rollouts on which they differ most."""

from __future__ import annotations

import math

import numpy as np

from reward_kit.agreement import cohens_kappa, pearson, spearman
from reward_kit.reward_agent.scoring import ScoringRequest
from reward_kit.reward_checks.answers import FORMS, text_of
from reward_kit.reward_checks.bench import Bench
from reward_kit.reward_checks.checkup import Checkup
from reward_kit.reward_checks.report import shown
from reward_kit.reward_checks.rollouts import clearly_different

_SHOWN = 5


async def agreement(checkup: Checkup, other: Bench, name: str, threshold: float = 1.0) -> None:
    """Score the same rollouts with a second reward.

    Args:
        checkup: its rollouts are the user's, and made ones where there are few.
        other: the second reward, open.
        name: of it, for the report.
        threshold: a score of this or more passes.
    """
    pairs, unscored = [], 0
    for request in _rollouts(checkup):
        left, right = (await checkup.bench.see(request)).score, (await other.see(request)).score
        if left is None or right is None:
            unscored += 1
        else:
            pairs.append((left, right, request))
    if len(pairs) < 2:
        checkup.report.cannot(f"agreement with {name}", f"{len(pairs)} rollouts were scored by both")
        return
    lefts, rights = np.array([left for left, _, _ in pairs]), np.array([right for _, right, _ in pairs])
    checkup.report.facts[f"agreement with {name}"] = {
        "rollouts": len(pairs),
        "unscored by one of them": unscored,
        "pearson": _rounded(pearson(lefts, rights)),
        "spearman": _rounded(spearman(lefts, rights)),
        "kappa": _rounded(cohens_kappa((lefts >= threshold).astype(int), (rights >= threshold).astype(int), 2)),
        "mean difference": _rounded(float(lefts.mean() - rights.mean())),
    }
    worst = sorted(pairs, key=lambda pair: -abs(pair[0] - pair[1]))[:_SHOWN]
    lines = [f"{left:.4g} against {right:.4g}: {_text(request)}" for left, right, request in worst if left != right]
    if lines:
        checkup.report.add("disagrees", "info", f"differs from {name}; the worst of {len(pairs)} rollouts", lines)


def _rollouts(checkup: Checkup) -> list[ScoringRequest]:
    found = [*checkup.rollouts, *(ground.gold for ground in checkup.grounds if ground.gold is not None)]
    if len(checkup.rollouts) < 20:
        for ground in checkup.grounds:
            found += [ground.answered(text) for text in clearly_different()]
            found += [ground.answered(ground.written(value)) for value in ground.wrong]
            if ground.truth is not None:
                text = text_of(ground.truth)
                found += [ground.answered(form.write(one)) for form in FORMS for one in (text, text.lower())]
    return found


def _text(request: ScoringRequest) -> str:
    return f'"{shown(request.messages[-1].text, 70)}"' if request.messages else "no messages"


def _rounded(value: float) -> float | None:
    return None if math.isnan(value) else round(value, 4)
