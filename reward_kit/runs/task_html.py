"""A task as a notebook shows it: what is run, by whom, and what gives the score."""

from __future__ import annotations

from reward_kit.notebook_html import code, folded, line, strong, table, whole
from reward_kit.runs.tasks import LoadedTask


def task_html(task: LoadedTask) -> str:
    """A loaded task."""
    definition, given = task.definition, task.given
    policy = definition.policy.type if definition.policy else getattr(given.policy, "__name__", None)
    policy = policy or (type(given.policy).__name__ if given.policy is not None else "named by each run")
    facts = {
        "samples": f"{len(task.samples):,} × {task.rollouts_per_sample} episodes",
        "policy": policy,
        "reward": task.reward.id if task.reward is not None else "none: episodes are only collected",
        "tools": ", ".join(sorted(task.tools.get_tools())) if task.tools is not None else "",
        "resource": definition.resource_type or "",
    }
    parts = [line(strong(f"Task {definition.name}"))]
    parts.append(table(["", ""], [(name, told) for name, told in facts.items() if told]))
    if definition.initial_user_prompt:
        parts.append(folded("prompt", code(definition.initial_user_prompt)))
    parts += [line(note) for note in task.notes]
    return whole(*parts)
