"""`neondist init` for tables, arrays, volumes and time series."""

import numpy as np
import pytest
from init_runs import run_init_and_check, schema_errors, write_images, write_picture

import neondist as nd
from neondist.cli import main
from neondist.config import load_experiment


@pytest.mark.parametrize("factor", [1, 0.5], ids=["names", "numbers"])
def test_init_for_a_table(tmp_path, monkeypatch, factor):
    folder = tmp_path / "my \U0001f4f7 é [1]"
    write_images(folder)
    (folder / "0.png").rename(folder / "0.PNG")  # two spellings of the suffix
    (folder / "._0.png").write_text("none")
    labels = [f"{i}.png,{'cat' if i % 2 else 'ape'}" if factor == 1 else f"{i}.png,{i * factor}" for i in range(4)]
    (folder / "labels.csv").write_text("\n".join(["file,label", labels[0].replace("png", "PNG"), *labels[1:]]))
    monkeypatch.chdir(tmp_path)
    assert main(["init", str(folder), "--to", "x.yaml"]) == 0
    experiment = load_experiment("x.yaml")
    experiment.validate(2)
    assert experiment.dataset._image_labels.ravel().tolist() == [i % 2 if factor == 1 else i * factor for i in range(4)]
    outputs, cost = (2, nd.CrossEntropy) if factor == 1 else (1, nd.MSE)
    assert (experiment.model.leaves[-1].arguments()["out_features"], type(experiment.model.cost)) == (outputs, cost)


@pytest.mark.parametrize(
    ("shape", "dtype", "cost", "number"),
    [
        ((), "i8", nd.CrossEntropy, "test_error"),
        ((2,), "f4", nd.MSE, "test_loss"),
        ((8, 9), "i8", nd.DiceCE, "test_loss"),
        ((8, 9, 2), "f4", nd.MSE, "test_loss"),
    ],
)
def test_init_for_an_hdf5_file(tmp_path, monkeypatch, capsys, shape, dtype, cost, number):
    h5py = pytest.importorskip("h5py")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    with h5py.File(tmp_path / "mine" / "data.h5", "w") as file:
        file["train/images"] = np.zeros((10, 8, 9, 3), "u1")
        file["train/labels"] = np.arange(10 * np.prod(shape, dtype=int)).reshape(10, *shape).astype(dtype) % 3
    experiment = run_init_and_check(capsys)
    assert (type(experiment.model.cost), experiment.best.number) == (cost, number)
    (tmp_path / "mine" / "data.h5").rename("mine.h5")
    (tmp_path / "mine.yaml").unlink()
    assert run_init_and_check(capsys, "mine.h5").dataset.path == "mine.h5"


@pytest.mark.parametrize(
    "names",
    [
        ["X.npy", "y.npy"],
        ["images.npy", "labels.npy"],
        ["x_train.npy", "y_train.npy", "x_test.npy", "y_test.npy"],
        ["d.npz"],
    ],
)
def test_init_names_the_commands_for_arrays(tmp_path, monkeypatch, capsys, names):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    images, labels = np.zeros((10, 8, 9), "u1"), np.arange(10) % 3
    for name in names:
        if name.endswith(".npz"):
            np.savez(tmp_path / "mine" / name, images=images, labels=labels)
        else:
            np.save(tmp_path / "mine" / name, labels if name[0] in "yl" else images)
    assert main(["init", "mine"]) == 2
    commands = capsys.readouterr().err.strip().partition("; run neondist ")[2].split(" and then neondist ")
    assert all(main(command.split()) == 0 for command in commands)
    assert main(["check", "mine.yaml"]) == 0


@pytest.mark.parametrize(
    ("table", "folder", "extra"),
    [("train.csv", "", "notes.csv"), ("train.csv", "train", "sample_submission.csv"), ("any.csv", "train_images", "")],
)
def test_init_finds_the_table_of_images(tmp_path, monkeypatch, capsys, table, folder, extra):
    monkeypatch.chdir(tmp_path)
    write_images(tmp_path / "mine" / folder)
    (tmp_path / "mine" / table).write_text("id,label\n" + "".join(f"{n}.png,{'ab'[n % 2]}\n" for n in range(4)))
    if extra:
        (tmp_path / "mine" / extra).write_text("x,y\n")
    assert run_init_and_check(capsys).dataset.labels == f"mine/{table}"


@pytest.mark.parametrize("kind", ["u1", "f4"])
def test_init_for_volumes(tmp_path, monkeypatch, kind):
    pytest.importorskip("nibabel", reason="NIfTI needs nibabel")
    monkeypatch.chdir(tmp_path)
    for folder, dtype in (("images", "i2"), ("masks", kind)):
        (tmp_path / "mine" / folder).mkdir(parents=True)
        for i in range(3):
            with nd.create_sink(tmp_path / "mine" / folder / f"{i}.nii.gz", (12, 40, 36, 1), dtype, "ZYXC") as sink:
                sink.write([(0, 1), (0, 1), (0, 2), (0, 1)], np.ones((1, 1, 2, 1), dtype))
                sink.commit()
    assert main(["init", "mine"]) == 0
    experiment = load_experiment("mine.yaml", ["epochs=1"])
    experiment.validate(2)
    assert (experiment.dataset.crop, experiment.dataset.sample_shape) == ([8, 32, 32], (8, 32, 32, 1))
    outputs, classes, cost = (2, 2, nd.DiceCE) if kind == "u1" else (1, None, nd.MSE)
    assert experiment.model.leaves[-1].arguments()["out_channels"] == outputs
    assert experiment.dataset.arguments().get("classes") == classes
    assert type(experiment.model.cost) is cost


@pytest.mark.parametrize("suffix", [".nc", ".zarr"])
def test_init_for_time_series(tmp_path, monkeypatch, suffix):
    xarray = pytest.importorskip("xarray")
    pytest.importorskip("zarr" if suffix == ".zarr" else "netCDF4")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    fields = np.random.default_rng(0).random((30, 6, 8), "f4")
    for part in range(2):
        times = slice(15 * part, 15 * part + 15)
        coordinates = {
            "time": ("time", np.arange(30)[times], {"units": "days since 2001-01-01"}),
            "lat": ("lat", np.linspace(-75, 75, 6), {"units": "degrees_north"}),
            "lon": ("lon", np.arange(8) * 45.0, {"units": "degrees_east"}),
        }
        variables = dict.fromkeys(("t2m", "u10"), (("time", "lat", "lon"), fields[times]))
        variables["area"] = (("lat", "lon"), fields[0])
        data = xarray.Dataset(variables, coordinates)
        path = tmp_path / "mine" / f"{part}{suffix}"
        data.to_netcdf(path) if suffix == ".nc" else data.to_zarr(path, consolidated=False)
    assert main(["init", "mine"]) == 0
    assert schema_errors((tmp_path / "mine.yaml").read_text()) == []
    experiment = load_experiment("mine.yaml")
    experiment.validate(2)
    assert (experiment.dataset.variables, experiment.dataset.files) == (["t2m", "u10"], f"mine/*{suffix}")
    assert experiment.model.cost.weights == "cos(lat)"


def test_init_for_dicom_files(tmp_path, capsys):
    (tmp_path / "series").mkdir()
    (tmp_path / "series" / "1.DCM").write_bytes(bytes(128) + b"DICM")
    assert main(["init", str(tmp_path), "--to", str(tmp_path / "x.yaml")]) == 2
    assert "has DICOM files; convert each series to NIfTI" in capsys.readouterr().err
    with pytest.raises(nd.DataError, match="DICOM files cannot be read; convert the series to NIfTI"):
        nd.open_source(tmp_path / "series" / "1.DCM")


def test_init_without_images(tmp_path, capsys):
    write_images(tmp_path / "split" / "train" / "cat", 1)
    assert main(["init", str(tmp_path / "split"), "--to", str(tmp_path / "x.yaml")]) == 2
    assert "but train/ has image folders; run neondist init" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    (tmp_path / "climate").mkdir()
    with nd.create_sink(tmp_path / "climate" / "1.nc", (4, 5, 1), "f4", "YXC") as sink:
        sink.commit()
    for folder, message in (
        ("none", "no such folder"),
        ("empty", "has 0 subfolders with images; give a subfolder"),
        ("climate", "has no variable over time, latitude and longitude; give a folder of such files"),
    ):
        assert main(["init", str(tmp_path / folder), "--to", str(tmp_path / "x.yaml")]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "x.yaml").exists()


@pytest.mark.parametrize(("separator", "name"), [(";", "semicolons"), ("\t", "tabs")])
def test_init_with_other_separators(tmp_path, monkeypatch, capsys, separator, name):
    monkeypatch.chdir(tmp_path)
    for i in range(3):
        write_picture(tmp_path / "mine" / f"{i}.png")
    (tmp_path / "mine" / "labels.csv").write_text("\n".join(f"{i}.png{separator}{i}" for i in range(3)))
    assert main(["init", "mine"]) == 2
    assert f"labels.csv: separates columns with {name}; use commas, as in FILE,CLASS" in capsys.readouterr().err


def test_init_quotes_names_for_the_shell(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        write_picture(tmp_path / "my images" / name / "0.png")
    assert main(["init", "my images"]) == 0
    assert "`neondist check 'my images.yaml'`, then `neondist run 'my images.yaml'`" in capsys.readouterr().out


def test_check_rejects_the_best_epoch_of_a_missing_split(tmp_path, monkeypatch, capsys):
    h5py = pytest.importorskip("h5py")
    monkeypatch.chdir(tmp_path)
    write_images(tmp_path / "mine" / "cat")
    write_images(tmp_path / "mine" / "dog")
    assert main(["init", "mine"]) == 0
    assert main(["check", "mine.yaml"]) == 0
    assert main(["check", "mine.yaml", "--set", "dataset.validation=null"]) == 2
    assert "best.number: no 'validation_error', because the data set has no validation split" in capsys.readouterr().err
    assert main(["check", "mine.yaml", "--set", "best.number=test_loss"]) == 2
    assert main(["check", "mine.yaml", "--set", "best.number=test_loss", "dataset.test=1"]) == 0
    with h5py.File("h5.h5", "w") as file:
        file["train/images"], file["train/labels"] = np.zeros((10, 8, 9, 3), "u1"), np.arange(10) % 3
    assert main(["init", "h5.h5"]) == 0
    for number, fields, code in (
        ("test_loss", [], 0),
        ("validation_loss", [], 2),
        ("validation_loss", ["dataset.validation=2"], 0),
        ("f1", [], 0),
    ):
        assert main(["check", "h5.yaml", "--set", f"best.number={number}", *fields]) == code
    assert "--set best.number=validation_loss: best.number: no 'validation_loss'" in capsys.readouterr().err
