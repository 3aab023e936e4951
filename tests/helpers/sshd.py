"""Real sshd on ports of this machine, and a second virtual environment."""

import getpass
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
from fake_nodes import missing
from processes import commands

from neondist.cluster.ssh_config import OWN


def without_sshd():
    """Return why there can be no sshd here, '' where there can."""
    if not Path("/usr/sbin/sshd").exists() or not shutil.which("ssh"):
        return "needs openssh-server"
    return missing()


class Sshd:
    """Servers on ports of their own, each under a host name of its own.

    Attributes
    ----------
    env : what `neondist launch` needs to reach them with the `settings` of each
    env_of_list : what `--hosts-from` needs to reach them by name
    """

    def __init__(self, folder, *nodes):
        Path("/run/sshd").mkdir(exist_ok=True)
        self.key, self.ports, self.servers = folder / "a key", {}, {}
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.key], check=True)
        shutil.copy(folder / "a key.pub", folder / "authorized")
        own, named = [], []
        for node in nodes:
            with socket.create_server(("127.0.0.1", 0)) as free:
                self.ports[node] = port = free.getsockname()[1]
            host = folder / f"host_{node}"
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", host], check=True)
            options = [f"HostKey={host}", f"AuthorizedKeysFile={folder / 'authorized'}", "StrictModes=no", "UsePAM=no",
                       "ListenAddress=127.0.0.1", "PidFile=none", "PermitRootLogin=prohibit-password"]  # fmt: skip
            words = ["/usr/sbin/sshd", "-D", "-f", "/dev/null", "-p", str(port), *(f"-o{one}" for one in options)]
            words = ["unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"', node, *words]
            self.servers[node] = subprocess.Popen(words, env={"PATH": os.environ["PATH"]})
            own += [f"Host {node}", "  HostName 127.0.0.1"]
            named += [f"Host {node}", f"  Port {port}"]
        rest = [*own, "Host *", f"  UserKnownHostsFile {folder / 'known'}", "  StrictHostKeyChecking accept-new"]
        (folder / "own").write_text("\n".join(rest) + "\n")
        (folder / "list").write_text("\n".join([*named, *rest, f'  IdentityFile "{self.key}"']) + "\n")
        self.env = {OWN: str(folder / "own"), "PRTE_MCA_prte_do_not_resolve": "1"}
        self.env_of_list = {"PRTE_MCA_plm_ssh_args": f"-F {folder / 'list'}"}

    def settings(self, node, **more):
        """Return the ssh group of a node in a resource file."""
        return {"username": getpass.getuser(), "port": self.ports[node], "key_file": str(self.key), **more}

    def wait(self):
        """Wait until they listen."""
        for _ in range(600):
            with socket.socket() as trial:
                if all(trial.connect_ex(("127.0.0.1", port)) == 0 for port in self.ports.values()):
                    return
            time.sleep(0.05)

    def sessions(self, node, word):
        """Return the sessions of a node in which a command with this word runs."""
        found = []
        for session in psutil.Process(self.servers[node].pid).children():
            if any(word in command for command in commands(session.pid)):
                found.append(session)
        return found

    def end(self):
        """End them."""
        for one in self.servers.values():
            one.terminate()
            one.wait()


def other_environment(folder):
    """Return a virtual environment beside this one, with its packages."""
    made = folder / "other env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(made)], check=True)
    (packages,) = made.glob("lib/python*/site-packages")
    ours = next(path for path in sys.path if path.endswith("site-packages"))
    root = Path(__file__).parents[2]
    (packages / "ours.pth").write_text(f"import site; site.addsitedir({ours!r})\n{root}\n")
    return made
