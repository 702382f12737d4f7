"""Task files for the task folders of other libraries, so that a folder can be used like a task file.

The text is derived from the folder each time it is read. A task file of your own can set the same keys.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from reward_kit.environments.harbor_task import TASK_FILE, find_task_folders, is_task_folder, read_harbor_config
from reward_kit.environments.openenv_server import BUILD_S, OPENENV_FILE, read_openenv_folder
from reward_kit.errors import ConfigError

FOLDER_FILES = frozenset({TASK_FILE, OPENENV_FILE})
"""Names of files that mark a task folder."""
_STEPS = 100
_SPARE_S = 120.0


def derive_task_file(path: Path) -> tuple[Path, bytes]:
    """Return the path that represents a task folder, and the text of a task file for it.

    Args:
        path: the folder, or one of `FOLDER_FILES` in it.

    Raises:
        ConfigError: the folder is not a task of a known kind, or its configuration is invalid.
    """
    folder = path if path.is_dir() else path.parent
    if tasks := find_task_folders(folder):
        name, document = TASK_FILE, _harbor_document(folder, tasks)
    elif (folder / OPENENV_FILE).is_file():
        name, document = OPENENV_FILE, _openenv_document(folder)
    else:
        raise ConfigError(
            f"{path} is not a task: expected a task file, a Harbor task (a folder with task.toml), a folder of "
            "Harbor tasks, or an OpenEnv folder (with openenv.yaml)"
        )
    return folder / name, yaml.safe_dump(document, sort_keys=False).encode()


def is_like_task_file(folder: Path) -> bool:
    """Return True for an OpenEnv folder or a folder of Harbor tasks, but not for a single Harbor task."""
    return (folder / OPENENV_FILE).is_file() or (not is_task_folder(folder) and bool(find_task_folders(folder)))


def _harbor_document(folder: Path, tasks: list[Path]) -> dict[str, Any]:
    configs = [read_harbor_config(task) for task in tasks]
    agent_s = max(config.agent_s for config in configs)
    setup_s = max(config.environment.build_timeout_sec for config in configs)
    test_s = max(config.verifier.timeout_sec for config in configs)
    return {
        "name": folder.resolve().name,
        "resource_type": "harbor",
        "base_resource_config": {"folder": "."},
        "dataset_path": ".",
        "reward_function_path": "reward_kit.rewards:harbor_tests",
        "max_episode_steps": _STEPS,
        "on_text": "end",
        "limits": {"tool_time_s": agent_s + _SPARE_S, "environment_time_s": max(setup_s, test_s) + _SPARE_S},
    }


def _openenv_document(folder: Path) -> dict[str, Any]:
    return {
        "name": read_openenv_folder(folder).name,
        "resource_type": "openenv",
        "resource_server": {
            "start_command": "{python} -P -m reward_kit.environments.openenv_server . {port}",
            "health_check_url": "http://127.0.0.1:{port}/health",
            "start_timeout_s": BUILD_S,
        },
        # By default, such a server has a single session, so the episodes wait for each other.
        "base_resource_config": {"connect_timeout": BUILD_S},
        "reward_function_path": "reward_kit.rewards:environment_score",
        "max_episode_steps": _STEPS,
        "limits": {"environment_time_s": 2 * BUILD_S},
    }


def harbor_rows(folder: Path) -> list[tuple[str, dict[str, Any]]]:
    """Return a row for each task in a Harbor task folder or a folder of them, with its place."""
    folder = folder.resolve()
    return [
        (str(task / TASK_FILE), {"id": task.name, "resource_config": {} if task == folder else {"task": task.name}})
        for task in find_task_folders(folder)
    ]
