"""Small models without a hub: a tokenizer of a domain, a decoder of a few numbers, supervised training, one folder."""

from typing import TYPE_CHECKING

from reward_kit.lazy import lazy_names

if TYPE_CHECKING:
    from reward_kit.rl.model_kit.models import (
        CHAT_TEMPLATE,
        TERSE_TEMPLATE,
        LoadedModel,
        build_decoder,
        build_tokenizer,
        compose_embeddings,
        describe,
        initialise,
        load_model,
        parameter_count,
        save_model,
        tool_texts,
        unknown_pieces,
    )
    from reward_kit.rl.model_kit.sft import (
        DemonstratingPolicy,
        Demonstrations,
        EpochReport,
        Evaluation,
        SFTConfig,
        SFTProgress,
        episode_texts,
        evaluate,
        fit,
        split_rows,
    )

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
        **dict.fromkeys(["build_decoder", "compose_embeddings", "describe", "initialise", "parameter_count"], "models"),
        **dict.fromkeys(["DemonstratingPolicy", "Demonstrations", "episode_texts"], "sft"),
        **dict.fromkeys(["LoadedModel", "load_model", "save_model"], "models"),
        **dict.fromkeys(["EpochReport", "Evaluation", "SFTConfig", "SFTProgress", "evaluate", "fit"], "sft"),
        "split_rows": "sft",
        **dict.fromkeys(["CHAT_TEMPLATE", "TERSE_TEMPLATE"], "models"),
        **dict.fromkeys(["build_tokenizer", "tool_texts", "unknown_pieces"], "models"),
    },
)
