"""Conversion of task files from reward-kit 0.4, where resources and options had different names.

An option that does not affect results is dropped, and a note is shown. An option that this version does not support is
rejected as an unknown key.
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
    "sqlite": {"db_name": "each episode has its own database, in memory"},
    "filesystem": {"base_dir_name": "each episode has its own temporary directory"},
}
_CRITERIA = {"ground_truth_function_calls": "function_calls", "ground_truth_comparable_state": "comparable_state"}


def upgrade_task(data: Any) -> Any:
    """Return a copy of a task file's content with current key names; return anything but a mapping unchanged."""
    if not isinstance(data, Mapping):
        return data
    name = _RESOURCES.get(str(data.get("resource_type")))
    if name is not None:
        # In 0.4, a text message without tool calls ended the episode.
        data = {"on_text": "end", **data, "resource_type": name}
        if isinstance(config := data.get("base_resource_config"), Mapping):
            options = {key: value for key, value in config.items() if key not in _WITHOUT_EFFECT.get(name, {})}
            renamed = _RENAMED.get(name, {})
            if name == "sqlite":  # Merge up to four scripts into one, in the same order.
                if options.get("db_type") == "sqlite":
                    del options["db_type"]  # the only supported value
                texts = [options.pop(key) for key in ("schema_sql", "seed_sql") if isinstance(options.get(key), str)]
                if texts:
                    options["seed_sql"] = "\n".join(texts)
                # Two files, or a file and a script, cannot be merged; they are rejected as unknown keys.
                if texts or len(renamed.keys() & options.keys()) != 1:
                    renamed = {}
            data["base_resource_config"] = {renamed.get(key, key): value for key, value in options.items()}
    criteria = data.get("evaluation_criteria")
    if "ground_truth" in data or not isinstance(criteria, Mapping) or not _CRITERIA.keys() & criteria.keys():
        return data
    # In 0.4, rewards received the criteria as the ground truth.
    return {**data, "ground_truth": {new: criteria.get(old) for old, new in _CRITERIA.items()}}


def upgrade_notes(data: Any) -> list[str]:
    """Return notes about the keys from reward-kit 0.4 in a task file."""
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
