"""Dockerfile: agreement with manifests, and its commands; `make image` also runs those that fetch packages."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from neondist.cli.submit import DEFAULT_IMAGE
from neondist.cluster.submit import Submission
from neondist.cluster.submit.manifests import SSH_PORT, mpi_job_manifests

ROOT = Path(__file__).parents[2]
DOCKERFILE_TEXT = (ROOT / "Dockerfile").read_text()


def find_obstacle():
    """Return the reason why the image cannot be emulated here, or ''."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "a private file system needs Linux and root"
    if not all(map(shutil.which, ("unshare", "setpriv", "useradd", "ssh"))) or not Path("/usr/sbin/sshd").exists():
        return "needs unshare, setpriv, useradd, openssh-client and openssh-server"
    trial = (
        "mount -t tmpfs none /mnt && cd /mnt && mkdir a b c && mount -t overlay x -o lowerdir=/,upperdir=a,workdir=b c"
    )
    if subprocess.run(["unshare", "--mount", "--net", "sh", "-c", trial], capture_output=True, check=False).returncode:
        return "overlays of the file system are not allowed here"
    return ""


def test_image_matches_manifests():
    worker = mpi_job_manifests(Submission("toy", str(ROOT / "yaml/mnist_convnet.yaml"), 1, 1), DEFAULT_IMAGE)[-1]
    spec = worker["spec"]["mpiReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    assert f"docker build -t {spec['image']} ." in DOCKERFILE_TEXT
    assert spec["command"][-1] in DOCKERFILE_TEXT
    assert f"--uid {spec['securityContext']['runAsUser']} " in DOCKERFILE_TEXT
    assert f"'{worker['spec']['sshAuthMountPath']}/authorized_keys'" in DOCKERFILE_TEXT.replace(
        "AuthorizedKeysFile ", ""
    )
    assert f"'Port {SSH_PORT}' 'PidFile" in DOCKERFILE_TEXT
    assert spec["readinessProbe"]["tcpSocket"]["port"] == SSH_PORT
    assert set(re.findall(r"^([A-Z]+) ", DOCKERFILE_TEXT, re.MULTILINE)) == {
        "FROM",
        "RUN",
        "ENV",
        "COPY",
        "USER",
        "WORKDIR",
    }


@pytest.mark.skipif(bool(find_obstacle()), reason=find_obstacle())
def test_launcher_reaches_a_worker():
    """Connect by ssh, without questions about host keys, with the key as operators mount it."""
    words = [sys.executable, ROOT / "tools" / "run_dockerfile.py", "--last", "1"]
    process = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert (process.returncode, process.stdout) == (0, "sshd: mpiuser\n"), process.stderr
