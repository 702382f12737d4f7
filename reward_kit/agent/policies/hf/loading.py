"""A model and its tokenizer from a folder or the local cache of the hub; the network only where it is asked for."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import try_to_load_from_cache
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from reward_kit.agent.policies.hf.quiet import no_progress_bars
from reward_kit.errors import ConfigError, boundary, did_you_mean

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_OF_MODELS = ("config.json", "tokenizer_config.json")
_OF_TOKENIZERS = ("tokenizer_config.json", "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


class Origin(NamedTuple):
    """Where a model comes from, and what it becomes here.

    Attributes:
        name: a folder, or a name at the hub.
        may_download: what is not here is fetched from the hub.
        device: where the weights go.
        dtype: of the weights.
    """

    name: str
    may_download: bool
    device: torch.device
    dtype: torch.dtype

    @classmethod
    def of(cls, model: str | Path, may_download: bool, device: str, dtype: str) -> Origin:
        """As a policy's options say it.

        Raises:
            ConfigError: the folder, the device or the type is none.
        """
        where = device_of(device)
        return cls(place_of(model), may_download, where, dtype_of(dtype, where))

    def model(self) -> PreTrainedModel:
        """The model, read anew.

        Raises:
            ConfigError: it is not there, or is no causal language model.
        """
        self._check_place("model", self.name)
        with boundary(ConfigError, f"model {self.name!r}"):
            options: dict[str, Any] = {"dtype": self.dtype, **self._where_from()}
            if self.device.type == "meta":
                return self._outline()
            with no_progress_bars():
                model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(self.name, **options)
            moved: Any = model
            moved.to(self.device)
        return model

    def _outline(self) -> PreTrainedModel:
        """The model with no memory behind its weights."""
        config = AutoConfig.from_pretrained(self.name, **self._where_from())
        build: Any = AutoModelForCausalLM
        with torch.device("meta"):
            model: PreTrainedModel = build.from_config(config, dtype=self.dtype, trust_remote_code=False)
        return model

    def tokenizer(self, name: str | None) -> PreTrainedTokenizerBase:
        """The tokenizer.

        Args:
            name: where it is, if not with the model.

        Raises:
            ConfigError: it is not there.
        """
        place = name or self.name
        if Path(place).is_dir() and not any((Path(place) / file).is_file() for file in _OF_TOKENIZERS):
            raise ConfigError(
                f"tokenizer: there is none in {place}; write it there with save_pretrained, or say where it is"
            )
        self._check_place("tokenizer" if name else "model", place)
        with boundary(ConfigError, f"tokenizer {place!r}"):
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(place, **self._where_from())
        return tokenizer

    def _where_from(self) -> dict[str, Any]:
        """Options of every loader: no code of a model's folder is run, and the network only where it is asked for."""
        return {"local_files_only": not self.may_download, "trust_remote_code": False}

    def _check_place(self, what: str, place: str) -> None:
        """A name that is not here is said to be none, before others speak of connections.

        Raises:
            ConfigError: it is neither a folder nor in the local cache, and nothing is to be fetched.
        """
        if self.may_download or Path(place).is_dir():
            return
        try:
            is_cached = any(isinstance(try_to_load_from_cache(place, file), str) for file in _OF_MODELS)
        except ValueError:  # no name that the hub could have
            is_cached = False
        if not is_cached:
            raise ConfigError(
                f"{what} {place!r}: there is no such folder, and no {what} of this name in the local cache of the hub; "
                "with download: true it is fetched from there"
            )


def place_of(model: str | Path) -> str:
    """A folder that is there, or a name at the hub.

    A path is what begins with a dot, a slash or a tilde, has more than one slash, or is a `Path`.

    Raises:
        ConfigError: it is a path, and no model is there.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(f"model: there is no config.json in {path}; give a folder that save_pretrained wrote")
        return str(path)
    name = str(model)
    if not isinstance(model, Path) and not name.startswith((".", "~", os.sep)) and name.count("/") < 2 and name:
        return name
    near = did_you_mean(path.name, [each.name for each in path.parent.iterdir()]) if path.parent.is_dir() else ""
    raise ConfigError(f"model: there is no folder {path}{near if near.endswith('?') else ''}")


def device_of(name: str) -> torch.device:
    """The device of this name; "auto" is the accelerator, where there is one.

    Raises:
        ConfigError: there is no such device.
    """
    if name == "auto":
        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return found or torch.device("cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        told = str(error).partition("\n")[0]
        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        here = f"cpu and {found.type}" if found is not None else "cpu alone"
        raise ConfigError(f"device: {name!r} cannot be used; on this machine torch has {here} ({told})") from None
    return device


def dtype_of(name: str, device: torch.device) -> torch.dtype:
    """The type of this name; "auto" is bfloat16 on an accelerator and float32 on the CPU.

    Raises:
        ConfigError: there is no such type.
    """
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if name not in DTYPES:
        raise ConfigError(f"dtype: {name!r}{did_you_mean(name, [*DTYPES, 'auto'])}")
    return DTYPES[name]
