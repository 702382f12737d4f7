"""How a task file and a composite resource name the several resources that serve one task."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator


class ResourcePartModel(BaseModel):
    """One of several resources that serve one task."""

    model_config = ConfigDict(extra="forbid")

    type: str = Field(min_length=1, description="a built-in resource's name, or module:Class")
    name: str = Field(default="", description="unique among the task's resources; by default the type's name")
    config: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _has_a_name(self) -> ResourcePartModel:
        # It stands in tool names, before the tool's own; the keys of a configuration are not to be mistaken for one.
        self.name = self.name or self.type.rpartition(":")[2]
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,32}", self.name) or self.name == "resources":
            raise ValueError(f"the name {self.name!r} must be 1 to 32 of A-Z a-z 0-9 _ -, and not 'resources'")
        return self


def _named_apart(parts: list[ResourcePartModel]) -> list[ResourcePartModel]:
    names = [part.name for part in parts]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"two resources are called {twice!r}; give one of them another name")
    return parts


ResourceParts = Annotated[list[ResourcePartModel], Field(min_length=1), AfterValidator(_named_apart)]
