"""`LiveEpisode`, a running episode and the writer of its record."""

from __future__ import annotations

import datetime
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from reward_kit.agent.limits import ActionUsage, EpisodeClock
from reward_kit.agent.models import SeenResults, StopReason, write_log_probs
from reward_kit.agent.policy_interface import OWN_ACCOUNT, PolicyOutput
from reward_kit.agent.starts import EpisodeStart, Past
from reward_kit.agent.tool_execution import Execution, Toolbox
from reward_kit.environments.base import ForkableResource
from reward_kit.episodes.record import EpisodeFacts, get_facts
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.errors import Failure
from reward_kit.models import Message
from reward_kit.providers.model_calls import ModelCall
from reward_kit.telemetry.current import EpisodeSpans

if TYPE_CHECKING:
    from reward_kit.agent.simulated_user import UserSession


@dataclass(slots=True)
class LiveEpisode:
    """The state of a running episode. Its methods write the episode's record."""

    start: EpisodeStart
    episode: SingleAgentEpisode
    tokens_used: int = 0
    policy_s: float = 0.0
    # For each step, the times when it began, the policy was called, the policy returned, and it ended. An aborted step
    # has fewer times, and a step that was repeated from a recorded episode has none.
    step_times: list[list[float]] = field(default_factory=list)
    tool_spans: list[list[tuple[float, float]]] = field(default_factory=list)  # per step
    model_calls: list[ModelCall] = field(default_factory=list)
    environment_s: float = 0.0  # time spent outside of the policy
    earlier_cost: float = 0.0  # the cost of the recorded steps that this episode begins with
    usage: dict[str, float] = field(default_factory=dict)  # the sum of the usage that the policy reported
    user_usage: dict[str, float] = field(default_factory=dict)
    seen: SeenResults = field(default_factory=SeenResults)
    own_calls: Execution | None = None  # calls executed by the policy itself in the current turn
    stop_reason: StopReason | None = None
    failure: Failure | None = None
    is_state_known: bool = True  # False once a call to the resource was cancelled
    clock: EpisodeClock = field(default_factory=EpisodeClock)
    tools: Toolbox | None = None
    user: UserSession | None = None
    spans: EpisodeSpans = field(default_factory=EpisodeSpans)
    _began: float = field(default_factory=time.perf_counter)
    began_at: datetime.datetime = field(default_factory=lambda: datetime.datetime.now(datetime.UTC))

    @property
    def cost(self) -> float:
        """The cost so far in US dollars, including the costs of the simulated user and of repeated steps."""
        return self.earlier_cost + self.usage.get("cost", 0.0) + self.user_usage.get("cost", 0.0)

    def resume(self, past: Past) -> None:
        """Begin with the steps of a recorded episode. Their usage counts towards the limits, but is not recorded."""
        self.episode = past.episode.slice(slice(None))
        self.episode.id_ = self.start.rollout_id
        earlier: dict[str, float] = {}
        resource = self.start.resource
        is_seen_needed = resource is not None and not resource.state_key_covers_results
        for t, turn in enumerate(past.turns):
            self.count_usage(turn.output.log_probs, earlier)
            self.count_usage(past.episode.get_infos(t + 1).get("user"), earlier)
            if is_seen_needed:
                self._see(past.episode.answers_to(t), past.episode.get_infos(t + 1))
            self.step_times.append([])
            self.tool_spans.append([])
        self.count_usage(past.episode.get_infos(0).get("user"), earlier)
        self.earlier_cost = earlier.get("cost", 0.0)

    def stop(self, reason: StopReason, failure: Failure | None = None) -> None:
        self.stop_reason, self.failure = reason, failure or self.failure
        self.episode.is_terminated, self.episode.is_truncated = reason.is_terminal, not reason.is_terminal

    def count_usage(self, facts: Mapping[str, Any] | None, account: dict[str, float]) -> ActionUsage:
        """Add the usage of one action to `account`. Return its number of tokens and its cost.

        If the endpoint reported no usage, the token ids are counted instead.
        """
        facts = facts or {}
        usage = facts.get("usage") or {}
        for key, value in usage.items():
            if isinstance(value, int | float):
                account[key] = account.get(key, 0) + value
        reported = usage.get("prompt_tokens", 0) + usage.get("completion_tokens", 0)
        ids = (facts.get("prompt_ids"), facts.get("token_ids"))
        tokens = int(reported) or sum(len(token_ids) for token_ids in ids if token_ids is not None)
        self.tokens_used += tokens
        return ActionUsage(tokens, usage.get("cost"))

    async def record_state(self, resource: ForkableResource) -> None:
        """Record the keys of the current state, in which the policy acts next or the episode ended."""
        info = self.episode.get_infos(-1)
        info["state_key"] = state_key = await resource.state_key()
        if not resource.state_key_covers_results:
            info["state_and_results"] = self.seen.key_with(state_key)

    def _see(self, messages: Iterable[Message], info: Mapping[str, Any]) -> None:
        self.seen.add(messages, (call["answer"] for call in info.get("own_calls", ())))

    def add_step(self, output: PolicyOutput, message: Message, execution: Execution, stop: StopReason | None) -> None:
        """Record one action and its results."""
        episode, action = self.episode, output.action_structured
        outputs: dict[str, Any] = {
            "raw_policy_output": output.raw_policy_output,
            "value_estimate": output.value_estimate,
            # The messages already contain the values, so a replay needs only the keys to repeat the action.
            "own_account": [key for key in ("results", "is_final") if action.get(key) not in (None, False)] or None,
        }
        if episode.assistant_turns:
            outputs["prompt_messages"] = action.get("prompt_messages")
        outputs |= write_log_probs(output.log_probs, episode, execution.info)
        if "state_and_results" in episode.get_infos(-1):
            self._see(execution.messages, execution.info)
        episode.add_assistant_message(message)
        episode.add_messages(execution.messages)
        episode.add_env_step(
            "\n".join(result.text for result in execution.messages),
            {key: value for key, value in action.items() if key not in OWN_ACCOUNT},
            execution.reward,
            execution.info,
            terminated=stop is not None and stop.is_terminal,
            truncated=stop is not None and not stop.is_terminal,
            extra_model_outputs={key: value for key, value in outputs.items() if value is not None},
        )

    def record_facts(self, policy_label: str) -> None:
        """Record the identity, start, end and timing of the episode."""
        start, reason, past = self.start, self.stop_reason or StopReason.ERROR, self.start.past
        zero = self._began
        steps = [[round(time_s - zero, 6) for time_s in times] for times in self.step_times]
        tools = [
            [[round(began - zero, 6), round(ended - zero, 6)] for began, ended in spans] for spans in self.tool_spans
        ]
        calls = [call.to_json(zero) for call in self.model_calls]
        facts = EpisodeFacts(
            final_state=get_facts(self.episode).get("final_state"),
            sample_id=start.sample.id,
            group_id=start.group_id,
            rollout_index=start.rollout_index,
            attempt=0,
            policy=policy_label,
            stop_reason=reason.value,
            failure=self.failure.to_json() if self.failure else None,
            seeds=asdict(start.seeds),
            start={
                "fork": start.fork,
                "state_key": start.state_key,
                "verified": start.verified,
                **({"continues": _origin(past)} if past else {}),
            },
            sample=dict(start.sample.row),
            ground_truth=start.sample.ground_truth,
            usage=dict(self.usage),
            timing={
                "started_at": self.began_at.isoformat(timespec="microseconds"),
                "duration_s": round(time.perf_counter() - self._began, 6),
                "policy_s": round(self.policy_s, 6),
                "steps_policy_s": [round(times[2] - times[1], 6) for times in self.step_times if len(times) == 4],
                "environment_s": round(self.environment_s, 6),
                **({"waited_s": round(self.clock.waited_s, 6)} if self.clock.waited_s else {}),
                "steps": steps,
                **({"tools": tools} if any(tools) else {}),
                **({"model_calls": calls} if calls else {}),
                **({"traceparent": self.spans.traceparent} if self.spans.traceparent else {}),
            },
        )
        if self.user_usage:
            facts["user_usage"] = dict(self.user_usage)
        self.episode.custom_data.update(facts)


def _origin(past: Past) -> dict[str, Any]:
    noise_seeds = [list(pair) for pair in past.noise_seeds]
    return {"rollout_id": past.rollout_id, "step": len(past.episode), "noise_seeds": noise_seeds}
