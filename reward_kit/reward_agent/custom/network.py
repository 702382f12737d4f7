"""Whether a user's `compute_score` asks an endpoint, found by reading its file and never by running it.

Behind walls there is no network. A score function of this form usually catches that, and returns 0.0 for every answer;
so what imports a client of the network is refused there before it is called once.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from reward_kit.errors import ConfigError
from reward_kit.reward_agent.definitions import Definition, definition_of, definitions

_CLIENTS = frozenset(
    {
        *("openai", "anthropic", "litellm", "cohere", "mistralai", "groq", "together", "ollama", "instructor"),
        *("httpx", "requests", "aiohttp", "urllib3", "grpc", "websockets", "boto3", "socket"),
        *("urllib.request", "http.client", "google.genai", "google.generativeai", "huggingface_hub"),
    }
)
_ASKS = (
    "reward {0!r}: {1} imports {2}, which asks the network, and there is none at the level {3}: run it with "
    "--sandbox in_process"
)


def refuse_network(text: str, name: str, file: str, level: str) -> None:
    """Refuse a `compute_score` that cannot work behind walls.

    Args:
        text: of its file.
        name: of the function or class.
        file, level: for the message.

    Raises:
        ConfigError: it imports a client of the network; the key that lets it run is told.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # told with its line where it is run
        return
    found = definition_of(name, tree.body)
    if found is None or not _has_form(found):
        return
    if (client := next((one for one in _imports(tree) if one in _CLIENTS), None)) is not None:
        raise ConfigError(_ASKS.format(name, file, client, level))


def _has_form(definition: Definition) -> bool:
    if isinstance(definition, ast.ClassDef):
        return any(one.name == "compute_score" for one in definitions(definition.body))
    names = {one.arg for one in (*definition.args.posonlyargs, *definition.args.args, *definition.args.kwonlyargs)}
    return bool(names & {"solution_str", "solution_strs"})


def _imports(tree: ast.AST) -> Iterator[str]:
    """Every module that is imported, with the packages around it, also inside functions."""
    for node in ast.walk(tree):
        named: list[str] = []
        if isinstance(node, ast.Import):
            named = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            named = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in named:
            parts = name.split(".")
            yield from (".".join(parts[:end]) for end in range(1, len(parts) + 1))
