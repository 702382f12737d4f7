"""Find the input files of a run, copy them into the run, and compare them before the run is resumed.

Episodes and scores of one run are comparable only if their inputs are the same. A run therefore keeps a copy of its
task file, dataset, code and other files in `inputs/`, and it cannot be resumed if one of them has changed.
"""

from __future__ import annotations

import difflib
import hashlib
import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from reward_kit.errors import ConfigError
from reward_kit.loading import split_reference, user_module_name
from reward_kit.models import TaskDefinitionModel
from reward_kit.private_files import make_private_folder
from reward_kit.reward_agent.named_rewards import NamedRewards
from reward_kit.reward_agent.sandboxed import SandboxedReward
from reward_kit.reward_agent.scoring import Reward
from reward_kit.reward_agent.sources import collect_sources, user_roots
from reward_kit.reward_calls import REFERENCE
from reward_kit.runs.files import wrap_os_errors, write_atomically
from reward_kit.runs.run_folder import RunFolder
from reward_kit.runs.task_objects import source_text
from reward_kit.task_parts import CreditModel
from reward_kit.typed_interface import RewardSpec

FOLDER = "inputs"
TASK_FILE = "task file"
_LARGEST_COPY = 4 * 1024 * 1024
_LARGEST_FOLDER = 64 * 1024 * 1024
_MOST_FILES = 10_000
_LONGEST_NAME = 150
_LINES_SHOWN = 20
_LINE_CHARS = 160


def find_inputs(
    path: Path | None, folder: Path, definition: TaskDefinitionModel, reward: Reward | None
) -> dict[str, Path]:
    """Return the files and directories on which the results of a run depend, keyed by name.

    These are the files to which the task file refers, the user's modules that these files import, and the files and
    directories that the reward may read. Installed packages are excluded.
    """
    code = {
        "tools": definition.tools_module_path,
        "reward": definition.reward_function_path,
        **{f"reward {reward.name}": reward.reward_function_path for reward in definition.rewards or ()},
        "redaction": definition.redact,
        "resource": definition.resource_type,
        "policy": definition.policy and definition.policy.type,
        "user": definition.user and definition.user.type,
    }
    files = {name: file for name, text in code.items() if text and (file := file_of_code(text, folder))}
    files |= credit_files(definition.credit, folder)
    blocks = (definition.policy, definition.user)
    further = files_in_options(
        (definition.base_resource_config, *(block.options() for block in blocks if block is not None)), folder
    )
    for file in [*files.values(), *(file for file in further if file.suffix == ".py")]:
        further += own_modules(file, user_module_name(file)) if file != files.get("reward") else []
    further += reward_files(reward) if reward is not None else ()
    files |= {TASK_FILE: path.resolve()} if path is not None else {}
    files |= {"dataset": folder / definition.dataset_path} if definition.dataset_path else {}
    known = set(files.values())
    for file in further:
        if file not in known:
            files[f"{'folder' if file.is_dir() else 'file'} {shown_path(file, folder)}"] = file
    return dict(sorted(files.items()))


def files_in_options(options: Any, folder: Path) -> list[Path]:
    """Return the files that strings in a configuration name, as a path or as `file.py:name`."""
    texts = [text for text in _texts(options) if len(text) < 256 and "\0" not in text]
    named = ((folder / text).resolve() if (folder / text).is_file() else file_of_code(text, folder) for text in texts)
    return [file for file in named if file is not None]


def shown_path(file: Path, folder: Path) -> Path:
    """Return the path relative to `folder` if it is inside, so that moving the folder does not change it."""
    return file.relative_to(folder) if file.is_relative_to(folder) else file


def credit_files(credit: CreditModel | None, folder: Path) -> dict[str, Path]:
    """Return the files of the estimator and the state hash of a `credit:` block, keyed by input name."""
    if credit is None:
        return {}
    estimator, texts = file_of_code(credit.estimator, folder), _texts(credit.options().get("state_hash"))
    files = dict.fromkeys(file for text in texts if (file := file_of_code(text, folder)))
    hashes = {f"state hash {i}" if i else "state hash": file for i, file in enumerate(files)}
    return hashes if estimator is None else {"estimator": estimator, **hashes}


def own_modules(file: Path, module: str) -> tuple[Path, ...]:
    """Return the files of a user's module and of the user's modules that it imports directly or indirectly."""
    if module.partition(".")[0] == "reward_kit":
        return ()
    try:
        sources = collect_sources(file, module, [file.parent, *user_roots()])
    except ConfigError:  # a module without source text is identified by its content
        return (file,)
    return tuple(sorted({Path(source.filename) for source in sources.modules.values() if source.text is not None}))


def reward_files(reward: Reward) -> tuple[Path, ...]:
    """Return the files on which a reward depends: its own file and the files that it may read on this machine."""
    if isinstance(reward, NamedRewards):
        return tuple(dict.fromkeys(file for part in reward.parts.values() for file in reward_files(part.reward)))
    if isinstance(reward, SandboxedReward):
        return reward.files
    if isinstance(reward, RewardSpec) and reward.origin is not None:
        return own_modules(reward.origin.file, reward.function.__module__)
    return ()


def scorer_hash(reward: Reward) -> str:
    """Return the identity of a reward: the SHA-256 of its file if the reward depends on nothing else.

    Otherwise, return the SHA-256 of the sorted SHA-256s of its files and options, one per line. For a reward behind
    HTTP, hash its URL and the digest from its server. For multiple rewards, hash the name, weight and SHA-256 of each.
    """
    if isinstance(reward, NamedRewards):
        parts = [[name, part.weight, scorer_hash(part.reward)] for name, part in reward.parts.items()]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
    if reward.origin is None:
        from reward_kit.reward_agent.remote import RemoteReward

        if isinstance(reward, RemoteReward):
            identity = f"{reward.url}\n{reward.digest}"
        else:  # without a file, as in a notebook, use the id and, if known, the source text
            text = source_text(reward.function) if isinstance(reward, RewardSpec) else ""
            identity = f"{reward.id}\n{text}" if text else reward.id
        digests = [hashlib.sha256(identity.encode()).hexdigest()]
    else:
        digests = sorted({hash_path(file) for file in {reward.origin.file, *reward_files(reward)} if file.exists()})
    if reward.options:
        identity = json.dumps(dict(reward.options), sort_keys=True, default=repr)
        digests = sorted([*digests, hashlib.sha256(identity.encode()).hexdigest()])
    return digests[0] if len(digests) == 1 else hashlib.sha256("\n".join(digests).encode()).hexdigest()


def hash_path(path: Path) -> str:
    """Return the SHA-256 of a file, or of the names and contents of the files in a directory.

    If a directory is larger than 64 MiB, names, sizes and times are hashed instead of the contents. Only the first
    10,000 files are included.
    """
    if not path.is_dir():
        try:
            return hashlib.sha256(path.read_bytes()).hexdigest()
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    files = {file: file.stat() for file in itertools.islice(_files_in(path), _MOST_FILES) if file.is_file()}
    is_small = sum(facts.st_size for facts in files.values()) <= _LARGEST_FOLDER
    total = hashlib.sha256()
    for file, facts in files.items():
        content: Any = [facts.st_size, facts.st_mtime_ns]
        if is_small:
            try:
                content = hashlib.sha256(file.read_bytes()).hexdigest()
            except OSError:  # Rewards cannot read it either
                content = None
        total.update(json.dumps([os.fsencode(file.relative_to(path)).hex(), content]).encode() + b"\n")
    return total.hexdigest()


def _files_in(folder: Path) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):
        folders.sort()
        yield from (Path(parent, name) for name in sorted(names))


def file_of_code(text: str, folder: Path) -> Path | None:
    """Return the file of `file.py` or `file.py:name`; None for a built-in name or a module of a package."""
    location = split_reference(text)[0] if REFERENCE.match(text) else text
    file = folder / location
    return file.resolve() if location.endswith(".py") and file.is_file() else None


def _texts(value: Any) -> Iterator[str]:
    """Yield every string in a configuration, since any of them may be the path of a file."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)


def copy_inputs(
    store: RunFolder,
    inputs: Mapping[str, Path],
    digests: Mapping[str, str],
    texts: Mapping[str, tuple[str, bytes]] | None = None,
) -> None:
    """Copy the input files of a run into its directory; secrets are redacted.

    For directories and for files over 4 MiB, only the digest is recorded.
    """
    folder = store.path / FOLDER
    with wrap_os_errors("make", folder):
        make_private_folder(folder, exist_ok=True)
    for name, (suffix, text) in (texts or {}).items():
        write_atomically(folder / _copy_name(name, Path(f"text{suffix}")), store.redaction.redact_bytes(text))
    for name, file in inputs.items():
        if file.is_dir() or file.stat().st_size > _LARGEST_COPY:
            continue
        content = file.read_bytes()
        if hashlib.sha256(content).hexdigest() != digests[name]:
            raise ConfigError(f"the {name} {file} changed while the run was starting; start the run again")
        write_atomically(folder / _copy_name(name, file), store.redaction.redact_bytes(content))


def differences(run: Path, before: Mapping[str, str], now: Mapping[str, str], inputs: Mapping[str, Path]) -> list[str]:
    """Return a message for each changed input of a run, followed by the changed lines.

    Args:
        run: the run's directory.
        before: the SHA-256 of each input when the run began.
        now: the SHA-256 of each input now.
        inputs: the path of each input now.
    """
    texts = []
    for name in sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name)):
        file = inputs.get(name)
        copy = run / FOLDER / _copy_name(name, file) if file is not None else None
        if name not in before:
            texts.append(f"the {name} {inputs[name]} is new")
        elif file is None or copy is None:
            texts.append(f"the {name} is missing")
        elif not copy.is_file():
            texts.append(f"the {name} {file} changed")
        else:
            old, new = (path.read_text(encoding="utf-8", errors="replace").splitlines() for path in (copy, file))
            diff = difflib.unified_diff(old, new, lineterm="", n=0)
            lines = [f"    {line[:_LINE_CHARS]}" for line in diff if line[:3] not in ("---", "+++")]
            more = [f"    … and {len(lines) - _LINES_SHOWN} more lines"] if len(lines) > _LINES_SHOWN else []
            texts.append("\n".join([f"the {name} {file} changed:", *lines[:_LINES_SHOWN], *more]))
    return texts


def refuse_changes(run: Path, changes: Sequence[str], *, use: str = "resumed", force: bool | None = None) -> str | None:
    """Raise an error if inputs of a run changed, because its results would not be comparable.

    Args:
        run: the run's directory.
        changes: a description of each changed input.
        use: what the command does with the run.
        force: True to return a warning instead of raising an error. None if the command has no option `--force`.

    Raises:
        ConfigError: If inputs changed and `force` is not set.
    """
    if not changes:
        return None
    changed = "\n".join(changes)
    if force:
        return f"--force: {run} is {use} although its inputs changed:\n{changed}"
    fixes = ["Undo the changes", "start again in a new directory"]
    fixes += ["continue anyway with --force"] if force is not None else []
    raise ConfigError(
        f"{run} cannot be {use}, because its inputs changed:\n{changed}\n{', '.join(fixes[:-1])}, or {fixes[-1]}"
    )


def _copy_name(name: str, file: Path) -> str:
    """Return a unique file name for the copy of an input."""
    plain = quote(name.replace(" ", "_", 1), safe="")
    if len(plain) > _LONGEST_NAME:
        plain = f"{hashlib.sha256(name.encode()).hexdigest()[:16]}{plain[-_LONGEST_NAME:]}"
    return plain if plain.endswith(file.suffix) else plain + file.suffix
