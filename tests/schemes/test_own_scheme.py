"""The example of a scheme, and how small the schemes are."""

import runpy
from pathlib import Path

import numpy as np
import pytest
from scheme_runs import on_ranks

import neondist as nd

ROOT = Path(__file__).resolve().parents[2]


def test_the_example(capsys):
    runpy.run_path(str(ROOT / "examples" / "own_scheme.py"), run_name="__main__")
    assert "instead of" in capsys.readouterr().out


def test_adding_a_scheme_takes_one_file_of_sixty_lines():
    whole = (ROOT / "examples" / "own_scheme.py").read_text().split("# begin scheme\n")[1].split("# end scheme")[0]
    assert len(whole.splitlines()) <= 60
    assert nd.Scheme.__doc__
    schemes = {file.name: file.read_text() for file in (ROOT / "neondist" / "halo" / "policies").glob("*.py")}
    assert "(ExchangePolicy):" in schemes["tower.py"]
    assert {
        name for name, text in schemes.items() if "(ExchangePolicy):" in text and len(text.splitlines()) > 60
    } == set()


class _AsBefore(nd.Scheme):
    """An exact exchange with the words of neondist 0.1."""

    def forward(self, way):
        courier = way.memory["courier"] = way.memory.get("courier") or way.courier()
        courier.start(way.parted(way.joined(way.outgoing()), way.sends))
        way.place(courier.finish())

    backward = forward


@pytest.mark.parametrize("word", ["courier", "finish", "place", "joined", "parted"])
def test_a_scheme_in_the_words_of_before_does_what_it_did(word):
    def job(comm):
        found = []
        for scheme in (nd.Halo(), _AsBefore()):
            ga = nd.GlobalArray(nd.ProcessGrid(comm, rows=2), (2, 7, 6, 2), nd.Window(3, padding=1))
            ga.policy, rng = scheme, np.random.default_rng(comm.rank)
            tile, view = (rng.normal(size=shape).astype("f") for shape in (ga.local_shape, ga.view_shape))
            found.append((ga.get_fprop_view(tile), ga.get_bprop_view(view), ga.bytes_sent))
        for one, other in zip(*found, strict=True):
            np.testing.assert_array_equal(one, other)

    with pytest.warns(DeprecationWarning, match=rf"^{word}.* is called .* now \(docs/adding_a_scheme.md\)"):
        on_ranks(4, job)
