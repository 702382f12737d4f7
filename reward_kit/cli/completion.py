"""`reward-kit completion`: the script by which a shell completes verbs, options and values."""

from __future__ import annotations

import click
from click.shell_completion import add_completion_class, get_completion_class

from reward_kit.cli.completing import WholeWords
from reward_kit.cli.echo import echo
from reward_kit.cli.main import COMPLETE_VARIABLE

_PROGRAM = "reward-kit"


@click.command(name="completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(shell: str) -> None:
    """Print the script that lets SHELL complete verbs, options, runs, policies, rewards and estimators at TAB.

    \b
    For good:
      echo 'eval "$(reward-kit completion bash)"' >> ~/.bashrc
      echo 'eval "$(reward-kit completion zsh)"' >> ~/.zshrc
      reward-kit completion fish > ~/.config/fish/completions/reward-kit.fish

    \b
    Example, for this shell alone:
      eval "$(reward-kit completion bash)"
    """
    add_completion_class(WholeWords, "bash")
    kind = get_completion_class(shell)
    assert kind is not None  # the three are click's own
    program = click.get_current_context().find_root().command
    echo(kind(program, {}, _PROGRAM, COMPLETE_VARIABLE).source(), nl=False)
