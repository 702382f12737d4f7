"""Calls in the sandbox at both strengths: values, output, faults and isolation."""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path

import pytest
import pytest_asyncio

from reward_kit.errors import ConfigError
from reward_kit.sandbox import Limits, Program, Sandbox
from tests.sandbox.sandbox_calls import AVAILABLE, QUICK, is_gone, missing, plain, run

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["namespaces", "landlock"])
async def sandbox(request):
    if missing(request.param):
        pytest.skip(AVAILABLE[request.param].reason if AVAILABLE else "not Linux")
    async with Sandbox(strength=request.param, slots=2) as opened:
        yield opened


async def test_reward_receives_arguments_and_returns_its_value(sandbox):
    reward = Program(
        """
def evaluate(messages, ground_truth=None, **kwargs):
    return {"score": len(messages) / 2, "k": kwargs}
"""
    )
    request = {"messages": [{"role": "user", "content": "é\ud800"}], "ground_truth": {"a": [1]}, "extra": 1}
    for level in ("isolated", "warm", "warm"):
        outcome = await sandbox.call(reward, request, level=level)
        assert outcome.value == {"score": 0.5, "k": {"extra": 1}}
        assert (outcome.kind, outcome.level, outcome.strength) == ("ok", level, sandbox.strength)


async def test_output_is_separate_from_the_result(sandbox):
    outcome = await run(
        sandbox,
        r"""
print('{"value": 9}')
print('\udc80', file=sys.stderr)
os.write(1, b'\xff\x00')
return 1
""",
    )
    assert (outcome.value, outcome.stdout, outcome.is_output_cut) == (1, '{"value": 9}\n\ufffd\0', False)
    assert outcome.stderr == "\\udc80\n"


async def test_output_beyond_its_limit_is_cut_and_marked(sandbox):
    outcome = await run(sandbox, "print('x' * 3_000_000); return 1")
    assert (outcome.value, len(outcome.stdout), outcome.is_output_cut) == (1, 4096, True)


async def test_questions_are_answered_in_order_by_the_same_child(sandbox):
    source = "seen = []\ndef solve(x):\n    seen.append(x)\n    return 1 // x, len(seen)"
    program = Program(source, "solve", form="plain")
    outcomes = await sandbox.ask(program, [1, 0, 2], limits=QUICK)
    assert [outcome.value for outcome in outcomes] == [[1, 1], None, [0, 3]]
    assert outcomes[1].failure.message.startswith("ZeroDivisionError")


async def test_questions_after_the_child_exits_fail_with_the_same_kind(sandbox):
    outcomes = await sandbox.ask(plain("if x: os._exit(0)\nreturn x"), [0, 1, 0], limits=QUICK)
    assert [outcome.kind for outcome in outcomes] == ["ok", "no_result", "no_result"]


async def test_open_files_are_harmless_and_an_exit_between_requests_fails(sandbox):
    """Open files and threads are harmless; an exit between requests is a failure."""
    leaves_open = "globals().setdefault('kept', []).append(open('/dev/null'))\nreturn x"
    assert [outcome.value for outcome in await sandbox.ask(plain(leaves_open), [1, 2, 3], limits=QUICK)] == [1, 2, 3]
    ends_later = "import threading\nthreading.Timer(0.3, os._exit, (0,)).start()\ntime.sleep(x)\nreturn True"
    outcomes = await sandbox.ask(plain(ends_later), [0, 1, 0], limits=QUICK)
    assert [outcome.kind for outcome in outcomes] == ["ok", "no_result", "no_result"]


async def test_questions_share_their_cpu_time(sandbox):
    spends = "end = time.process_time() + 0.15\nwhile time.process_time() < end: pass\nreturn x"
    outcomes = await sandbox.ask(plain(spends), [0, 1, 2, 3], limits=Limits(wall_s=20, cpu_s=0.25))
    assert [outcome.kind for outcome in outcomes] == ["ok", "cpu", "cpu", "cpu"]


@pytest.mark.parametrize("level", ["isolated", "warm"])
@pytest.mark.parametrize(
    ("body", "kind", "failure_class"),
    [
        ("time.sleep(60)", "wall", "timeout"),
        ("return bytearray(1 << 30)", "memory", "limit"),
        ("return 'x' * 5000", "result_size", "limit"),
        ("return [open('/dev/null') for _ in range(100)]", "open_files", "limit"),
        ("open('f', 'wb').write(bytes(3 << 20))", "disk", "limit"),
        ("return os.fork()", "denied", "refused"),
        ("import socket\nsocket.socket()", "denied", "refused"),
        ("return float('nan')", "non_finite", "invalid_result"),
        ("return 10 ** 2000", "huge_integer", "invalid_result"),
        ("return {1, 2}", "type", "invalid_result"),
        ("a = []; a.append(a); return a", "cycle", "invalid_result"),
        ("a = []\nfor _ in range(100_000): a = [a]\nreturn a", "nesting", "invalid_result"),
        ("return '\\ud800'", "surrogate", "invalid_result"),
        ("os.write(3, b'RKF1 forged')", "forged_frame", "invalid_result"),
        ("os.kill(os.getpid(), 11)", "signal", "crash"),
        ("sys.exit(0)", "exit", "crash"),
        ("os._exit(0)", "no_result", "crash"),
        ("raise ValueError('bad')", "exception", "crash"),
    ],
)
async def test_each_fault_has_its_kind_and_does_not_affect_the_next_call(sandbox, level, body, kind, failure_class):
    if body == "os.kill(os.getpid(), 11)" and sandbox.strength == "namespaces":
        body = "import ctypes; ctypes.string_at(0)"  # process 1 of a namespace ignores signals that it sends itself
    limits = (
        Limits(wall_s=0.3, cpu_s=2, memory_mb=200, disk_mb=2, output_kb=4, result_kb=4) if kind == "wall" else QUICK
    )
    outcome = await run(sandbox, body, limits=limits, level=level)
    assert (outcome.kind, outcome.failure and outcome.failure.failure_class, outcome.value) == (
        kind,
        failure_class,
        None,
    )
    assert (await run(sandbox, "return 7", level=level)).value == 7


@pytest.mark.parametrize("level", ["isolated", "warm"])
async def test_cpu_time_is_limited_separately_from_wall_time(sandbox, level):
    # The kernel counts a child's seconds whole; a warm worker's are looked at by the host.
    cpu_s = 1 if level == "isolated" else 0.3
    outcome = await run(sandbox, "while True: pass", limits=Limits(wall_s=20, cpu_s=cpu_s), level=level)
    assert (outcome.kind, outcome.failure.failure_class) == ("cpu", "timeout")
    assert 0.7 * cpu_s < outcome.cpu_s < 2 * cpu_s


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def solve(x)\n    return 1", "SyntaxError.*line 1"),
        ("import not_there_at_all", "ModuleNotFoundError.*not_there_at_all"),
        ("x = 1", "defines no function 'solve'"),
        ("\0", "null bytes"),
    ],
)
async def test_unloadable_program_reports_the_reason(sandbox, source, message):
    outcome = await sandbox.call(Program(source, "solve", form="plain"), 1, limits=QUICK)
    assert outcome.kind == "load"
    assert re.search(message, outcome.failure.message)


async def test_traceback_shows_lines_of_user_code(sandbox):
    program = Program(
        "def solve(x):\n    return inner(x)\ndef inner(x):\n    return x['key']", "solve", "my.py", "plain"
    )
    outcome = await sandbox.call(program, {}, limits=QUICK)
    assert outcome.failure.traceback.splitlines()[:3] == [
        "KeyError: 'key'",
        "  my.py:4 in inner",
        "    return x['key']",
    ]


async def test_host_environment_and_files_are_not_readable(sandbox, monkeypatch):
    monkeypatch.setenv("TEST_API_KEY", "canary-4711")
    body = """
seen = [dict(os.environ)]
for path in ("/proc/self/environ", "/proc/1/environ", "/etc/passwd", "/etc/hostname"):
    try:
        seen.append(open(path).read())
    except OSError:
        pass
return seen
"""
    outcome = await run(sandbox, body)
    assert "canary-4711" not in repr(outcome)
    assert len(outcome.value) == 1, "a file of the host was read"


async def test_async_function_is_rejected(sandbox):
    source = "async def solve(x):\n    return x"
    assert (await sandbox.call(Program(source, "solve", form="plain"), 5, limits=QUICK)).kind == "type"


async def test_declared_imports_are_preloaded_and_unknown_imports_are_named(sandbox):
    body = "import decimal\nreturn str(decimal.Decimal('0.1') + 1)"
    assert (await run(sandbox, body, imports=("decimal",))).value == "1.1"
    outcome = await run(sandbox, "return 1", imports=("no_such_module",))
    assert (outcome.kind, outcome.failure.failure_class) == ("setup", "refused")
    assert "no_such_module" in outcome.failure.message


async def test_preloaded_modules_have_no_network_and_no_host_files(sandbox, tmp_path):
    make_parents_searchable(tmp_path)
    (tmp_path / "greedy.py").write_text(
        """
import _socket
reached = []
for what in (lambda: _socket.socket(2, 1).bind(("127.0.0.1", 0)), lambda: open("/etc/passwd")):
    try:
        what()
        reached.append(what)
    except OSError:
        pass
"""
    )
    body = "import greedy\nreturn len(greedy.reached)"
    settings = {"imports": ("greedy",), "search_paths": (str(tmp_path),)}
    # In a network namespace of its own a socket reaches nobody, not even a loopback that is up.
    assert (await run(sandbox, body, **settings)).value == (1 if sandbox.strength == "namespaces" else 0)


async def test_only_declared_paths_are_readable(sandbox, tmp_path):
    make_parents_searchable(tmp_path)
    data = tmp_path / "data"
    data.mkdir()
    (data / "table.txt").write_text("42")
    (tmp_path / "beside.txt").write_text("secret")
    body = """
reached = []
for name, mode in (("data/table.txt", "r"), ("data/table.txt", "a"), ("data/new", "w"), ("beside.txt", "r")):
    try:
        open(f"{x}/{name}", mode).close()
        reached.append((name, mode))
    except OSError:
        pass
return reached
"""
    outcome = await run(sandbox, body, str(tmp_path), read_paths=(str(data),))
    assert outcome.value == [["data/table.txt", "r"]]


def make_parents_searchable(path: Path) -> None:
    """Make pytest's temporary folders accessible to any user."""
    for folder in (path, *path.parents):
        if "pytest" in str(folder):
            folder.chmod(0o755)


async def test_work_folder_is_empty_writable_and_removed_afterwards(sandbox):
    body = """
import tempfile
before = os.listdir(".")
with tempfile.NamedTemporaryFile() as file:
    file.write(b"x")
open("f", "w").write("x")
os.makedirs("a/" * 50)
try:
    os.chmod("a", 0)
except PermissionError:  # without a root of its own
    pass
return before, os.getcwd()
"""
    first, second = [await run(sandbox, body) for _ in range(2)]
    assert not {"f", "a"} & {*first.value[0], *second.value[0]}
    if sandbox.strength == "landlock":
        assert is_gone(first.value[1])


async def test_memory_of_earlier_calls_is_not_visible_to_later_calls(sandbox):
    marker = "earlier-" + "needle" * 3
    assert (await run(sandbox, "return len(x)", marker * 1000)).value
    body = """
import gc
kinds = (str, bytes, bytearray, list, dict)
return sum("earlier-" + "needle" in repr(item)[:10000] for item in gc.get_objects() if isinstance(item, kinds))
"""
    assert (await run(sandbox, body)).value == 0


async def test_warm_worker_is_reused_unless_a_call_leaves_a_thread(sandbox):
    source = "import threading, os, time\nn = 0\ndef solve(x):\n    global n\n    n += 1\n    {}\n    return n"
    clean = Program(source.format("pass"), "solve", form="plain")
    assert [(await sandbox.call(clean, 1, level="warm")).value for _ in range(3)] == [1, 2, 3]
    for leak in ("threading.Thread(target=time.sleep, args=(60,), daemon=True).start()", "os.dup(0)"):
        leaky = Program(source.format(leak), "solve", form="plain")
        assert [(await sandbox.call(leaky, 1, level="warm")).value for _ in range(2)] == [1, 1]


async def test_warm_worker_is_replaced_after_a_second_frame(sandbox):
    source = """
import os, signal
n = 0
def solve(x):
    global n
    n += 1
    signal.signal(signal.SIGALRM, lambda *_: os.write(3, b"late"))
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    return n
"""
    program = Program(source, "solve", form="plain")
    assert (await sandbox.call(program, 1, level="warm")).value == 1
    await asyncio.sleep(1.0)
    assert (await sandbox.call(program, 1, level="warm")).value == 1, "a new worker"


async def test_cancelled_call_leaves_no_process_and_a_working_sandbox(sandbox):
    for level in ("isolated", "warm"):
        call = asyncio.create_task(run(sandbox, "time.sleep(60)", level=level, limits=Limits(wall_s=70)))
        await asyncio.sleep(0.15)
        started = time.monotonic()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert time.monotonic() - started < 30  # half of what the code would sleep
        assert (await run(sandbox, "return 1", level=level)).value == 1


async def test_concurrent_calls_get_their_own_answers(sandbox):
    outcomes = await asyncio.gather(*(run(sandbox, "return x * 2", number) for number in range(40)))
    assert [outcome.value for outcome in outcomes] == [2 * number for number in range(40)]


async def test_large_requests_and_results_pass(sandbox):
    text = "a" * 3_000_000
    outcome = await run(sandbox, "return x", text, limits=Limits(result_kb=4096))
    assert outcome.value == text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"imports": ("os; evil",)}, "is not a module name"),
        ({"read_paths": ("relative",)}, "absolute"),
        ({"read_paths": ("/",)}, "never readable"),
        ({"read_paths": ("/usr/../etc",)}, "normalized"),
        ({"function": "a b"}, "is not a function name"),
    ],
)
async def test_invalid_program_settings_are_rejected(settings, message):
    with pytest.raises(ConfigError, match=message):
        Program("", **settings)


async def test_missing_read_path_is_rejected(sandbox):
    with pytest.raises(ConfigError, match="read path /not/there does not exist"):
        await run(sandbox, "return 1", read_paths=("/not/there",))


async def test_requests_that_are_not_json_are_rejected(sandbox):
    with pytest.raises(ConfigError, match="JSON"):
        await run(sandbox, "return 1", object())
    with pytest.raises(ConfigError, match="argument names"):
        await sandbox.call(Program("def evaluate(): pass"), [1])


async def test_closed_sandbox_raises():
    sandbox = Sandbox(strength="process")
    with pytest.raises(ConfigError, match="async with"):
        await run(sandbox, "return 1")
