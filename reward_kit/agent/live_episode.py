"""One episode while it runs: what the worker knows of it so far, and how each step is written to its record."""

from __future__ import annotations

import datetime
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from reward_kit.agent.budget import Used
from reward_kit.agent.clock import EpisodeClock
from reward_kit.agent.execution import Execution
from reward_kit.agent.log_probs import write_log_probs
from reward_kit.agent.models import StopReason
from reward_kit.agent.plain_json import plain
from reward_kit.agent.policy_interface import OWN_ACCOUNT, PolicyOutput
from reward_kit.agent.starts import EpisodeStart
from reward_kit.environments.base import hash_key
from reward_kit.episodes.record import EpisodeFacts, facts_of
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.errors import Failure
from reward_kit.models import Message


@dataclass(slots=True)
class LiveEpisode:
    """One episode while it runs.

    Attributes:
        start: its identity, seeds and world.
        episode: the record.
        tokens_used: prompt and completion tokens of all steps so far.
        policy_s: seconds that the policy took.
        environment_s: seconds that everything else took.
        usage: what the policy's endpoint reported, added up.
        user_usage: the same of the simulated user's.
        outside: what came of the calls that the policy made itself in the present turn.
        stop_reason: set once it is over.
        failure: what broke, where something did.
        is_world_known: no call of the world was cut off.
        clock: its own time, which its limits are about.
    """

    start: EpisodeStart
    episode: SingleAgentEpisode
    tokens_used: int = 0
    policy_s: float = 0.0
    environment_s: float = 0.0
    usage: dict[str, float] = field(default_factory=dict)
    user_usage: dict[str, float] = field(default_factory=dict)
    outside: Execution | None = None
    stop_reason: StopReason | None = None
    failure: Failure | None = None
    is_world_known: bool = True
    clock: EpisodeClock = field(default_factory=EpisodeClock)
    _began: float = field(default_factory=time.perf_counter)
    _began_at: datetime.datetime = field(default_factory=lambda: datetime.datetime.now(datetime.UTC))

    def stop(self, reason: StopReason, failure: Failure | None = None) -> None:
        """End it."""
        self.stop_reason, self.failure = reason, failure or self.failure
        self.episode.is_terminated, self.episode.is_truncated = reason.is_terminal, not reason.is_terminal

    def take_outside(self) -> Execution:
        """What came of the policy's own calls since the last step."""
        done, self.outside = self.outside or Execution(), None
        return done

    @property
    def cost(self) -> float:
        """US dollars so far, the simulated user's included."""
        return self.usage.get("cost", 0.0) + self.user_usage.get("cost", 0.0)

    def adopt_prompt(self, action: Mapping[str, Any]) -> None:
        """Let the record begin with what the model was really given, where the policy says so.

        After the first action the conversation stands; what the policy made of it is kept in its step's outputs.
        """
        if "prompt_messages" not in action or self.episode.assistant_turns:
            return
        given = [message.to_chat() for message in self.episode.messages]
        self.episode.messages[:] = [Message.model_validate(message) for message in action["prompt_messages"]]
        self.episode.get_infos(-1)["given_messages"] = given

    def record_own_call(self, name: str, arguments: Mapping[str, Any] | str) -> None:
        """Note a call that the policy made itself, with the key of its answer, so that it can be made again."""
        assert self.outside is not None
        given = arguments if isinstance(arguments, str) else plain(dict(arguments))
        call = {"name": name, "arguments": given, "answer": hash_key(self.outside.messages[-1].text)}
        self.outside.info.setdefault("own_calls", []).append(call)

    def count_usage(self, facts: Mapping[str, Any] | None, account: dict[str, float] | None = None) -> Used:
        """Add what one action used to an account, by default the policy's.

        Args:
            facts: with `usage`, or with token ids where there is no endpoint to report it.
            account: what it is added to.
        """
        facts, account = facts or {}, self.usage if account is None else account
        usage = facts.get("usage") or {}
        for key, value in usage.items():
            if isinstance(value, int | float):
                account[key] = account.get(key, 0) + value
        reported = usage.get("prompt_tokens", 0) + usage.get("completion_tokens", 0)
        # A local model reports no usage; its token ids say the same.
        ids = (facts.get("prompt_ids"), facts.get("token_ids"))
        tokens = int(reported) or sum(len(known) for known in ids if known is not None)
        self.tokens_used += tokens
        return Used(tokens, usage.get("cost"))

    def add_step(self, output: PolicyOutput, message: Message, execution: Execution, stop: StopReason | None) -> None:
        """Write one action and what came of it to the record."""
        episode, action = self.episode, output.action_structured
        outputs: dict[str, Any] = {
            "raw_policy_output": output.raw_policy_output,
            "value_estimate": output.value_estimate,
            # What the action said besides is found in the messages; a replay has to say it again.
            "own_account": [key for key in ("results", "is_final") if action.get(key) not in (None, False)] or None,
        }
        if episode.assistant_turns:
            outputs["prompt_messages"] = action.get("prompt_messages")
        outputs |= write_log_probs(output.log_probs, episode, execution.info)
        episode.add_assistant_message(message)
        episode.add_messages(execution.messages)
        episode.add_env_step(
            "\n".join(shown.text for shown in execution.messages),
            {key: value for key, value in action.items() if key not in OWN_ACCOUNT},
            execution.reward,
            execution.info,
            terminated=stop is not None and stop.is_terminal,
            truncated=stop is not None and not stop.is_terminal,
            extra_model_outputs={key: value for key, value in outputs.items() if value is not None},
        )

    def record_facts(self, policy_label: str) -> None:
        """Write who, from where, why it ended and how long it took."""
        start, reason = self.start, self.stop_reason or StopReason.ERROR
        facts = EpisodeFacts(
            final_state=facts_of(self.episode).get("final_state"),
            sample_id=start.sample.id,
            group_id=start.group_id,
            rollout_index=start.rollout_index,
            attempt=0,
            policy=policy_label,
            stop_reason=reason.value,
            failure=self.failure.to_json() if self.failure else None,
            seeds=asdict(start.seeds),
            start={"fork": start.fork, "state_key": start.state_key, "verified": start.verified},
            sample=dict(start.sample.row),
            ground_truth=start.sample.ground_truth,
            usage=dict(self.usage),
            timing={
                "started_at": self._began_at.isoformat(timespec="microseconds"),
                "duration_s": round(time.perf_counter() - self._began, 6),
                "policy_s": round(self.policy_s, 6),
                "environment_s": round(self.environment_s, 6),
                **({"waited_s": round(self.clock.waited_s, 6)} if self.clock.waited_s else {}),
            },
        )
        if self.user_usage:
            facts["user_usage"] = dict(self.user_usage)
        self.episode.custom_data.update(facts)
