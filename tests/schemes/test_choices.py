"""The best exact scheme of each layer: what a machine's figures make of it, and that a model is planned with it."""

import pytest

import neondist as nd
from neondist.errors import ConfigError
from neondist.halo import as_scheme, scheme_text
from neondist.plan.choices import choose
from neondist.system.machine import Figures, Link, Machine, write

SHAPE, GRID = (48, 48, 2), nd.GridShape(1, 3, 3)
DEAR = Figures(latency=1.0)
"""messages cost more than any computing"""
CHEAP = Figures(latency=1e-9, bandwidth=1e15, speed=1e6)


def conv(**options):
    return nd.ConvLayerDist(8, 3, padding=1, **options)


NETWORKS = {
    "chain": lambda: [conv() for _ in range(5)],
    "normalised": lambda: [nd.BatchNormLayerDist(), conv(), nd.BatchNormLayerDist(), conv()],
    "refused": lambda: [conv(), nd.LCNLayerDist(3), conv(), conv(), nd.DeconvLayerDist(2, 3), conv(), conv()],
    "branches": lambda: [conv(), nd.Sum([[conv(), conv()], [conv()]]), conv(), conv(), nd.FCLayerDist(3)],
    "wrap": lambda: [conv(padding_mode="wrap"), conv(), conv(padding_mode="reflect"), conv()],
}


def chosen(name, figures):
    model = nd.ConvnetDist(NETWORKS[name]())
    return model, choose(model.chain, SHAPE, GRID, figures)


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
def test_dear_messages_are_avoided_where_layers_allow_it(name, expected):
    _, choices = chosen(name, DEAR)
    assert [choice.scheme for choice in choices] == expected
    assert sum(choice.seconds for choice in choices) < sum(choice.halo_seconds for choice in choices) - 1


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("figures", [DEAR, CHEAP, Figures(latency=1e-4)], ids=["dear", "cheap", "between"])
def test_a_model_with_them_is_planned_and_costs_what_was_promised(name, figures):
    model, choices = chosen(name, figures)
    by_name = {choice.layer: choice for choice in choices}
    for layer in model.leaves:
        if str(layer.name) in by_name:
            layer.scheme = as_scheme(by_name[str(layer.name)].scheme)
    middle = 4
    for at, plan in enumerate(model.plan(SHAPE, GRID)):
        if plan.name not in by_name:
            continue
        back = plan.backward[middle] if at or plan.reverse else []
        fetched = figures.sent(len(plan.forward[middle]), sum(plan.backward[middle] if not plan.reverse else []))
        choice = by_name[plan.name]
        if not plan.halo_cells[middle]:
            assert not plan.forward[middle] + plan.backward[middle]
        elif choice.scheme == "halo" and not plan.reverse:
            assert choice.seconds == pytest.approx(fetched + figures.sent(len(back), sum(back)), rel=1e-3)
    assert sum(c.seconds for c in choices) <= sum(c.halo_seconds for c in choices) * (1 + 1e-12)


def test_measured_layers_count_instead_of_the_speed():
    figures = Figures(latency=1e-3, speed=1e15, cell_seconds={f"conv{n}": 1.0 for n in range(1, 6)})
    assert {choice.scheme for choice in chosen("chain", figures)[1][1:]} == {"halo"}


def test_auto_plans_with_the_figures_of_a_machine(tmp_path):
    near, far = Link(1e-9, 1e15), Link(1.0, 1e9)
    write(tmp_path / "m.yaml", Machine(4, near, far, speed=1e10), "a comment")
    scheme = nd.schemes.Auto(machine=str(tmp_path / "m.yaml"))
    assert scheme.figures(4) == Figures(1e-9, 1e15, 1e10)
    assert scheme.figures(9, samples=7) == Figures(1.0, 1e9, 1e10, 7)
    assert nd.schemes.Auto(machine=str(tmp_path / "m.yaml"), latency=2.0, samples=3).figures(9, samples=7).samples == 3
    assert scheme_text(as_scheme(scheme_text(scheme))) == scheme_text(scheme)
    layers = [conv() for _ in range(5)]
    counts = [
        sum(plan.halo_cells[0] > 0 for plan in nd.ConvnetDist(layers, scheme=scheme).plan(SHAPE, grid))
        for grid in (nd.GridShape(1, 2, 2), GRID)
    ]
    assert counts == [5, 1]
    with pytest.raises(ConfigError, match=r"no\.yaml: cannot be read"):
        nd.schemes.Auto(machine="no.yaml")


def test_auto_plans_for_the_samples_of_a_replica():
    layers = [conv() for _ in range(4)]
    scheme = nd.schemes.Auto(latency=1e-3, bandwidth=1e15, speed=1e9)  # a message is as dear as some samples' computing
    halos = [
        sum(plan.halo_cells[4] > 0 for plan in nd.ConvnetDist(layers, scheme=scheme).plan(SHAPE, GRID, batch_size=n))
        for n in (1, 10**5)
    ]
    assert halos == [1, 4]
