"""Rules of the code base: import layers, weight of the first import, public names and wording."""

from __future__ import annotations

import ast
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import reward_kit

PACKAGE = Path(reward_kit.__file__).parent

# Lowest first. A unit imports from rows above it, and from units to its left in its own row.
LAYERS = [
    ["errors", "lazy", "removed_names", "blocking", "private_files", "display_text", "notebook_html", "safe_input"],
    ["task_parts", "legacy_tasks", "validation", "models", "loading", "process_guardian", "telemetry", "run_warnings"],
    ["processes", "limited_yaml", "torch_cpu"],
    ["typed_interface", "reward_calls", "reward_function", "providers", "episodes", "environments"],
    ["console", "agent", "sandbox"],
    ["agreement", "rewards", "tokens", "reward_agent", "credit", "rl_helpers", "rl_processing"],
    ["runs", "report"],
    ["checks", "rl"],
    ["integrations", "server", "cli"],
]
# A run ends by writing its page, and a page is made of the files of a run; no module of the two is in a cycle.
TOGETHER = {("runs", "report")}
HEAVY = {"torch", "transformers", "ray", "trl"}
MAY_IMPORT_HEAVY = (
    "reward_kit.agent.policies.hf",
    "reward_kit.checks.trainer",
    "reward_kit.integrations",
    "reward_kit.rl",
    "reward_kit.torch_cpu",
)


def modules() -> dict[str, ast.Module]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
        found[name] = ast.parse(path.read_text(encoding="utf-8"))
    return found


MODULES = modules()


def imports_of(name: str, *, ours: bool) -> set[str]:
    """Return every module that `name` imports, also inside functions and under TYPE_CHECKING."""
    found: set[str] = set()
    for node in ast.walk(MODULES[name]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{name} imports relatively"
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {target for target in inner if target in MODULES} or {node.module}
    return {target for target in found if target.startswith("reward_kit") == ours}


def unit_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def test_every_unit_has_a_place_in_the_layers() -> None:
    units = {unit_of(name) for name in MODULES} - {""}
    assert units <= {unit for row in LAYERS for unit in row}


def test_modules_import_only_from_lower_layers() -> None:
    layer = {unit: (row, column) for row, units in enumerate(LAYERS) for column, unit in enumerate(units)}
    wrong = []
    for name in MODULES.keys() - {"reward_kit"}:
        own = unit_of(name)
        for target in imports_of(name, ours=True):
            other = unit_of(target)
            if not other:
                wrong.append(f"{name} imports the package itself; import from the module that defines the name")
            elif other != own and layer[other] >= layer[own] and (own, other) not in TOGETHER:
                wrong.append(f"{name} imports {target}, which is in a higher layer")
    assert not wrong, "\n".join(sorted(wrong))


def test_no_module_is_in_an_import_cycle() -> None:
    graph = {name: imports_of(name, ours=True) - {name} for name in MODULES if name != "reward_kit"}
    while leaves := [name for name, targets in graph.items() if not targets & graph.keys()]:
        for leaf in leaves:
            del graph[leaf]
    assert not graph, f"import cycle among {sorted(graph)}"


def test_only_training_modules_import_heavy_packages() -> None:
    for name in MODULES:
        heavy = {target.split(".")[0] for target in imports_of(name, ours=False)} & HEAVY
        assert not heavy or name.startswith(MAY_IMPORT_HEAVY), f"{name} imports {heavy}"


def test_no_print_and_no_swallowed_exception() -> None:
    for name, tree in MODULES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ExceptHandler) and len(node.body) == 1:
                assert not isinstance(node.body[0], ast.Pass), f"{name}:{node.lineno} swallows an exception"


def loaded_after(statement: str) -> set[str]:
    code = f"import sys, json\n{statement}\nprint(json.dumps(sorted({{name.split('.')[0] for name in sys.modules}})))"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    return set(json.loads(output.splitlines()[-1]))


def test_importing_the_package_loads_nothing_heavy() -> None:
    loaded = loaded_after("import reward_kit")
    assert not loaded & (HEAVY | {"openai", "pydantic", "numpy", "aiohttp", "httpx", "rich", "jinja2", "anyio", "yaml"})


def test_help_loads_nothing_heavy() -> None:
    statement = "from click.testing import CliRunner\nfrom reward_kit.cli.main import program\n"
    loaded = loaded_after(statement + "assert CliRunner().invoke(program, ['--help']).exit_code == 0")
    assert not loaded & (HEAVY | {"openai", "pydantic", "numpy", "aiohttp", "httpx", "rich", "jinja2"})


def test_importing_the_main_names_loads_no_model_library() -> None:
    loaded = loaded_after("from reward_kit import reward_function, RLRolloutWorker")
    assert not loaded & (HEAVY | {"openai", "httpx", "aiohttp", "gymnasium", "rich"})


def has_exports(tree: ast.Module) -> bool:
    """Return whether it has an `__all__`, without importing it, since an integration's peer may be missing."""
    targets = [target for node in tree.body if isinstance(node, ast.Assign) for target in node.targets]
    return any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets)


def test_exported_names_exist_are_sorted_and_few() -> None:
    for name in [name for name, tree in MODULES.items() if has_exports(tree)]:
        try:
            module = importlib.import_module(name)
            exported = list(module.__all__)
            missing = [attribute for attribute in exported if getattr(module, attribute) is None]
        except ModuleNotFoundError as error:
            if unit_of(name) != "integrations" or (error.name or "").startswith("reward_kit"):
                raise
            continue  # the peer of this integration is not installed here
        # The linter's order: constants, classes, functions.
        assert exported == sorted(exported, key=lambda one: (not one.isupper(), not one[0].isupper(), one)), name
        assert len(exported) <= 40, name
        assert not missing, name


def test_public_names_are_defined_in_their_fixed_modules() -> None:
    homes = {
        "reward_kit.agent.rl_rollout_worker": ["RLRolloutWorker"],
        "reward_kit.agent.policy_interface": ["AgentPolicy", "PolicyOutput", "EpisodeContext"],
        "reward_kit.agent.policies.openai_policy": ["OpenAIAgentPolicy"],
        "reward_kit.agent.models": ["StepData", "StopReason"],
        "reward_kit.models": ["EvaluateResult", "Message", "MetricResult", "StepOutput", "TaskDefinitionModel"],
        "reward_kit.typed_interface": ["reward_function"],
        "reward_kit.rl_helpers": ["system_apply_gigpo_to_batch_steps"],
        "reward_kit.rl_processing": ["RLDataAligner"],
    }
    for home, names in homes.items():
        module = importlib.import_module(home)
        for name in names:
            assert getattr(module, name).__module__ == home


def test_every_module_has_a_docstring() -> None:
    for name, tree in MODULES.items():
        assert ast.get_docstring(tree) or not tree.body, f"{name} does not say why it exists"


def test_commands_print_through_escaping_functions() -> None:
    for name, tree in MODULES.items():
        if name in ("reward_kit.cli.echo", "reward_kit.console"):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in ("click.echo", "click.secho"), f"{name}:{node.lineno}: call `cli.echo.echo`"
                assert called not in ("Console", "rich.print"), f"{name}:{node.lineno}: take `console.SafeConsole`"
                assert not called.endswith(("from_markup", "render_markup")), f"{name}:{node.lineno}: no markup"


def test_slow_tests_list_is_sorted_and_names_existing_tests() -> None:
    listed = Path(__file__).with_name("slow_tests.txt").read_text(encoding="utf-8").split()
    assert listed == sorted(set(listed))
    root = Path(__file__).parent.parent
    for one in listed:
        file, *_, function = one.split("::")
        assert f"def {function}(" in (root / file).read_text(encoding="utf-8"), f"{one} is not there any more"


DIALECT = re.compile(
    r"\b(told|tells|said|nobody|somebody|whoever|stranger'?s?|anew|besides|whereby|thereby|of its own accord|"
    r"there is no such|in the place of|behind walls|mends?|mended|is no longer|is no (?:valid|proof|matter|free))\b",
    re.IGNORECASE,
)
DIALECT_ALLOWED = {
    "checks/reward_exploits.py",
    "rewards/judge_prompts.py",  # prompts of judges: their wording was calibrated
}


def test_docstrings_open_with_a_verb_or_a_noun_phrase() -> None:
    opening = re.compile(r"(What|Where|Which|Whether|How|Who|Whose|When|Whatever|Whoever)\b")
    wrong = []
    for name, tree in MODULES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                docstring = ast.get_docstring(node)
                if docstring and opening.match(docstring):
                    wrong.append(f"{name}: {docstring.splitlines()[0]}")
    assert not wrong, "see development/style.md:\n" + "\n".join(wrong)


def test_texts_use_plain_words() -> None:
    found = []
    for name, tree in MODULES.items():
        if name.removeprefix("reward_kit.").replace(".", "/") + ".py" in DIALECT_ALLOWED:
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
                found += [f"{name}:{node.lineno}: {word}" for word in DIALECT.findall(node.value)]
    assert not found, "see development/style.md:\n" + "\n".join(found)
