"""Changing lists of hosts: their source, and the currently usable hosts."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path

from .. import version
from ..errors import ConfigError
from ..io.regular_file import read_bytes
from .resources import ResourceSpec
from .ssh_config import AGENT, remote_command

SCRIPT_TIMEOUT = 60.0
"""seconds that a script may take"""
SSH_TIMEOUT = 15.0
"""seconds in which a host has to answer"""
SSH_ARGS = "PRTE_MCA_plm_ssh_args"
DEFAULT_SLOTS = "OMPI_MCA_orte_set_default_slots"
"""Environment variable with the slots of each host, set by the MPI operator, whose script prints names only."""
UNREACHABLE = "cannot be reached"
"""Reason for the exclusion of a host that does not respond within SSH_TIMEOUT."""
_PROBE = '[ -x "$1" ] && [ -f "$2" ] || exit 113; grep -qF "$3" "$2" || exit 114'
_REASONS: dict[int | None, str] = {
    113: f"has no {sys.executable} with neondist; install it there at the same path",
    114: "has another version of neondist; install the same one",
}
_LARGEST = 1 << 22  # bytes of a host file
_HOST = r"(?P<host>[A-Za-z0-9_][A-Za-z0-9._-]*)"
_LINE = re.compile(rf"{_HOST}(?::(?P<colon>\d{{1,6}})|(?P<rest>(?:\s+\w+=\d{{1,6}})*))")


def slots_of(resources: ResourceSpec) -> dict[str, int]:
    """Return the slots of each node: one per GPU, or one per CPU without GPUs."""
    return {node.address: len(node.gpus or node.cpus) for node in resources.nodes}


def parse_hosts(text: str, label: str) -> dict[str, int]:
    """Return hosts and their slots, in order, from lines 'HOST', 'HOST:SLOTS' or 'HOST slots=N'; '#' begins a comment.

    The default number of slots is the environment variable OMPI_MCA_orte_set_default_slots, or 1.

    Raises
    ------
    ConfigError
        A line is invalid ('LABEL:LINE: problem; remedy'), or the variable is not a positive integer.
    """
    default = os.environ.get(DEFAULT_SLOTS, "1")
    if not re.fullmatch(r"0*[1-9]\d{0,5}", default):
        raise ConfigError(f"{DEFAULT_SLOTS}: expected the number of ranks per host, got '{default}'")
    slots_by_host: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        content = line.partition("#")[0].strip()
        if not content:
            continue
        match = _LINE.fullmatch(content)
        if match is None:
            raise ConfigError(f"{label}:{number}: '{content}' is not a host; expected HOST, HOST:SLOTS or HOST slots=N")
        slots = re.search(r"\bslots=(\d+)", match["rest"] or "")
        count = int(match["colon"] or (slots[1] if slots else default))
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
        self.is_resources = self.path.suffix in (".yaml", ".yml")
        self.is_script = not self.is_resources and os.access(self.path, os.X_OK)

    @cached_property
    def at_start(self) -> dict[str, int]:
        """Hosts at the start of the command, read once for all checks and placements; as `read`."""
        return self.read()

    def read(self) -> dict[str, int]:
        """Return the current hosts with their slots, in order.

        Raises
        ------
        ConfigError
            The script fails, or the file is invalid.
        """
        if self.is_resources:
            return slots_of(ResourceSpec(self.path))
        if self.is_script:
            return parse_hosts(self._output(), f"{self.path}: output")
        try:
            text = read_bytes(self.path, _LARGEST).decode(errors="replace")
        except OSError as error:
            raise ConfigError(f"{self.path}: cannot be read ({error.strerror})") from None
        if text.startswith("#!"):
            raise ConfigError(f"{self.path}: is a script that is not executable; chmod +x it")
        return parse_hosts(text, str(self.path))

    def _output(self) -> str:
        try:
            process = subprocess.run(
                [str(self.path.absolute())],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=SCRIPT_TIMEOUT,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise ConfigError(f"{self.path}: has not ended within {SCRIPT_TIMEOUT:g} s") from None
        except OSError as error:
            raise ConfigError(f"{self.path}: cannot be run ({error.strerror}); begin it with #!/bin/sh") from None
        if process.returncode:
            message = (process.stderr.decode(errors="replace").strip().splitlines() or ["no message"])[-1][:300]
            raise ConfigError(
                f"{self.path}: exit code {process.returncode} ({message}); correct the script, which must print"
                " HOST:SLOTS lines"
            )
        return process.stdout.decode(errors="replace")


class HostPool:
    """Usable hosts: those of a source, except hosts that cool down after a failure.

    Parameters
    ----------
    read : callable
        Returns hosts and slots, as `HostSource.read`.
    cool_down : float
        Seconds for which a failed host is excluded.
    clock : callable
        Replacement of time.monotonic in tests.

    Attributes
    ----------
    listed : dict of str to int
        Slots of each host, as of the last successful `refresh`.
    error : str
        Reason why the last `refresh` failed, which keeps the list; '' if it succeeded.
    """

    def __init__(
        self, read: Callable[[], dict[str, int]], cool_down: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._read, self.cool_down, self._clock = read, cool_down, clock
        self.listed: dict[str, int] = {}
        self.error = ""
        self._failed: dict[str, float] = {}
        self._reasons: dict[str, str] = {}

    def refresh(self) -> None:
        """Reread the list."""
        try:
            self.listed, self.error = self._read(), ""
        except ConfigError as error:
            self.error = str(error)

    def fail(self, host: str) -> None:
        """Exclude a host until it has cooled down."""
        self._failed[host] = self._clock() + self.cool_down

    def exclude(self, reasons: Mapping[str, str]) -> list[str]:
        """Exclude unusable hosts like failed ones; return a message for each host with a new reason."""
        new = {host: reason for host, reason in reasons.items() if self._reasons.get(host) != reason}
        for host in reasons:
            self.fail(host)
        self._reasons.update(reasons)
        return [f"hosts: {host} {reason}; it is left out" for host, reason in new.items()]

    def cooling(self) -> dict[str, float]:
        """Return the listed hosts that cool down, with the remaining seconds."""
        now = self._clock()
        return {host: end - now for host, end in self._failed.items() if end > now and host in self.listed}

    def usable(self) -> dict[str, int]:
        """Return the usable hosts with their slots."""
        cooling = self.cooling()
        return {host: slots for host, slots in self.listed.items() if host not in cooling}

    def match(self, name: str) -> str:
        """Return the listed host with a name, fully qualified or not; '' if there is none."""
        if name in self.listed:
            return name
        short = name.partition(".")[0]
        return next((host for host in self.listed if host.partition(".")[0] == short), "")


def fill(hosts: Mapping[str, int], ranks: int) -> dict[str, int]:
    """Return the number of ranks on each host, filled in order; hosts without ranks are omitted."""
    counts, remaining = {}, ranks
    for host, slots in hosts.items():
        if count := min(slots, remaining):
            counts[host] = count
        remaining -= count
    return counts


def host_command(host: str, words: Sequence[str], env: Mapping[str, str], extra: Sequence[str] = ()) -> list[str]:
    """Return the command that runs a command on a host by ssh, with `extra` options, or by mpirun's agent."""
    options = shlex.split(env.get(SSH_ARGS, ""))
    options += [] if AGENT in env else ["-o", "BatchMode=yes", "-o", "ConnectTimeout=10", *extra]
    return remote_command(host, options, words, env)


def unusable(hosts: Iterable[str], env: Mapping[str, str]) -> dict[str, str]:
    """Return the unusable hosts with reasons; all are checked in parallel, over the connections of mpirun.

    A host must respond within 15 seconds, and have this version of neondist for this Python at the same paths.
    """
    hosts = [host for host in hosts if host not in ("localhost", os.uname().nodename)]
    words = ["sh", "-c", _PROBE, "sh", sys.executable, version.__file__, f'"{version.__version__}"']

    async def check(host: str) -> int | None:
        null = asyncio.subprocess.DEVNULL
        try:
            process = await asyncio.create_subprocess_exec(
                *host_command(host, words, env), stdin=null, stdout=null, stderr=null, env=dict(env)
            )
        except OSError:
            return None
        try:
            return await asyncio.wait_for(process.wait(), SSH_TIMEOUT)
        except asyncio.TimeoutError:
            process.kill()
            await process.wait()
            return None

    async def check_all() -> list[int | None]:
        return await asyncio.gather(*map(check, hosts))

    codes = zip(hosts, asyncio.run(check_all()), strict=True)
    return {host: _REASONS.get(code, UNREACHABLE) for host, code in codes if code != 0}
