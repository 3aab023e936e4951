"""Hosts that come and go: where their list comes from, and which of them may be used now."""

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
"""Environment variable in which the MPI operator says how many ranks each host takes: its script prints names alone."""
UNREACHABLE = "cannot be reached"
"""Why a host is not used that does not answer, or not within SSH_TIMEOUT."""
_PROBE = '[ -x "$1" ] && [ -f "$2" ] || exit 113; grep -qF "$3" "$2" || exit 114'
_REASONS: dict[int | None, str] = {
    113: f"has no {sys.executable} with neondist; install it there at the same path",
    114: "has another version of neondist; install the same one",
}
_LARGEST = 1 << 22  # bytes of a host file
_HOST = r"(?P<host>[A-Za-z0-9_][A-Za-z0-9._-]*)"
_LINE = re.compile(rf"{_HOST}(?::(?P<colon>\d{{1,6}})|(?P<rest>(?:\s+\w+=\d{{1,6}})*))")


def slots_of(resources: ResourceSpec) -> dict[str, int]:
    """Return how many ranks each node takes: one for each GPU, or, where there is none, each CPU."""
    return {node.address: len(node.gpus or node.cpus) for node in resources.nodes}


def parse_hosts(text: str, where: str) -> dict[str, int]:
    """Return hosts and their slots, in order, from lines 'HOST', 'HOST:SLOTS' or 'HOST slots=N'; '#' begins a comment.

    A host without slots has as many as the environment variable OMPI_MCA_orte_set_default_slots says, or 1.

    Raises
    ------
    ConfigError
        'WHERE:LINE: what, and the remedy'; or the variable is no positive integer.
    """
    default = os.environ.get(DEFAULT_SLOTS, "1")
    if not re.fullmatch(r"0*[1-9]\d{0,5}", default):
        raise ConfigError(f"{DEFAULT_SLOTS}: expected the number of ranks per host, got '{default}'")
    found: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        content = line.partition("#")[0].strip()
        if not content:
            continue
        match = _LINE.fullmatch(content)
        if match is None:
            raise ConfigError(f"{where}:{number}: '{content}' is not a host; expected HOST, HOST:SLOTS or HOST slots=N")
        slots = re.search(r"\bslots=(\d+)", match["rest"] or "")
        count = int(match["colon"] or (slots[1] if slots else default))
        if count:
            found[match["host"]] = found.get(match["host"], 0) + count
    return found


class HostSource:
    """A host file, a resource file (.yaml, .yml), or an executable script that prints 'HOST[:SLOTS]' lines.

    Raises
    ------
    ConfigError
        There is no such file.
    """

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise ConfigError(f"{path}: no such file; give a host file, a resource file, or an executable script")
        self.is_resources = self.path.suffix in (".yaml", ".yml")
        self.is_script = not self.is_resources and os.access(self.path, os.X_OK)

    @cached_property
    def at_start(self) -> dict[str, int]:
        """The hosts at the start of the command, read once for all that is checked and placed by them; as `read`."""
        return self.read()

    def read(self) -> dict[str, int]:
        """Return the hosts that there are now, with their slots, in order.

        Raises
        ------
        ConfigError
            The list cannot be had: the script fails, or the file is wrong.
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
            done = subprocess.run(
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
        if done.returncode:
            said = (done.stderr.decode(errors="replace").strip().splitlines() or ["no message"])[-1][:300]
            raise ConfigError(
                f"{self.path}: exit code {done.returncode} ({said}); correct the script, which must print"
                " HOST:SLOTS lines"
            )
        return done.stdout.decode(errors="replace")


class HostPool:
    """Hosts that may be used now: those of a source, without those that have failed and cool down.

    Parameters
    ----------
    read : callable
        Returns hosts and slots, as `HostSource.read`.
    cool_down : float
        Seconds for which a host that has failed is not used.
    clock : callable
        time.monotonic, but for tests.

    Attributes
    ----------
    listed : dict of str to int
        Slots of each host, as of the last `refresh`.
    error : str
        Why the source could not be read then, in which case the list stays; '' where it could.
    """

    def __init__(
        self, read: Callable[[], dict[str, int]], cool_down: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._read, self.cool_down, self._clock = read, cool_down, clock
        self.listed: dict[str, int] = {}
        self.error = ""
        self._failed: dict[str, float] = {}

    def refresh(self) -> None:
        """Reread the list."""
        try:
            self.listed, self.error = self._read(), ""
        except ConfigError as error:
            self.error = str(error)

    def fail(self, host: str) -> None:
        """Do not use a host until it has cooled down."""
        self._failed[host] = self._clock() + self.cool_down

    def cooling(self) -> dict[str, float]:
        """Return the hosts on the list that cool down, and for how many seconds still."""
        now = self._clock()
        return {host: end - now for host, end in self._failed.items() if end > now and host in self.listed}

    def usable(self) -> dict[str, int]:
        """Return hosts that may be used, with their slots."""
        cooling = self.cooling()
        return {host: slots for host, slots in self.listed.items() if host not in cooling}

    def match(self, name: str) -> str:
        """Return the listed host with this name, fully qualified or not; '' if there is none."""
        if name in self.listed:
            return name
        short = name.partition(".")[0]
        return next((host for host in self.listed if host.partition(".")[0] == short), "")


def fill(hosts: Mapping[str, int], ranks: int) -> dict[str, int]:
    """Return how many of so many ranks each host runs, filled in order; hosts without any are left out."""
    found, left = {}, ranks
    for host, slots in hosts.items():
        if take := min(slots, left):
            found[host] = take
        left -= take
    return found


def host_command(host: str, words: Sequence[str], env: Mapping[str, str], more: Sequence[str] = ()) -> list[str]:
    """Return the words that run a command on a host: by ssh, with `more` options, or by the agent of mpirun's."""
    options = shlex.split(env.get(SSH_ARGS, ""))
    options += [] if AGENT in env else ["-o", "BatchMode=yes", "-o", "ConnectTimeout=10", *more]
    return remote_command(host, options, words, env)


def unusable(hosts: Iterable[str], env: Mapping[str, str]) -> dict[str, str]:
    """Return the hosts that cannot run ranks, and why; all are asked at once, over the connections of mpirun.

    A host has to answer within 15 seconds, and to have this version of neondist for this Python, at the same paths.
    """
    hosts = [host for host in hosts if host not in ("localhost", os.uname().nodename)]
    words = ["sh", "-c", _PROBE, "sh", sys.executable, version.__file__, f'"{version.__version__}"']

    async def ask(host: str) -> int | None:
        nowhere = asyncio.subprocess.DEVNULL
        try:
            process = await asyncio.create_subprocess_exec(
                *host_command(host, words, env), stdin=nowhere, stdout=nowhere, stderr=nowhere, env=dict(env)
            )
        except OSError:
            return None
        try:
            return await asyncio.wait_for(process.wait(), SSH_TIMEOUT)
        except asyncio.TimeoutError:
            process.kill()
            await process.wait()
            return None

    async def ask_all() -> list[int | None]:
        return await asyncio.gather(*map(ask, hosts))

    codes = zip(hosts, asyncio.run(ask_all()), strict=True)
    return {host: _REASONS.get(code, UNREACHABLE) for host, code in codes if code != 0}
