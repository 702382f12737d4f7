"""Task files of reward-kit 0.4, read as they are: the names of resources and of their options that were others then.

What had no effect on a result is left out with a note; what would have one here and cannot have it is refused where
every unknown key is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class _EarlierResource(NamedTuple):
    """The earlier name of a resource.

    Attributes:
        name: what it is called now.
        options: of each option that has another name now, that name.
        without_effect: options for the place of something that is private and temporary now, each with the reason.
    """

    name: str
    options: Mapping[str, str] = {}
    without_effect: Mapping[str, str] = {}


_RESOURCES = {
    "PythonStateResource": _EarlierResource("python_state"),
    "SQLResource": _EarlierResource(
        "sqlite",
        {"schema_file": "seed_sql_file", "seed_data_file": "seed_sql_file"},
        {"db_name": "each episode has a database of its own, in memory"},
    ),
    "FileSystemResource": _EarlierResource(
        "filesystem",
        {"initial_files": "files"},
        {"base_dir_name": "each episode has a directory of its own, which is removed"},
    ),
    "HttpRolloutResource": _EarlierResource("http"),
    "http_rollout": _EarlierResource("http"),
}
_CRITERIA = {"ground_truth_function_calls": "function_calls", "ground_truth_comparable_state": "comparable_state"}


def read_as_now(data: Any) -> Any:
    """The keys of a task file with today's names; anything else as it is. Nothing given is changed."""
    if not isinstance(data, Mapping):
        return data
    found = _RESOURCES.get(str(data.get("resource_type")))
    if found is not None:
        # A text without tool calls was the agent's last word.
        data = {"on_text": "end", **data, "resource_type": found.name}
        if isinstance(config := data.get("base_resource_config"), Mapping):
            data["base_resource_config"] = _MAKE.get(found.name, _renamed)(found, config)
    return _with_truth(data)


def notes_on(data: Any) -> list[str]:
    """Return notes for the user of such a file."""
    found = _RESOURCES.get(str(data.get("resource_type"))) if isinstance(data, Mapping) else None
    if found is None:
        return []
    config = data.get("base_resource_config")
    left_out = [
        f"base_resource_config.{name} of reward-kit 0.4 has no effect: {why}"
        for name, why in found.without_effect.items()
        if isinstance(config, Mapping) and name in config
    ]
    return [f"resource_type {data['resource_type']} of reward-kit 0.4 is read as {found.name}", *left_out]


def _renamed(found: _EarlierResource, config: Mapping[str, Any]) -> dict[str, Any]:
    return {found.options.get(key, key): value for key, value in config.items() if key not in found.without_effect}


def _one_script(found: _EarlierResource, config: Mapping[str, Any]) -> dict[str, Any]:
    """A database was made by up to four scripts; it is made by one, of their texts or a file's, in the same order."""
    rest = {key: value for key, value in config.items() if key not in found.without_effect}
    if rest.get("db_type") == "sqlite":
        del rest["db_type"]  # the only one there was
    texts = [rest.pop(key) for key in ("schema_sql", "seed_sql") if isinstance(rest.get(key), str)]
    if texts:
        rest["seed_sql"] = "\n".join(texts)
    files = [key for key in ("schema_file", "seed_data_file") if key in rest]
    # Two files, or a file beside a text, cannot be one script: they stay, and are refused by their own names.
    return _renamed(found, rest) if len(files) == 1 and not texts else rest


_MAKE: dict[str, Callable[[_EarlierResource, Mapping[str, Any]], dict[str, Any]]] = {"sqlite": _one_script}


def _with_truth(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Give rewards the criteria as `ground_truth`, as in 0.4, unless the file has a ground truth of its own."""
    criteria = data.get("evaluation_criteria")
    if "ground_truth" in data or not isinstance(criteria, Mapping) or not _CRITERIA.keys() & criteria.keys():
        return data
    return {**data, "ground_truth": {now: criteria.get(then) for then, now in _CRITERIA.items()}}
