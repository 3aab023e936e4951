"""The ssh_config of a job, used to check its nodes and to start mpirun's daemons on them."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from ..errors import ConfigError
from .resources import Node, ResourceSpec, SSHConfig

USER_CONFIG_VARIABLE = "NEONDIST_SSH_CONFIG"
"""Environment variable with a user's ssh_config to include instead of ~/.ssh/config."""
SSH_ARGS_VARIABLE = "PRTE_MCA_plm_ssh_args"
"""Environment variable with the options of the ssh that mpirun uses."""
SSH_AGENT_VARIABLE = "PRTE_MCA_plm_ssh_agent"
"""Environment variable with a program that mpirun uses instead of ssh: AGENT [OPTIONS] HOST COMMAND."""
SH_SHELLS, CSH_SHELLS = ("sh", "bash", "dash", "ash", "ksh", "mksh", "zsh"), ("csh", "tcsh")
UNUSABLE_SHELL_PROBLEM = "cannot run the commands of mpirun; change it there with chsh -s /bin/bash"
_SAME_SHELL_VARIABLE = "PRTE_MCA_plm_ssh_assume_same_shell"
_ACTIVATE_PATTERN = re.compile(r"(?P<folder>.+)/bin/activate")


def login_shells_for_mpirun(env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of login shells that run the commands of mpirun, which are in the syntax of this user's shell.

    Return () if these are unknown, such as with an agent other than ssh.
    """
    if SSH_AGENT_VARIABLE in env or _SAME_SHELL_VARIABLE in env:
        return ()
    import pwd  # not on every system

    own_shell = ""
    with suppress(KeyError):  # in a container, the user ID may have no entry
        own_shell = os.path.basename(pwd.getpwuid(os.getuid()).pw_shell)
    return CSH_SHELLS if own_shell in CSH_SHELLS else SH_SHELLS


def ssh_settings_of(resources: ResourceSpec, node: Node) -> SSHConfig:
    """Return the SSH settings of a node; the defaults for a node reached without SSH."""
    return resources.ssh[node.ssh_config] if node.ssh_config is not None else SSHConfig()


def write_ssh_config(resources: ResourceSpec, path: Path, env: Mapping[str, str]) -> None:
    """Write the settings of all nodes reached by SSH.

    The user's own configuration applies to settings that are not specified. The key of an unknown host is accepted on
    first use; a changed key is rejected. No password is requested.

    Raises
    ------
    ConfigError
        OpenSSH does not accept the user name or a path, or the ssh_config in USER_CONFIG_VARIABLE does not exist.
    """
    lines = []
    for node in resources.nodes:
        if node.ssh_config is None:
            continue
        ssh = ssh_settings_of(resources, node)
        lines += [f"Host {node.address}", f"  Port {ssh.port}"]
        lines += [f"  User {_quote_argument(ssh.username, f'ssh.{node.ssh_config}.username')}"] if ssh.username else []
        if ssh.key_file is not None:
            key_file = _quote_argument(ssh.key_file, f"ssh.{node.ssh_config}.key_file").replace("%", "%%")
            lines += [f"  IdentityFile {key_file}", "  IdentitiesOnly yes"]
    lines += ["Host *", "  BatchMode yes", "  ConnectTimeout 10", "  StrictHostKeyChecking accept-new"]
    lines += ["  ServerAliveInterval 20", "  ServerAliveCountMax 3"]  # otherwise ssh outlives a job whose node is lost
    user_config = _user_config_path(env) or "~/.ssh/config"
    if user_config != os.devnull:  # ssh refuses to include a file that others can write to
        lines += [f"Include {_quote_argument(user_config, USER_CONFIG_VARIABLE)}"]
    lines += ["Include /etc/ssh/ssh_config"]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _user_config_path(env: Mapping[str, str]) -> str | None:
    """Return the absolute path in USER_CONFIG_VARIABLE, or None if unset; ConfigError if the file does not exist."""
    text = env.get(USER_CONFIG_VARIABLE)
    if not text:
        return None
    path = Path(os.path.expanduser(text)).absolute()
    if not path.exists():
        raise ConfigError(f"{USER_CONFIG_VARIABLE}: {path} does not exist; give the path of an ssh_config, or unset it")
    return str(path)


def ssh_arguments_for_mpirun(env: Mapping[str, str]) -> str:
    """Return the value of SSH_ARGS_VARIABLE with which ssh reaches the hosts of a list.

    The user's ssh_config applies unless the given options name another one.

    Raises
    ------
    ConfigError
        The ssh_config in USER_CONFIG_VARIABLE does not exist, or mpirun does not accept its path.
    """
    path = _user_config_path(env)
    if path is not None and re.search(r"\s", path):
        raise ConfigError(
            f"{USER_CONFIG_VARIABLE}: '{path}': mpirun requires a path without spaces; move or rename the file"
        )
    return " ".join(filter(None, [path and f"-F {path}", env.get(SSH_ARGS_VARIABLE)]))


def unreachable_host_remedy(host: str, env: Mapping[str, str]) -> str:
    """Return the remedy for an unreachable host of a list, with an ssh command that shows the error."""
    command = shlex.join(["ssh", *shlex.split(ssh_arguments_for_mpirun(env)), host])
    return f"correct the list, or the error shown by `{command}`"


def ssh_command(
    node: Node, config_path: Path, command: list[str], env: Mapping[str, str], options: Sequence[str] = ()
) -> list[str]:
    """Return the command line that runs a command on a node; `options` are additional options of ssh."""
    return remote_command(node.address, ["-F", str(config_path), *options], command, env)


def remote_command(host: str, options: Sequence[str], command: Sequence[str], env: Mapping[str, str]) -> list[str]:
    """Return the command line that runs a command on a host by ssh with options, or by mpirun's agent."""
    ssh_program = shlex.split(env.get(SSH_AGENT_VARIABLE, "ssh")) or ["ssh"]
    return [*ssh_program, *options, host, shlex.join(command)]


def format_ssh_command(node: Node, ssh: SSHConfig, env: Mapping[str, str]) -> str:
    """Return an ssh command with which the user can test the connection to a node."""
    config = _user_config_path(env)
    words = ["ssh", *(["-F", config] if config else []), *(["-p", str(ssh.port)] if ssh.port != 22 else [])]
    words += ["-i", ssh.key_file] if ssh.key_file is not None else []
    return shlex.join([*words, f"{ssh.username}@{node.address}" if ssh.username else node.address])


def python_path_of(ssh: SSHConfig, setting_name: str, default: str) -> str:
    """Return the path of Python on a node: that of its virtual environment, or the default.

    Raises
    ------
    ConfigError
        `python_venv` is not a virtual environment; other shell commands are not run.
    """
    if not ssh.python_venv:
        return default
    try:
        words = shlex.split(ssh.python_venv)
    except ValueError:
        words = []
    match = _ACTIVATE_PATTERN.fullmatch(words[1]) if len(words) == 2 and words[0] in ("source", ".") else None
    folder = match["folder"] if match else words[0] if len(words) == 1 else ""
    if not os.path.isabs(folder):
        raise ConfigError(
            f"{setting_name}: '{ssh.python_venv}' is not a virtual environment; give its absolute path,"
            " or 'source /PATH/bin/activate'"
        )
    return f"{folder}/bin/python"


def _quote_argument(text: str, setting_name: str) -> str:
    """Return a quoted argument of ssh_config; ConfigError for characters that ssh_config cannot escape."""
    if re.search(r'["\\]|\$\{', text):
        raise ConfigError(
            f"{setting_name}: '{text}' contains characters that ssh_config does not support (\" \\ ${{); use a name"
            " without these"
        )
    return f'"{text}"'
