"""Names for the tools of several resources: a tool keeps its own, or gets its resource's before it where two clash."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from reward_kit.environments.base import ToolSpec, hash_key

_LONGEST = 64
_DIGEST = 8


class ToolNames:
    """What each tool is called, and which one a name means; a name means what the last `offer` said.

    A name that clashed once stays with its prefix, also where the tools of a resource change later.
    """

    def __init__(self) -> None:
        self._clashed: frozenset[str] = frozenset()
        self._pairs: list[tuple[str, str]] = []
        self._shown: dict[tuple[str, str], str] = {}
        self._meant: dict[str, tuple[str, str]] = {}

    def copy(self) -> ToolNames:
        """A twin that is unaffected by what is offered later."""
        twin = ToolNames()
        twin.__dict__.update(self.__dict__)  # every value is replaced by `offer`, none is changed
        return twin

    def offer(self, specs: Mapping[str, Sequence[ToolSpec]]) -> list[ToolSpec]:
        """The tools of all parts under names that differ, each valid where the part's own is: at most 64 characters.

        Args:
            specs: each part's tools by the part's name.
        """
        pairs = [(part, spec["function"]["name"]) for part, offered in specs.items() for spec in offered]
        if pairs != self._pairs:
            self._pairs, self._shown = pairs, self._named_apart(pairs)
            self._meant = {name: pair for pair, name in self._shown.items()}
        offered = [spec for part in specs.values() for spec in part]
        return [_renamed(spec, self._shown[pair]) for pair, spec in zip(pairs, offered, strict=True)]

    def meant_by(self, name: str) -> tuple[str, str] | None:
        """The part and its tool; None where no tool has the name."""
        return self._meant.get(name)

    def shown(self, part: str, tool: str) -> str | None:
        """The name under which a part's tool was offered; None where it was not."""
        return self._shown.get((part, tool))

    def known(self) -> list[str]:
        """All names that were offered."""
        return list(self._meant)

    def _named_apart(self, pairs: Sequence[tuple[str, str]]) -> dict[tuple[str, str], str]:
        while True:
            shown = {pair: self._name(*pair) for pair in pairs}
            count = Counter(shown.values())
            twice = frozenset(name for name in count if count[name] > 1)
            if not twice:
                return shown
            # A name with a prefix may clash too, with another's own; it is then told apart by a digest.
            self._clashed |= twice

    def _name(self, part: str, tool: str) -> str:
        if tool not in self._clashed:
            return tool
        name = f"{part}_{tool}"
        if len(name) <= _LONGEST and name not in self._clashed:
            return name
        return f"{name[: _LONGEST - _DIGEST - 1]}_{hash_key(part, tool)[:_DIGEST]}"


def _renamed(spec: ToolSpec, name: str) -> ToolSpec:
    function = spec["function"]
    return spec if function["name"] == name else {**spec, "function": {**function, "name": name}}
