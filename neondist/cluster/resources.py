"""Resource specs: the nodes of a job, their devices and SSH settings, from a YAML file or a mapping."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from .. import yaml_nodes
from ..registry import suggest
from ..registry.arguments import type_checked
from ..registry.ranges import Index, Positive, between
from ..yaml_nodes import field_error, join_path, node_error, parse_file, to_node, typed_value
from ..yaml_nodes.convert import convert_fields, convert_node

_SSH_FIELDS = {
    "username": yaml_nodes.Node,
    "port": Annotated[int, between(1, 65535)],
    "key_file": yaml_nodes.Node,
    "python_venv": yaml_nodes.Node,
    "shared_envs": dict[str, yaml_nodes.Node],
}
_NODE_FIELDS = {
    "address": str | int,
    "cpus": tuple[Index, ...],
    "gpus": tuple[Index, ...],
    "chief": bool,
    "ssh_config": str,
    "network_bandwidth": Positive,
}
SSH_CONFIG_OF_ALL_NODES = "default"
"""Name of a flat `ssh:` mapping, which applies to all nodes."""
_LOOPBACK_NAMES = "localhost", "localhost.localdomain", "localhost4", "localhost6", "ip6-localhost", "ip6-loopback"


@dataclass(frozen=True)
class SSHConfig:
    """SSH settings of a node.

    Attributes
    ----------
    username : str
        '': as in the user's ssh_config, by default the user of this process.
    port : int
    key_file : str or None
        Absolute path; None: OpenSSH's default keys.
    python_venv : str
        Absolute path of the node's virtual environment, or 'source PATH/bin/activate'; '': this Python's path is used.
    shared_envs : dict of str to str
        Environment variables of the node's ranks.
    """

    username: str = ""
    port: int = 22
    key_file: str | None = None
    python_venv: str = ""
    shared_envs: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Node:
    """A machine of a job.

    Attributes
    ----------
    address : str
        Host name or IP address.
    cpus, gpus : tuple of int
        Indices of its devices.
    chief : bool
        Whether the job is started there.
    ssh_config : str or None
        A name in `ResourceSpec.ssh`; None for a node that is reached without SSH.
    network_bandwidth : float
        In Gbit/s.
    """

    address: str
    cpus: tuple[int, ...] = (0,)
    gpus: tuple[int, ...] = ()
    chief: bool = False
    ssh_config: str | None = None
    network_bandwidth: float = 1


@dataclass(frozen=True)
class Device:
    """A GPU or a CPU core of a node.

    Attributes
    ----------
    node : str
        Address of the node.
    kind : {'gpu', 'cpu'}
    index : int
    """

    node: str
    kind: str
    index: int


class ResourceSpec:
    """Resource specification: the nodes and devices of a job.

    Parameters
    ----------
    resources : path or mapping
        YAML file or its contents. `nodes`: a list of {address, cpus, gpus, chief, ssh_config, network_bandwidth};
        `ssh`: a mapping of names to {username, port, key_file, python_venv, shared_envs}, or a single such mapping for
        all nodes. Relative paths of key files are relative to the folder of the YAML file.

    Attributes
    ----------
    nodes : list of Node
    ssh : dict of str to SSHConfig
    path : Path or None
        Path of the file, if any.
    lowest_bandwidth : float or None
        Lowest given `network_bandwidth`; None if there is none.

    Raises
    ------
    ConfigError
        If the specification is invalid: 'FILE:LINE: field: problem; remedy'.
    """

    path: Path | None

    @type_checked
    def __init__(self, resources: str | os.PathLike[str] | Mapping[str, Any]) -> None:
        if isinstance(resources, Mapping):
            self.path, root, folder = None, to_node(dict(resources), "resources"), Path()
        else:
            self.path = path = Path(resources)
            root, folder = parse_file(path) or yaml_nodes.Node(None, f"{path}:1"), path.parent
        top = convert_fields(root, "", {"nodes": yaml_nodes.Node, "ssh": yaml_nodes.Node})
        self.ssh = _parse_ssh_configs(top["ssh"], folder) if "ssh" in top else {}
        if "nodes" not in top:
            raise node_error(root, "nodes", "missing; list the machines, such as [{address: localhost}]")
        entries = typed_value(top["nodes"], "nodes", list, "a list")
        if not entries:
            raise node_error(top["nodes"], "nodes", "is empty; list at least one machine, such as {address: localhost}")
        is_only_node = len(entries) == 1
        self.nodes = [
            self._parse_node(node, join_path("nodes", index), is_only_node) for index, node in enumerate(entries)
        ]
        given = [node for node, entry in zip(self.nodes, entries, strict=True) if "network_bandwidth" in entry.value]
        self.lowest_bandwidth = min((node.network_bandwidth for node in given), default=None)
        self._check_chief(top["nodes"], entries)
        self._check_addresses(entries)

    @property
    def chief(self) -> Node:
        """The node on which the job is started."""
        return next(node for node in self.nodes if node.chief)

    @property
    def devices(self) -> list[Device]:
        """All devices, by node: GPUs, then CPUs."""
        kinds = ((node, kind, at) for node in self.nodes for kind in ("gpu", "cpu") for at in getattr(node, f"{kind}s"))
        return [Device(node.address, kind, at) for node, kind, at in kinds]

    @property
    def ranks_by_node(self) -> list[int]:
        """Number of ranks on each node: one for each GPU or, on nodes without GPUs, each CPU."""
        return [len(node.gpus or node.cpus) for node in self.nodes]

    @property
    def replicas(self) -> int:
        """Number of data-parallel copies: all GPUs, and the CPUs of nodes without GPUs."""
        return sum(self.ranks_by_node)

    @property
    def servers(self) -> int:
        """Number of devices that can own parameters: CPUs, at least one per node."""
        return sum(len(node.cpus) for node in self.nodes)

    def _parse_node(self, node: yaml_nodes.Node, path: str, is_only_node: bool) -> Node:
        fields = convert_fields(node, path, _NODE_FIELDS, ["address"])
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._:-]*|[0-9A-Fa-f:]+", str(fields["address"])):
            raise field_error(node, path, "address", f"'{fields['address']}' is not a host name or IP address")
        if ":" in str(fields["address"]) and not _is_ip_address(str(fields["address"])):
            raise field_error(
                node, path, "address", f"'{fields['address']}' is not an IP address; give a port below ssh"
            )
        for kind in ("cpus", "gpus"):
            indices = fields.get(kind, ())
            if repeated := [index for index in indices if indices.count(index) > 1]:
                raise field_error(node, path, kind, f"device {repeated[0]} is listed twice; list each once")
        fields["chief"] = fields.get("chief", False) or is_only_node
        fields["ssh_config"] = self._ssh_config_name(node, fields, path)
        fields["cpus"] = fields.get("cpus") or (0,)
        return Node(**fields | {"address": str(fields["address"])})

    def _ssh_config_name(self, node: yaml_nodes.Node, fields: Mapping[str, Any], path: str) -> str | None:
        default = SSH_CONFIG_OF_ALL_NODES if SSH_CONFIG_OF_ALL_NODES in self.ssh and len(self.ssh) == 1 else None
        name: str | None = fields.get("ssh_config", default)
        if name is not None and name not in self.ssh:
            raise field_error(node, path, "ssh_config", f"no entry '{name}' below ssh{suggest(name, self.ssh)}")
        if name is None and not fields["chief"]:
            remedy = f"; choose from {', '.join(self.ssh)}" if self.ssh else ", and an entry of that name below ssh"
            raise field_error(node, path, "ssh_config", f"missing; every node but the chief needs one{remedy}")
        return name

    def _check_chief(self, parent: yaml_nodes.Node, entries: list[yaml_nodes.Node]) -> None:
        chiefs = [index for index, node in enumerate(self.nodes) if node.chief]
        if not chiefs:
            raise node_error(
                parent, "nodes", "no node is the chief; add chief: true to the one where the job is started"
            )
        if len(chiefs) > 1:
            first, second = (self.nodes[index].address for index in chiefs[:2])
            path = join_path(join_path("nodes", chiefs[1]), "chief")
            raise node_error(entries[chiefs[1]], path, f"two nodes are marked as chief, {first} and {second}; keep one")

    def _check_addresses(self, entries: list[yaml_nodes.Node]) -> None:
        indices: dict[str, int] = {}
        for index, (entry, node) in enumerate(zip(entries, self.nodes, strict=True)):
            path = join_path(join_path("nodes", index), "address")
            key = _normalise_address(node.address)
            if key in indices:
                raise node_error(
                    entry, path, f"'{node.address}' is listed twice; list each machine once, with all devices"
                )
            indices[key] = index
        loopback_keys = [key for key in indices if _is_loopback(key)]
        names = [key for key in loopback_keys if _is_loopback_name(key)]
        if loopback_keys and len(self.nodes) > 1 and (names or len(loopback_keys) < len(self.nodes)):
            index = indices[[*names, *loopback_keys][0]]
            address = self.nodes[index].address
            remedy = "give the address by which the other nodes reach it"
            path = join_path(join_path("nodes", index), "address")
            problem = f"'{address}' is a loopback address, which other nodes cannot reach"
            raise node_error(entries[index], path, f"{problem}; {remedy}")


def _normalise_address(address: str) -> str:
    """Return the same text for all spellings of a host name or IP address."""
    return str(ipaddress.ip_address(address)) if _is_ip_address(address) else address.lower().rstrip(".")


def _is_ip_address(text: str) -> bool:
    with suppress(ValueError):
        return bool(ipaddress.ip_address(text))
    return False


def _is_loopback(address: str) -> bool:
    """Return whether a normalised address refers to the local machine on every machine."""
    return ipaddress.ip_address(address).is_loopback if _is_ip_address(address) else _is_loopback_name(address)


def _is_loopback_name(address: str) -> bool:
    """Return whether a normalised address is a common name of the machine itself (see RFC 6761)."""
    return address.endswith(".localhost") or address in _LOOPBACK_NAMES


def _parse_ssh_configs(node: yaml_nodes.Node, folder: Path) -> dict[str, SSHConfig]:
    entries = typed_value(node, "ssh", dict, "a mapping of names to SSH settings")
    if any(name in _SSH_FIELDS and not isinstance(child.value, dict) for name, child in entries.items()):
        return {SSH_CONFIG_OF_ALL_NODES: _parse_ssh_config(node, "ssh", folder)}
    return {name: _parse_ssh_config(child, join_path("ssh", name), folder) for name, child in entries.items()}


def _parse_ssh_config(node: yaml_nodes.Node, path: str, folder: Path) -> SSHConfig:
    fields = convert_fields(node, path, _SSH_FIELDS)
    for name in ("username", "key_file", "python_venv"):
        if name in fields:
            fields[name] = _parse_line(fields[name], join_path(path, name))
    if re.search(r"^-|[\s@]", fields.get("username", "")):
        raise field_error(node, path, "username", f"invalid; expected a user name, got '{fields['username']}'")
    if "key_file" in fields:  # the launcher checks relative paths, whose files may be created later
        file = Path(os.path.expanduser(fields["key_file"]))
        if not fields["key_file"]:
            raise field_error(node, path, "key_file", "is empty; give the path of a private key, or leave it out")
        if file.is_absolute() and not file.is_file():
            problem = "is not a file" if file.exists() else "does not exist"
            raise field_error(node, path, "key_file", f"'{file}' {problem}; give the path of a private key")
        fields["key_file"] = str((folder / file).absolute())
    for name, child in fields.get("shared_envs", {}).items():
        variable = join_path(join_path(path, "shared_envs"), name)
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise node_error(child, variable, "invalid name; expected letters, digits and _")
        fields["shared_envs"][name] = _parse_line(child, variable)
    return SSHConfig(**fields)


def _parse_line(node: yaml_nodes.Node, path: str) -> str:
    """Return a single line of text; numbers are read as text."""
    text = str(convert_node(node, str | int | float, path))
    if not text.isprintable():
        raise node_error(node, path, "expected text of one line without control characters")
    return text
