"""How a judge's endpoint is asked, as options of the judges: one block of them for what is seldom said."""

from __future__ import annotations

from typing import Any, Literal

import pydantic
from pydantic import BaseModel, ConfigDict, Field, field_validator

from reward_kit.errors import ConfigError
from reward_kit.validation import describe_validation_error

AnswerForm = Literal["auto", "json_schema", "json_object", "text"]
_OWN_KEYS = frozenset({"model", "messages", "stream", "stream_options", "seed", "response_format", "n"})


class ClientOptions(BaseModel):
    """How the endpoint of a judge is asked.

    Attributes:
        api_key_env: name of the variable that holds the key; by default OPENAI_API_KEY.
        temperature: None sends none, for models that take no other than their own.
        max_tokens: of one verdict; None sends no limit.
        seed: of the first vote, counted up for the others; None sends none.
        answer_form: "json_schema" or "json_object" asks for structured output, "text" tells the form in words only;
            "auto" asks for a schema, and does without where the endpoint refuses it.
        total_timeout_s: seconds for one attempt.
        max_attempts: attempts at one request, the first included.
        retry_budget_s: seconds from the first attempt after which no further one begins.
        retry_base_s: upper bound in seconds of the first random wait between attempts.
        price_file: US dollars per million tokens; see `providers/prices.py`.
        requests_per_minute: attempts that may begin in a minute.
        tokens_per_minute: tokens of prompts and answers in a minute.
        max_connections: requests in flight.
        extra_body: further keys of each request.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    api_key_env: str | None = None
    temperature: float | None = Field(default=0.0, ge=0)
    max_tokens: int | None = Field(default=None, ge=1)
    seed: int | None = Field(default=0, ge=0)
    answer_form: AnswerForm = "auto"
    total_timeout_s: float = Field(default=120.0, gt=0)
    max_attempts: int = Field(default=5, ge=1)
    retry_budget_s: float = Field(default=300.0, gt=0)
    retry_base_s: float = Field(default=0.5, gt=0)
    price_file: str | None = None
    requests_per_minute: float | None = Field(default=None, gt=0)
    tokens_per_minute: float | None = Field(default=None, gt=0)
    max_connections: int | None = Field(default=None, ge=1)
    extra_body: dict[str, Any] = Field(default_factory=dict)

    @field_validator("extra_body")
    @classmethod
    def _leaves_ours_alone(cls, extra: dict[str, Any]) -> dict[str, Any]:
        if taken := sorted(extra.keys() & _OWN_KEYS):
            raise ValueError(f"{taken[0]!r} belongs to the judge and cannot be set here")
        return extra


def client_options(given: ClientOptions | dict[str, Any] | None) -> ClientOptions:
    """The options, also from the plain mapping that a call by hand gives.

    Raises:
        ConfigError: an option is unknown or wrong.
    """
    try:
        return ClientOptions.model_validate({} if given is None else given)
    except pydantic.ValidationError as error:
        problems = "; ".join(describe_validation_error(error, ClientOptions))
        raise ConfigError(f"judge, option client: {problems}") from None
