"""Choice of the best exact scheme for each layer from a machine's profile."""

import pytest

import neondist as nd
from neondist.errors import ConfigError
from neondist.halo import as_scheme, scheme_text
from neondist.plan.choices import choose_schemes
from neondist.system.machine import Link, Machine, MachineProfile, write_machine

SHAPE, GRID = (48, 48, 2), nd.GridShape(1, 3, 3)
COSTLY_MESSAGES = MachineProfile(latency=1.0)
"""messages cost more than computing"""
CHEAP_MESSAGES = MachineProfile(latency=1e-9, bandwidth=1e15, flops_per_second=1e6)


def conv(**options):
    return nd.ConvLayerDist(8, 3, padding=1, **options)


NETWORKS = {
    "chain": lambda: [conv() for _ in range(5)],
    "normalised": lambda: [nd.BatchNormLayerDist(), conv(), nd.BatchNormLayerDist(), conv()],
    "refused": lambda: [conv(), nd.LCNLayerDist(3), conv(), conv(), nd.DeconvLayerDist(2, 3), conv(), conv()],
    "branches": lambda: [conv(), nd.Sum([[conv(), conv()], [conv()]]), conv(), conv(), nd.FCLayerDist(3)],
    "wrap": lambda: [conv(padding_mode="wrap"), conv(), conv(padding_mode="reflect"), conv()],
}


def choose_for_network(name, profile):
    model = nd.ConvnetDist(NETWORKS[name]())
    return model, choose_schemes(model.chain, SHAPE, GRID, profile)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("chain", ["overlap_tile"] * 5),
        ("normalised", ["overlap_tile(statistics=global)"] * 2),
        ("refused", ["overlap_tile", "halo", *["deep_halo(layers=2)"] * 2, "halo", *["deep_halo(layers=2)"] * 2]),
        ("branches", ["overlap_tile", *["deep_halo(layers=2)"] * 2, *["deep_halo(layers=2)"] * 2, "halo"]),
        ("wrap", ["halo", *["deep_halo(layers=3)"] * 3]),
    ],
)
def test_costly_messages_are_avoided(name, expected):
    _, choices = choose_for_network(name, COSTLY_MESSAGES)
    assert [choice.scheme for choice in choices] == expected
    assert sum(choice.seconds for choice in choices) < sum(choice.halo_scheme_seconds for choice in choices) - 1


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize(
    "profile", [COSTLY_MESSAGES, CHEAP_MESSAGES, MachineProfile(latency=1e-4)], ids=["costly", "cheap", "moderate"]
)
def test_planned_costs_match_the_choices(name, profile):
    model, choices = choose_for_network(name, profile)
    by_name = {choice.layer: choice for choice in choices}
    for layer in model.leaves:
        if str(layer.name) in by_name:
            layer.scheme = as_scheme(by_name[str(layer.name)].scheme)
    middle_tile = 4
    for index, plan in enumerate(model.plan(SHAPE, GRID)):
        if plan.name not in by_name:
            continue
        forward, adjoint = plan.sent_message_sizes(middle_tile)
        backward = adjoint if index or plan.adds_output_halo else []
        forward_seconds = profile.message_seconds(len(forward), sum([] if plan.adds_output_halo else adjoint))
        choice = by_name[plan.name]
        if not plan.halo_cells_by_tile[middle_tile]:
            assert not forward + adjoint
        elif choice.scheme == "halo" and not plan.adds_output_halo:
            assert choice.seconds == pytest.approx(
                forward_seconds + profile.message_seconds(len(backward), sum(backward)), rel=1e-3
            )
    assert sum(choice.seconds for choice in choices) <= sum(choice.halo_scheme_seconds for choice in choices) * (
        1 + 1e-12
    )


def test_measured_times_override_the_speed():
    profile = MachineProfile(
        latency=1e-3, flops_per_second=1e15, seconds_per_cell={f"conv{n}": 1.0 for n in range(1, 6)}
    )
    assert {choice.scheme for choice in choose_for_network("chain", profile)[1][1:]} == {"halo"}


def test_auto_uses_the_profile_of_a_machine(tmp_path):
    node, network = Link(1e-9, 1e15), Link(1.0, 1e9)
    write_machine(tmp_path / "m.yaml", Machine(4, node, network, speed=1e10), "a comment")
    scheme = nd.schemes.Auto(machine=str(tmp_path / "m.yaml"))
    assert scheme.planner_profile(4) == MachineProfile(1e-9, 1e15, 1e10)
    assert scheme.planner_profile(9, samples=7) == MachineProfile(1.0, 1e9, 1e10, 7)
    overridden = nd.schemes.Auto(machine=str(tmp_path / "m.yaml"), latency=2.0, samples=3)
    assert overridden.planner_profile(9, samples=7).samples_per_replica == 3
    assert scheme_text(as_scheme(scheme_text(scheme))) == scheme_text(scheme)
    layers = [conv() for _ in range(5)]
    exchanges = [
        sum(plan.halo_cells_by_tile[0] > 0 for plan in nd.ConvnetDist(layers, scheme=scheme).plan(SHAPE, grid))
        for grid in (nd.GridShape(1, 2, 2), GRID)
    ]
    assert exchanges == [5, 1]
    with pytest.raises(ConfigError, match=r"no\.yaml: no such file"):
        nd.schemes.Auto(machine="no.yaml")


def test_auto_uses_the_samples_of_a_replica():
    layers = [conv() for _ in range(4)]
    scheme = nd.schemes.Auto(
        latency=1e-3, bandwidth=1e15, speed=1e9
    )  # a message costs as much as computing some samples
    exchanges = [
        sum(
            plan.halo_cells_by_tile[4] > 0
            for plan in nd.ConvnetDist(layers, scheme=scheme).plan(SHAPE, GRID, batch_size=n)
        )
        for n in (1, 10**5)
    ]
    assert exchanges == [1, 4]
