"""Resource specs: the good and bad files of resources.yaml, as files and as mappings, and generated mistakes."""

import copy
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import neondist as nd
import yaml

CASES = yaml.safe_load((Path(__file__).parent / "resources.yaml").read_text())
GOOD, BAD = CASES["good"], CASES["bad"]


def spec_of(case, how, folder):
    if how == "mapping":
        return nd.ResourceSpec(case["spec"])
    path = folder / "resources.yaml"
    path.write_text(yaml.safe_dump(case["spec"], sort_keys=False))
    return nd.ResourceSpec(path)


@pytest.mark.parametrize("how", ["mapping", "file"])
@pytest.mark.parametrize("name", GOOD)
def test_good(name, how, tmp_path):
    case = GOOD[name]
    spec = spec_of(case, how, tmp_path)
    found = {"chief": spec.chief.address, "replicas": spec.replicas, "servers": spec.servers}
    found["bandwidth"] = {node.address: node.network_bandwidth for node in spec.nodes}
    assert {key: found[key] for key in case if key != "spec"} == {key: case[key] for key in case if key != "spec"}
    assert [node.address for node in spec.nodes] == [node["address"] for node in case["spec"]["nodes"]]
    assert len(spec.devices) == sum(len(node.cpus) + len(node.gpus) for node in spec.nodes)


@pytest.mark.parametrize("how", ["mapping", "file"])
@pytest.mark.parametrize("name", BAD)
def test_bad(name, how, tmp_path):
    with pytest.raises(nd.ConfigError) as error:
        spec_of(BAD[name], how, tmp_path)
    where, _, says = str(error.value).partition(": ")
    assert BAD[name]["names"] in says
    if how == "file":
        path, line = where.rsplit(":", 1)
        assert path == str(tmp_path / "resources.yaml")
        assert 1 <= int(line) <= len((tmp_path / "resources.yaml").read_text().splitlines())


def test_ssh_settings(tmp_path):
    spec = spec_of(GOOD["two_groups"], "file", tmp_path)
    a, b = spec.ssh["a"], spec.ssh["b"]
    assert (a.username, a.port, a.key_file) == ("ana", 2201, str(tmp_path / "key_a"))
    assert b.shared_envs == {"LD_LIBRARY_PATH": "/opt/lib"}
    assert [node.ssh_config for node in spec.nodes] == [None, "a", "b"]
    assert (
        nd.ResourceSpec(GOOD["flat_ssh"]["spec"]).nodes[1].ssh_config in nd.ResourceSpec(GOOD["flat_ssh"]["spec"]).ssh
    )


@pytest.mark.parametrize(("ssh", "names"), [
    ({"username": "-oProxyCommand=x"}, "username"),
    ({"username": "a b"}, "username"),
    ({"python_venv": "a\nb"}, "python_venv"),
    ({"shared_envs": {"A B": "1"}}, "A B"),
    ({"shared_envs": {"A": "1\n2"}}, "A"),
    ({"shared_envs": ["A"]}, "shared_envs"),
    ({"port": "22"}, "port"),
    ({"port": True}, "port"),
    ({"user": "x"}, "user"),
])  # fmt: skip
def test_bad_ssh_settings(ssh, names):
    nodes = [{"address": "a", "chief": True}, {"address": "b", "ssh_config": "g"}]
    with pytest.raises(nd.ConfigError, match=rf"ssh\.g\S*{names}"):
        nd.ResourceSpec({"nodes": nodes, "ssh": {"g": ssh}})


@pytest.mark.parametrize("address", ["-oProxyCommand=x", "a b", "", "a;b", "a\n", None, [1], "$(x)", "a@b"])
def test_bad_addresses(address):
    with pytest.raises(nd.ConfigError, match=r"nodes\.0\.address"):
        nd.ResourceSpec({"nodes": [{"address": address}]})


values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 99_999) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(sorted(GOOD)), st.data(), values)
def test_any_value_anywhere_is_taken_or_refused_by_one_message(name, data, value):
    spec = copy.deepcopy(GOOD[name]["spec"])
    places = []

    def walk(node):
        for key in node if isinstance(node, dict) else range(len(node)):
            places.append((node, key))
            if isinstance(node[key], dict | list):
                walk(node[key])

    walk(spec)
    node, key = data.draw(st.sampled_from(range(len(places))).map(places.__getitem__))
    node[key] = value
    try:
        found, message = nd.ResourceSpec(spec), "taken"
    except nd.ConfigError as error:
        found, message = None, str(error)
    assert len(message.splitlines()) == 1
    assert found is None or found.chief in found.nodes
