"""Score conversations with rewards of a file, by the reward-kit version of this Python; JSON in, JSON out."""

from __future__ import annotations

import importlib.util
import json
import sys
from typing import Any

_FIELDS = ("score", "is_score_valid", "reason", "metrics", "step_outputs", "error")


def _plain(result: Any) -> dict[str, Any]:
    data = result.model_dump() if hasattr(result, "model_dump") else dict(result)
    return {name: data.get(name) for name in _FIELDS}


def main() -> None:
    """Read `{path, calls: [[name, arguments], …]}` and print each call's result, or its exception class."""
    asked = json.load(sys.stdin)
    spec = importlib.util.spec_from_file_location("rewards_of_04", asked["path"])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["rewards_of_04"] = module
    spec.loader.exec_module(module)
    found = []
    for name, arguments in asked["calls"]:
        result = getattr(module, name)(**arguments)
        found.append([_plain(one) for one in result] if isinstance(result, list) else _plain(result))
    print("\n" + json.dumps(found))


main()
