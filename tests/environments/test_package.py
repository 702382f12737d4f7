"""Test the environments package: public names, built-in resources, and no leftover files."""

from __future__ import annotations

import subprocess
import sys

import pytest

import reward_kit.environments as package
from reward_kit.environments import ForkableResource, canonical_json, hash_key, resource_class
from reward_kit.errors import ConfigError

CONFIGS = {
    "python_state": {},
    "filesystem": {"files": {"a": "x"}},
    "sqlite": {"seed_sql": "CREATE TABLE t (a);"},
    "gymnasium": {"env_id": "FrozenLake-v1"},
    "alfworld": {},
    "sokoban": {},
    "webshop": {"products": 50},
}
# `alfworld_real` needs packages that the development environment does not have; tests/environments/household has it.


def test_public_names_are_sorted_and_exist() -> None:
    assert package.__all__ == sorted(package.__all__, key=str)
    for name in package.__all__:
        assert getattr(package, name) is not None
    assert set(package.__all__) <= set(dir(package))
    with pytest.raises(AttributeError, match="no_such_name"):
        package.no_such_name  # noqa: B018


def test_importing_the_package_loads_no_submodules() -> None:
    code = (
        "import sys, reward_kit.environments\n"
        "print(sorted({'pydantic', 'numpy', 'gymnasium', 'sqlite3', 'anyio'} & set(sys.modules)))"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "[]"


def test_gymnasium_module_can_be_imported_without_gymnasium() -> None:
    code = "import sys; sys.modules['gymnasium'] = None; import reward_kit.environments.gymnasium"
    subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)


@pytest.mark.parametrize("name", CONFIGS)
async def test_tools_of_every_built_in_resource_have_openai_form(name) -> None:
    # In the predecessor they never did: the loop read a top-level name that nested specifications do not have.
    resource = resource_class(name)()
    await resource.setup(CONFIGS[name])
    await resource.reset(0)
    specs = await resource.get_tools_spec()
    assert specs
    for spec in specs:
        assert spec.keys() == {"type", "function"}
        assert spec["type"] == "function"
        assert spec["function"].keys() == {"name", "description", "parameters"}
        assert spec["function"]["parameters"]["type"] == "object"
        properties = spec["function"]["parameters"]["properties"]
        required = spec["function"]["parameters"].get("required", [])
        assert set(required) == {key for key, schema in properties.items() if "default" not in schema}
    await resource.close()


@pytest.mark.parametrize("name", CONFIGS)
async def test_built_in_resources_leave_nothing_in_the_working_directory(name, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    resource = resource_class(name)()
    await resource.setup(CONFIGS[name])
    await resource.reset(0)
    fork = await resource.fork()
    assert not list(tmp_path.iterdir())
    await fork.close()
    await resource.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("filesytem", "did you mean 'filesystem'"),
        ("json:loads", "not a subclass of ForkableResource"),
        ("no_such_module:Thing", "no_such_module"),
    ],
)
def test_class_that_is_not_a_resource_is_rejected(name, message) -> None:
    with pytest.raises(ConfigError, match=message):
        resource_class(name)


def test_custom_resource_is_found_by_module_and_class() -> None:
    found = resource_class("reward_kit.environments.python_state:PythonStateResource")
    assert issubclass(found, ForkableResource)


async def test_resource_without_fork_raises() -> None:
    class Outside(package.PythonStateResource):
        fork_kind = "none"
        fork = ForkableResource.fork
        checkpoint = ForkableResource.checkpoint
        restore = ForkableResource.restore

    outside = Outside()
    for call in (outside.fork(), outside.checkpoint(), outside.restore(None)):
        with pytest.raises(NotImplementedError, match="Outside"):
            await call


def test_canonical_json_is_equal_for_equal_values() -> None:
    assert canonical_json({"b": [1, "é"], "a": None}) == '{"a":null,"b":[1,"é"]}'


def test_hash_key_depends_on_the_boundaries_of_its_parts() -> None:
    assert hash_key("ab", "c") != hash_key("a", "bc")
    assert hash_key("a") == hash_key("a")
    assert len(hash_key("\ud800")) == 32
