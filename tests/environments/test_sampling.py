"""Test that random arguments match the schemas pydantic writes for tools."""

from __future__ import annotations

import enum
import random
from typing import Annotated, Literal

import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from reward_kit.environments import sample_arguments
from reward_kit.environments.sampling import sample_value


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Address(BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")

    street: str = Field(min_length=3, max_length=5)
    number: int = Field(gt=0, le=9)


class Node(BaseModel):
    name: str
    children: list[Node] = []


class Everything(BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")

    text: str
    colour: Colour
    literal: Literal["a", 3]
    constant: Literal["only"]
    count: int = Field(ge=5, lt=7)
    even: int = Field(multiple_of=2, ge=3, le=9)
    share: float = Field(gt=0, lt=1)
    flag: bool
    maybe: int | None
    either: int | list[str]
    address: Address
    addresses: list[Address] = Field(min_length=1, max_length=2)
    unique: Annotated[set[int], Field(min_length=2)]
    pair: tuple[int, str]
    table: dict[str, int]
    tree: Node
    optional: str = "x"


@given(st.integers(0, 10_000))
def test_sample_of_every_type_is_valid(seed: int) -> None:
    Everything.model_validate(sample_arguments(Everything.model_json_schema(), random.Random(seed)))


def test_equal_seeds_give_equal_samples() -> None:
    schema = Everything.model_json_schema()
    assert sample_arguments(schema, random.Random(3)) == sample_arguments(schema, random.Random(3))


def test_optional_arguments_are_sometimes_present() -> None:
    samples = [sample_arguments(Everything.model_json_schema(), random.Random(seed)) for seed in range(20)]
    assert len({"optional" in sample for sample in samples}) == 2


@pytest.mark.parametrize(
    ("schema", "fits"),
    [
        ({"type": ["integer", "null"]}, lambda value: value is None or isinstance(value, int)),
        ({"exclusiveMinimum": 3, "exclusiveMaximum": 5, "type": "integer"}, lambda value: value == 4),
        ({"minimum": 3, "exclusiveMinimum": True, "maximum": 4, "type": "integer"}, lambda value: value == 4),
        ({"type": "number", "minimum": 1, "maximum": 1.5, "multipleOf": 0.5}, lambda value: value in (1.0, 1.5)),
        ({"type": "integer", "maximum": -100}, lambda value: value <= -100),
        ({"oneOf": [{"const": 1}, {"const": 2}]}, lambda value: value in (1, 2)),
        (
            {"allOf": [{"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}]},
            lambda v: v == {"a": 1},
        ),
        ({"enum": [[1], None]}, lambda value: value in ([1], None)),
        ({}, lambda value: value is None or isinstance(value, str | int)),
        (True, lambda value: value is None or isinstance(value, str | int)),
    ],
)
def test_samples_match_each_json_schema_keyword(schema, fits) -> None:
    for seed in range(30):
        assert fits(sample_value(schema, random.Random(seed)))


def test_circular_and_dangling_references_terminate() -> None:
    circle = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}
    sample_value(circle, random.Random(0))
    sample_value({"$ref": "#/$defs/none"}, random.Random(0))


def test_schema_without_properties_gives_no_arguments() -> None:
    assert sample_arguments({"type": "object", "properties": {}}, random.Random(0)) == {}
