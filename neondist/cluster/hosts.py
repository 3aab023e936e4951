"""Lists of hosts that may change: their source, and the currently usable hosts."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path

from .. import version
from ..errors import ConfigError
from ..io.regular_file import read_bytes
from .resources import ResourceSpec
from .ssh_config import SSH_AGENT_VARIABLE, UNUSABLE_SHELL_PROBLEM, remote_command, ssh_arguments_for_mpirun

HOST_SCRIPT_TIMEOUT = 60.0
_SCRIPT_POLL_SECONDS = 0.1
SSH_TIMEOUT = 15.0
DEFAULT_SLOTS_VARIABLE = "OMPI_MCA_orte_set_default_slots"
"""Environment variable with the slots of each host, set by the MPI operator, whose script prints names only."""
UNREACHABLE_TEXT = "cannot be reached"
"""Reason for the exclusion of a host that does not respond within SSH_TIMEOUT."""
_PROBE_SCRIPT = (
    '[ -x "$1" ] && [ -f "$2" ] || exit 113; grep -qF "$3" "$2" || exit 114;'
    ' case "$4" in ""|*" ${SHELL##*/} "*) exit 116;; *) exit 115;; esac'
)
_USABLE_EXIT_CODE = 116  # not 0, with which ssh ends if the host runs another command, or none
_REASON_BY_EXIT_CODE: dict[int | None, str] = {
    0: "does not run commands; correct its login shell, or the command of the key in its authorized_keys",
    113: f"has no {sys.executable} with neondist; install it there at the same path",
    114: "has a different version of neondist; install the same version",
    115: f"has a login shell that {UNUSABLE_SHELL_PROBLEM}",
}
_MAX_FILE_BYTES = 1 << 22  # maximum size of a host file
_HOST_PATTERN = r"(?P<host>[A-Za-z0-9_][A-Za-z0-9._-]*)"
_LINE_PATTERN = re.compile(rf"{_HOST_PATTERN}(?::(?P<colon>\d{{1,6}})|(?P<rest>(?:\s+\w+=\d{{1,6}})*))")


def slots_by_node(resources: ResourceSpec) -> dict[str, int]:
    """Return the slots of each node: one per GPU, or one per CPU if the node has no GPUs."""
    return {node.address: len(node.gpus or node.cpus) for node in resources.nodes}


def is_this_machine(host: str) -> bool:
    """Whether a listed host is this machine, which mpirun also recognises by these names."""
    node = os.uname().nodename
    return host in ("localhost", "127.0.0.1", node, node.partition(".")[0])


def parse_hosts(text: str, source_label: str) -> dict[str, int]:
    """Return hosts and their slots, in order, from lines 'HOST', 'HOST:SLOTS' or 'HOST slots=N'; '#' begins a comment.

    The default number of slots is the environment variable OMPI_MCA_orte_set_default_slots, or 1.

    Raises
    ------
    ConfigError
        A line is invalid ('LABEL:LINE: problem; remedy'), or the variable is not a positive integer.
    """
    default_slots = os.environ.get(DEFAULT_SLOTS_VARIABLE, "1")
    if not re.fullmatch(r"0*[1-9]\d{0,5}", default_slots):
        raise ConfigError(f"{DEFAULT_SLOTS_VARIABLE}: expected the number of ranks per host, got '{default_slots}'")
    slots_by_host: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        content = line.partition("#")[0].strip()
        if not content:
            continue
        match = _LINE_PATTERN.fullmatch(content)
        if match is None:
            raise ConfigError(
                f"{source_label}:{number}: '{content}' is not a host; expected HOST, HOST:SLOTS or HOST slots=N"
            )
        slots = re.search(r"\bslots=(\d+)", match["rest"] or "")
        count = int(match["colon"] or (slots[1] if slots else default_slots))
        if count:
            slots_by_host[match["host"]] = slots_by_host.get(match["host"], 0) + count
    return slots_by_host


class HostSource:
    """A host file, a resource file (.yaml, .yml), or an executable script that prints 'HOST[:SLOTS]' lines.

    Raises
    ------
    ConfigError
        The file does not exist.
    """

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise ConfigError(f"{path}: no such file; give a host file, a resource file, or an executable script")
        self.is_resource_file = self.path.suffix in (".yaml", ".yml")
        self.is_script = not self.is_resource_file and os.access(self.path, os.X_OK)
        self._closed = False
        self._running_scripts: list[str] = []

    def close(self) -> None:
        """End a running script, and any started later, without waiting; may be called from a signal handler."""
        self._closed = True

    def wait_closed(self) -> None:
        """Close the source, and wait until no script runs in another thread."""
        self.close()
        while self._running_scripts:
            time.sleep(_SCRIPT_POLL_SECONDS / 4)

    @cached_property
    def slots_at_start(self) -> dict[str, int]:
        """Result of `read` at the start of the command, for all checks and placements."""
        return self.read()

    def read(self) -> dict[str, int]:
        """Return the current hosts with their slots, in order.

        Raises
        ------
        ConfigError
            The script fails, or the file is invalid.
        """
        if self.is_resource_file:
            return slots_by_node(ResourceSpec(self.path))
        if self.is_script:
            self._running_scripts.append(str(self.path))  # before the start, and until the process has been waited for
            try:
                output = self._run_host_script()
            finally:
                self._running_scripts.pop()
            return parse_hosts(output, f"{self.path}: output")
        try:
            text = read_bytes(self.path, _MAX_FILE_BYTES).decode(errors="replace")
        except OSError as error:
            raise ConfigError(
                f"{self.path}: cannot be read ({error.strerror}); specify a readable list or script"
            ) from None
        if text.startswith("#!"):
            raise ConfigError(f"{self.path}: is a script that is not executable; run chmod +x on it")
        return parse_hosts(text, str(self.path))

    def _run_host_script(self) -> str:
        try:
            process = subprocess.Popen(
                [str(self.path.absolute())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        except OSError as error:
            text = f"cannot be run ({error.strerror}); make it executable and begin it with #!/bin/sh"
            raise ConfigError(f"{self.path}: {text}") from None
        with process:
            try:
                output, stderr = self._collect_output(process)
            except BaseException:
                _kill_with_children(process)
                raise
        if process.returncode:
            message = (stderr.decode(errors="replace").strip().splitlines() or ["no message"])[-1][:300]
            raise ConfigError(
                f"{self.path}: exit code {process.returncode} ({message}); correct the script, which must print"
                " HOST:SLOTS lines"
            )
        return output.decode(errors="replace")

    def _collect_output(self, process: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
        """Return the output of a script once it exits, without waiting for children that keep the pipes open."""
        deadline = time.monotonic() + HOST_SCRIPT_TIMEOUT
        while True:
            has_ended = process.poll() is not None
            try:
                return process.communicate(timeout=_SCRIPT_POLL_SECONDS)
            except subprocess.TimeoutExpired as expired:
                if has_ended:
                    return expired.output or b"", expired.stderr or b""
            if self._closed:
                raise ConfigError(f"{self.path}: ended before it had printed the hosts, as the command was stopped")
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"{self.path}: has not ended within {HOST_SCRIPT_TIMEOUT:g} s; run it by hand to see why"
                )


def _kill_with_children(process: subprocess.Popen[bytes]) -> None:
    import psutil  # slow import

    with suppress(psutil.Error):
        for child in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.Error):
                child.kill()
    process.kill()


class HostPool:
    """Usable hosts: those of a source, except hosts in their cooldown after a failure.

    Parameters
    ----------
    read : callable
        Returns hosts and slots, as `HostSource.read` does.
    cooldown : float
        Seconds for which a failed host is excluded.
    clock : callable
        Replacement for time.monotonic in tests.

    Attributes
    ----------
    listed_slots : dict of str to int
        Slots of each host, as of the last successful `refresh_host_list`.
    refresh_error : str
        Reason why the last `refresh_host_list` failed and kept the old list; '' if it succeeded.
    """

    def __init__(
        self, read: Callable[[], dict[str, int]], cooldown: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._read_slots, self.cooldown, self._clock = read, cooldown, clock
        self.listed_slots: dict[str, int] = {}
        self.refresh_error = ""
        self._excluded_until: dict[str, float] = {}
        self._reported_reasons: dict[str, str] = {}

    def refresh_host_list(self) -> None:
        """Reread the list."""
        try:
            self.listed_slots, self.refresh_error = self._read_slots(), ""
        except ConfigError as error:
            self.refresh_error = str(error)

    def exclude_temporarily(self, host: str) -> None:
        """Exclude a host until the end of its cooldown."""
        self._excluded_until[host] = self._clock() + self.cooldown

    def exclude_unusable(self, reasons: Mapping[str, str]) -> list[str]:
        """Exclude unusable hosts until the end of their cooldown; return a message for each host with a new reason."""
        new_reasons = {host: reason for host, reason in reasons.items() if self._reported_reasons.get(host) != reason}
        for host in reasons:
            self.exclude_temporarily(host)
        self._reported_reasons.update(reasons)
        return [f"hosts: {host} {reason}; the host is left out" for host, reason in new_reasons.items()]

    def list_excluded_hosts(self) -> dict[str, float]:
        """Return the listed hosts in their cooldown, with the remaining seconds."""
        now = self._clock()
        return {
            host: end - now for host, end in self._excluded_until.items() if end > now and host in self.listed_slots
        }

    def list_usable_hosts(self) -> dict[str, int]:
        """Return the usable hosts with their slots."""
        excluded = self.list_excluded_hosts()
        return {host: slots for host, slots in self.listed_slots.items() if host not in excluded}

    def listed_host_of(self, name: str) -> str:
        """Return the listed host of a given name, fully qualified or not; '' if there is none."""
        if name in self.listed_slots:
            return name
        short_name = name.partition(".")[0]
        return next((host for host in self.listed_slots if host.partition(".")[0] == short_name), "")


def ranks_per_host(hosts: Mapping[str, int], ranks: int) -> dict[str, int]:
    """Return the number of ranks on each host, filled in order; hosts without ranks are omitted."""
    counts, remaining = {}, ranks
    for host, slots in hosts.items():
        if count := min(slots, remaining):
            counts[host] = count
        remaining -= count
    return counts


def command_on_host(
    host: str, words: Sequence[str], env: Mapping[str, str], extra_options: Sequence[str] = ()
) -> list[str]:
    """Return the command line that runs a command on a host by ssh, with `extra_options`, or by mpirun's agent."""
    options = shlex.split(ssh_arguments_for_mpirun(env))
    options += [] if SSH_AGENT_VARIABLE in env else ["-o", "BatchMode=yes", "-o", "ConnectTimeout=10", *extra_options]
    return remote_command(host, options, words, env)


def find_unusable_hosts(
    hosts: Iterable[str], env: Mapping[str, str], login_shells: Iterable[str] = ()
) -> dict[str, str]:
    """Return the unusable hosts with reasons; all are checked in parallel, over the connections of mpirun.

    A host must respond within 15 seconds, have this version of neondist for this Python at the same paths and, if
    `login_shells` are given, one of these as its login shell.
    """
    hosts = [host for host in hosts if not is_this_machine(host)]
    shells = " ".join(["", *login_shells, "", ""]) if login_shells else ""  # an unset shell is accepted
    words = ["sh", "-c", _PROBE_SCRIPT, "sh", sys.executable, version.__file__, f'"{version.__version__}"', shells]

    async def check_host(host: str) -> int | None:
        null = asyncio.subprocess.DEVNULL
        try:
            process = await asyncio.create_subprocess_exec(
                *command_on_host(host, words, env), stdin=null, stdout=null, stderr=null, env=dict(env)
            )
        except OSError:
            return None
        try:
            return await asyncio.wait_for(process.wait(), SSH_TIMEOUT)
        except asyncio.TimeoutError:
            process.kill()
            await process.wait()
            return None

    async def check_all_hosts() -> list[int | None]:
        return await asyncio.gather(*map(check_host, hosts))

    codes = zip(hosts, asyncio.run(check_all_hosts()), strict=True)
    return {host: _REASON_BY_EXIT_CODE.get(code, UNREACHABLE_TEXT) for host, code in codes if code != _USABLE_EXIT_CODE}
