"""What all probes of one check share: the bench, what is known, and what was seen so far."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from reward_kit.reward_agent.scoring import ScoringRequest
from reward_kit.reward_checks.bench import Bench, Seen
from reward_kit.reward_checks.grounds import Ground
from reward_kit.reward_checks.report import Report, shown
from reward_kit.reward_checks.source_facts import SourceFacts


@dataclass(slots=True)
class Checkup:
    """One check under way.

    Attributes:
        bench: where the reward is called.
        report: what was found.
        source: what the reward's text says.
        chance: for everything random.
        grounds: the questions; at least one.
        rollouts: the user's own transcripts.
        scores: every call whose rollout has a name, by that name.
        events: what the reward opened, asked for and started, in any call.
        changed: inputs that it changed, with how.
        early: rollouts with what they scored before anything else was asked.
    """

    bench: Bench
    report: Report
    source: SourceFacts
    chance: random.Random
    grounds: list[Ground]
    rollouts: Sequence[ScoringRequest] = ()
    scores: dict[str, Seen] = field(default_factory=dict)
    events: dict[tuple[str, str], None] = field(default_factory=dict)
    changed: dict[str, str] = field(default_factory=dict)
    early: list[tuple[ScoringRequest, float | None]] = field(default_factory=list)

    @property
    def first(self) -> Ground:
        """The question that most probes ask: one whose right answer is known to earn more, before others."""
        return next((ground for ground in self.grounds if ground.tells_apart), self.grounds[0])

    @property
    def known(self) -> list[Ground]:
        """The questions whose right answer earns more than wrong ones."""
        return [ground for ground in self.grounds if ground.tells_apart]

    @property
    def takes_truth(self) -> bool:
        """The reward is given the ground truth."""
        names = self.bench.parameters
        return names is None or bool(names & {"ground_truth", "ground_truths"})

    async def see(self, name: str, request: ScoringRequest, *, memory: bool = False) -> Seen:
        """One call, noted."""
        seen = await self.bench.see(request, memory=memory)
        self.note(name, seen)
        return seen

    def note(self, name: str, seen: Seen) -> None:
        """Keep what was seen."""
        self.scores[name] = seen
        self.events.update(dict.fromkeys(seen.events))
        for what, how in seen.changed.items():
            self.changed.setdefault(what, how)


Probe = Callable[[Checkup], Awaitable[None]]


def told(name: str, seen: Seen, text: str | None = None) -> str:
    """One line of evidence: which rollout, what was answered, and what it got."""
    answer = f' "{shown(text, 60)}"' if text is not None else ""
    return f"{name}{answer}: {seen.text}"
