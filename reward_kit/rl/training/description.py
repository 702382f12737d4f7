"""The description of a training plan that `train --dry-run` prints: its batches, credit and loss, with all values."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

from reward_kit.display_text import pluralize
from reward_kit.rl.learner.config import PPOConfig
from reward_kit.rl.schedule import Schedule
from reward_kit.rl.training.config import TrainModel
from reward_kit.rl.training.plan import TrainingPlan

_WIDTH = 100
_INDENT = 12
_CREDIT: Mapping[str, str] = {
    "grpo": "A = (score - mean) / std over the episodes of a group",
    "rloo": "A = score - mean score of the other episodes of the group",
    "opo": "A = score - mean score of the group, weighted by length",
    "gpg": "A = (score - mean) · episodes / episodes in groups that differ",
    "grpo_passk": "A = best - second-best score for the best episode of a group, else 0",
    "reinforce_plus_plus_baseline": "A = (score - mean of the group) / std over the batch",
    "reinforce_plus_plus": "A = (G - mean) / std over all steps of the batch",
    "discounted_returns": "A = G, minus the mean of the group with baseline: mean",
    "turn_level_grpo": "A = G_k - mean G_k of the other episodes of the group at the same turn",
    "hgpo": "A = Σ w_i A_i, A_i = (G_k - mean) / std over the group's steps whose last i + 1 states are equal",
    "gagpo": "A = (B - mean) / std over the steps of a group, B = Σ (gamma lam)^i δ_i, δ = r + gamma V' - V, "
    "V = mean G of the group in the state",
    "graphgpo": "A = A_E + step_weight A_S, A_S = (R - mean) / std over the group's steps taken in the same state, "
    "R = distance_discount ^ (steps from the next state to success)",
    "vine": "A = V' - V, V = mean score of rollout.continuations episodes that continue from the state; "
    "V after the last step = score",
    "g2po": "A = A_E + step_weight A_S, A_S = norm of Q in the state + norm of Q - V in the group, Q = r + V', "
    "V = gamma mean G of the group in the state",
    "gae": "A = Σ (gamma lam)^i δ_i,  δ = r + gamma V' - V",
}
_OVER_THE_BATCH: Mapping[str, str] = {
    "gpg": "the share of groups whose scores differ over the batch",
    "reinforce_plus_plus_baseline": "its scale over the batch",
    "reinforce_plus_plus": "its mean and its scale over the batch",
}
_PIPELINES: Mapping[Schedule, str] = {
    Schedule.SYNC: "in sequence: roll out, score, learn; every token is sampled by the current weights",
    Schedule.MINIBATCH: "a part of the batch is trained on as soon as its groups are scored, with slow groups last",
    Schedule.ONE_STEP_OFF: "the next batch is rolled out while the current one is scored "
    "and trained on; its tokens are one "
    "version older than the weights that train on them",
    Schedule.BOTH: "the next batch is rolled out while the current one is trained on part by part, as groups are "
    "scored; its tokens are one version older than the weights that train on them",
}
_LOSSES: Mapping[str, tuple[str, ...]] = {
    "ppo": ("L_t = max(-A r, -A clip(r, {low:g}, {high:g}))", "r   = π(token) / π_old(token)"),
    "gspo": (
        "L_t = max(-A s, -A clip(s, {low:g}, {high:g}))",
        "s   = exp(mean over the sequence of log π - log π_old), with the gradient of each token's own log π",
    ),
    "turn_gspo": (
        "L_t = max(-A s, -A clip(s, {low:g}, {high:g}))",
        "s   = exp(mean over the action of log π - log π_old), with the gradient of each token's own log π",
    ),
    "turn_ppo": (
        "L_t = max(-A s, -A clip(s, {low:g}, {high:g}))",
        "s   = exp(sum over the action of log π - log π_old), with the gradient of each token's own log π",
    ),
    "cispo": ("L_t = -stop_gradient(clip(r, {low:g}, {high:g})) A log π(token)", "r   = π(token) / π_old(token)"),
    "sapo": (
        "L_t = -A (4 / τ) sigmoid(τ (r - 1))",
        "r   = π(token) / π_old(token),  τ = 1 for A > 0, else 1.05",
    ),
    "gmpo": (
        "L_t = -A s",
        "s   = exp(mean over the sequence of log π - log π_old, clipped to [-{below:g}, {above:g}] "
        "against the sign of A)",
    ),
    "dppo_tv": (
        "L_t = -A r, or 0 if |π(token) - π_old(token)| grows beyond {below:g} (A < 0) or {above:g} (A > 0)",
        "r   = π(token) / π_old(token)",
    ),
    "dppo_kl": (
        "L_t = -A r, or 0 if the KL divergence over {{token, others}} grows beyond {below:g} (A < 0) or "
        "{above:g} (A > 0)",
        "r   = π(token) / π_old(token)",
    ),
    "decoupled": (
        "L_t = w max(-A r, -A clip(r, {low:g}, {high:g}))",
        "r   = π(token) / π_prox(token),  π_prox: the weights before the update",
        "w   = π_prox(token) / π_sampler(token),  at most {cap:g}; a token beyond it {beyond}",
    ),
}
_NORMALIZATIONS: Mapping[str, str] = {
    "none": "unchanged",
    "length": "divided by the episode's number of steps",
    "variance": "(score - mean) / (std + 1e-8), running over all episodes so far",
}
_AGGREGATIONS: Mapping[str, str] = {
    "token-mean": "the mean over all tokens in the loss",
    "seq-mean-token-sum": "the mean over sequences of each sequence's sum",
    "seq-mean-token-mean": "the mean over sequences of each sequence's mean",
    "seq-mean-token-sum-norm": "the mean over sequences of each sequence's sum / {norm:g}",
}


def describe_plan(plan: TrainingPlan) -> str:
    """Describe the plan in words and formulas that contain the values in effect."""
    config, definition, schedule = plan.config, plan.task.definition, plan.config.pipeline
    kind = config.reward_manager.normalization_type
    reward = definition.reward_function_path or " + ".join(one.name for one in definition.rewards or ())
    parts = f"{plan.samples_per_minibatch} groups at a time, each with all the epochs and mini-batches of `ppo`"
    sections = {
        "Training": _training(plan),
        "Engine": _engine(config),
        "Pipeline": [f"{schedule.value}: {_PIPELINES[schedule]}", *([parts] if schedule.updates_early else [])],
        "Scores": [
            (
                f"{reward}, up to {config.reward.max_concurrency} concurrent calls; unscored episodes are "
                "excluded, not counted as 0"
            ),
            f"reward manager {config.reward_manager.name}, normalization {kind}: {_NORMALIZATIONS[kind]}",
        ],
        "Credit": _credit(plan),
        "Loss": _loss(config.ppo),
        "Update": _update(config.ppo),
        "Evaluation": _evaluation(plan),
        "Checkpoints": [
            f"every {config.checkpoints.every} updates; the latest {config.checkpoints.keep} are kept, and the best by "
            f"{config.best_by}"
        ],
    }
    printed: list[str] = []
    for title, lines in sections.items():
        wrapped: list[str] = []
        for line in lines:
            first, hanging = " " * _INDENT, " " * (_INDENT + 6)
            wrapped += textwrap.wrap(line, _WIDTH, initial_indent=first, subsequent_indent=hanging) or [""]
        if wrapped:
            wrapped[0] = f"{title:<{_INDENT}}{wrapped[0][_INDENT:]}"
        printed += wrapped
    return "\n".join(printed)


def plan_notes(plan: TrainingPlan) -> list[str]:
    """Return notes about settings that are allowed but may be unintended."""
    estimator, groups = plan.credit.estimator, plan.samples_per_minibatch
    if estimator not in _OVER_THE_BATCH or groups == plan.config.rollout.samples_per_update:
        return []
    return [
        f"note: {estimator} measures {_OVER_THE_BATCH[estimator]}, and pipeline {plan.config.pipeline.value} "
        f"passes it {groups} of {plan.config.rollout.samples_per_update} groups at a time; raise "
        "rollout.samples_per_minibatch, or use an estimator that compares within groups"
    ]


def describe_limit(config: TrainModel) -> str:
    """Return the limit of training, such as "60,000 environment steps"."""
    steps = "" if config.max_env_steps is None else pluralize(config.max_env_steps, "environment step")
    updates = "" if config.updates is None else pluralize(config.updates, "update")
    return f"{steps} in at most {updates}" if steps and updates else steps or updates


def _training(plan: TrainingPlan) -> list[str]:
    config, rollout = plan.config, plan.config.rollout
    episodes = rollout.samples_per_update * rollout.group_size
    limit = f", up to {rollout.max_concurrency} concurrent" if rollout.max_concurrency else ""
    block = config.policy or plan.task.definition.policy
    in_updates = " in updates" if config.updates is None else ""
    lines = [
        f"{plan.name}: {describe_limit(config)}{in_updates} of {pluralize(rollout.samples_per_update, 'sample')} × "
        f"{pluralize(rollout.group_size, 'episode')} = {pluralize(episodes, 'episode')}{limit}; "
        f"{pluralize(len(plan.samples), 'sample')} to train on, seed {config.seed}",
        f"policy {block.type if block else 'none'}; task {plan.task.path}",
    ]
    if (branching := rollout.branching) is not None:
        where = branching.where.replace("_", " ")
        lines.append(
            f"branching: {pluralize(branching.groups, 'additional group')} of "
            f"{pluralize(rollout.group_size, 'episode')}, which continue episodes of the update ({where})"
        )
    if rollout.continuations is not None:
        lines.append(f"the value before each step is measured by {pluralize(rollout.continuations, 'continuation')}")
    if (dynamic := config.dynamic_sampling) is not None:
        kept = "whose scores differ" + (", or whose steps differ" if dynamic.keep_step_signal else "")
        band = f" and whose mean score is in [{dynamic.band[0]:g}, {dynamic.band[1]:g}]" if dynamic.band else ""
        dropped = "; groups with an unscored member are dropped" if dynamic.unscored == "drop" else ""
        lines.append(
            f"only groups {kept}{band} are kept; others are replaced, with at most "
            f"{dynamic.max_collections} collections{dropped}"
        )
    return lines


def _engine(config: TrainModel) -> list[str]:
    if (engine := config.engine).type == "local":
        return []
    count = engine.workers or "as many as fit"
    where = f"the cluster {engine.address}" if engine.address else "a cluster on this machine"
    rewards = f"in {engine.reward_workers} processes of the cluster" if engine.reward_workers else "in this process"
    return [
        f"ray: rollouts in {count} processes of {where}, each with {engine.cpus:g} CPUs, {engine.gpus:g} GPUs and a "
        f"copy of the weights, which gets the new ones after each update; rewards are called {rewards}",
        "forward passes group episodes differently each time, so the same seed does not give bitwise identical results",
    ]


def _credit(plan: TrainingPlan) -> list[str]:
    credit, options = plan.credit, dict(plan.credit.options)
    sources = {
        "reward_function": "r_k: the reward of step k from the reward function",
        "environment": "r_k: the environment's reward of step k, unless the reward function returns one",
    }
    formulas = _gigpo(options) if credit.estimator == "gigpo" else [_CREDIT.get(credit.estimator, "your function")]
    texts = {name: f"{value:g}" if isinstance(value, float) else str(value) for name, value in options.items()}
    shown = ", ".join(f"{name} {text}" for name, text in texts.items() if options[name] is not None)
    name = credit.estimator.rpartition("/")[2]  # A user's file is located by an absolute path
    return [
        f"{name}: {formulas[0]}",
        *formulas[1:],
        sources[credit.step_rewards],
        *([f"with {shown}"] if shown else []),
    ]


def _gigpo(options: Mapping[str, Any]) -> list[str]:
    if options["combination"] == "convex":
        rule = f"A = {options['omega']:g} A_E + {1 - options['omega']:g} A_S"
    else:
        rule = f"A = A_E + {options['step_weight']:g} A_S"
    scale = {
        "std": "/ (std + {:g})".format(options["epsilon"]),
        "mean": "",
        "constant": f"/ {options['normalization_constant']}",
        "leave_one_out": "of the other episodes",
    }[options["normalization"]]
    return [
        rule,
        f"A_E = (score - mean) {scale}  over the episodes of a group",
        f"A_S = (G_k - mean) {scale}  over the group's steps taken in the same state",
        f"G_k = r_k + {options['gamma']:g} G_k+1",
    ]


def _loss(ppo: PPOConfig) -> list[str]:
    clip = ppo.clip
    beyond = "is excluded" if ppo.beyond_cap == "exclude" else "counts with that weight"
    values = {
        **{"low": 1 - clip.low, "high": 1 + clip.high, "below": clip.low, "above": clip.high},
        **{"cap": ppo.decoupled_cap, "beyond": beyond},
    }
    lines = [line.format(**values) for line in _LOSSES[ppo.loss]]
    if clip.dual is not None:
        lines.insert(1, f"L_t is at most {clip.dual:g} |A| if A < 0")
    if ppo.loss != "decoupled":
        recorded = "as recorded by the sampler" if ppo.old_logprobs == "sampler" else "recomputed before the update"
        lines.append(f"π_old: {recorded}")
    if ppo.importance is not None:
        lines.append(
            f"times w = min(π_before / π_sampler of the {ppo.importance}, {ppo.importance_cap:g}), to correct for "
            "differences of the sampler"
        )
    total = _AGGREGATIONS[ppo.reduction].format(norm=ppo.norm_length or 1.0)
    lines = [f"{ppo.loss}: {lines[0]}", *lines[1:], f"log π at temperature {ppo.temperature:g}; L is {total}"]
    if ppo.kl_coefficient:
        held = (
            f", adapted to keep the divergence at {ppo.kl_target:g} per sequence" if ppo.kl_target is not None else ""
        )
        lines.append(f"+ {ppo.kl_coefficient:g} KL(π, the policy at the start), estimator {ppo.kl_kind}{held}")
    else:
        lines.append("no divergence from a reference (kl_coefficient 0)")
    sign = "-" if ppo.entropy_coefficient >= 0 else "+"
    lines += [f"{sign} {abs(ppo.entropy_coefficient):g} entropy"] if ppo.entropy_coefficient else ["no entropy bonus"]
    kept = f", kept within {ppo.value_clip:g} of the old value" if ppo.value_clip is not None else ""
    lines.append(f"+ {ppo.value_coefficient:g} · ½ (V - return)²{kept}, if the policy has a value head")
    return lines


def _update(ppo: PPOConfig) -> list[str]:
    if ppo.minibatch_rows is not None:
        batches = f"mini-batches of {ppo.minibatch_rows} rows"
    else:
        batches = f"{ppo.minibatches} mini-batches" if ppo.minibatches else "one mini-batch"
    cut = f"gradient norm at most {ppo.max_grad_norm:g}" if ppo.max_grad_norm is not None else "gradient not clipped"
    decay = f", weight decay {ppo.weight_decay:g} on matrices" if ppo.weight_decay else ""
    optimizer = {"adamw": "AdamW", "muon": "Muon with AdamW"}[ppo.optimizer]
    lines = [
        f"{ppo.epochs} epochs of {batches}; {optimizer}, lr {ppo.lr:g}, betas {ppo.betas[0]:g} and "
        f"{ppo.betas[1]:g}{decay}; {cut}",
        *(f"lr {rate:g} for {pattern}" for pattern, rate in ppo.lr_by_name.items()),
        f"lr {ppo.schedule}" + (f" after {ppo.warmup} updates of warm-up" if ppo.warmup else ""),
    ]
    if ppo.critic_warmup:
        lines.append(f"the first {ppo.critic_warmup} updates train only the value head")
    if ppo.lora is not None:
        lines.append(f"low-rank adapters of rank {ppo.lora.rank}, alpha {ppo.lora.alpha:g}, in {ppo.lora.targets}")
    computed = {
        "packed rows": ppo.packed,
        f"attention {ppo.attention}": ppo.attention is not None,
        "compiled layers": ppo.compile,
        "gradient checkpointing": ppo.gradient_checkpointing,
    }
    if asked := [name for name, is_set in computed.items() if is_set]:
        lines.append(f"computed with {', '.join(asked)}, as far as the model and the machine support it")
    return lines


def _evaluation(plan: TrainingPlan) -> list[str]:
    options, held_out = plan.config.evaluation, plan.held_out
    if options is None or held_out is None:
        return ["none"]
    every = options.every_env_steps
    often = f"{options.every} updates" if every is None else f"{every:,} environment steps"
    temperature = "" if options.temperature is None else f" at temperature {options.temperature:g}"
    lines = [
        (
            f"every {often}, before the first and after the last: {len(held_out.samples)} samples "
            f"× {options.rollouts} of {held_out.task.path}{temperature}, with the same draws each time"
        )
    ]
    if (stop := plan.config.early_stop) is not None:
        times = f" {stop.times} times in a row" if stop.times > 1 else ""
        lines.append(f"training ends once {stop.metric} is at least {stop.at_least:g}{times}")
    return lines
