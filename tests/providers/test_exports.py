"""`reward_kit.providers` exports its names and imports nothing heavy."""

from __future__ import annotations

import subprocess
import sys

import pytest

from reward_kit import providers


def test_every_exported_name_exists():
    for name in providers.__all__:
        assert getattr(providers, name).__module__.startswith("reward_kit.providers.")
    assert set(providers.__all__) <= set(dir(providers))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = providers.nothing


@pytest.mark.parametrize(
    "module, heavy",
    [
        ("reward_kit.providers", ["aiohttp", "pydantic", "asyncio", "yaml"]),
        ("reward_kit.agent.policies.openai_policy", ["aiohttp", "openai", "httpx", "yaml"]),
    ],
)
def test_import_does_not_load_http_and_validation_packages(module, heavy):
    code = f"import sys, {module}; print([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
