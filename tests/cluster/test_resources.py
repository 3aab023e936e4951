"""Resource specs: valid and invalid ones of resources.yaml, as files and mappings, and generated ones."""

import copy
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import neondist as nd
import yaml

CASES = yaml.safe_load((Path(__file__).parent / "resources.yaml").read_text())
VALID, INVALID = CASES["good"], CASES["bad"]


def spec_of(case, source, folder):
    if source == "mapping":
        return nd.ResourceSpec(case["spec"])
    path = folder / "resources.yaml"
    path.write_text(yaml.safe_dump(case["spec"], sort_keys=False))
    return nd.ResourceSpec(path)


@pytest.mark.parametrize("source", ["mapping", "file"])
@pytest.mark.parametrize("name", VALID)
def test_valid_specs(name, source, tmp_path):
    case = VALID[name]
    spec = spec_of(case, source, tmp_path)
    actual = {"chief": spec.chief.address, "replicas": spec.replicas, "servers": spec.servers}
    actual["bandwidth"] = {node.address: node.network_bandwidth for node in spec.nodes}
    assert {key: actual[key] for key in case if key != "spec"} == {key: case[key] for key in case if key != "spec"}
    assert [node.address for node in spec.nodes] == [node["address"] for node in case["spec"]["nodes"]]
    assert len(spec.devices) == sum(len(node.cpus) + len(node.gpus) for node in spec.nodes)


@pytest.mark.parametrize("source", ["mapping", "file"])
@pytest.mark.parametrize("name", INVALID)
def test_invalid_specs(name, source, tmp_path):
    with pytest.raises(nd.ConfigError) as error:
        spec_of(INVALID[name], source, tmp_path)
    location, _, message = str(error.value).partition(": ")
    assert INVALID[name]["names"] in message
    if source == "file":
        path, line = location.rsplit(":", 1)
        assert path == str(tmp_path / "resources.yaml")
        assert 1 <= int(line) <= len((tmp_path / "resources.yaml").read_text().splitlines())


def test_classes_are_public():
    spec = nd.ResourceSpec({"nodes": [{"address": "a", "gpus": [0, 2], "chief": True}], "ssh": {"username": "u"}})
    assert spec.chief == nd.Node("a", (0,), (0, 2), True, "default")
    assert {nd.Device("a", "gpu", 2), nd.Device("a", "cpu", 0)} < {*spec.devices}
    assert spec.ssh == {"default": nd.SSHConfig("u")}


def test_ssh_settings(tmp_path):
    spec = spec_of(VALID["two_groups"], "file", tmp_path)
    a, b = spec.ssh["a"], spec.ssh["b"]
    assert (a.username, a.port, a.key_file) == ("ana", 2201, str(tmp_path / "key_a"))
    assert b.shared_envs == {"LD_LIBRARY_PATH": "/opt/lib"}
    assert [node.ssh_config for node in spec.nodes] == [None, "a", "b"]
    assert (
        nd.ResourceSpec(VALID["flat_ssh"]["spec"]).nodes[1].ssh_config in nd.ResourceSpec(VALID["flat_ssh"]["spec"]).ssh
    )


def test_key_file_of_an_unknown_user(tmp_path):
    """Use the path as it is, like a shell."""
    (tmp_path / "r.yaml").write_text("nodes: [{address: a}]\nssh: {key_file: ~no_such_user/key}\n")
    assert nd.ResourceSpec(tmp_path / "r.yaml").ssh["default"].key_file == str(tmp_path / "~no_such_user/key")


def test_key_file_that_is_a_folder(tmp_path):
    resources = {**VALID["flat_ssh"]["spec"], "ssh": {"username": "ana", "key_file": str(tmp_path)}}
    with pytest.raises(nd.ConfigError, match=r"key_file: .* is not a file; give the path of a private key"):
        nd.ResourceSpec(resources)


@pytest.mark.parametrize(("ssh", "field"), [
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
def test_bad_ssh_settings(ssh, field):
    nodes = [{"address": "a", "chief": True}, {"address": "b", "ssh_config": "g"}]
    with pytest.raises(nd.ConfigError, match=rf"ssh\.g\S*{field}"):
        nd.ResourceSpec({"nodes": nodes, "ssh": {"g": ssh}})


@pytest.mark.parametrize("address", ["-oProxyCommand=x", "a b", "", "a;b", "a\n", None, [1], "$(x)", "a@b"])
def test_bad_addresses(address):
    with pytest.raises(nd.ConfigError, match=r"nodes\.0\.address"):
        nd.ResourceSpec({"nodes": [{"address": address}]})


def test_bytes_are_rejected():
    with pytest.raises(nd.ConfigError, match="resources: expected text"):
        nd.ResourceSpec(b"resources.yaml")


values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 99_999) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(sorted(VALID)), st.data(), values)
def test_any_value_is_accepted_or_rejected_with_one_message(name, data, value):
    spec = copy.deepcopy(VALID[name]["spec"])
    entries = []

    def walk(node):
        for key in node if isinstance(node, dict) else range(len(node)):
            entries.append((node, key))
            if isinstance(node[key], dict | list):
                walk(node[key])

    walk(spec)
    node, key = data.draw(st.sampled_from(range(len(entries))).map(entries.__getitem__))
    node[key] = value
    try:
        resources, message = nd.ResourceSpec(spec), "accepted"
    except nd.ConfigError as error:
        resources, message = None, str(error)
    assert len(message.splitlines()) == 1
    assert resources is None or resources.chief in resources.nodes
