"""What a task may say of a TextWorld game: which maker makes it with which options, or which file it is.

The options are those of `tw-make` in TextWorld 1.7 (`textworld/challenges/*/`, `scripts/tw-make`), with underscores.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

Maker = Literal["cooking", "coin_collector", "treasure_hunter", "simple", "custom"]
Section = Literal["objective", "description", "inventory", "admissible_commands"]

_MOST_ROOMS = 100


class _Options(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class CookingOptions(_Options):
    """A meal to cook by the cookbook in the kitchen (the First TextWorld Problems competition)."""

    recipe: int = Field(default=1, ge=1, le=5, description="ingredients")
    take: int = Field(default=0, ge=0, description="ingredients that must be found; the others are carried")
    go: Literal[1, 6, 9, 12] = Field(default=1, description="rooms")
    open: bool = Field(default=False, description="containers and doors are closed")
    cook: bool = False
    cut: bool = False
    drop: bool = Field(default=False, description="few things can be carried at once")
    recipe_seed: int = Field(default=0, ge=0, description="above 0: another recipe in the same house")
    split: Literal["train", "valid", "test"] | None = Field(default=None, description="which foods there are")

    @model_validator(mode="after")
    def _fits(self) -> CookingOptions:
        if self.take > self.recipe:
            raise ValueError(f"take: {self.take} is more than the recipe's {self.recipe} ingredients")
        if self.recipe_seed and not self.take:
            raise ValueError("recipe_seed: another recipe needs ingredients to take")
        return self


class CoinCollectorOptions(_Options):
    """A coin at the end of a chain of `(level - 1) % 100 + 1` rooms; from 101 on with dead ends beside it."""

    level: int = Field(ge=1, le=300)

    @field_validator("level")
    @classmethod
    def _fits(cls, level: int) -> int:
        rooms = ((level - 1) // 100 + 1) * ((level - 1) % 100 + 1)
        if rooms > _MOST_ROOMS:
            raise ValueError(f"would have {rooms} rooms, and TextWorld's games have {_MOST_ROOMS} at most")
        return level


class TreasureHunterOptions(_Options):
    """One of two things to take: from 11 on behind doors and in containers, from 21 on behind locks."""

    level: int = Field(ge=1, le=30)


class SimpleOptions(_Options):
    """Out of a locked bedroom, and food on the stove; always the same house."""

    rewards: Literal["dense", "balanced", "sparse"] = "dense"
    goal: Literal["detailed", "brief", "none"] = "detailed"
    test: bool = Field(default=False, description="foods that the other games do not have")


class CustomOptions(_Options):
    """A house and quests drawn at random. `ambiguous_instructions` is not offered: it fails in TextWorld 1.7."""

    world_size: int = Field(default=5, ge=1, le=_MOST_ROOMS)
    nb_objects: int = Field(default=10, ge=1)
    nb_parallel_quests: int = Field(default=1, ge=1)
    quest_length: int | None = Field(default=None, ge=1, description="shorthand for its minimum, maximum and depth")
    quest_breadth: int | None = Field(default=None, ge=1, description="shorthand for its minimum and maximum")
    quest_min_length: int = Field(default=1, ge=1)
    quest_max_length: int = Field(default=5, ge=1)
    quest_min_breadth: int = Field(default=1, ge=1)
    quest_max_breadth: int = Field(default=5, ge=1)
    quest_min_depth: int = Field(default=1, ge=1)
    quest_max_depth: int = Field(default=5, ge=1)
    theme: Literal["house", "basic"] = "house"
    include_adj: bool = False
    only_last_action: bool = False
    blend_instructions: bool = False
    blend_descriptions: bool = False
    entity_numbering: bool = False


OPTIONS: dict[Maker, type[_Options]] = {
    "cooking": CookingOptions,
    "coin_collector": CoinCollectorOptions,
    "treasure_hunter": TreasureHunterOptions,
    "simple": SimpleOptions,
    "custom": CustomOptions,
}


class TextworldConfig(BaseModel):
    """The configuration of `textworld`."""

    model_config = ConfigDict(extra="forbid")

    game: str | None = Field(default=None, description="a game file (.z1 to .z8), relative to the task's folder")
    maker: Maker | None = None
    options: dict[str, Any] = Field(default_factory=dict, description="the maker's")
    game_seed: int | None = Field(default=None, ge=0, lt=2**32, description="of the maker; by default the reset's seed")
    max_moves: int | None = Field(default=None, ge=1, description="after so many commands the episode is truncated")
    show: list[Section] = Field(default_factory=list, description="what every observation tells besides the answer")
    task_folder: str | None = None

    @model_validator(mode="after")
    def _is_one_game(self) -> TextworldConfig:
        if (self.game is None) == (self.maker is None):
            raise ValueError("name either a game file (game) or a maker")
        if self.game is not None and (self.options or self.game_seed is not None):
            raise ValueError("options and game_seed are a maker's; a game file is made already")
        return self
