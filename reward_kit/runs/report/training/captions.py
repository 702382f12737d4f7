"""Which pictures the page has, of which figures, and what they say. Names are those of docs/reference/metrics.md."""

from __future__ import annotations

from typing import NamedTuple

from reward_kit.runs.files import HELD_OUT_SCORE


class Line(NamedTuple):
    """One figure of a picture, and what it is called in its legend."""

    name: str
    label: str


class Picture(NamedTuple):
    """One picture.

    Attributes:
        title: above it.
        lines: the figures that it shows, as far as the run has them.
        told: what they mean, and what to look for.
        has_zero: 0 is on its scale.
        is_log: its scale is logarithmic where the values are far apart.
        is_share: its values are shares, shown in per cent.
        hides_zeros: it is left out where nothing but 0 was measured.
    """

    title: str
    lines: tuple[Line, ...]
    told: str
    has_zero: bool = False
    is_log: bool = False
    is_share: bool = False
    hides_zeros: bool = False


class Part(NamedTuple):
    """Pictures under one heading."""

    anchor: str
    title: str
    pictures: tuple[Picture, ...]


SCORE = Picture(
    "Score",
    (Line(HELD_OUT_SCORE, "held-out samples"), Line("score/mean", "batch in training")),
    "The mean score on held-out samples, always the same samples and the same draws, and the band of ± 1.96 standard "
    "errors. The batch in training is another one each time, so that it jumps more; where it climbs away from the "
    "held-out score, the policy learns its training samples by heart.",
)
POLICY = Part(
    "policy",
    "How the policy moves",
    (
        Picture(
            "KL of one update",
            (Line("learner/approx_kl", "moved in this update"), Line("learner/kl", "from the reference")),
            "How far the policy moved in one update (k3 estimator), and how far it is from the reference, if there is "
            "one. A jump says that the steps are too large; lower ppo.lr.",
            has_zero=True,
        ),
        Picture(
            "Tokens that the clip holds back",
            (
                Line("learner/clip_fraction", "all"),
                Line("learner/clip_fraction_low", "lower bound"),
                Line("learner/clip_fraction_high", "upper bound"),
            ),
            "Share of tokens without a gradient, since their probability has moved beyond a bound. Some per cent are "
            "common; most of them would be wasted work.",
            has_zero=True,
            is_share=True,
        ),
        Picture(
            "Entropy",
            (Line("learner/entropy", "nats per token"),),
            "How undecided the policy is. It falls as the policy makes up its mind; near 0 it tries nothing new, and "
            "the episodes of a group become equal.",
            has_zero=True,
        ),
        Picture(
            "Gradient norm",
            (Line("learner/grad_norm", "mean of the update"), Line("learner/grad_norm_max", "greatest")),
            "Before it is cut. Peaks of ten times the usual are cut by ppo.max_grad_norm; a steady climb is a warning.",
            is_log=True,
        ),
        Picture("Learning rate", (Line("learner/lr", "learning rate"),), "Its schedule.", has_zero=True),
        Picture(
            "Loss",
            (
                Line("learner/policy_loss", "policy"),
                Line("learner/value_loss", "value"),
                Line("learner/kl_loss", "KL"),
                Line("learner/entropy_loss", "entropy"),
            ),
            "The parts of what is made smaller. The policy's part says little by itself: it is measured on other "
            "episodes each time, and need not fall.",
        ),
        Picture(
            "Critic",
            (Line("learner/explained_variance", "explained variance"),),
            "1 is a perfect critic, 0 one that says the mean, and below 0 it is worse than that.",
        ),
    ),
)
OFF_POLICY = Part(
    "off-policy",
    "How old the samples are",
    (
        Picture(
            "Policy lag",
            (Line("learner/lag_mean", "mean"), Line("learner/lag_max", "greatest")),
            "How many versions older than the weights in training those are that sampled a token: 0 for sync and "
            "minibatch, 1 for one_step_off and both.",
            has_zero=True,
        ),
        Picture(
            "Effective share of the samples",
            (Line("learner/effective_share", "share of the tokens"),),
            "How many tokens with equal ratios would be worth as much, as a share. Where it falls, few tokens decide.",
            has_zero=True,
            is_share=True,
        ),
        Picture(
            "Sampler and learner",
            (Line("learner/logprob_gap_mean", "mean difference"), Line("learner/logprob_gap", "greatest")),
            "The log-probability of a token as it was recorded when it was sampled, and as the learner computes it "
            "before the update. About 1e-6 in float32 at lag 0; more says that the two are not the same policy.",
            is_log=True,
        ),
        Picture(
            "Probability ratio",
            (
                Line("learner/ratio_min", "least"),
                Line("learner/ratio_mean", "mean"),
                Line("learner/ratio_max", "greatest"),
            ),
            "Probability of a token now, over that when it was sampled.",
            is_log=True,
        ),
    ),
)
EPISODES = Part(
    "figures-episodes",
    "The episodes",
    (
        Picture(
            "Steps of an episode",
            (Line("held_out/steps_mean", "held-out"), Line("episode/steps_mean", "in training")),
            "Mean number of actions. Where a task can be done in fewer, they fall as the score climbs.",
            has_zero=True,
        ),
        Picture(
            "Sampled tokens of an episode",
            (Line("held_out/tokens_mean", "held-out"), Line("episode/tokens_mean", "in training")),
            "Mean number. A climb without a better score is talk.",
            has_zero=True,
        ),
        Picture(
            "Impossible actions",
            (Line("held_out/invalid_action_share", "held-out"), Line("episode/invalid_action_share", "in training")),
            "Share of actions that the environment could not carry out.",
            has_zero=True,
            is_share=True,
            hides_zeros=True,
        ),
        Picture(
            "How episodes end",
            (),
            "Share of the batch that ended so. Many that a limit cut off leave little to learn from.",
            has_zero=True,
            is_share=True,
        ),
        Picture(
            "Unscored",
            (Line("held_out/unscored", "held-out"), Line("score/unscored", "in training")),
            "Episodes without a score; they take no part, and are in no mean.",
            has_zero=True,
            hides_zeros=True,
        ),
        Picture(
            "What groups teach",
            (
                Line("credit/tied_groups_share", "groups whose scores are equal"),
                Line("credit/zero_advantage_share", "steps with advantage 0"),
                Line("credit/other_peer_share", "steps in a state that another episode was in"),
            ),
            "Groups whose scores are all equal teach nothing by scores: the samples are too easy or too hard by now. "
            "Steps in shared states are what GiGPO's second half compares.",
            has_zero=True,
            is_share=True,
        ),
    ),
)
TIME = Part(
    "time",
    "Where the time goes",
    (
        Picture(
            "Throughput",
            (
                Line("speed/sampled_tokens_per_s", "tokens sampled per second"),
                Line("speed/trained_tokens_per_s", "tokens learned from per second"),
            ),
            "Of the whole update, evaluation left out.",
            has_zero=True,
        ),
        Picture(
            "Environment steps per second",
            (Line("speed/env_steps_per_s", "steps per second"),),
            "Actions carried out, per second of the whole update.",
            has_zero=True,
        ),
        Picture(
            "Seconds of an update",
            (
                Line("time/total_s", "in all"),
                Line("time/collect_s", "rollouts"),
                Line("time/update_s", "learner"),
                Line("time/wait_for_scores_s", "waiting for scores"),
            ),
            "What goes on at the same time counts in each of its places.",
            has_zero=True,
        ),
        Picture(
            "Scoring that cost nothing",
            (Line("overlap/hidden_share", "share of the time of scoring"),),
            "1 − waiting / scoring: how much of scoring was used for something else.",
            has_zero=True,
            is_share=True,
        ),
    ),
)
PARTS = (POLICY, OFF_POLICY, EPISODES, TIME)
STOPS = "episode/stop/"
STOPS_TITLE = "How episodes end"
