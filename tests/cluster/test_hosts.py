"""Lists of hosts from files and scripts, and usable hosts."""

import os
import re
import signal
import subprocess
import threading
import time
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from processes import is_alive
from waiting import wait_until

from neondist.cluster import ResourceSpec
from neondist.cluster.hosts import (
    HostPool,
    HostSource,
    command_on_host,
    find_unusable_hosts,
    parse_hosts,
    ranks_per_host,
)
from neondist.cluster.ssh_config import format_ssh_command, unreachable_host_remedy, write_ssh_config
from neondist.errors import ConfigError
from neondist.launcher.placement import HostListPlacement

NAMES = st.from_regex(r"[a-z0-9][a-z0-9.-]{0,8}", fullmatch=True)
HOST_LINE_FORMATS = ("{0}:{1}", "{0} slots={1}", "  {0} slots={1} max_slots=9  # two", "{0}\tslots={1}")


@given(st.dictionaries(NAMES, st.tuples(st.integers(1, 99), st.sampled_from(HOST_LINE_FORMATS))))
def test_line_formats(hosts):
    text = "# hosts\n\n" + "\n".join(form.format(name, slots) for name, (slots, form) in hosts.items())
    assert parse_hosts(text, "hosts") == {name: slots for name, (slots, _) in hosts.items()}


def test_repeated_and_empty_lines():
    assert parse_hosts("a\nb:2\na:3\nc:0\n", "x") == {"a": 4, "b": 2}


def test_default_slots_from_environment(monkeypatch):
    """Read bare names, as the script of the MPI operator prints them."""
    monkeypatch.setenv("OMPI_MCA_orte_set_default_slots", "3")
    assert parse_hosts("a\nb:2\nc slots=1\nd max_slots=9\n", "x") == {"a": 3, "b": 2, "c": 1, "d": 3}
    monkeypatch.setenv("OMPI_MCA_orte_set_default_slots", "two")
    with pytest.raises(ConfigError, match="OMPI_MCA_orte_set_default_slots: expected the number of ranks per host"):
        parse_hosts("a\n", "x")


@pytest.mark.parametrize("line", ["-x", "a b", "a:b", "a: 2", "$(id)", "a slots=-1", "a;b", "a:1:2"])
def test_invalid_hosts(line):
    with pytest.raises(ConfigError, match=r"hosts:2: '.*' is not a host; expected HOST"):
        parse_hosts(f"a\n{line}\n", "hosts")


@given(st.dictionaries(NAMES, st.integers(1, 4), max_size=5), st.integers(0, 20))
def test_hosts_are_filled_in_order(hosts, ranks):
    filled = ranks_per_host(hosts, ranks)
    assert sum(filled.values()) == min(ranks, sum(hosts.values()))
    assert list(filled) == list(hosts)[: len(filled)]
    assert all(filled[host] == hosts[host] for host in list(filled)[:-1])


def write_script(path, text):
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


def test_sources(tmp_path):
    (tmp_path / "hosts").write_text("a slots=2\nb\n")
    (tmp_path / "r.yaml").write_text("nodes: [{address: a, cpus: [0, 1]}]")
    assert HostSource(str(tmp_path / "hosts")).read() == {"a": 2, "b": 1}
    assert HostSource(str(tmp_path / "r.yaml")).read() == {"a": 2}
    discover = write_script(tmp_path / "discover_hosts.sh", "#!/bin/sh\necho w-0.job.svc:1\necho w-1.job.svc:1\n")
    assert HostSource(discover).read() == {"w-0.job.svc": 1, "w-1.job.svc": 1}


def test_unreadable_sources(tmp_path):
    (tmp_path / "no.sh").write_text("#!/bin/sh\necho a\n")
    for path, message in (
        (str(tmp_path / "none"), "no such file"),
        (str(tmp_path / "no.sh"), "chmod"),
        (write_script(tmp_path / "fails", "#!/bin/sh\necho no network >&2; exit 3\n"), r"exit code 3 \(no network\)"),
        (write_script(tmp_path / "prints", "#!/bin/sh\necho a b\n"), "prints: output:1: 'a b' is not a host"),
    ):
        with pytest.raises(ConfigError, match=message):
            HostSource(path).read()


def test_script_that_hangs(tmp_path, monkeypatch):
    """End the script and its children at the time limit."""
    monkeypatch.setattr("neondist.cluster.hosts.HOST_SCRIPT_TIMEOUT", 1.0)
    text = f"#!/bin/sh\nsh -c 'echo $$ > {tmp_path}/pid; sleep 300; :'\necho a\n"
    source = HostSource(write_script(tmp_path / "hangs", text))
    with pytest.raises(ConfigError, match="hangs: has not ended within 1 s; run it by hand to see why"):
        source.read()
    wait_until(lambda: not is_alive(int((tmp_path / "pid").read_text())), 10)


def test_script_with_background_child(tmp_path):
    """Return the output of a script that has ended, although a child of it keeps its output open."""
    text = f"#!/bin/sh\nsleep 300 &\necho $! > {tmp_path}/pid\necho a:2\n"
    try:
        start = time.monotonic()
        assert HostSource(write_script(tmp_path / "hosts", text)).read() == {"a": 2}
        assert time.monotonic() - start < 20
    finally:
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)


class SlowlyStartedProcess(subprocess.Popen):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        time.sleep(0.3)


@pytest.mark.parametrize("process", [subprocess.Popen, SlowlyStartedProcess])
def test_closed_source_ends_its_script(tmp_path, monkeypatch, process):
    """End a script that runs in another thread, with its children, and wait for its end."""
    monkeypatch.setattr(subprocess, "Popen", process)
    source = HostSource(write_script(tmp_path / "hangs", f"#!/bin/sh\necho $$ > {tmp_path}/pid\nsleep 300\n"))
    errors = []

    def read():
        try:
            source.read()
        except ConfigError as error:
            errors.append(str(error))

    thread = threading.Thread(target=read)
    thread.start()
    wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), 10)
    source.wait_closed()
    assert not is_alive(int((tmp_path / "pid").read_text()))
    thread.join()
    assert "hangs: ended before it had printed the hosts" in errors[0]


def test_failed_host_cools_down():
    now, hosts = [0.0], {"a": 1, "b.cluster": 2}
    pool = HostPool(lambda: dict(hosts), 60.0, lambda: now[0])
    pool.refresh_host_list()
    assert (pool.listed_host_of("b"), pool.listed_host_of("c")) == ("b.cluster", "")
    pool.exclude_temporarily("b.cluster")
    now[0] = 59.0
    assert (pool.list_usable_hosts(), pool.list_excluded_hosts()) == ({"a": 1}, {"b.cluster": 1.0})
    now[0] = 60.0
    assert pool.list_usable_hosts() == hosts


def test_last_list_is_kept_if_the_source_fails():
    answers = [{"a": 1}, ConfigError("no network"), {"b": 1}]

    def read():
        answer = answers.pop(0)
        if isinstance(answer, ConfigError):
            raise answer
        return answer

    pool = HostPool(read, 1.0)
    for listed, error in (({"a": 1}, ""), ({"a": 1}, "no network"), ({"b": 1}, "")):
        pool.refresh_host_list()
        assert (pool.listed_slots, pool.refresh_error) == (listed, error)


def test_ssh_config_of_listed_hosts(tmp_path, monkeypatch):
    """The check of a host, mpirun, and the commands shown to the user use the same ssh_config."""
    config = tmp_path / "config"
    config.touch()
    monkeypatch.chdir(tmp_path)
    options = ["-o", "BatchMode=yes", "-o", "ConnectTimeout=10"]
    for text in (str(config), "config"):
        for variables, words in (({}, []), ({"PRTE_MCA_plm_ssh_args": "-F own"}, ["-F", "own"])):  # the last -F applies
            env = {"NEONDIST_SSH_CONFIG": text, **variables}
            expected = ["-F", str(config), *words]
            assert command_on_host("a", ["true"], env) == ["ssh", *expected, *options, "a", "true"]
            assert f"`{' '.join(['ssh', *expected, 'a'])}`" in unreachable_host_remedy("a", env)
            assert HostListPlacement({"a": 1}).mpirun_environment(env)["PRTE_MCA_plm_ssh_args"] == " ".join(expected)
        nodes = [{"address": "a", "chief": True}, {"address": "b"}]
        resources = ResourceSpec({"nodes": nodes, "ssh": {"username": "u", "port": 7}})
        ssh = next(iter(resources.ssh.values()))
        assert format_ssh_command(resources.nodes[1], ssh, env) == f"ssh -F {config} -p 7 u@b"
        write_ssh_config(resources, tmp_path / "written", env)
        assert f'Include "{config}"\n' in (tmp_path / "written").read_text()
    assert HostListPlacement({"a": 1}).mpirun_environment({}) == {}
    assert unreachable_host_remedy("a", {}) == "correct the list, or the error shown by `ssh a`"


def test_no_ssh_config_of_the_user(tmp_path):
    """NEONDIST_SSH_CONFIG=/dev/null: ssh includes no file that everyone can write to."""
    write_ssh_config(
        ResourceSpec({"nodes": [{"address": "a"}]}), tmp_path / "written", {"NEONDIST_SSH_CONFIG": os.devnull}
    )
    text = (tmp_path / "written").read_text()
    assert re.findall("Include .*", text) == ["Include /etc/ssh/ssh_config"]


@pytest.mark.parametrize(("name", "message"), [("none", "none does not exist"), ("a b", "without spaces")])
def test_invalid_ssh_config(tmp_path, name, message):
    (tmp_path / "a b").touch()
    env = {"NEONDIST_SSH_CONFIG": str(tmp_path / name)}
    for read in (partial(find_unusable_hosts, ["a"]), HostListPlacement({"a": 1}).mpirun_environment):
        with pytest.raises(ConfigError, match=f"NEONDIST_SSH_CONFIG: .*{message}"):
            read(env)


def test_names_of_this_machine_need_no_ssh(tmp_path):
    names = ["localhost", "127.0.0.1", os.uname().nodename]
    assert find_unusable_hosts([*names, "a"], {"PRTE_MCA_plm_ssh_agent": str(tmp_path / "none")}).keys() == {"a"}


def test_unusable_hosts(tmp_path, monkeypatch):
    agent = write_script(
        tmp_path / "agent", '#!/bin/sh\n[ "$1" != b ] || exit 255\n[ "$1" != c ] || exit 0\neval "$2"\n'
    )
    env = {"PRTE_MCA_plm_ssh_agent": agent}
    reasons = find_unusable_hosts(["a", "b", "c"], env)  # the key of c has a command in authorized_keys
    assert reasons.keys() == {"b", "c"}
    assert reasons["b"] == "cannot be reached"
    assert reasons["c"].startswith("does not run commands; correct")
    assert find_unusable_hosts(["a"], {"PRTE_MCA_plm_ssh_agent": str(tmp_path / "none")}) == {"a": "cannot be reached"}
    monkeypatch.setattr("neondist.version.__version__", "0.0.1")
    assert find_unusable_hosts(["a"], env) == {"a": "has a different version of neondist; install the same version"}
    for name, value in (("sys.executable", "/nowhere/python"), ("neondist.version.__file__", "/nowhere")):
        with monkeypatch.context() as patch:
            patch.setattr(name, value)
            assert find_unusable_hosts(["a"], env)["a"].startswith("has no /")
