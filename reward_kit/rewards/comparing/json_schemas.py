"""Whether a JSON value conforms to a JSON schema: by the library `jsonschema`, without network and within bounds."""

from __future__ import annotations

import functools
import json
from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING, Any, Final

from reward_kit.errors import RewardError, how_to_install
from reward_kit.rewards.comparing.json_values import DEEPEST, as_json, key_of
from reward_kit.rewards.reading.texts import shown

if TYPE_CHECKING:
    import jsonschema  # type: ignore[import-untyped, unused-ignore]

LONGEST_MATCHED: Final = 10_000
"""Characters of a text or name that a schema's regular expressions are run on."""


def why_not_conforming(value: Any, schema: Any, formats: bool) -> str:
    """The first thing in which a value does not conform to a schema; "" where it conforms.

    Args:
        value: as `json_values.read_json` gives it.
        schema: of the draft that its `$schema` names, else 2020-12.
        formats: whether `format` is checked as well, as far as the library can.

    Raises:
        RewardError: jsonschema is not installed, or the schema refers to another document or to itself without end.
        ValueError: the schema is none.
    """
    text = json.dumps(as_json(schema), sort_keys=True)
    validator = _validator(text, formats)
    if '"pattern' in text and _longest(value) > LONGEST_MATCHED:
        return f"a text is longer than {LONGEST_MATCHED:,} characters, and patterns are not matched with that"
    import referencing.exceptions

    try:
        error = next(validator.iter_errors(value), None)
    except referencing.exceptions.Unresolvable as unknown:
        raise RewardError(f"the schema refers to {unknown.ref!r}, which is not in it; nothing is fetched") from None
    except RecursionError:
        if _depth(value) > DEEPEST // 2:
            return "it nests too deeply"
        raise RewardError("the schema refers to itself without end") from None
    if error is None:
        return ""
    return f"{shown(error.json_path)}: {shown(error.message, 120)[1:-1]}"


def check_schema(schema: Any) -> None:
    """Refuse what is no schema, without a value.

    Raises:
        RewardError: jsonschema is not installed.
        ValueError: it is none.
    """
    _validator(json.dumps(as_json(schema), sort_keys=True), formats=False)


@functools.lru_cache(maxsize=64)
def _validator(text: str, formats: bool) -> jsonschema.protocols.Validator:
    """The validator of a schema's text. Its registry has the drafts' own schemas and fetches nothing."""
    try:
        import jsonschema.validators  # type: ignore[import-untyped, unused-ignore]
        import jsonschema_specifications  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        raise RewardError(f"json_schema_answer needs jsonschema; {how_to_install('json')}") from None
    schema = json.loads(text)
    draft = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        draft.check_schema(schema)
    except jsonschema.SchemaError as error:
        raise ValueError(f"{shown(error.json_path)}: {shown(error.message, 120)[1:-1]}") from None
    bounded = jsonschema.validators.extend(draft, {"uniqueItems": _unique_items})
    checker = draft.FORMAT_CHECKER if formats else None
    return bounded(schema, registry=jsonschema_specifications.REGISTRY, format_checker=checker)


def _unique_items(_validator: Any, is_asked: Any, items: Any, _schema: Any) -> Iterator[jsonschema.ValidationError]:
    """As the library's, whose time grows with the square of the number of items."""
    import jsonschema

    if is_asked is True and isinstance(items, list):
        seen: set[Hashable] = set()
        for item in items:
            key = key_of(item)
            if key in seen:
                yield jsonschema.ValidationError("two items are the same")
                return
            seen.add(key)


def _longest(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return max((max(len(name), _longest(item)) for name, item in value.items()), default=0)
    return max(map(_longest, value), default=0) if isinstance(value, list) else 0


def _depth(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max(map(_depth, inner), default=0)
