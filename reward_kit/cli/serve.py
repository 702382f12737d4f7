"""`reward-kit serve`: serve reward functions over HTTP to trainers and tools on other machines."""

from __future__ import annotations

import contextlib
import ipaddress
import signal
import sys
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import click

from reward_kit.cli import operator_log
from reward_kit.cli.echo import echo
from reward_kit.cli.options import Number, WholeNumber, complete_rewards, sandbox_options, set_option
from reward_kit.cli.trust import require_trust_in, trust_option
from reward_kit.errors import ConfigError
from reward_kit.reward_agent.loading import SandboxChoice
from reward_kit.reward_agent.remote import KEY_VARIABLE
from reward_kit.runs.otlp import live_export, traces_endpoint
from reward_kit.runs.redaction import Redaction, known_secrets
from reward_kit.runs.task_file import parse_override

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reward_kit.integrations.reward_server.options import Keys, ServerOptions
    from reward_kit.integrations.reward_server.server import NamedReward

_EXAMPLE = '{"messages": [{"role": "assistant", "content": "42"}], "ground_truth": "42"}'


@click.command(name="serve")
@click.argument("rewards", nargs=-1, required=True, metavar="[NAME=]FILE.py:FUNCTION…", shell_complete=complete_rewards)
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option(
    "--port",
    type=WholeNumber(0, 65535),
    default=8700,
    show_default=True,
    help="The port to listen on; 0 chooses a free port.",
)
@click.option(
    "--api-key-file",
    type=click.Path(path_type=Path),
    help="File with one key per line. Default: $REWARD_KIT_SERVE_API_KEY, otherwise a generated key, which is printed.",
)
@set_option("Set an option of the reward; with multiple rewards, NAME.KEY=VALUE.", ("-O", "--option", "options"))
@sandbox_options()
@click.option(
    "--deadline",
    type=Number(0.001),
    default=600.0,
    show_default=True,
    metavar="S",
    help="Time limit for one call in seconds.",
)
@click.option(
    "--max-concurrency",
    type=WholeNumber(1),
    default=64,
    show_default=True,
    help="Maximum number of concurrent calls to each reward.",
)
@click.option(
    "--max-pending",
    type=WholeNumber(1),
    default=4096,
    show_default=True,
    help="Maximum number of waiting rollouts for each reward; further requests receive status 429.",
)
@click.option(
    "--max-batch",
    type=WholeNumber(1),
    help="Maximum number of rollouts in a request.  [default: 1024, or --max-pending if lower]",
)
@click.option(
    "--max-messages",
    type=WholeNumber(1),
    default=10_000,
    show_default=True,
    help="Maximum number of messages in a rollout.",
)
@click.option(
    "--max-body-mb",
    type=Number(0.001),
    help="Maximum size of a request body in MiB.  [default: 16, or --max-held-mb if lower]",
)
@click.option(
    "--max-held-mb",
    type=Number(0.001),
    default=512.0,
    show_default=True,
    help="Maximum total size, in MiB, of the bodies held at any time.",
)
@click.option(
    "--max-connections",
    type=WholeNumber(1),
    default=8192,
    show_default=True,
    help="Maximum number of open connections.",
)
@click.option(
    "--head-timeout",
    type=Number(0.001),
    default=10.0,
    show_default=True,
    metavar="S",
    help="Time limit in seconds for the head of the first request.",
)
@click.option(
    "--body-timeout",
    type=Number(0.001),
    default=60.0,
    show_default=True,
    metavar="S",
    help="Time limit in seconds for the body of a request.",
)
@click.option(
    "--shutdown-timeout",
    type=Number(0.001),
    default=30.0,
    show_default=True,
    metavar="S",
    help="Time limit in seconds for requests in flight at shutdown.",
)
@click.option(
    "--otlp",
    metavar="URL|env",
    help="Send a trace of each score to this OpenTelemetry collector; env: use OTEL_EXPORTER_OTLP_ENDPOINT.",
)
@trust_option
def command(rewards: tuple[str, ...], **given: Any) -> None:
    """Serve reward functions over HTTP. Every request needs a key, and the rewards run in their sandbox.

    `POST /v1/rewards/NAME/score` scores one rollout, and `…/score_batch` scores multiple rollouts; see /openapi.json. A
    task refers to a served reward by its URL: `reward_function_path: http://HOST:8700/v1/rewards/NAME`. Ctrl-C stops
    the server once all requests in flight are answered.

    \b
    Examples:
      reward-kit serve my_reward.py:exact
      reward-kit serve my_reward.py:exact graded=other.py:score --host 0.0.0.0 --api-key-file keys.txt
    """
    from reward_kit.integrations.reward_server.server import load_named_rewards

    options = dict(parse_override(item, "-O") for item in given.pop("options"))
    choice = SandboxChoice(given.pop("sandbox"), reward_time_s=given["deadline"])
    require_trust_in([one.rpartition("=")[2] for one in rewards])
    key_file, otlp = given.pop("api_key_file"), given.pop("otlp")
    endpoint = traces_endpoint(otlp) if otlp is not None else None
    limits = _limits(given)
    keys, made = _keys(key_file)
    with contextlib.redirect_stdout(sys.stderr):  # a user's module may print when it is loaded
        named = load_named_rewards(rewards, Path.cwd(), choice, options)
    with contextlib.ExitStack() as stack:
        if endpoint is not None:
            stack.enter_context(live_export(endpoint, "", "", Redaction(known_secrets())))
        anyio.run(_serve, named, keys, made, limits)


def _limits(given: dict[str, Any]) -> ServerOptions:
    """Return the options of the server.

    A limit that is not set defaults to its usual value or, if the related larger limit is lower, to that limit.
    """
    from reward_kit.integrations.reward_server.options import AT_LEAST, ServerOptions

    usual = {field.name: field.default for field in fields(ServerOptions)}
    for larger, smaller in AT_LEAST:
        if given[smaller] is None:
            given[smaller] = min(usual[smaller], given[larger])
        if given[smaller] > given[larger]:
            flags = [f"--{name.replace('_', '-')}" for name in (smaller, larger)]
            raise ConfigError(f"{flags[0]} must be at most {flags[1]} ({given[larger]:g}); increase both limits")
    return ServerOptions(**{name if name in usual else f"{name}_s": value for name, value in given.items()})


def _keys(file: Path | None) -> tuple[Keys, str]:
    """Return the keys, and either the key generated for this server or, if keys are configured, ""."""
    from reward_kit.integrations.reward_server.options import Keys, new_key, read_keys

    keys, note = read_keys(file)
    if note:
        echo(f"warning: {note}", err=True)
    made = "" if keys else new_key()
    texts = keys or [made]
    operator_log.add_redaction(Redaction(texts))
    return Keys(texts), made


async def _serve(named: Sequence[NamedReward], keys: Keys, made: str, options: ServerOptions) -> None:
    from reward_kit.integrations.reward_server.server import serving

    async def stop_at_next() -> None:
        await anext(signals)
        running.stop()

    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async with anyio.create_task_group() as tasks:
            async with serving(named, keys, options) as running:
                _show_addresses(named, running.address, made, options.host)
                await anext(signals)
                echo("Answering requests in flight; press Ctrl-C again to stop now.", err=True)
                tasks.start_soon(stop_at_next)
            tasks.cancel_scope.cancel()


def _show_addresses(named: Sequence[NamedReward], address: str, made: str, host: str) -> None:
    """Print the addresses on standard output, and all other information on standard error."""
    for one in named:
        for note in one.notes:
            echo(note, err=True)
        echo(f"{one.name}: {one.reward.mode}, POST {address}/v1/rewards/{one.name}/score", err=True)
    if made:
        echo(
            "Key for this server, shown only once; to use a fixed key, set REWARD_KIT_SERVE_API_KEY or --api-key-file:",
            err=True,
        )
        echo(f"  export {KEY_VARIABLE}={made}", err=True)
    echo(
        f'Try it:\n  curl {address}/v1/rewards/{named[0].name}/score -H "Authorization: Bearer ${KEY_VARIABLE}" '
        f"-H 'Content-Type: application/json' -d '{_EXAMPLE}'",
        err=True,
    )
    try:
        is_loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = host == "localhost"
    if not is_loopback:
        echo(
            f"warning: {host} can be reached from other machines, and HTTP is not encrypted: anyone on the "
            "network path can read keys and rollouts. Use a proxy with TLS, or serve on 127.0.0.1 and forward the port "
            "with ssh",
            err=True,
        )
    echo(address)
