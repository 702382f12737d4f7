"""Loading of language models, the options stored with a tokenizer, merged weights, and the value head.

`transformers` is imported in the functions that need it, so code that only saves weights does not import it.
"""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from reward_kit.display_text import pluralize
from reward_kit.errors import ConfigError, boundary, did_you_mean, type_name

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
OPTIONS: dict[str, Any] = {"action_format": "auto", "tools_in_prompt": True, "tool_role": "tool"}
"""Options stored with the tokenizer, and their defaults."""
_KEY = "reward_kit"
_MODEL_FILES = ("config.json", "tokenizer_config.json")
_TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
_hook_lock = threading.RLock()  # the progress hook is process-wide and is restored afterwards


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Hide progress bars while models are loaded and saved.

    Downloads still show progress bars, because they may take minutes.
    """
    from transformers.utils.logging import EmptyTqdm, set_tqdm_hook

    with _hook_lock:
        previous = set_tqdm_hook(lambda _, args, options: EmptyTqdm(*args, **options))  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            set_tqdm_hook(previous)


def remember(tokenizer: Any, **options: Any) -> None:
    """Store options with a tokenizer. `save_pretrained` writes them to `tokenizer_config.json`.

    If a model was trained to answer with bare commands and its answers are parsed as JSON, it performs badly, but no
    error is raised. The options that determine the form of prompts and answers are therefore saved with the tokenizer,
    like the chat template.

    Args:
        tokenizer: a tokenizer from `transformers`.
        **options: the options to store. Their names are keys of `OPTIONS`. Options that were stored earlier are kept.

    Raises:
        ConfigError: If an option is unknown.
    """
    if unknown := sorted(options.keys() - OPTIONS.keys()):
        raise ConfigError(
            f"unknown option {', '.join(unknown)}; the options saved with a model are {', '.join(OPTIONS)}"
        )
    if options:
        tokenizer.init_kwargs[_KEY] = {**remembered(tokenizer), **options}


def remembered(tokenizer: Any) -> dict[str, Any]:
    """Return the options stored with a tokenizer. Unknown options are ignored."""
    kept = getattr(tokenizer, "init_kwargs", {}).get(_KEY)
    return {key: value for key, value in kept.items() if key in OPTIONS} if isinstance(kept, dict) else {}


def settle_options(tokenizer: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Combine the given options with those stored with the tokenizer.

    If an option is `None`, its stored value, if any, is used.

    Raises:
        ConfigError: If a given option contradicts the stored option.
    """
    kept = remembered(tokenizer)
    chosen = {key: value for key, value in given.items() if value is not None}

    def as_yaml(value: Any) -> str:
        return str(value).lower() if isinstance(value, bool) else str(value)

    for key, value in chosen.items():
        if key in kept and kept[key] != value:
            raise ConfigError(
                f"{key}: the model was trained with {as_yaml(kept[key])} (see its tokenizer_config.json), but "
                f"the option is {as_yaml(value)}; remove {key}"
            )
    return {**kept, **chosen}


class ModelSource(NamedTuple):
    """The directory or hub name of a model, and the device and dtype for its weights.

    With the device "meta", no weights are loaded.
    """

    name: str
    may_download: bool
    device: torch.device
    dtype: torch.dtype

    @classmethod
    def parse(cls, model: str | Path, may_download: bool, device: str, dtype: str) -> ModelSource:
        """Parse a policy's options.

        The model is a path if it is a `Path`, if it starts with a dot, a slash or a tilde, or if it has more than one
        slash.

        Raises:
            ConfigError: If the directory, device or dtype is unknown.
        """
        target = parse_device(device)
        if dtype != "auto" and dtype not in DTYPES:
            raise ConfigError(f"dtype: unknown type {dtype!r}{did_you_mean(dtype, [*DTYPES, 'auto'])}")
        automatic = torch.float32 if target.type == "cpu" else torch.bfloat16
        name, path = str(model), Path(model).expanduser()
        is_name = not isinstance(model, Path) and not name.startswith((".", "~", os.sep)) and name.count("/") < 2
        if path.is_dir():
            if not (path / "config.json").is_file():
                raise ConfigError(f"model: {path} has no config.json; set it to a directory written by save_pretrained")
            name = str(path)
        elif not is_name or not name:
            siblings = [each.name for each in path.parent.iterdir()] if path.parent.is_dir() else []
            near = did_you_mean(path.name, siblings)
            raise ConfigError(f"model: directory {path} does not exist{near if near.endswith('?') else ''}")
        return cls(name, may_download, target, DTYPES.get(dtype, automatic))

    def load_model(self) -> PreTrainedModel:
        """Load the model.

        Raises:
            ConfigError: If the model is missing or incomplete, or is not a causal language model.
        """
        from transformers import AutoConfig, AutoModelForCausalLM

        self._check_present("model", self.name)
        build: Any = AutoModelForCausalLM
        with boundary(ConfigError, f"model {self.name!r}"):
            if self.device.type == "meta":
                config = AutoConfig.from_pretrained(self.name, **self._loader_options())
                with self.device:
                    outline: PreTrainedModel = build.from_config(config, dtype=self.dtype, trust_remote_code=False)
                return outline
            with no_progress_bars():
                model, report = build.from_pretrained(
                    self.name, dtype=self.dtype, output_loading_info=True, **self._loader_options()
                )
            loaded: PreTrainedModel = model.to(self.device)
        refuse_missing_weights(f"model {self.name!r}", loaded, report)
        return loaded

    def load_tokenizer(self, name: str | None) -> PreTrainedTokenizerBase:
        """Load the tokenizer of the model. If `name` is set, load that tokenizer instead.

        Raises:
            ConfigError: If the tokenizer is missing.
        """
        from transformers import AutoTokenizer

        source = name or self.name
        if Path(source).is_dir() and not any((Path(source) / file).is_file() for file in _TOKENIZER_FILES):
            raise ConfigError(
                f"tokenizer: {source} has no tokenizer; save it there with save_pretrained, or set tokenizer"
            )
        self._check_present("tokenizer" if name else "model", source)
        with boundary(ConfigError, f"tokenizer {source!r}"):
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source, **self._loader_options())
        return tokenizer

    def _loader_options(self) -> dict[str, Any]:
        """Return options that forbid code from the model's directory, and network access unless it is requested."""
        return {"local_files_only": not self.may_download, "trust_remote_code": False}

    def _check_present(self, what: str, place: str) -> None:
        """Report that a model is missing before `transformers` reports a failed connection."""
        from huggingface_hub import try_to_load_from_cache

        if self.may_download or Path(place).is_dir():
            return
        try:
            is_cached = any(isinstance(try_to_load_from_cache(place, file), str) for file in _MODEL_FILES)
        except ValueError:  # not a valid name on the hub
            is_cached = False
        if not is_cached:
            raise ConfigError(
                f"{what} {place!r}: it is neither a directory nor a {what} in the local hub cache; "
                "set download: true to download it"
            )


def refuse_missing_weights(what: str, model: nn.Module, report: Mapping[str, Any]) -> None:
    """Reject a loaded model if parameters were missing, since `transformers` draws these at random in each load.

    Args:
        what: the beginning of the message.
        model: the loaded model.
        report: the second result of `from_pretrained` with `output_loading_info=True`.

    Raises:
        ConfigError: If parameters were missing.
    """
    if missing := sorted({*report["missing_keys"]} & {name for name, _ in model.named_parameters()}):
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ConfigError(
            f"{what}: the weights of {pluralize(len(missing), 'parameter')} are missing: {', '.join(missing[:3])}{more}"
            "; save the whole model with save_pretrained"
        )


def parse_device(name: str) -> torch.device:
    """Return the device with this name. "auto" selects the accelerator or otherwise the CPU.

    Raises:
        ConfigError: If the device cannot be used.
    """
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if name == "auto":
        return accelerator or torch.device("cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        here = f"cpu and {accelerator.type}" if accelerator is not None else "only cpu"
        raise ConfigError(
            f"device: {name!r} cannot be used; on this machine, torch supports {here} ({reason})"
        ) from None
    return device


@torch.no_grad()
def merged_state_dict(module: nn.Module) -> dict[str, Tensor]:
    """Return the weights of a module after merging its `peft` low-rank adapters. The module is not changed.

    The names are the same as in the module without adapters. If there are no adapters, the result is the module's
    `state_dict`.
    """
    state: dict[str, Tensor] = module.state_dict()
    modules: Iterator[tuple[str, Any]] = module.named_modules()
    for path, layer in modules:
        # Recognized by attributes, so that peft need not be imported.
        if not (hasattr(layer, "lora_A") and hasattr(layer, "get_delta_weight")):
            continue
        for key in [key for key in state if key.startswith(f"{path}.lora_")]:
            del state[key]
        for key in [key for key in state if key.startswith(f"{path}.base_layer.")]:
            state[key.replace(".base_layer.", ".")] = state.pop(key)
        weight = layer.get_base_layer().weight
        # Merged adapters are already in the weight, and not every adapter covers every layer.
        known = {*layer.lora_A, *layer.lora_embedding_A} - {*layer.merged_adapters}
        names = [] if layer.disable_adapters else [name for name in layer.active_adapters if name in known]
        delta = sum((layer.get_delta_weight(name) for name in names), torch.zeros_like(weight))
        state[f"{path}.weight"] = (weight + delta.to(weight.dtype)).detach()
    return state


def merged_model(model: PreTrainedModel, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Return a model for saving: without adapters, which are merged, and with its weights in `dtype`.

    Weights that do not change share their memory with `model`. If nothing changes, the result is `model` itself.
    """
    dtype = dtype or model.dtype
    merged = merged_state_dict(model)
    if dtype == model.dtype and merged.keys() == model.state_dict().keys():
        return model
    with torch.device("meta"):
        plain = type(model)(copy.deepcopy(model.config))
    weights = {name: value.to(dtype) if value.is_floating_point() else value for name, value in merged.items()}
    plain.load_state_dict(weights, assign=True)
    plain.tie_weights()
    plain.generation_config = model.generation_config
    return plain


class PolicyWithValue(nn.Module):
    """A causal language model and a value head that are trained together.

    Calling this module calls the language model. The value of a state is the output of `value_head` for the hidden
    state at the last token before an action. The first token of the action is sampled based on the same hidden state.

    Args:
        policy: a causal language model from `transformers`.
        value_head: a module that maps (…,H) to (…,1). The default is a linear layer initialized to zero, so that
            advantages begin as plain returns without noise from the critic. It has the dtype and device of the model.

    Raises:
        ConfigError: If the model has no output embeddings. They are needed to obtain the hidden state.
    """

    def __init__(self, policy: nn.Module, value_head: nn.Module | None = None) -> None:
        super().__init__()
        embeddings: Any = getattr(policy, "get_output_embeddings", lambda: None)()
        if embeddings is None:
            raise ConfigError(
                f"a value head needs a causal language model with output embeddings, got {type_name(policy)}"
            )
        self.policy = policy
        if value_head is None:
            weight = embeddings.weight
            value_head = nn.Linear(weight.shape[1], 1, device=weight.device, dtype=weight.dtype)
            nn.init.zeros_(value_head.weight)
            nn.init.zeros_(value_head.bias)
        self.value_head = value_head

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.policy(*args, **kwargs)

    def get_output_embeddings(self) -> Any:
        """Return the output layer of the language model."""
        policy: Any = self.policy
        return policy.get_output_embeddings()

    @property
    def config(self) -> Any:
        """The configuration of the language model."""
        return self.policy.config
