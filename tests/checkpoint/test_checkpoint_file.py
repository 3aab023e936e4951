"""A checkpoint of P ranks is read by any other number; a file that is not as it was written is refused."""

import os
import random

import numpy as np
import pytest
from checkpoint_toys import arrays, begun, experiment, forged, load, save

import neondist as nd
from neondist.comm import SingleTransport, loopback
from neondist.errors import DataError, OutputError
from neondist.io.checkpoint import checksum, keep, pieces
from neondist.train import TrainState
from neondist.train.callbacks.checkpoint import Checkpoint, restore

LAYOUTS = [(1, None), (4, None), (6, None), (9, None), (4, {"replicas": 2}), (6, {"replicas": 3, "rows": 1})]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(pieces, "BLOCK", 1000)
    monkeypatch.setattr(checksum, "PIECE", 1000)


@pytest.mark.parametrize("writer", LAYOUTS)
@pytest.mark.long
def test_any_number_of_ranks_reads_what_any_other_wrote(tmp_path, writer):
    written = save(tmp_path / "c.h5", *writer)
    for reader in LAYOUTS[(LAYOUTS.index(writer) + 1) % 2 :: 2]:
        run, found = load(tmp_path / "c.h5", *reader)
        assert run.history == [{"epoch": 1, "test_error": 0.1}]
        assert run.step == 2
        for each in found:
            assert each.keys() == written.keys()
            for name, array in written.items():
                np.testing.assert_array_equal(each[name], array)
    assert [path.name for path in tmp_path.iterdir()] == ["c.h5"]


def test_a_serial_model_reads_it_too(tmp_path):
    written = save(tmp_path / "c.h5", 4)
    made = experiment(dist_flag=False)
    model = nd.Convnet(
        [
            nd.ConvLayer(3, 3, padding=1, activation=nd.ReLU()),
            nd.BatchNormLayer(),
            nd.LocalFilteringLayer(3, 2, bias=True),
            nd.DropoutLayer(0.2),
            nd.FCLayer(4),
        ],
        optimizer=nd.Adam(0.01),
        dtype="float64",
        seed=1,
    )
    made.dataset.open(nd.ProcessGrid.serial())
    model.build((7, 6, 2), 10)
    run = TrainState(model, made.dataset, 2, 10)
    restore(tmp_path / "c.h5", run)
    for name, array in arrays(run).items():
        np.testing.assert_array_equal(array, written[name])


def test_anybody_can_open_it(tmp_path):
    import h5py

    written = save(tmp_path / "c.h5", 2, resolved="!FitExperiment {}\n")
    with h5py.File(tmp_path / "c.h5") as file:
        np.testing.assert_array_equal(file["model/conv1/weights"], written["model/conv1/weights"])
        assert file["experiment"][()] == b"!FitExperiment {}\n"


def mutations(content, count):
    """Files that differ from a good one: cut, lengthened, bits or blocks changed."""
    rng = random.Random(4)
    for _ in range(count):
        kind, at = rng.choice(["cut", "longer", "bit", "bit", "zeros", "block"]), rng.randrange(len(content))
        changed = bytearray(content)
        if kind == "cut":
            changed = changed[:at]
        elif kind == "longer":
            changed += bytes(rng.randrange(1, 9))
        elif kind == "bit":
            changed[at] ^= 1 << rng.randrange(8)
        elif kind == "zeros":
            changed[at : at + 64] = bytes(len(changed[at : at + 64]))
        else:
            changed[at : at + 64] = rng.randbytes(len(changed[at : at + 64]))
        if changed != content:
            yield bytes(changed)


def test_a_file_with_any_bit_changed_is_refused(tmp_path):
    save(tmp_path / "c.h5", 2)
    good = (tmp_path / "c.h5").read_bytes()
    bad, run = tmp_path / "bad.h5", begun(nd.ProcessGrid(SingleTransport()))
    before = arrays(run)
    bits = [good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :] for at in range(600)]  # of the checksum, and HDF5's head
    for changed in [*bits, *mutations(good, 400)]:
        bad.write_bytes(changed)
        with pytest.raises(DataError, match=r"bad\.h5: ") as caught:
            restore(bad, run)
        assert "\n" not in str(caught.value)
    for name, array in arrays(run).items():
        np.testing.assert_array_equal(array, before[name])


def test_what_is_no_checkpoint(tmp_path):
    run = begun(nd.ProcessGrid(SingleTransport()))
    for content in (b"", b"not HDF5 at all" * 100, b"neondist checkpoint 2\n"):
        (tmp_path / "c.h5").write_bytes(content)
        with pytest.raises(DataError, match=r"c\.h5: is "):
            restore(tmp_path / "c.h5", run)
    with pytest.raises(DataError, match="no such file"):
        restore(tmp_path / "none.h5", run)
    with pytest.raises(DataError, match="cannot be read"):
        restore(tmp_path, run)


def _link(file):
    import h5py

    del file["model/fc1/bias"]
    file["model/fc1/bias"] = h5py.ExternalLink("/etc/passwd", "/x")


def _soft(file):
    import h5py

    file["model/more"] = h5py.SoftLink("/model")


def _elsewhere(file):
    del file["model/fc1/bias"]
    file.create_dataset("model/fc1/bias", (4,), "f8", external=[("/etc/hostname", 0, 32)])


def _virtual(file):
    import h5py

    layout = h5py.VirtualLayout((4,), "f8")
    layout[:] = h5py.VirtualSource("other.h5", "x", (4,))
    del file["model/fc1/bias"]
    file.create_virtual_dataset("model/fc1/bias", layout)


def _objects(file):
    import h5py

    file.create_dataset("model/words", data=["a", "b"], dtype=h5py.string_dtype())


def _endless(file):
    file["model/again"] = file["model"]


def _position(text):
    def change(file):
        del file["position"]
        if text is not None:
            file["position"] = np.bytes_(text)

    return change


HARMS = [_link, _soft, _elsewhere, _virtual, _objects, _endless, *map(_position, [None, "{", "[]", '{"epoch": 1}'])]


@pytest.mark.parametrize("harm", HARMS)
def test_a_forged_file_is_refused_and_leads_nowhere(tmp_path, harm):
    save(tmp_path / "c.h5")
    with pytest.raises(DataError, match=r"forged\.h5: (is not a neondist checkpoint|does not record)"):
        restore(forged(tmp_path / "c.h5", harm), begun(nd.ProcessGrid(SingleTransport())))


def test_another_model_is_refused_by_name_before_anything_changes(tmp_path):
    save(tmp_path / "c.h5")
    run = begun(
        nd.ProcessGrid(SingleTransport()), layers=lambda: [nd.ConvLayerDist(4, 3, padding=1), nd.FCLayerDist(4)]
    )
    before = arrays(run)
    with pytest.raises(DataError, match=r"c\.h5: belongs to another model: it has \[3\] for 'batch_norm1/beta'"):
        restore(tmp_path / "c.h5", run)
    for name, array in arrays(run).items():
        np.testing.assert_array_equal(array, before[name])


def test_every_rank_learns_that_the_file_is_bad(tmp_path):
    (tmp_path / "c.h5").write_bytes(b"x" * 2000)

    def body(world):
        try:
            restore(tmp_path / "c.h5", begun(nd.ProcessGrid(world)))
        except DataError as error:
            return str(error)
        return None

    first, *others = loopback.run(3, body)
    assert "is not a neondist checkpoint" in first
    assert others == [first] * 2


@pytest.mark.parametrize("call", ["replace", "fsync"])
def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch, call):
    save(tmp_path / "c.h5", steps=1)
    before = (tmp_path / "c.h5").read_bytes()

    def fails(*arguments):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, call, fails)
        with pytest.raises(OutputError, match=r"c\.h5: .*\(No space left on device\).*--resume"):
            save(tmp_path / "c.h5", 2)
    assert (tmp_path / "c.h5").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["c.h5"]


def test_no_room_is_found_before_anything_is_written(tmp_path, monkeypatch):
    import shutil

    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    with pytest.raises(OutputError, match=r"it needs 0\.\d MB, the disk has 0\.0 MB"):
        save(tmp_path / "c.h5", 2)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("links", [True, False])
def test_keeping_the_last_three(tmp_path, monkeypatch, links):
    if not links:
        monkeypatch.setattr(keep.os, "link", lambda *paths: (_ for _ in ()).throw(PermissionError()))
    schedule = nd.train.callbacks.checkpoint.CheckpointSchedule(keep=3)
    hook, run = Checkpoint(tmp_path / "c.h5", schedule), begun(nd.ProcessGrid(SingleTransport()))
    for step in (5, 20, 100, 7):  # the last after going back to an older one
        run.model.step = step
        hook.save(run)
        assert (tmp_path / "c.h5").read_bytes() == (tmp_path / f"c-{step:08d}.h5").read_bytes()
    names = ["c-00000007.h5", "c-00000020.h5", "c-00000100.h5", "c.h5"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert [path.name for path in keep.kept_files(tmp_path / "c.h5")] == [names[0], names[2], names[1]]
