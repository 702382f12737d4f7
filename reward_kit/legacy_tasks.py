"""Task files of reward-kit 0.4, whose resources and options had other names.

An option without effect on a result is left out with a note; one that would have an effect and cannot have it here is
refused like any unknown key.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_RESOURCES = {
    "PythonStateResource": "python_state",
    "SQLResource": "sqlite",
    "FileSystemResource": "filesystem",
    "HttpRolloutResource": "http",
    "http_rollout": "http",
}
_RENAMED = {
    "sqlite": {"schema_file": "seed_sql_file", "seed_data_file": "seed_sql_file"},
    "filesystem": {"initial_files": "files"},
}
_WITHOUT_EFFECT = {
    "sqlite": {"db_name": "each episode has a database of its own, in memory"},
    "filesystem": {"base_dir_name": "each episode has a directory of its own, which is removed"},
}
_CRITERIA = {"ground_truth_function_calls": "function_calls", "ground_truth_comparable_state": "comparable_state"}


def upgrade_task(data: Any) -> Any:
    """Return a copy of a task file's keys with today's names; anything else as it is."""
    if not isinstance(data, Mapping):
        return data
    name = _RESOURCES.get(str(data.get("resource_type")))
    if name is not None:
        # A text without tool calls was the agent's last word.
        data = {"on_text": "end", **data, "resource_type": name}
        if isinstance(config := data.get("base_resource_config"), Mapping):
            kept = {key: value for key, value in config.items() if key not in _WITHOUT_EFFECT.get(name, {})}
            renamed = _RENAMED.get(name, {})
            if name == "sqlite":  # one script instead of up to four, of their texts or a file's, in the same order
                if kept.get("db_type") == "sqlite":
                    del kept["db_type"]  # the only one there was
                texts = [kept.pop(key) for key in ("schema_sql", "seed_sql") if isinstance(kept.get(key), str)]
                if texts:
                    kept["seed_sql"] = "\n".join(texts)
                # Two files, or a file beside a text, cannot be one script: they are refused by their own names.
                if texts or len(renamed.keys() & kept.keys()) != 1:
                    renamed = {}
            data["base_resource_config"] = {renamed.get(key, key): value for key, value in kept.items()}
    criteria = data.get("evaluation_criteria")
    if "ground_truth" in data or not isinstance(criteria, Mapping) or not _CRITERIA.keys() & criteria.keys():
        return data
    # Rewards got the criteria as the ground truth.
    return {**data, "ground_truth": {now: criteria.get(then) for then, now in _CRITERIA.items()}}


def upgrade_notes(data: Any) -> list[str]:
    """Return notes for the user of such a file."""
    name = _RESOURCES.get(str(data.get("resource_type"))) if isinstance(data, Mapping) else None
    if name is None:
        return []
    config = data.get("base_resource_config")
    left_out = [
        f"base_resource_config.{option} of reward-kit 0.4 has no effect: {why}"
        for option, why in _WITHOUT_EFFECT.get(name, {}).items()
        if isinstance(config, Mapping) and option in config
    ]
    return [f"resource_type {data['resource_type']} of reward-kit 0.4 is read as {name}", *left_out]
