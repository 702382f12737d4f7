"""A language model: where it is loaded from, what is kept with it, its value head."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from reward_kit.errors import ConfigError, boundary, did_you_mean, kind_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_one_at_a_time = threading.RLock()  # the setting is the whole process's, and is put back as it was found


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Models are read and written without a bar; those of downloads are shown, since these may take minutes."""
    # Imported here, since who writes a checkpoint without a model does not need it.
    from transformers.utils.logging import set_tqdm_hook

    with _one_at_a_time:
        found = set_tqdm_hook(_without_a_bar)
        try:
            yield
        finally:
            set_tqdm_hook(found)


def _without_a_bar(_: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    from transformers.utils.logging import EmptyTqdm

    return EmptyTqdm(*args, **options)  # type: ignore[no-untyped-call]


_KEY = "reward_kit"

OPTIONS: dict[str, Any] = {"action_format": "auto", "tools_in_prompt": True, "tool_role": "tool"}

"""What is kept, with what counts where neither the caller nor the model says anything."""


def remember(tokenizer: Any, **options: Any) -> None:
    """Keep options with the tokenizer; `save_pretrained` writes them to `tokenizer_config.json`.

    Args:
        tokenizer: of `transformers`.
        **options: of `OPTIONS`; others that it has stay.

    Raises:
        ConfigError: there is no such option.
    """
    if unknown := sorted(options.keys() - OPTIONS.keys()):
        raise ConfigError(f"a model does not remember {', '.join(unknown)}; it does {', '.join(OPTIONS)}")
    if options:
        tokenizer.init_kwargs[_KEY] = {**remembered(tokenizer), **options}


def remembered(tokenizer: Any) -> dict[str, Any]:
    """What is kept with the tokenizer; options that no release of ours knows are left out."""
    kept = getattr(tokenizer, "init_kwargs", {}).get(_KEY)
    return {key: value for key, value in kept.items() if key in OPTIONS} if isinstance(kept, dict) else {}


def settled(tokenizer: Any, given: dict[str, Any]) -> dict[str, Any]:
    """What was given, and for what was not, what the model remembers.

    Args:
        tokenizer: the model's.
        given: options of `OPTIONS`; None is "as the model says".

    Returns:
        The options for which somebody said something; the others have their defaults.

    Raises:
        ConfigError: the model was taught otherwise.
    """
    kept = remembered(tokenizer)
    asked = {key: value for key, value in given.items() if value is not None}
    for key, value in asked.items():
        if key in kept and kept[key] != value:
            raise ConfigError(
                f"{key}: the model was trained with {_as_yaml(kept[key])}, as its tokenizer_config.json says, and here "
                f"it is {_as_yaml(value)}; leave {key} out"
            )
    return {**kept, **asked}


def _as_yaml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


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


@torch.no_grad()
def merged_state_dict(module: nn.Module) -> dict[str, Tensor]:
    """The weights under the names that they have without low-rank adapters, each adapter added to its matrix.

    The module stays as it is. Without adapters this is the module's own `state_dict`.

    Args:
        module: with the adapters of `peft` in it or not.
    """
    state: dict[str, Tensor] = module.state_dict()
    for path, layer in module.named_modules():
        # By what it has, so that nothing of peft is imported where it is not used.
        if hasattr(layer, "lora_A") and hasattr(layer, "get_delta_weight"):
            _merge(state, path, layer)
    return state


def _merge(state: dict[str, Tensor], path: str, layer: Any) -> None:
    for key in [key for key in state if key.startswith(f"{path}.lora_")]:
        del state[key]
    for key in [key for key in state if key.startswith(f"{path}.base_layer.")]:
        state[key.replace(".base_layer.", ".")] = state.pop(key)
    weight = layer.get_base_layer().weight
    # What peft has merged already stands in the weight; and not every adapter has a part in every layer.
    known = {*layer.lora_A, *layer.lora_embedding_A} - {*layer.merged_adapters}
    names = [] if layer.disable_adapters else [name for name in layer.active_adapters if name in known]
    delta = sum((layer.get_delta_weight(name) for name in names), torch.zeros_like(weight))
    state[f"{path}.weight"] = (weight + delta.to(weight.dtype)).detach()


class PolicyWithValue(nn.Module):
    """A model and a value head, trained together.

    Called, it is the model. The value of a state is `value_head` of the hidden state at the last token before an
    action, the one from which the action's first token is sampled.

    Args:
        policy: a causal language model of `transformers`.
        value_head: (…,H) -> (…,1); None: a linear layer that begins with 0, in the model's own type and on its device.

    Raises:
        ConfigError: the model has no output embeddings to take the hidden state from.
    """

    def __init__(self, policy: nn.Module, value_head: nn.Module | None = None) -> None:
        super().__init__()
        embeddings: Any = getattr(policy, "get_output_embeddings", lambda: None)()
        if embeddings is None:
            raise ConfigError(f"a value head needs a causal language model with a head; got {kind_of(policy)}")
        self.policy = policy
        self.value_head = _zero_head(embeddings.weight) if value_head is None else value_head

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model gives."""
        return self.policy(*args, **kwargs)

    def get_output_embeddings(self) -> Any:
        """The model's head."""
        policy: Any = self.policy
        return policy.get_output_embeddings()

    @property
    def config(self) -> Any:
        """The model's configuration."""
        return self.policy.config


def _zero_head(weight: Tensor) -> nn.Linear:
    head = nn.Linear(weight.shape[1], 1, device=weight.device, dtype=weight.dtype)
    # A critic that says 0 at first makes advantages of returns, and not of noise.
    with torch.no_grad():
        head.weight.zero_()
        head.bias.zero_()
    return head
