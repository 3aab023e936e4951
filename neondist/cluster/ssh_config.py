"""The ssh_config of a job: what reaches its nodes, for the check before the start and for mpirun's daemons alike."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..errors import ConfigError
from .resources import Node, ResourceSpec, SSHConfig

OWN = "NEONDIST_SSH_CONFIG"
"""An ssh_config of the user's that is included instead of ~/.ssh/config."""
AGENT = "PRTE_MCA_plm_ssh_agent"
"""A program that mpirun starts daemons with instead of ssh: AGENT [OPTIONS] HOST COMMAND."""
_ACTIVATE = re.compile(r"(?P<folder>.+)/bin/activate")


def settings_of(resources: ResourceSpec, node: Node) -> SSHConfig:
    """Return the SSH settings of a node; the defaults for one that is reached without SSH."""
    return resources.ssh[node.ssh_config] if node.ssh_config is not None else SSHConfig()


def write_ssh_config(resources: ResourceSpec, path: Path, env: Mapping[str, str]) -> None:
    """Write the settings of all nodes that are reached by SSH.

    Those of the user's own configuration apply where these leave something open. A host that is not known yet is
    accepted once; one whose key has changed is refused. Nothing asks for a password.

    Raises
    ------
    ConfigError
        The path of a key that OpenSSH would not take as it is.
    """
    lines = []
    for node in resources.nodes:
        if node.ssh_config is None:
            continue
        ssh = settings_of(resources, node)
        lines += [f"Host {node.address}", f"  Port {ssh.port}"]
        lines += [f"  User {_quoted(ssh.username, f'ssh.{node.ssh_config}.username')}"] if ssh.username else []
        if ssh.key_file is not None:
            key = _quoted(ssh.key_file, f"ssh.{node.ssh_config}.key_file").replace("%", "%%")
            lines += [f"  IdentityFile {key}", "  IdentitiesOnly yes"]
    lines += ["Host *", "  BatchMode yes", "  ConnectTimeout 10", "  StrictHostKeyChecking accept-new"]
    own = env.get(OWN, "~/.ssh/config")
    lines += [f"Include {_quoted(own, OWN)}", "Include /etc/ssh/ssh_config"]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def ssh_command(
    node: Node, config: Path, command: list[str], env: Mapping[str, str], options: Sequence[str] = ()
) -> list[str]:
    """Return the words that run a command on a node; `options` are further ones of ssh."""
    return remote_command(node.address, ["-F", str(config), *options], command, env)


def remote_command(host: str, options: Sequence[str], command: Sequence[str], env: Mapping[str, str]) -> list[str]:
    """Return the words that run a command on a host: by ssh with options, or by the agent that mpirun uses."""
    agent = shlex.split(env.get(AGENT, "ssh")) or ["ssh"]
    return [*agent, *options, host, shlex.join(command)]


def typed_command(node: Node, ssh: SSHConfig) -> str:
    """Return the command with which a user tries the connection to a node."""
    words = ["ssh", *(["-p", str(ssh.port)] if ssh.port != 22 else [])]
    words += ["-i", ssh.key_file] if ssh.key_file is not None else []
    return shlex.join([*words, f"{ssh.username}@{node.address}" if ssh.username else node.address])


def python_of(ssh: SSHConfig, where: str, default: str) -> str:
    """Return the path of Python on a node with these settings: that of its virtual environment, or the default.

    Raises
    ------
    ConfigError
        `python_venv` is something else than a virtual environment: it is no shell command that could be run.
    """
    if not ssh.python_venv:
        return default
    try:
        words = shlex.split(ssh.python_venv)
    except ValueError:
        words = []
    found = _ACTIVATE.fullmatch(words[1]) if len(words) == 2 and words[0] in ("source", ".") else None
    folder = found["folder"] if found else words[0] if len(words) == 1 else ""
    if not os.path.isabs(folder):
        raise ConfigError(
            f"{where}: '{ssh.python_venv}' is not a virtual environment; give its absolute path,"
            " or 'source /PATH/bin/activate'"
        )
    return f"{folder}/bin/python"


def _quoted(text: str, where: str) -> str:
    """Return an argument of ssh_config, which has quotes, but no way to write a quote or a variable's sign."""
    if re.search(r'["\\]|\$\{', text):
        raise ConfigError(f"{where}: '{text}' has characters that ssh_config cannot take (\" \\ ${{); rename it")
    return f'"{text}"'
