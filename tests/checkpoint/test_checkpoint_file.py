"""Checkpoints of P ranks, read by any other number of ranks; rejection of altered files."""

import os
import random

import numpy as np
import pytest
from checkpoint_runs import collect_arrays, forge_checkpoint, load_run, make_experiment, save_run, start_run

import neondist as nd
from neondist.comm import SingleTransport, loopback
from neondist.errors import DataError, OutputError
from neondist.io.checkpoint import checksum, pieces, retention
from neondist.train import TrainState
from neondist.train.callbacks.checkpoint import Checkpoint, restore_checkpoint

LAYOUTS = [(1, None), (4, None), (6, None), (9, None), (4, {"replicas": 2}), (6, {"replicas": 3, "rows": 1})]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(pieces, "MAX_TRANSFER_BYTES", 1000)
    monkeypatch.setattr(checksum, "READ_PIECE_BYTES", 1000)


@pytest.mark.parametrize("writer", LAYOUTS)
@pytest.mark.long
def test_ranks_read_checkpoints_of_other_layouts(tmp_path, writer):
    written = save_run(tmp_path / "c.h5", *writer)
    for reader in LAYOUTS[(LAYOUTS.index(writer) + 1) % 2 :: 2]:
        run, loaded = load_run(tmp_path / "c.h5", *reader)
        assert run.history == [{"epoch": 1, "test_error": 0.1}]
        assert run.step == 2
        for arrays in loaded:
            assert arrays.keys() == written.keys()
            for name, array in written.items():
                np.testing.assert_array_equal(arrays[name], array)
    assert [path.name for path in tmp_path.iterdir()] == ["c.h5"]


def test_serial_model_reads_distributed_checkpoint(tmp_path):
    written = save_run(tmp_path / "c.h5", 4)
    experiment = make_experiment(dist_flag=False)
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
    experiment.dataset.open(nd.ProcessGrid.serial())
    model.build((7, 6, 2), 10)
    run = TrainState(model, experiment.dataset, 2, 10)
    restore_checkpoint(tmp_path / "c.h5", run)
    for name, array in collect_arrays(run).items():
        np.testing.assert_array_equal(array, written[name])


def test_checkpoint_is_plain_hdf5(tmp_path):
    import h5py

    written = save_run(tmp_path / "c.h5", 2, yaml_text="!FitExperiment {}\n")
    with h5py.File(tmp_path / "c.h5") as file:
        np.testing.assert_array_equal(file["model/conv1/weights"], written["model/conv1/weights"])
        assert file["experiment"][()] == b"!FitExperiment {}\n"


def generate_alterations(content, count):
    """Yield altered contents of a file: truncated, extended, or with changed bits or blocks."""
    rng = random.Random(4)
    for _ in range(count):
        kind, offset = rng.choice(["cut", "longer", "bit", "bit", "zeros", "block"]), rng.randrange(len(content))
        altered = bytearray(content)
        if kind == "cut":
            altered = altered[:offset]
        elif kind == "longer":
            altered += bytes(rng.randrange(1, 9))
        elif kind == "bit":
            altered[offset] ^= 1 << rng.randrange(8)
        elif kind == "zeros":
            altered[offset : offset + 64] = bytes(len(altered[offset : offset + 64]))
        else:
            altered[offset : offset + 64] = rng.randbytes(len(altered[offset : offset + 64]))
        if altered != content:
            yield bytes(altered)


def test_altered_file_is_rejected(tmp_path):
    save_run(tmp_path / "c.h5", 2)
    content = (tmp_path / "c.h5").read_bytes()
    path, run = tmp_path / "altered.h5", start_run(nd.ProcessGrid(SingleTransport()))
    before = collect_arrays(run)
    # a bit of each byte of the checksum and the HDF5 header
    flipped = [content[:offset] + bytes([content[offset] ^ 1]) + content[offset + 1 :] for offset in range(600)]
    for altered in [*flipped, *generate_alterations(content, 400)]:
        path.write_bytes(altered)
        with pytest.raises(DataError, match=r"altered\.h5: ") as caught:
            restore_checkpoint(path, run)
        assert "\n" not in str(caught.value)
    for name, array in collect_arrays(run).items():
        np.testing.assert_array_equal(array, before[name])


def test_invalid_files(tmp_path):
    run = start_run(nd.ProcessGrid(SingleTransport()))
    for content in (b"", b"not HDF5 at all" * 100, b"neondist checkpoint 2\n"):
        (tmp_path / "c.h5").write_bytes(content)
        with pytest.raises(DataError, match=r"c\.h5: is "):
            restore_checkpoint(tmp_path / "c.h5", run)
    with pytest.raises(DataError, match="no such file"):
        restore_checkpoint(tmp_path / "none.h5", run)
    with pytest.raises(DataError, match="is a folder; specify a checkpoint"):
        restore_checkpoint(tmp_path, run)


def _add_external_link(file):
    import h5py

    del file["model/fc1/bias"]
    file["model/fc1/bias"] = h5py.ExternalLink("/etc/passwd", "/x")


def _add_soft_link(file):
    import h5py

    file["model/more"] = h5py.SoftLink("/model")


def _store_externally(file):
    del file["model/fc1/bias"]
    file.create_dataset("model/fc1/bias", (4,), "f8", external=[("/etc/hostname", 0, 32)])


def _make_virtual(file):
    import h5py

    layout = h5py.VirtualLayout((4,), "f8")
    layout[:] = h5py.VirtualSource("other.h5", "x", (4,))
    del file["model/fc1/bias"]
    file.create_virtual_dataset("model/fc1/bias", layout)


def _add_strings(file):
    import h5py

    file.create_dataset("model/words", data=["a", "b"], dtype=h5py.string_dtype())


def _add_cycle(file):
    file["model/again"] = file["model"]


def _replace_position(text):
    def change(file):
        del file["position"]
        if text is not None:
            file["position"] = np.bytes_(text)

    return change


ALTERATIONS = [
    _add_external_link,
    _add_soft_link,
    _store_externally,
    _make_virtual,
    _add_strings,
    _add_cycle,
    *map(_replace_position, [None, "{", "[]", '{"epoch": 1}']),
]


@pytest.mark.parametrize("alter", ALTERATIONS)
def test_forged_file_is_rejected(tmp_path, alter):
    save_run(tmp_path / "c.h5")
    with pytest.raises(DataError, match=r"forged\.h5: (is not a neondist checkpoint|does not record)"):
        restore_checkpoint(forge_checkpoint(tmp_path / "c.h5", alter), start_run(nd.ProcessGrid(SingleTransport())))


def test_other_model_is_rejected_before_any_change(tmp_path):
    save_run(tmp_path / "c.h5")
    run = start_run(
        nd.ProcessGrid(SingleTransport()), layers=lambda: [nd.ConvLayerDist(4, 3, padding=1), nd.FCLayerDist(4)]
    )
    before = collect_arrays(run)
    with pytest.raises(
        DataError, match=r"c\.h5: belongs to another model or optimiser: the file has \[3\] for 'batch_norm1/beta'"
    ):
        restore_checkpoint(tmp_path / "c.h5", run)
    for name, array in collect_arrays(run).items():
        np.testing.assert_array_equal(array, before[name])


def test_all_ranks_reject_an_invalid_file(tmp_path):
    (tmp_path / "c.h5").write_bytes(b"x" * 2000)

    def body(world):
        try:
            restore_checkpoint(tmp_path / "c.h5", start_run(nd.ProcessGrid(world)))
        except DataError as error:
            return str(error)
        return None

    first, *others = loopback.run(3, body)
    assert "is not a neondist checkpoint" in first
    assert others == [first] * 2


@pytest.mark.parametrize("call", ["replace", "fsync"])
def test_failed_write_keeps_the_old_file(tmp_path, monkeypatch, call):
    save_run(tmp_path / "c.h5", steps=1)
    before = (tmp_path / "c.h5").read_bytes()

    def fail(*arguments):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        message = r"c\.h5: .*\(No space left on device\); the previous one is unchanged; free .*--resume"
        with pytest.raises(OutputError, match=message):
            save_run(tmp_path / "c.h5", 2)
    assert (tmp_path / "c.h5").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["c.h5"]


def test_disk_space_is_checked_before_writing(tmp_path, monkeypatch):
    import shutil

    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    with pytest.raises(OutputError, match=r"it needs \d+ kB, but 1 kB are free\); free disk space"):
        save_run(tmp_path / "c.h5", 2)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("links", [True, False])
def test_last_three_are_kept(tmp_path, monkeypatch, links):
    if not links:
        monkeypatch.setattr(retention.os, "link", lambda *paths, **options: (_ for _ in ()).throw(PermissionError()))
    schedule = nd.train.callbacks.checkpoint.CheckpointSchedule(keep=3)
    hook, run = Checkpoint(tmp_path / "c.h5", schedule), start_run(nd.ProcessGrid(SingleTransport()))
    for step in (5, 20, 100, 7):  # the last one after a return to an earlier checkpoint
        run.model.step = step
        hook.save(run)
        assert (tmp_path / "c.h5").read_bytes() == (tmp_path / f"c-{step:08d}.h5").read_bytes()
    names = ["c-00000007.h5", "c-00000020.h5", "c-00000100.h5", "c.h5"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert [path.name for path in retention.list_step_checkpoints(tmp_path / "c.h5")] == [names[0], names[2], names[1]]
