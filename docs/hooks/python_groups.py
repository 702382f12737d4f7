"""Groups of the Python reference. A package stands for the names in its `__all__`, a file for its own names."""

from __future__ import annotations

from typing import NamedTuple


class Group(NamedTuple):
    """A page of the reference.

    Attributes:
        slug: of its address.
        title: of the page.
        intro: what it is for, as Markdown.
        parts: headings, each with what stands below it: `module:Name`, a package, or a module.
    """

    slug: str
    title: str
    intro: str
    parts: dict[str, tuple[str, ...]]


_CREDIT = "reward_kit.credit"
GROUPS = (
    Group(
        "running",
        "Run and evaluate",
        "`reward-kit run` and `reward-kit score` from Python and in notebooks; see"
        " [runs](../../guides/runs.md#from-python). The keys of a task are in [the task file](../task_file.md).",
        {
            "Run": (
                "reward_kit.runs.evaluation:evaluate",
                "reward_kit.runs.evaluation:evaluate_async",
                "reward_kit.runs.evaluation:score_transcripts",
                "reward_kit.runs.finished:FinishedRun",
                "reward_kit.runs.evaluation:Task",
                "reward_kit.models:TaskDefinitionModel",
                "reward_kit.runs.tasks:load_task",
                "reward_kit.runs.datasets:load_jsonl",
            ),
            "Read stored runs": (
                "reward_kit.runs.run_folder:read_episodes",
                "reward_kit.runs.run_folder:read_scores",
                "reward_kit.episodes.record:episode_from_record",
                "reward_kit.episodes.record:episode_to_record",
            ),
            "Statistics": ("reward_kit.runs.statistics",),
        },
    ),
    Group(
        "rewards",
        "Rewards",
        "To [write a reward function](../../guides/rewards.md) and to [call it](../../guides/reward_agent.md)."
        " [Built-in rewards](../rewards_built_in.md) lists the rewards by purpose.",
        {
            "Write a reward": (
                "reward_kit.typed_interface:reward_function",
                "reward_kit.reward_function:RewardFunction",
                "reward_kit.reward_calls:with_options",
                "reward_kit.models:EvaluateResult",
                "reward_kit.models:MetricResult",
                "reward_kit.models:StepOutput",
                "reward_kit.reward_agent.loading:load_custom_reward",
            ),
            "Call rewards": ("reward_kit.reward_agent",),
            "Built-in rewards": ("reward_kit.rewards",),
            "Simulate overlap": ("reward_kit.rl.overlap", "reward_kit.rl.overlap_published:simulate_published"),
        },
    ),
    Group(
        "agents",
        "Agents and models",
        "[Policies](../../guides/policies.md), and running them from Python.",
        {
            "Write a policy": (
                "reward_kit.agent.policy_interface:AgentPolicy",
                "reward_kit.agent.policy_interface:PolicyOutput",
                "reward_kit.agent.policy_interface:EpisodeContext",
            ),
            "Built-in policies": (
                "reward_kit.agent.policies.openai_policy:OpenAIAgentPolicy",
                "reward_kit.agent.policies.hf_policy:HFAgentPolicy",
                "reward_kit.agent.policies.own_agent_policy:OwnAgentPolicy",
                "reward_kit.agent.policies.own_agent_policy:AgentTask",
                "reward_kit.agent.policies.simple_policies:ScriptedPolicy",
                "reward_kit.agent.policies.simple_policies:ExpertPolicy",
                "reward_kit.agent.policies.replay_policy:ReplayPolicy",
                "reward_kit.agent.simulated_user:SimulatedUser",
                "reward_kit.agent.simulated_user:ScriptedUser",
            ),
            "Collect episodes": (
                "reward_kit.agent.rl_rollout_worker:RLRolloutWorker",
                "reward_kit.agent.rl_rollout_worker:FirstRequest",
                "reward_kit.agent.samples:Sample",
            ),
            "Messages": ("reward_kit.models:Message", "reward_kit.models:ToolCall"),
            "Model endpoints": ("reward_kit.providers",),
        },
    ),
    Group(
        "resources",
        "Resources and tools",
        "[Resources and tools](../../guides/environments.md) for agents.",
        {
            "Write a resource": (
                "reward_kit.environments.base:ForkableResource",
                "reward_kit.environments.base:StepOutcome",
                "reward_kit.environments.tools:ToolRegistry",
            ),
            "The whole package": ("reward_kit.environments",),
        },
    ),
    Group(
        "episodes",
        "Episodes and tokens",
        "[Episodes](../../concepts/episode.md), and [tokens and masks](../../concepts/tokens.md).",
        {
            "Episodes": (
                "reward_kit.episodes.single_agent_episode:SingleAgentEpisode",
                "reward_kit.episodes.multi_agent_episode:MultiAgentEpisode",
                "reward_kit.episodes",
                "reward_kit.episodes.allowed_ids:AllowedIds",
            ),
            "Steps": (
                "reward_kit.agent.models:StepData",
                "reward_kit.agent.models:StopReason",
                "reward_kit.agent.models:episode_steps",
                "reward_kit.agent.rl_rollout_worker:collect_group",
            ),
            "Check them": ("reward_kit.checks.episode:check_episode", "reward_kit.checks"),
            "Tokens": ("reward_kit.tokens",),
        },
    ),
    Group(
        "credit",
        "Credit",
        "Advantages of steps; see [Credit](../../concepts/credit.md) for the formulas.",
        {
            "By name": (
                "reward_kit.rl_helpers:system_apply_gigpo_to_batch_steps",
                "reward_kit.rl_processing:RLDataAligner",
                "reward_kit.rl_processing",
            ),
            "GiGPO": ("reward_kit.rl_helpers", f"{_CREDIT}.state_hashes"),
            "Other estimators": (f"{_CREDIT}.estimators", f"{_CREDIT}.state_estimators"),
            "Write an estimator": (f"{_CREDIT}.step_arrays",),
            "On token rows": (f"{_CREDIT}.row_credit:token_advantages", f"{_CREDIT}.row_credit:TokenCredit"),
            "What they return": (f"{_CREDIT}.step_credit", f"{_CREDIT}.diagnostics"),
            "Which groups teach something": (f"{_CREDIT}.group_filter",),
        },
    ),
    Group(
        "training",
        "Training",
        "For loops of your own; `reward-kit train` needs none of it. See [Train](../../guides/training.md),"
        " [the PPO step](../ppo.md), [losses](../losses.md) and [reward managers](../reward_managers.md).",
        {
            "The loop": (
                "reward_kit.rl.training.train_file:train",
                "reward_kit.rl.training.sweep:sweep",
                "reward_kit.rl.training.trainer:Trainer",
                "reward_kit.rl.training.pipelines:Pipeline",
                "reward_kit.rl.served_policy:ServedPolicy",
            ),
            "The learner": ("reward_kit.rl.ppo", "reward_kit.agent.policies.hf.model:PolicyWithValue"),
            "Losses": ("reward_kit.rl.losses", "reward_kit.rl.kl"),
            "Reward managers": ("reward_kit.rl.reward_manager",),
            "Checkpoints": ("reward_kit.rl.checkpoint",),
            "Models and tokenizers": ("reward_kit.rl.model_kit.models", "reward_kit.rl.model_kit.sft"),
        },
    ),
    Group(
        "sandbox",
        "The sandbox",
        "Runs untrusted code; see [guarantees and limits](../../concepts/sandbox.md).",
        {"The whole package": ("reward_kit.sandbox",)},
    ),
    Group(
        "errors",
        "Errors",
        "See [the page of errors](../errors.md) for meanings and fixes.",
        {"Base and boundary": ("reward_kit.errors:RewardKitError", "reward_kit.errors")},
    ),
    Group(
        "integrations",
        "With other tools",
        "Each imports its peer by itself, and only where it has to.",
        {
            "TRL and Axolotl": (
                "reward_kit.integrations.trl.rewards:as_trl_reward",
                "reward_kit.integrations.trl.rewards:rollout_scores",
                "reward_kit.integrations.trl.rollouts:as_rollout_func",
                "reward_kit.integrations.trl.rollouts:Rollouts",
                "reward_kit.integrations.trl.environments:environment_factory",
                "reward_kit.integrations.trl.trainer:StepCreditTrainer",
                "reward_kit.integrations.trl.trainer_loss:trl_loss",
                "reward_kit.integrations.trl.axolotl:StepCreditPlugin",
            ),
            "verl": (
                "reward_kit.integrations.verl.data_proto:verl_rows",
                "reward_kit.integrations.verl.data_proto:to_data_proto",
                "reward_kit.integrations.verl.data_proto:from_data_proto",
                "reward_kit.integrations.verl.compute_score:as_compute_score",
                "reward_kit.integrations.verl.reward_loop:RewardKitManager",
                "reward_kit.integrations.verl.trainer_rewards:RewardPipeline",
                "reward_kit.integrations.verl.estimators:row_credit",
                "reward_kit.integrations.verl.estimators:compute_advantage",
                "reward_kit.integrations.verl.trainer_loss:verl_loss",
                "reward_kit.integrations.verl.register:register",
            ),
            "verifiers and prime-rl": (
                "reward_kit.runs.logs.verifiers_traces:episode_to_trace",
                "reward_kit.runs.logs.verifiers_traces:trace_to_episode",
                "reward_kit.runs.logs.verifiers_traces:trace_advantages",
                "reward_kit.runs.logs.verifiers_traces:trace_score",
                "reward_kit.integrations.verifiers.tasksets:TaskFileTaskset",
                "reward_kit.integrations.verifiers.tasksets:TaskFileConfig",
                "reward_kit.integrations.verifiers.tasksets:as_verifiers_reward",
                "reward_kit.integrations.verifiers.rewards:as_reward_function",
                "reward_kit.integrations.verifiers.rewards:write_samples",
                "reward_kit.integrations.verifiers.tasksets:ResourceTaskset",
            ),
            "Ray": (
                "reward_kit.integrations.ray.rollouts:RayRolloutWorker",
                "reward_kit.integrations.ray.rewards:RayScorer",
                "reward_kit.integrations.ray.reward_agent:RayAsyncRewardAgent",
                "reward_kit.integrations.ray.options:RayOptions",
                "reward_kit.integrations.ray.training:train_loop",
            ),
            "Gymnasium": ("reward_kit.integrations.gymnasium_env:ResourceEnv",),
            "pytest": ("reward_kit.integrations.pytest_plugin:reward_kit_run",),
            "Rewards over HTTP": (
                "reward_kit.integrations.reward_server.server:serving",
                "reward_kit.integrations.reward_server.options:ServerOptions",
            ),
        },
    ),
)
