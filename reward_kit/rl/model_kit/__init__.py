"""Small models without a hub: a tokenizer of a domain, a decoder of a few numbers, supervised training, one folder."""

from typing import TYPE_CHECKING

from reward_kit.lazy import lazy_names

if TYPE_CHECKING:
    from reward_kit.rl.model_kit.decoder import (
        build_decoder,
        compose_embeddings,
        describe,
        initialise,
        parameter_count,
    )
    from reward_kit.rl.model_kit.demonstrations import DemonstratingPolicy, Demonstrations, episode_texts
    from reward_kit.rl.model_kit.folder import LoadedModel, load_model, save_model
    from reward_kit.rl.model_kit.sft import EpochReport, Evaluation, SFTConfig, SFTProgress, evaluate, fit, split_rows
    from reward_kit.rl.model_kit.templates import CHAT_TEMPLATE, TERSE_TEMPLATE
    from reward_kit.rl.model_kit.tokenizer import build_tokenizer, tool_texts, unknown_pieces

__all__ = [
    "CHAT_TEMPLATE",
    "TERSE_TEMPLATE",
    "DemonstratingPolicy",
    "Demonstrations",
    "EpochReport",
    "Evaluation",
    "LoadedModel",
    "SFTConfig",
    "SFTProgress",
    "build_decoder",
    "build_tokenizer",
    "compose_embeddings",
    "describe",
    "episode_texts",
    "evaluate",
    "fit",
    "initialise",
    "load_model",
    "parameter_count",
    "save_model",
    "split_rows",
    "tool_texts",
    "unknown_pieces",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        **dict.fromkeys(
            ["build_decoder", "compose_embeddings", "describe", "initialise", "parameter_count"], "decoder"
        ),
        **dict.fromkeys(["DemonstratingPolicy", "Demonstrations", "episode_texts"], "demonstrations"),
        **dict.fromkeys(["LoadedModel", "load_model", "save_model"], "folder"),
        **dict.fromkeys(["EpochReport", "Evaluation", "SFTConfig", "SFTProgress", "evaluate", "fit"], "sft"),
        "split_rows": "sft",
        **dict.fromkeys(["CHAT_TEMPLATE", "TERSE_TEMPLATE"], "templates"),
        **dict.fromkeys(["build_tokenizer", "tool_texts", "unknown_pieces"], "tokenizer"),
    },
)
