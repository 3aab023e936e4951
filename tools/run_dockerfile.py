"""Run the Dockerfile's commands without Docker, in a temporary copy of this machine's file system.

python tools/run_dockerfile.py              # all commands (minutes, 1 GB of memory), then an experiment on two ranks
python tools/run_dockerfile.py --last 1     # only the commands after the packages: users and sshd

The copy is an overlay in a separate mount namespace (Linux, root). Finally, sshd is started as on a worker, with the
key mounted as by an operator, and ssh is run as on a launcher.
"""

import argparse
import os
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[1]
SETUP_SCRIPT = """
set -e
mount -t tmpfs none {place}
mkdir {place}/upper {place}/work {place}/root
mount -t overlay none -o lowerdir=/,upperdir={place}/upper,workdir={place}/work {place}/root
mount --rbind /dev {place}/root/dev
mount -t proc none {place}/root/proc
chroot {place}/root sh -c "$STEPS"
exec unshare --net chroot {place}/root sh -c "$CHECKS"
"""
# the base image has no user with this id
REMOVE_OTHER_USER = [
    "other=$(getent passwd 1000 | cut -d: -f1)",
    'if [ "$other" ]; then userdel "$other" 2> /dev/null; fi',
]
# operators mount the key as files owned by root
SSH_SCRIPT = """
mkdir /home/mpiuser/.ssh && cd /home/mpiuser/.ssh
ssh-keygen -q -t ecdsa -b 521 -N '' -f id_rsa && cp id_rsa.pub authorized_keys
chown root:mpiuser id_rsa id_rsa.pub authorized_keys && chmod 0640 id_rsa
as='setpriv --reuid mpiuser --regid mpiuser --clear-groups env HOME=/home/mpiuser'
ip link set lo up
$as /usr/sbin/sshd -De -f /home/mpiuser/.sshd_config & server=$!
said=$($as ssh -o ConnectionAttempts=10 127.0.0.1 id --user --name)
echo "sshd: $said"
"""
TRAINING_SCRIPT = """
export PATH=/opt/neondist/bin:$PATH
cd /home/mpiuser && cp {root}/yaml/mnist_distarray_convnet.yaml toy.yaml && chown mpiuser .
$as neondist run toy.yaml -n 2 --set epochs=1 model.optimizer.schedule.epochs=1 --output out
"""


def parse_instructions(path: Path) -> list[tuple[str, str]]:
    """Return the instructions of a Dockerfile, each with its arguments."""
    lines = [line for line in path.read_text().splitlines() if line.strip() and not line.startswith("#")]
    pairs = [line.split(None, 1) for line in "\n".join(lines).replace("\\\n", "").splitlines()]
    return [(name, arguments) for name, arguments in pairs]


def script_of_commands(last: int | None) -> str:
    """Return a shell script of all or the last commands."""
    script, runs = ["set -e", *REMOVE_OTHER_USER], 0
    count = sum(name == "RUN" for name, _ in parse_instructions(ROOT / "Dockerfile"))
    for name, arguments in parse_instructions(ROOT / "Dockerfile"):
        runs += name == "RUN"
        skipped = last is not None and runs <= count - last
        if name == "ENV":
            script.append(f"export {arguments}")
        elif name == "RUN" and not skipped:
            script.append(f"( {arguments} )")
        elif name == "COPY" and not skipped:
            place = shlex.quote(arguments.split()[1])
            script.append(
                f"mkdir -p {place} && cd {shlex.quote(str(ROOT))} && git ls-files -z | xargs -0 cp --parents -t {place}"
            )
    return "\n".join(script)


def main() -> int:
    """Run the commands, and return the exit code."""
    parser = argparse.ArgumentParser(description=textwrap.dedent(__doc__ or "").splitlines()[0])
    parser.add_argument("--last", type=int, metavar="N", help="only the last N commands")
    last = parser.parse_args().last
    words = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", SETUP_SCRIPT.format(place="/mnt")]
    path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"  # excludes this machine's Python
    env = {**os.environ, "PATH": path, "STEPS": script_of_commands(last)}
    training = TRAINING_SCRIPT.format(root=shlex.quote(str(ROOT))) if last is None else ""
    env["CHECKS"] = f"set -e\n{SSH_SCRIPT}{training}kill $server"
    return subprocess.run(words, env=env, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
