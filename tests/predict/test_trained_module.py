"""Trained weights without an experiment: dense outputs, and maps of a window classifier."""

import base64
import io
import json
import re

import numpy as np
import pytest
import zarr

torch = pytest.importorskip("torch")
tifffile = pytest.importorskip("tifffile")

from cli_runs import run_in_process  # noqa: E402
from interruptions import Killed, interrupt_after_part  # noqa: E402
from PIL import Image  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

import neondist as nd  # noqa: E402
from neondist.cli import main  # noqa: E402
from neondist.comm import ProcessGrid, loopback  # noqa: E402
from neondist.errors import ConfigError, DataError, OutputError  # noqa: E402
from neondist.formats.class_colours import class_colours  # noqa: E402
from neondist.torch.training.windows import WindowScores  # noqa: E402
from neondist.train.inference import TrainedModule, predict_module  # noqa: E402
from neondist.train.inference.window_prediction import WindowCentres  # noqa: E402

NETWORKS_MODULE = """
from torch import nn


def tiles(channels=3):
    return nn.Sequential(
        nn.Conv2d(channels, 5, 3, 2), nn.BatchNorm2d(5), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, 3),
    )


class Dense(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 2, 1)

    def forward(self, x):
        return self.b(self.a(x).relu())


def needs(channels):
    return tiles(channels)


def number():
    return 3


three = 3
"""
WINDOW, STRIDE = 24, 8
WINDOW_OPTIONS = {"windows": WINDOW, "stride": STRIDE, "scale": 255.0, "mean": [0.5, 0.4, 0.3], "std": [0.2]}
OME_PIXEL_SIZE = {"PhysicalSizeX": 0.5, "PhysicalSizeXUnit": "µm", "PhysicalSizeY": 0.25, "PhysicalSizeYUnit": "µm"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Weights of two networks, a slide, and the outputs of a plain loop over its windows."""
    folder = tmp_path_factory.mktemp("weights")
    (folder / "nets_of_test.py").write_text(NETWORKS_MODULE)
    names = load_nets()
    torch.manual_seed(0)
    tiles, dense = names["tiles"](), names["Dense"]()
    tiles[1].running_mean.uniform_(-1, 1)
    state = tiles.state_dict()
    others = {
        "transposed": {"0.weight": state["0.weight"].transpose(0, 1)},
        "whole_numbers": {"5.bias": state["5.bias"].int()},
        "nan": {"5.bias": state["5.bias"] / 0},
        "more": {"6.bias": torch.zeros(1)},
    }
    for name, arrays in others.items():
        torch.save(state | arrays, folder / f"{name}.pt")
    torch.save({f"module.{name}": value for name, value in state.items()}, folder / "wrapped.pt")
    torch.save({"model": tiles.state_dict(), "epoch": 3, "optimizer": {"state": {}}}, folder / "tiles.pt")
    save_file(dense.state_dict(), folder / "dense.safetensors")
    x = np.random.default_rng(0).integers(0, 256, (104, 131, 3), "uint8")
    tifffile.imwrite(
        folder / "slide.ome.tif",
        x,
        tile=(32, 32),
        compression="zlib",
        photometric="rgb",
        metadata={"axes": "YXS", **OME_PIXEL_SIZE},
    )
    with nd.create_sink(folder / "four.ome.zarr", (104, 131, 4), "uint8", "YXC") as sink:
        sink.commit()
    cells = torch.from_numpy(x).permute(2, 0, 1)[None].float()
    normalised = (cells / 255 - torch.tensor([0.5, 0.4, 0.3])[:, None, None]) / 0.2
    tiles.eval()
    with torch.no_grad():
        rows = [
            torch.cat(
                [
                    tiles(normalised[..., row : row + WINDOW, col : col + WINDOW])
                    for col in range(0, 131 - WINDOW + 1, STRIDE)
                ]
            )
            for row in range(0, 104 - WINDOW + 1, STRIDE)
        ]
        np.save(folder / "map.npy", torch.stack(rows).numpy())
        np.save(folder / "dense.npy", dense(cells)[0].permute(1, 2, 0).numpy())
    return folder


def load_nets():
    names = {}
    exec(NETWORKS_MODULE, names)
    return names


def predict_on_ranks(ranks, folder, target, source="slide.ome.tif", block=None, overwrite=False, **options):
    def body(world):
        trained = TrainedModule(load_nets()["tiles"], folder / "tiles.pt", "tiles", **WINDOW_OPTIONS | options)
        return predict_module(trained, folder / source, target, ProcessGrid(world), block=block, overwrite=overwrite)

    (shape,) = set(loopback.run(ranks, body))
    return shape


@pytest.mark.parametrize(("ranks", "block"), [(1, None), (2, 3), (3, 1)])
def test_windows_match_a_plain_loop(folder, tmp_path, monkeypatch, ranks, block):
    monkeypatch.setattr("neondist.torch.training.windows.MAX_CELLS_PER_BATCH", 4 * WINDOW**2)  # several calls a block
    expected = np.load(folder / "map.npy")
    assert predict_on_ranks(ranks, folder, tmp_path / "y.npy", block=block) == expected.shape == (11, 14, 3)
    np.testing.assert_allclose(np.load(tmp_path / "y.npy"), expected, rtol=0, atol=1e-6)
    assert [path.name for path in tmp_path.iterdir()] == ["y.npy"]


def test_windows_resume_after_an_interruption(folder, tmp_path, monkeypatch):
    """On another number of ranks, without computing completed parts again."""
    run, computed = WindowScores.run, []
    with interrupt_after_part(), pytest.raises(Killed):
        predict_on_ranks(1, folder, tmp_path / "y.ome.zarr", block=4)
    assert not (tmp_path / "y.ome.zarr").exists()
    with pytest.raises(OutputError, match="belongs to a job with different network"):
        predict_on_ranks(1, folder, tmp_path / "y.ome.zarr", scale=1.0)
    monkeypatch.setattr(WindowScores, "run", lambda self, number, x: (computed.append(number), run(self, number, x))[1])
    predict_on_ranks(2, folder, tmp_path / "y.ome.zarr")
    assert len(computed) == len(set(computed)) == 12 - 1
    group = zarr.open_group(str(tmp_path / "y.ome.zarr"), mode="r")
    np.testing.assert_allclose(np.moveaxis(group["0"][:], 0, -1), np.load(folder / "map.npy"), rtol=0, atol=1e-6)
    (image,) = group.attrs["ome"]["multiscales"]
    assert [axis.get("unit") for axis in image["axes"]] == [None, "micrometer", "micrometer"]
    scale, shift = image["datasets"][0]["coordinateTransformations"]
    assert scale["scale"] == [1, 0.25 * STRIDE, 0.5 * STRIDE]
    assert shift["translation"] == [0, 0.25 * (WINDOW - 1) / 2, 0.5 * (WINDOW - 1) / 2]


def test_interrupted_command_explains_how_to_continue(folder, tmp_path, capsys):
    output = tmp_path / "y.npy"
    words = ["predict", "--weights", folder / "dense.safetensors", "--factory", f"{folder}/nets_of_test.py:Dense"]
    words += ["--input", folder / "slide.ome.tif", "--output", output, "--block", 64]
    arguments = list(map(str, words))
    note = f"note: {output}.partial keeps the completed blocks; repeat the command to continue"
    with interrupt_after_part(KeyboardInterrupt):
        assert main(arguments) == 130
    assert note in capsys.readouterr().err
    assert main([*arguments, "--classes"]) == 2  # another job, with a message of its own
    assert note not in capsys.readouterr().err
    assert main(arguments) == 0
    assert note not in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["y.npy"]


@pytest.mark.parametrize("stride", [1, STRIDE])
@pytest.mark.parametrize("window", [1, 5, WINDOW])
def test_centres_of_windows(folder, window, stride):
    with nd.open_source(folder / "slide.ome.tif") as source:
        image = source.read([(0, n) for n in source.shape])
        centres = WindowCentres(source, window, stride)
        actual = centres.read([(0, n) for n in centres.shape])
        rows, cols = (((n - window) // stride) * stride + 1 for n in image.shape[:2])
        first = window // 2
        np.testing.assert_array_equal(actual, image[first : first + rows : stride, first : first + cols : stride])


@pytest.mark.long
def test_dense_outputs_and_class_colours(folder):
    arguments = (
        "predict",
        "--weights",
        "dense.safetensors",
        "--factory",
        "nets_of_test.py:Dense",
        "--input",
        "slide.ome.tif",
    )
    code, out, err = run_in_process(folder, *arguments, "--output", "cells.png", "--raw", "--classes", "--block", "64")
    assert code == 2
    assert "PNG cannot store shape [104, 131, 2], axes 'YXC', dtype float32" in err
    code, out, err = run_in_process(folder, *arguments, "--output", "cells.png", "--classes", "--block", "64")
    assert code == 0, err
    assert "written: cells.png, 104 x 131" in out
    expected = np.load(folder / "dense.npy").argmax(axis=-1)
    with Image.open(folder / "cells.png") as image:
        assert image.mode == "P"
        assert len(np.unique(np.asarray(image.convert("RGB")).reshape(-1, 3), axis=0)) == len(np.unique(expected)) == 2
        np.testing.assert_array_equal(np.asarray(image), expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--factory nets_of_test.py:Dense", "tiles.pt: does not fit the module: not in the file: a.weight"),
        ("--factory nets_of_test.py:tile", "nets_of_test.py has no 'tile'; did you mean 'tiles'"),
        ("--factory nets_of_test.py:three", "three is a int; specify one of Dense, needs, number, tiles"),
        ("--factory nets_of_test.py:needs", "py:needs: arguments: needs failed: TypeError: needs() missing 1"),
        ("--factory nets_of_test.py:needs", "'channels'; specify a class or function without arguments"),
        ("--factory nets_of_test.py:number", "returned a int; it must return a torch.nn.Module\n"),
        ("--factory none.py:tiles", "--factory none.py: no such file"),
        ("--factory tiles", "expected FILE.py:NAME"),
        ("--factory nets_of_test.py:tiles --windows 105", "104 x 131 cells are smaller than a window of 105"),
        ("--factory nets_of_test.py:tiles --windows 32 --mean 1,2", "--mean: 2 values, but slide.ome.tif has 3"),
        ("--factory nets_of_test.py:tiles --stride 3", "--stride requires --windows CELLS"),
        ("--factory nets_of_test.py:tiles --windows 2", "for windows [1, 3, 2, 2], it fails: RuntimeError"),
        ("--factory nets_of_test.py:tiles --set epochs=1", "--import apply to experiments"),
        ("", "give --factory FILE.py:NAME"),
        ("--factory slide.ome.tif:tiles", "--factory slide.ome.tif: is not a Python file"),
        ("transposed.pt --factory nets_of_test.py:tiles", "0.weight (file [3, 5, 3, 3], model [5, 3, 3, 3])"),
        ("whole_numbers.pt --factory nets_of_test.py:tiles", "numbers.pt: 5.bias contains torch.int32 values, but"),
        ("nan.pt --factory nets_of_test.py:tiles", "nan.pt: 5.bias has values that are not finite"),
        ("more.pt --factory nets_of_test.py:tiles", "more.pt: does not fit the module: not in the model: 6.bias"),
        ("wrapped.pt --factory nets_of_test.py:tiles", "remove the prefix 'module.', which a wrapper"),
    ],
)
@pytest.mark.parametrize("ranks", ["1", "2"])
def test_invalid_input(folder, arguments, message, ranks):
    first, *more = arguments.split() or [""]
    weights, more = (first, more) if first.endswith(".pt") else ("tiles.pt", arguments.split())
    command = ["--weights", weights, *more, "--input", "slide.ome.tif", "--output", "bad.npy", "-n", ranks]
    code, _, err = run_in_process(folder, "predict", *command)
    assert (code, err.count("\n")) == (2, 1), err
    assert message in err
    assert not list(folder.glob("bad*"))


def test_incompatible_channels_and_options(folder):
    files = "--input", "four.ome.zarr", "--output", "bad.npy"
    network = "--weights", "tiles.pt", "--factory", "nets_of_test.py:tiles"
    code, _, err = run_in_process(folder, "predict", *network, *files, "--windows", "32")
    assert code == 2
    assert "four.ome.zarr: has 4 channels, but the first convolution of" in err
    for options, message in (
        ((), "give FILE.yaml and --checkpoint"),
        (("--windows", "3"), "--windows requires --weights"),
    ):
        code, _, err = run_in_process(folder, "predict", *files, *options)
        assert code == 2
        assert message in err


def test_channels_of_tiff_are_never_rows_or_columns(folder, tmp_path):
    cells = tifffile.imread(folder / "slide.ome.tif")
    planes = {"planarconfig": "separate", "photometric": "rgb"}
    tifffile.imwrite(tmp_path / "planes.tif", np.moveaxis(cells, -1, 0), metadata=None, **planes)
    trained = TrainedModule(load_nets()["Dense"], folder / "dense.safetensors", "Dense")
    with nd.ProcessGrid.serial() as grid:
        predict_module(trained, tmp_path / "planes.tif", tmp_path / "y.npy", grid)
        np.testing.assert_allclose(np.load(tmp_path / "y.npy"), np.load(folder / "dense.npy"), atol=1e-4)

        def grey():
            return torch.nn.Conv2d(1, 2, 3, padding=1)

        torch.save(grey().state_dict(), tmp_path / "grey.pt")
        with pytest.raises(DataError, match="has 3 channels, but the first convolution of grey takes 1"):
            predict_module(
                TrainedModule(grey, tmp_path / "grey.pt", "grey"), folder / "slide.ome.tif", tmp_path / "z.npy", grid
            )


@pytest.mark.parametrize("target", ["map.npy", "map.zarr", "map.tif"])
def test_windows_of_images_without_units(folder, tmp_path, target):
    cells = tifffile.imread(folder / "slide.ome.tif")[:50, :40]
    with nd.create_sink(tmp_path / "slide.ome.zarr", cells.shape, cells.dtype, "YXC") as sink:
        sink.write([(0, n) for n in cells.shape], cells)
        sink.commit()
    trained = TrainedModule(load_nets()["tiles"], folder / "tiles.pt", "tiles", windows=24)
    with nd.ProcessGrid.serial() as grid:
        assert predict_module(trained, tmp_path / "slide.ome.zarr", tmp_path / target, grid) == (2, 1, 3)


@pytest.mark.parametrize("target", ["slide.npy", "sub/../slide.npy"])
def test_outputs_never_replace_the_input(folder, tmp_path, target):
    cells = tifffile.imread(folder / "slide.ome.tif")
    np.save(tmp_path / "slide.npy", cells)
    (tmp_path / "sub").mkdir()
    trained = TrainedModule(load_nets()["Dense"], folder / "dense.safetensors", "Dense")
    with nd.ProcessGrid.serial() as grid, pytest.raises(nd.OutputError, match="is the input; choose another output"):
        predict_module(trained, tmp_path / "slide.npy", tmp_path / target, grid, overwrite=True)
    np.testing.assert_array_equal(np.load(tmp_path / "slide.npy"), cells)
    assert {path.name for path in tmp_path.iterdir()} == {"slide.npy", "sub"}


def test_axes_in_another_order(folder, tmp_path):
    cells = tifffile.imread(folder / "slide.ome.tif")
    np.save(tmp_path / "planes.npy", np.moveaxis(cells, -1, 0))
    network = "--weights", "dense.safetensors", "--factory", "nets_of_test.py:Dense"
    files = "--input", str(tmp_path / "planes.npy"), "--output", str(tmp_path / "y.npy")
    code, _, err = run_in_process(folder, "predict", *network, *files)
    assert code == 2
    assert "or the order of the axes, such as --axes CYX" in err
    code, _, err = run_in_process(folder, "predict", *network, *files, "--axes", "CYX")
    assert code == 0, err
    np.testing.assert_allclose(np.load(tmp_path / "y.npy"), np.load(folder / "dense.npy"), atol=1e-4)


class PickledExit:
    def __reduce__(self):
        return exec, ("raise SystemExit(7)",)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"model": {"0.weight": torch.zeros(1)}, "object": PickledExit()}, r"contains objects other than tensors"),
        (
            {"model": {"a": torch.zeros(1)}, "net": {"a": torch.zeros(1)}},
            r"several state_dicts, under 'model' and 'net'",
        ),
        ({"weight": 3}, r"contains no state_dict, but a dict with the keys 'weight'"),
        ([1], r"contains no state_dict, but a list"),
    ],
)
def test_files_without_a_state_dict(tmp_path, content, message):
    torch.save(content, tmp_path / "x.pt")
    with pytest.raises(DataError, match=rf"x\.pt: .*{message}"):
        TrainedModule(load_nets()["tiles"], tmp_path / "x.pt", "tiles")


def test_truncated_weights_and_unsupported_outputs(folder, tmp_path):
    (tmp_path / "x.pt").write_bytes((folder / "tiles.pt").read_bytes()[:900])
    with pytest.raises(DataError, match=r"x\.pt: "):
        TrainedModule(load_nets()["tiles"], tmp_path / "x.pt", "tiles")
    trained = TrainedModule(load_nets()["Dense"], folder / "dense.safetensors", "Dense", windows=9)
    with pytest.raises(ConfigError, match=r"returns \[1, 9, 9, 2\], channels last; return scores"):
        trained.check_images(folder / "slide.ome.tif")


@pytest.mark.parametrize("block", [None, "37"])
def test_loss_and_error_match_pytorch(folder, tmp_path, capsys, block):
    y = torch.from_numpy(np.load(folder / "dense.npy")).permute(2, 0, 1)[None]
    labels = np.random.default_rng(1).integers(0, 2, (104, 131))
    Image.fromarray(labels.astype("uint8")).save(tmp_path / "labels.tif")
    arguments = ["evaluate", "--weights", folder / "dense.safetensors", "--factory", f"{folder}/nets_of_test.py:Dense"]
    arguments += ["--input", folder / "slide.ome.tif", "--labels", tmp_path / "labels.tif"]
    arguments += ["--report", tmp_path / "page.html"]
    assert main([*map(str, arguments), *([] if block is None else ["--block", block])]) == 0
    page = (tmp_path / "page.html").read_text()
    shown = re.findall(r"<img alt='([a-z 0-9]+)' width='256' src='data:image/png;base64,([^']+)'", page)
    assert [alt for alt, _ in shown] == ["image 0", "target", "prediction"]
    images = [np.asarray(Image.open(io.BytesIO(base64.b64decode(data)))) for _, data in shown]
    colours = np.array(class_colours(2))
    np.testing.assert_array_equal(images[1], colours[labels])
    assert (images[2] == colours[np.load(folder / "dense.npy").argmax(-1)]).mean() > 0.999
    x = tifffile.imread(folder / "slide.ome.tif").astype(float)
    np.testing.assert_allclose(images[0], 255 * (x - x.min()) / (x.max() - x.min()), atol=1.01)
    assert "Classes: " in page
    results = json.loads(capsys.readouterr().out)
    target = torch.from_numpy(labels)[None]
    assert results["loss"] == pytest.approx(torch.nn.functional.cross_entropy(y, target).item(), rel=1e-5)
    assert results["error"] == pytest.approx((y.argmax(1) != target).double().mean().item(), abs=1e-3)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (np.full((104, 131), 8, "u1"), r"y.tif: label 8 is outside the 2 classes"),
        (np.full((104, 131), 0.5, "f4"), r"y.tif: contains one float32 value per cell; give classes"),
        (np.zeros((50, 50), "u1"), r"y.tif: has labels of shape [1, 50, 50], but the outputs have shape [1, 104, 131]"),
    ],
)
def test_incompatible_labels(folder, tmp_path, capsys, labels, message):
    tifffile.imwrite(tmp_path / "y.tif", labels)
    arguments = ["evaluate", "--weights", folder / "dense.safetensors", "--factory", f"{folder}/nets_of_test.py:Dense"]
    arguments += ["--input", folder / "slide.ome.tif", "--labels", tmp_path / "y.tif"]
    for block in ([], ["--block", "64"]):
        assert main([*map(str, arguments), *block]) == 2
        err = capsys.readouterr().err
        assert message in err
        assert err.count("error: ") == 1


def test_damaged_slide_leaves_no_output(folder, tmp_path, capsys):
    x = np.random.default_rng(0).integers(0, 256, (104, 131, 3), "uint8")
    tifffile.imwrite(tmp_path / "x.tif", x, tile=(32, 32), photometric="rgb")
    content = (tmp_path / "x.tif").read_bytes()
    (tmp_path / "x.tif").write_bytes(content[: len(content) // 3])
    arguments = ["predict", "--weights", folder / "dense.safetensors", "--factory", f"{folder}/nets_of_test.py:Dense"]
    arguments += ["--input", tmp_path / "x.tif"]
    for name in ("y.npy", "y.ome.zarr"):
        assert main([*map(str, arguments), "--output", str(tmp_path / name)]) == 2
        assert "x.tif: ends early; restore it from a good copy" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["x.tif"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give FILE.yaml, or --weights W and --factory"),
        (["--weights", "w.pt"], "needs images and labels; give --input X and --labels T"),
        (["--weights", "w.pt", "--split", "test"], "--split applies to experiments"),
        (["e.yaml", "--weights", "w.pt", "--input", "x.npy", "--labels", "t.npy"], "cannot be combined with e.yaml"),
        (["e.yaml", "--checkpoint", "c.h5", "--scale", "2"], "evaluate: --scale requires --weights W"),
    ],
)
def test_evaluate_options_with_weights(arguments, message, capsys):
    assert main(["evaluate", *arguments]) == 2
    assert message in capsys.readouterr().err
