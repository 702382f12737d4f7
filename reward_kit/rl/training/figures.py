"""What episodes, their scores and their credit come to in figures, under the names that logs show."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from reward_kit.credit.diagnostics import credit_diagnostics
from reward_kit.episodes.record import environment_return, facts_of
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.errors import Failure
from reward_kit.rl_processing import CreditBatch

Figures = dict[str, float]

_SUMS = ("tokens", "optimizer_steps", "effective_sample_size")
_CREDIT_SUMS = ("credit/trajectories", "credit/unscored", "credit/steps", "credit/groups", "credit/anchors")


def sampled_tokens(episode: SingleAgentEpisode) -> int:
    """How many tokens the policy sampled in an episode; 0 where tokens were not recorded."""
    return sum(span.stop - span.start for span in episode.tokens.spans)


def score_figures(scores: Sequence[float | None], failures: Iterable[Failure], pass_threshold: float) -> Figures:
    """The mean, the extremes and the passes of the scored episodes, absent without any, and what is unscored and why.

    Args:
        scores: (N,) None where unscored.
        failures: why some are.
        pass_threshold: a score of at least this passes.
    """
    known = [score for score in scores if score is not None]
    figures: Figures = {"unscored": float(len(scores) - len(known))}
    if known:
        figures["mean"] = sum(known) / len(known)
        figures |= {"min": min(known), "max": max(known)}
        figures["passed_share"] = sum(score >= pass_threshold for score in known) / len(known)
    for name, count in sorted(Counter(failure.failure_class for failure in failures).items()):
        figures[f"failed/{name}"] = float(count)
    return figures


def episode_figures(episodes: Sequence[SingleAgentEpisode]) -> Figures:
    """How long the episodes are, what their worlds gave, how many actions were impossible, and why they ended."""
    count = len(episodes)
    figures: Figures = {"count": float(count)}
    if not count:
        return figures
    steps = sum(len(episode) for episode in episodes)
    figures |= {"steps_mean": steps / count, "tokens_mean": sum(map(sampled_tokens, episodes)) / count}
    returns = [value for episode in episodes if (value := environment_return(episode)) is not None]
    if returns:
        figures["return_mean"] = sum(returns) / len(returns)
    if steps:
        figures["invalid_action_share"] = sum(map(_invalid_actions, episodes)) / steps
    for reason, ended in sorted(Counter(str(facts_of(one).get("stop_reason")) for one in episodes).items()):
        figures[f"stop/{reason}_share"] = ended / count
    return figures


def _invalid_actions(episode: SingleAgentEpisode) -> int:
    # What came of an action stands in the information that followed it.
    return sum(episode.get_infos(t + 1).get("is_action_valid") is False for t in range(len(episode)))


def credit_figures(credited: CreditBatch) -> Figures:
    """The diagnostics of a batch's credit; see `credit.diagnostics`."""
    if credited.credit is None:
        return {}
    lengths = [len(steps) for steps in credited.steps]
    return credit_diagnostics(credited.credit, lengths, credited.scores, credited.group_ids).summary()


def prefixed(prefix: str, figures: Mapping[str, float]) -> Figures:
    """The figures under `prefix/`."""
    return {f"{prefix}/{name}": value for name, value in figures.items()}


def merged_updates(updates: Sequence[Figures]) -> Figures:
    """The diagnostics of the updates that one batch was split into, as if it had been one.

    Counts are added, extremes are the extremes, and everything else is the mean weighted by tokens.
    """
    return _merged(updates, [one.get("tokens", 0.0) for one in updates], _SUMS)


def merged_credit(parts: Sequence[Figures]) -> Figures:
    """The credit figures of parts of one batch: counts are added, shares are weighted by steps."""
    return _merged(parts, [one.get("credit/steps", 0.0) for one in parts], _CREDIT_SUMS)


def _merged(parts: Sequence[Figures], weights: Sequence[float], sums: Sequence[str]) -> Figures:
    if len(parts) == 1:
        return dict(parts[0])
    merged: Figures = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        pairs = [(part[name], weight) for part, weight in zip(parts, weights, strict=True) if name in part]
        values = [value for value, _ in pairs]
        total = sum(weight for _, weight in pairs)
        if name in sums:
            merged[name] = sum(values)
        elif name.endswith("_min"):
            merged[name] = min(values)
        elif name.endswith("_max") or name.startswith("alarm/"):
            merged[name] = max(values)
        else:
            merged[name] = sum(v * w for v, w in pairs) / total if total else sum(values) / len(values)
    return merged
