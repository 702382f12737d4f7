"""What `check_episode` and its siblings say: findings that name their kind and their place, and who collects them."""

from __future__ import annotations

from dataclasses import dataclass, field

from reward_kit.findings import Finding, Level


@dataclass(frozen=True, slots=True)
class EpisodeFinding(Finding):
    """One thing that is wrong with an episode, a group, a batch of rows or a foreign record.

    Attributes:
        level: "error" breaks the contract; "warning" may be meant.
        message: where it is, what is wrong and the likely cause.
        kind: names the fault, such as "drifted-prefix"; `docs/guides/check_episodes.md` lists them.
        rollout_id: of the episode; None where no single one is at fault.
        step: the action, from 0; None where none is at fault.
        token: the place in the token ids that the message counts in; None where no token is at fault.
    """

    kind: str
    rollout_id: str | None = None
    step: int | None = None
    token: int | None = None


@dataclass(slots=True)
class Found:
    """Collects the findings about one thing.

    Attributes:
        what: what is looked at, for messages: "episode", "row 3", "file.jsonl:7".
        rollout_id: of the episode.
        findings: in the order in which they were made.
    """

    what: str
    rollout_id: str | None = None
    findings: list[EpisodeFinding] = field(default_factory=list)

    @classmethod
    def about_episode(cls, rollout_id: str) -> Found:
        """Nothing yet about the episode of this id."""
        return cls(f"episode {rollout_id}", rollout_id)

    def error(self, kind: str, message: str, *, step: int | None = None, token: int | None = None) -> None:
        """Add what breaks the contract."""
        self._add("error", kind, message, step, token)

    def warn(self, kind: str, message: str, *, step: int | None = None, token: int | None = None) -> None:
        """Add what may be meant."""
        self._add("warning", kind, message, step, token)

    def _add(self, level: Level, kind: str, message: str, step: int | None, token: int | None) -> None:
        place = [self.what]
        place += [f"step {step}"] if step is not None else []
        place += [f"token {token}"] if token is not None else []
        said = f"{', '.join(place)}: {message}"
        self.findings.append(EpisodeFinding(level, said, kind, self.rollout_id, step, token))
