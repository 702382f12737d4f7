"""A model and its tokenizer in one folder, in the format of `transformers`: written as a whole, read from disk only."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from reward_kit.agent.policies.hf.model import no_progress_bars
from reward_kit.errors import ConfigError, StoreError, boundary
from reward_kit.rl.checkpoint.atomic_folders import atomic_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class LoadedModel(NamedTuple):
    """A model and its tokenizer, None where the folder has none."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None


def save_model(
    folder: Path | str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    is_private: bool = False,
) -> None:
    """Write a folder that `AutoModelForCausalLM.from_pretrained` and `AutoTokenizer.from_pretrained` load.

    The weights are in safetensors. A folder that is there already is replaced as a whole.

    Args:
        folder: where to; folders above it are made.
        model: a causal language model.
        tokenizer: its tokenizer.
        is_private: the folder is its owner's alone; by default the umask decides.

    Raises:
        StoreError: it cannot be written; what was there stays.
    """
    with atomic_folder(Path(folder), is_private=is_private) as part:
        write_model(part, model, tokenizer)


def write_model(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> None:
    """As `save_model`, into a folder that is there and of which somebody else takes care.

    Raises:
        StoreError: it cannot be written.
    """
    with boundary(StoreError, f"cannot write the model to {folder}"), no_progress_bars():
        model.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)


def load_model(
    folder: Path | str, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> LoadedModel:
    """Read what `save_model` wrote; nothing is ever fetched from the network.

    Args:
        folder: the model's.
        dtype: of the weights; by default what they were saved in.
        device: where they go.

    Raises:
        ConfigError: there is no model in the folder, or it cannot be read.
    """
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise ConfigError(f"there is no model in {folder}: no config.json; give a folder that save_model wrote")
    # It takes seconds, and checkpoints without a model need none of it.
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with boundary(ConfigError, f"cannot load the model in {folder}"), no_progress_bars():
        # No code of the folder is run.
        options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype or "auto", **options)
        has_tokenizer = (folder / "tokenizer_config.json").is_file()
        tokenizer = AutoTokenizer.from_pretrained(folder, **options) if has_tokenizer else None
        torch.nn.Module.to(model, device)
    return LoadedModel(model, tokenizer)
