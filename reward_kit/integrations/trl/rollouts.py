"""Multi-turn rollouts as a `rollout_func` for TRL. The model that is being trained acts in a task's episodes.

TRL passes each prompt once for each of its generations, and expects a row for each generation. A prompt is the id of
one of the task's samples. The G episodes of a prompt form a group and start from forks of one state. Before each
generation, the policy receives the trainer's weights. If the task has a reward, groups are scored while other groups
are still being collected. The rows then contain an advantage for each step, which a `StepCreditTrainer` uses.
"""

from __future__ import annotations

import inspect
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from itertools import groupby
from pathlib import Path
from typing import Any

from reward_kit.agent.policies.hf.model import merged_state_dict
from reward_kit.agent.policy_interface import AgentPolicy
from reward_kit.agent.rl_rollout_worker import RLRolloutWorker
from reward_kit.agent.samples import Sample, derive_seed
from reward_kit.blocking import LoopThread
from reward_kit.environments.servers import ServerPool
from reward_kit.episodes.record import get_facts
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.errors import ConfigError, did_you_mean, type_name
from reward_kit.integrations.trl.rows import RowOutcome, Segments, rollout_output
from reward_kit.models import TaskDefinitionModel
from reward_kit.reward_agent.agent import AsyncRewardAgent
from reward_kit.reward_agent.custom_rewards import build_spec
from reward_kit.reward_agent.loading import make_scorer
from reward_kit.reward_agent.scoring import Reward, Scored, ScoringRequest
from reward_kit.reward_agent.tickets import Ticket
from reward_kit.rl.training.rollouts import Collector, LockstepBarrier
from reward_kit.rl.training.trainer import TrainablePolicy, trainable
from reward_kit.rl_processing import CreditAssigner
from reward_kit.runs.plan import make_user
from reward_kit.runs.tasks import LoadedTask, load_task, make_assigner

SampleOf = Callable[[Any], Sample]
logger = logging.getLogger("reward_kit.integrations.trl")
_UNUSED: Mapping[str, tuple[Any, ...]] = {
    "top_p": (1.0, None),
    "top_k": (0, None),
    "min_p": (None, 0.0),
    "repetition_penalty": (1.0, None),
    "generation_kwargs": (None, {}),
    "chat_template_kwargs": (None, {}),
    "use_vllm": (False,),
    "use_transformers_continuous_batching": (False,),
    "cache_implementation": (None,),
}
"""Options of `GRPOConfig` that control TRL's own sampling, and the default values, which have no effect."""


def as_rollout_func(
    task: LoadedTask | TaskDefinitionModel | Path | str,
    policy: AgentPolicy,
    *,
    reward: Callable[..., Any] | None = None,
    credit: CreditAssigner | None = None,
    samples: Sequence[Sample] | None = None,
    sample_of: SampleOf | None = None,
    run_seed: int = 0,
    max_concurrency: int | None = None,
    reward_concurrency: int = 16,
    segments: Segments = "refuse",
) -> Rollouts:
    """Return a `rollout_func` for `GRPOTrainer` that collects episodes of a task.

    Args:
        task: the task, or its file. `runs.tasks.load_task` also loads everything to which a file refers.
        policy: the policy that chooses the actions. It is an `HFAgentPolicy` with the same model, or a different
            `TrainablePolicy` whose module is the trainer's module. The policy receives the trainer's weights before
            each generation.
        reward: the reward to use instead of the task's reward. If None and the task has no reward, the `reward_funcs`
            of the trainer compute the scores.
        credit: the credit assigner to use instead of the task's `credit`.
        samples: the samples to use instead of the task's samples.
        sample_of: a function that returns the sample for a prompt, for datasets whose prompts are not sample ids. By
            default, a prompt is the id of a sample, as in `Rollouts.rows`.
        run_seed: the seed for all random choices that the trainer's seed does not determine.
        max_concurrency: the maximum number of concurrent episodes. If None, all episodes of a generation run
            concurrently.
        reward_concurrency: the maximum number of concurrent reward calls.
        segments: see `rollout_output`.

    Raises:
        ConfigError: If the policy cannot be trained, if there is credit but no reward, or if an option would have no
            effect.
    """
    loaded = load_task(Path(task)) if isinstance(task, str | Path) else task
    definition = loaded.definition if isinstance(loaded, LoadedTask) else loaded
    trainable(policy)
    scored_by: Reward | None = build_spec(reward) if reward is not None else getattr(loaded, "reward", None)
    if credit is None and definition.credit is not None:
        credit = make_assigner(definition.credit)
    if credit is not None and scored_by is None:
        raise ConfigError("credit is computed from scores, but the task has no reward; pass reward=…")
    known = list(samples) if samples is not None else list(getattr(loaded, "samples", [Sample.from_task(definition)]))
    if sample_of is not None and samples is not None:
        raise ConfigError(
            "samples have no effect with sample_of, which returns the sample for a prompt; remove one of them"
        )
    scoring = None
    if scored_by is not None:
        scoring = AsyncRewardAgent(
            make_scorer(scored_by, definition.limits.reward_time_s), max_concurrency=reward_concurrency
        )
    acting = LockstepBarrier(policy) if getattr(policy, "lockstep", False) else policy
    tools, user = (loaded.tools, make_user(loaded)) if isinstance(loaded, LoadedTask) else (None, None)
    worker = RLRolloutWorker(definition, acting, tools=tools, user=user, policy_label="policy")
    return Rollouts(
        policy,
        worker,
        known,
        reward_agent=scoring,
        credit=credit,
        segments=segments,
        sample_of=sample_of,
        run_seed=run_seed,
        max_concurrency=max_concurrency,
    )


class Rollouts:
    """A `rollout_func` that `as_rollout_func` creates.

    Attributes:
        policy: the policy that acts and is trained.
        worker: the worker that collects episodes.
        reward_agent: the agent that scores the episodes, or None if the trainer scores them.
        credit: the credit assigner, or None if no credit is assigned.
        episodes: the episodes of the last generation.
    """

    __name__ = "reward_kit_rollouts"

    def __init__(
        self,
        policy: AgentPolicy,
        worker: RLRolloutWorker,
        samples: Sequence[Sample],
        *,
        reward_agent: AsyncRewardAgent | None,
        credit: CreditAssigner | None,
        segments: Segments,
        sample_of: SampleOf | None,
        run_seed: int,
        max_concurrency: int | None,
    ) -> None:
        self.policy, self.worker, self.reward_agent, self.credit = policy, worker, reward_agent, credit
        self._segments = segments
        self.episodes: list[SingleAgentEpisode] = []
        self._samples = {sample.id: sample for sample in samples}
        self._sample_of, self._run_seed, self._limit = sample_of or self._named, run_seed, max_concurrency
        self._thread: LoopThread | None = None
        self._generation: tuple[str, int, int] = ("", -1, 0)  # The mode, the step, and the number of calls at the step

    def rows(self) -> list[dict[str, Any]]:
        """Return the samples as rows `{"prompt": id}`, for `datasets.Dataset.from_list(rollouts.rows())`."""
        return [{"prompt": id_} for id_ in self._samples]

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, list[Any]]:
        """Collect an episode for each prompt, and return the rows of the episodes.

        Raises:
            ConfigError: If the prompts do not form groups, if a prompt is not the id of a sample, if an option of the
                trainer would have no effect, or if an episode cannot be converted to a row.
        """
        check_trainer(trainer, self.policy)
        is_training = trainer.model.training
        size = trainer.num_generations if is_training else trainer.num_generations_eval
        samples = [self._sample_of(prompt) for prompt in group_prompts(prompts, size)]
        seeded = self._with_seeds(samples, "train" if is_training else "evaluate", trainer)
        if self._thread is None:
            self._thread = LoopThread("rollouts for TRL", self._opened())
        output = self._thread.run(self._collect(seeded, size, trainer))
        # In TRL, the columns of a rollout override the columns of the dataset. Reject equal names, so that no column is
        # lost silently.
        known = getattr(getattr(trainer, "train_dataset", None), "column_names", None) or ()
        if clash := sorted(set(known) & output.keys()):
            raise ConfigError(
                f"the dataset and the rollouts both have a column {clash[0]!r}; rename the column of the dataset"
            )
        return output

    def close(self) -> None:
        """Close the policy, the reward and the thread. The rollouts cannot be used afterwards."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.close()

    def _named(self, prompt: Any) -> Sample:
        """Return the sample whose id is the prompt or the content of the prompt's last message."""
        name = prompt[-1].get("content") if isinstance(prompt, list) and prompt else prompt
        if not isinstance(name, str):
            raise ConfigError(
                f"a prompt must be the id of a sample, got {type_name(name)}; for other prompts, pass sample_of"
            )
        if name not in self._samples:
            near = did_you_mean(name, self._samples)
            raise ConfigError(
                f"no sample {name[:80]!r}{near} (the prompts of the dataset must come from "
                "rows(); for other prompts, pass sample_of)"
            )
        return self._samples[name]

    def _with_seeds(self, samples: Sequence[Sample], mode: str, trainer: Any) -> list[tuple[Sample, int]]:
        """Give each sample the seed of its group.

        The seed differs between groups and stays the same if training is resumed.
        """
        step = int(trainer.state.global_step)
        number = self._generation[2] + 1 if self._generation[:2] == (mode, step) else 0
        self._generation = (mode, step, number)
        parts = ("trl", self._run_seed, mode, step, number, trainer.accelerator.process_index)
        # Seeds depend on the sample and not on its position, because a resumed trainer has the same samples in a
        # different order.
        seen: Counter[str] = Counter()
        seeded = []
        for sample in samples:
            seeded.append((sample, derive_seed(*parts, sample.id, seen[sample.id])))
            seen[sample.id] += 1
        return seeded

    async def _collect(self, seeded: Sequence[tuple[Sample, int]], size: int, trainer: Any) -> dict[str, list[Any]]:
        worker, agent, credit = self.worker, self.reward_agent, self.credit
        policy = trainable(self.policy)
        await publish(policy, trainer)
        tickets: dict[int, Ticket] = {}

        async def submit(group: int, episodes: list[SingleAgentEpisode]) -> None:
            if agent is not None:
                requests = [ScoringRequest.from_episode(episode, worker.task_definition) for episode in episodes]
                tickets[group] = await agent.submit(requests, size)

        groups = await Collector(size, self._limit).collect(worker, seeded, submit)
        self.episodes = [episode for group in groups for episode in group]
        failures = [failure for episode in self.episodes if (failure := get_facts(episode)["failure"]) is not None]
        if failures:
            first = failures[0]["message"]
            logger.warning("%d of %d episodes failed; the first failure: %s", len(failures), len(self.episodes), first)
        outcome = RowOutcome()
        if agent is not None:
            scored: list[Scored] = []
            for group in sorted(tickets):
                scored += (await agent.get(size, ticket=tickets[group])).extra_infos
            outcome = RowOutcome(scored, credit.assign(self.episodes, scored) if credit is not None else None)
        return rollout_output(self.episodes, outcome, filler_id=policy.pad_token_id, segments=self._segments)

    @asynccontextmanager
    async def _opened(self) -> AsyncIterator[None]:
        """Keep the servers and the reward agent open between generations, and close the policy at the end."""
        try:
            async with ServerPool(), self.reward_agent or nullcontext():
                yield
        finally:
            await self.policy.close()


def group_prompts(prompts: Sequence[Any], size: int) -> list[Any]:
    """Return one prompt for each group of `size` identical consecutive prompts."""
    cut = [prompts[start : start + size] for start in range(0, len(prompts), size)]
    if any(len(group) != size or any(prompt != group[0] for prompt in group) for group in cut):
        lengths = [len(list(same)) for _, same in groupby(prompts)]
        raise ConfigError(
            f"{len(prompts)} prompts do not form groups of {size} identical prompts (the runs of identical prompts "
            f"have the lengths {lengths}), but a group shares one initial state; make per_device_train_batch_size × "
            "steps_per_generation, and per_device_eval_batch_size, multiples of the number of generations"
        )
    return [group[0] for group in cut]


def check_trainer(trainer: Any, policy: AgentPolicy) -> None:
    """Reject trainer options that would have no effect, and weights that the policy cannot use."""
    args = trainer.args
    for name, values in _UNUSED.items():
        if (value := getattr(args, name, values[0])) not in values:
            raise ConfigError(f"{name}={value!r} has no effect, because the policy samples instead of TRL; remove it")
    sampling = getattr(policy, "sampling", None)
    if sampling is not None and sampling.temperature != trainer.temperature:
        raise ConfigError(
            f"temperature: the policy samples at {sampling.temperature:g}, but TRL divides logits "
            f"by the temperature in GRPOConfig, {trainer.temperature:g}; set both to the same value"
        )
    deepspeed = getattr(trainer.accelerator.state, "deepspeed_plugin", None)
    if getattr(trainer, "is_fsdp_enabled", False) or (deepspeed is not None and deepspeed.zero_stage == 3):
        raise ConfigError(
            "the trainer's weights are sharded, but the policy needs full weights; train without FSDP and ZeRO-3"
        )
    if getattr(trainer, "tools", None):
        raise ConfigError(
            "tools have no effect with these rollouts, because TRL would call the tools in its own loop; remove them"
        )


async def publish(policy: TrainablePolicy, trainer: Any) -> None:
    """Set the policy's weights to the trainer's weights. Their version is the number of optimizer steps."""
    version, module = int(trainer.state.global_step), trainer.accelerator.unwrap_model(trainer.model)
    takes: Any = policy.publish
    if "state_dict" in inspect.signature(takes).parameters:
        await takes(version, state_dict=plain_weights(merged_state_dict(module)))
    elif policy.module is module:
        await policy.publish(version)
    else:
        raise ConfigError(
            f"{type(policy).__name__} acts with its own module, but the trainer trains a different module; pass "
            "model=policy.module to the trainer"
        )


def plain_weights(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the weights under the names that they have without the `peft` wrapper."""
    return {name.removeprefix("base_model.model."): tensor for name, tensor in state.items()}
