"""Loading of untrusted YAML: PyYAML's safe loader with limits on size, nesting and aliases.

A dozen lines of aliases can expand to a billion values ("billion laughs"), and a merge key (`<<`) repeats the mapping
to which it refers. All aliases are therefore expanded when values are counted, before any object is constructed.
"""

from __future__ import annotations

from typing import Any

import yaml

from reward_kit.safe_input import NESTING, YAML_BYTES, YAML_VALUES, format_size

_TOO_DEEP = f"a value is nested more than {NESTING} levels deep"


class YamlLimitError(yaml.MarkedYAMLError):
    """The file is too large or too deeply nested. Like every YAML error, it has a mark (line and column)."""


class LimitedLoader(yaml.SafeLoader):
    """PyYAML's safe loader for one document, with limits.

    Raises:
        YamlLimitError: a limit is exceeded. The size in bytes is checked by the constructor, and the other limits are
            checked by `get_single_node`.
    """

    def __init__(self, text: str) -> None:
        if len(text) > YAML_BYTES:
            problem = f"the file is larger than the limit of {format_size(YAML_BYTES)}; store a dataset as JSONL"
            raise YamlLimitError(problem=problem)
        super().__init__(text)
        self._depth = self._nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Compose the next node; raise a YamlLimitError if a limit is exceeded."""
        mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
        self._depth += 1
        self._nodes += 1
        if self._depth > NESTING:
            raise YamlLimitError(problem=_TOO_DEEP, problem_mark=mark)
        if self._nodes > YAML_VALUES:
            raise YamlLimitError(problem=_too_many(), problem_mark=mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def get_single_node(self) -> yaml.Node | None:
        """Return the document's node.

        Raise a YamlLimitError if the number of its values, with aliases expanded, exceeds a limit.
        """
        node = super().get_single_node()
        if node is not None:
            _check_aliases(node, {}, set())
        return node

    def construct_yaml_int(self, node: yaml.ScalarNode) -> Any:
        """Parse an integer; raise an error that contains the line if the integer has too many digits."""
        try:
            return super().construct_yaml_int(node)
        except ValueError as error:
            raise YamlLimitError(problem=f"not a number: {str(error)[:80]}", problem_mark=node.start_mark) from None


LimitedLoader.add_constructor("tag:yaml.org,2002:int", LimitedLoader.construct_yaml_int)


def _too_many() -> str:
    return f"the file has more than {YAML_VALUES:,} values with its aliases expanded; store a dataset as JSONL"


def _check_aliases(node: yaml.Node, known: dict[int, tuple[int, int]], above: set[int]) -> tuple[int, int]:
    """Return the number of values below a node and their nesting depth, both with aliases expanded."""
    if id(node) in known:
        return known[id(node)]
    if id(node) in above:
        raise YamlLimitError(problem="a value contains itself", problem_mark=node.start_mark)
    parts: list[yaml.Node] = []
    if isinstance(node, yaml.MappingNode):
        parts = [part for pair in node.value for part in pair]
    elif isinstance(node, yaml.SequenceNode):
        parts = node.value
    above.add(id(node))
    inner = [_check_aliases(part, known, above) for part in parts]
    above.discard(id(node))
    size, depth = 1 + sum(count for count, _ in inner), 1 + max((level for _, level in inner), default=0)
    if size > YAML_VALUES:
        raise YamlLimitError(problem=_too_many(), problem_mark=node.start_mark)
    if depth > NESTING:
        raise YamlLimitError(problem=_TOO_DEEP, problem_mark=node.start_mark)
    known[id(node)] = size, depth
    return size, depth


def load_yaml(text: str) -> Any:
    """Parse YAML text."""
    loader = LimitedLoader(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()
