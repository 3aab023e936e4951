"""Real sshd servers on ports of this machine, and a second virtual environment."""

import getpass
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from fake_nodes import find_obstacle
from processes import list_commands

from neondist.cluster.ssh_config import USER_CONFIG_VARIABLE


def find_sshd_obstacle():
    """Return the reason that sshd is unavailable, or ''."""
    if not Path("/usr/sbin/sshd").exists() or not shutil.which("ssh"):
        return "needs openssh-server"
    return find_obstacle()


needs_sshd = pytest.mark.skipif(bool(find_sshd_obstacle()), reason=find_sshd_obstacle())


class SshServers:
    """Servers, each with a port and a host name.

    Attributes
    ----------
    env : environment in which `neondist launch` reaches the nodes by their `settings`
    host_list_env : environment in which `--hosts-from` reaches the nodes by name
    """

    def __init__(self, folder, *nodes):
        Path("/run/sshd").mkdir(exist_ok=True)
        self.key, self.ports, self.servers = folder / "a key", {}, {}
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.key], check=True)
        shutil.copy(folder / "a key.pub", folder / "authorized")
        own_hosts, listed_hosts = [], []
        for node in nodes:
            with socket.create_server(("127.0.0.1", 0)) as listener:
                self.ports[node] = port = listener.getsockname()[1]
            host = folder / f"host_{node}"
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", host], check=True)
            options = [f"HostKey={host}", f"AuthorizedKeysFile={folder / 'authorized'}", "StrictModes=no", "UsePAM=no",
                       "ListenAddress=127.0.0.1", "PidFile=none", "PermitRootLogin=prohibit-password"]  # fmt: skip
            sshd = ["/usr/sbin/sshd", "-D", "-f", "/dev/null", "-p", str(port), *(f"-o{option}" for option in options)]
            command = ["unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"', node, *sshd]
            self.servers[node] = subprocess.Popen(command, env={"PATH": os.environ["PATH"]})
            own_hosts += [f"Host {node}", "  HostName 127.0.0.1"]
            listed_hosts += [f"Host {node}", f"  Port {port}"]
        known = f"  UserKnownHostsFile {folder / 'known'}"
        common = [*own_hosts, "Host *", known, "  StrictHostKeyChecking accept-new"]
        (folder / "own").write_text("\n".join(common) + "\n")
        (folder / "list").write_text("\n".join([*listed_hosts, *common, f'  IdentityFile "{self.key}"']) + "\n")
        self.env = {USER_CONFIG_VARIABLE: str(folder / "own"), "PRTE_MCA_prte_do_not_resolve": "1"}
        self.host_list_env = {USER_CONFIG_VARIABLE: str(folder / "list")}

    def settings(self, node, **overrides):
        """Return the ssh settings of a node for a resource file."""
        return {"username": getpass.getuser(), "port": self.ports[node], "key_file": str(self.key), **overrides}

    def wait(self):
        """Wait until all servers listen."""
        for _ in range(600):
            with socket.socket() as client:
                if all(client.connect_ex(("127.0.0.1", port)) == 0 for port in self.ports.values()):
                    return
            time.sleep(0.05)

    def sessions(self, node, word):
        """Return the sessions of a node that run a command with this argument."""
        result = []
        for session in psutil.Process(self.servers[node].pid).children():
            if any(word in command for command in list_commands(session.pid)):
                result.append(session)
        return result

    def end(self):
        """Terminate all servers."""
        for server in self.servers.values():
            server.terminate()
            server.wait()


def create_environment(folder):
    """Create a second virtual environment with the packages of this one, and return its folder."""
    environment = folder / "other env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    (packages,) = environment.glob("lib/python*/site-packages")
    site_packages = next(path for path in sys.path if path.endswith("site-packages"))
    root = Path(__file__).parents[2]
    (packages / "ours.pth").write_text(f"import site; site.addsitedir({site_packages!r})\n{root}\n")
    return environment
