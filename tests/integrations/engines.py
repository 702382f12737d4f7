"""Container engines and an SSH server of this machine's own packages, started apart from any that run here already."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

IMAGE = "localhost/reward-kit-here:latest"
PATH = "ENV PATH=/usr/local/bin:/usr/bin:/bin"
# A machine whose own limits cannot be raised, such as a container, cannot raise those of a container either.
_CONTAINERS_CONF = '[containers]\ndefault_ulimits = ["nofile=4096:4096", "nproc=4096:4096"]\n'


class Missing(Exception):
    """The software is not here or does not work here; the text says how it was found out."""


@contextlib.contextmanager
def podman(folder: Path, image: Path) -> Iterator[dict[str, str]]:
    """Variables with which Podman is the engine, with a store of its own that has the image."""
    if shutil.which("podman") is None:
        raise Missing("podman is not installed")
    (folder / "containers.conf").write_text(_CONTAINERS_CONF)
    words = ["podman", "--root", f"{folder}/store", "--runroot", f"{folder}/run", "--storage-driver=vfs"]
    words += ["--cgroup-manager=cgroupfs", "--events-backend=none"]
    words += ["--runtime=runc"] if shutil.which("runc") else []
    variables = {"REWARD_KIT_CONTAINER_ENGINE": " ".join(words), "CONTAINERS_CONF": f"{folder}/containers.conf"}
    try:
        _made(words, image, variables)
        yield variables
    finally:
        _done([*words, "rm", "--all", "--force"], variables)
        _done([*words, "rmi", "--all", "--force"], variables)


@contextlib.contextmanager
def docker(folder: Path, image: Path) -> Iterator[dict[str, str]]:
    """Variables with which Docker is the engine, at a daemon of its own that has the image."""
    if shutil.which("dockerd") is None or shutil.which("docker") is None or os.geteuid() != 0:
        raise Missing("dockerd and docker are not installed, or this is not root")
    variables = {"REWARD_KIT_CONTAINER_ENGINE": "docker", "DOCKER_HOST": f"unix://{folder}/socket"}
    line = ["dockerd", f"--data-root={folder}/data", f"--exec-root={folder}/exec", f"--host=unix://{folder}/socket"]
    line += [f"--pidfile={folder}/pid", "--bridge=none", "--iptables=false", "--ip6tables=false"]
    line += ["--storage-driver=vfs", "--default-ulimit=nofile=4096:4096"]
    with (folder / "log").open("wb") as log:
        daemon = subprocess.Popen(line, stdout=log, stderr=log)
    try:
        _await(lambda: _done(["docker", "version"], variables).returncode == 0, daemon, folder / "log")
        _made(["docker"], image, variables)
        yield variables
    finally:
        daemon.terminate()
        daemon.wait(60)


@contextlib.contextmanager
def ssh_server(folder: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """A host name, and variables with which it is reached by SSH: a server on the loopback with keys of its own."""
    server = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
    if server is None or shutil.which("ssh") is None:
        raise Missing("the OpenSSH server or client is not installed")
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    for name in ("host_key", "user_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", f"{folder}/{name}"], check=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (folder / "known_hosts").write_text(f"[127.0.0.1]:{port} {(folder / 'host_key.pub').read_text()}")
    (folder / "sshd_config").write_text(
        f"ListenAddress 127.0.0.1:{port}\nHostKey {folder}/host_key\nAuthorizedKeysFile {folder}/user_key.pub\n"
        f"PidFile {folder}/pid\nStrictModes no\nPasswordAuthentication no\nUsePAM no\n"
    )
    (folder / "config").write_text(
        f"Host box\n  HostName 127.0.0.1\n  Port {port}\n  User {getpass.getuser()}\n  IdentityFile {folder}/user_key\n"
        f"  IdentitiesOnly yes\n  UserKnownHostsFile {folder}/known_hosts\n"
    )
    with (folder / "log").open("wb") as log:
        daemon = subprocess.Popen([server, "-D", "-e", "-f", f"{folder}/sshd_config"], stdout=log, stderr=log)
    variables = {"REWARD_KIT_SSH": f"ssh -F {folder}/config"}
    try:
        line = ["ssh", "-F", f"{folder}/config", "-oBatchMode=yes", "box", "true"]
        _await(lambda: _done(line, {}).returncode == 0, daemon, folder / "log")
        yield "box", variables
    finally:
        daemon.terminate()
        daemon.wait(10)


def containers(variables: dict[str, str]) -> list[str]:
    """The names of the containers that there are, ended ones included."""
    words = variables["REWARD_KIT_CONTAINER_ENGINE"].split()
    return _done([*words, "ps", "--all", "--format", "{{.Names}}"], variables).stdout.split()


def _made(words: list[str], image: Path, variables: dict[str, str]) -> None:
    done = _done([*words, "import", "--change", PATH, str(image), IMAGE], variables)
    done = (
        done
        if done.returncode
        else _done([*words, "run", "--rm", "--network=none", IMAGE, "reward-kit", "-h"], variables)
    )
    if done.returncode != 0:
        raise Missing(f"{words[0]} does not work here: {done.stderr.strip()[-300:]}")


def _await(works, daemon: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + 30
    while not works():
        if daemon.poll() is not None or time.monotonic() > end:
            raise Missing(f"it does not start here: {log.read_text()[-300:]}")
        time.sleep(0.2)


def _done(line: list[str], variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(line, capture_output=True, text=True, timeout=120, env={**os.environ, **variables})
