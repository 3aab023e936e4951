"""Axes of images and outputs of trained weights: channels named by metadata, unnamed, or absent."""

import h5py
import numpy as np
import pytest
import zarr

torch = pytest.importorskip("torch")
tifffile = pytest.importorskip("tifffile")

import neondist as nd  # noqa: E402
from neondist.errors import ConfigError, DataError  # noqa: E402
from neondist.train.inference import TrainedModule, predict_module  # noqa: E402


@pytest.fixture
def create_network(tmp_path):
    """Return a function that returns a convolution, and a function that loads its weights."""

    def create(channels):
        def make():
            return torch.nn.Conv2d(channels, 2, 3, padding=1)

        torch.manual_seed(2)
        net = make()
        torch.save(net.state_dict(), tmp_path / "net.pt")
        return net, lambda **options: TrainedModule(make, tmp_path / "net.pt", "grey", **options)

    return create


@pytest.mark.parametrize("axes", ["CYX", "TCYX", "ZCYX", "CZYX", "CTYX"])
@pytest.mark.parametrize("name", ["a.ome.tif", "a.tif"])
def test_channels_named_by_ome_or_shaped_metadata(create_network, tmp_path, axes, name):
    """Read channels that are pages, of an image with as many columns as channels."""
    cells = np.random.default_rng(3).integers(0, 255, (2, 5, 6, 3), dtype=np.uint8)
    extents = {"C": 3, "T": 2, "Z": 2, "Y": 5, "X": 6}
    for columns in (6, 3):  # three columns as well as channels: no guess from extents
        samples = cells[: 2 if len(axes) == 4 else 1, :, :columns]
        order = ["NYXC".index(letter.translate(str.maketrans("TZ", "NN"))) for letter in axes]
        stored = samples.transpose(order) if len(axes) == 4 else samples[0].transpose([n - 1 for n in order])
        assert [extents[letter] for letter in axes][:-1] == list(stored.shape[:-1])
        tifffile.imwrite(tmp_path / name, stored, photometric="minisblack", metadata={"axes": axes})
        trained = create_network(3)[1]()
        with nd.ProcessGrid.serial() as grid:
            predict_module(trained, tmp_path / name, tmp_path / "y.npy", grid, overwrite=True)
            np.save(tmp_path / "samples.npy", samples)
            predict_module(trained, tmp_path / "samples.npy", tmp_path / "z.npy", grid, overwrite=True)
        np.testing.assert_array_equal(np.load(tmp_path / "y.npy"), np.squeeze(np.load(tmp_path / "z.npy")))


def write_unnamed(folder, kind, array):
    path = folder / f"unnamed{kind}"
    if kind == ".npy":
        np.save(path, array)
    elif kind == ".h5":
        with h5py.File(path, "w") as file:
            file["images"] = array
    elif kind == ".zarr":
        zarr.create_array(path, data=array)
    else:
        tifffile.imwrite(path, array, photometric="minisblack", metadata=None)
    return path


@pytest.mark.parametrize("kind", [".npy", ".h5", ".zarr", ".tif"])
def test_unnamed_last_axis_that_may_be_channels(create_network, tmp_path, kind):
    net, load = create_network(1)
    array = np.random.default_rng(3).random((6, 7, 3)).astype("f4")
    path = write_unnamed(tmp_path, kind, array)
    message = r"\[6, 7, 3\] without names of its axes, whose last one may be 3 channels, .* or --axes NYX if the last"
    with nd.ProcessGrid.serial() as grid:
        with pytest.raises(DataError, match=message):
            predict_module(load(), path, tmp_path / "y.npy", grid)
        with pytest.raises(DataError, match="has 3 channels, but the first convolution of grey takes 1 channel; give"):
            predict_module(load(axes="YXC"), path, tmp_path / "y.npy", grid)
        assert predict_module(load(axes="NYX"), path, tmp_path / "y.npy", grid) == (6, 7, 3, 2)
        expected = net(torch.from_numpy(array)[:, None]).detach().permute(0, 2, 3, 1)
        np.testing.assert_allclose(np.load(tmp_path / "y.npy"), expected, atol=1e-6)


@pytest.mark.parametrize("dims", [(1,), (2, 3)])
def test_outputs_without_the_axes_of_images(tmp_path, dims):
    """They are not written with other axes in place of the channels."""

    class Regression(torch.nn.Conv2d):
        def forward(self, x):
            return super().forward(x).mean(1) if dims == (1,) else super().forward(x).mean(dims)

    torch.save(Regression(2, 4, 3).state_dict(), tmp_path / "x.pt")
    trained = TrainedModule(lambda: Regression(2, 4, 3), tmp_path / "x.pt", "Regression")
    np.save(tmp_path / "x.npy", np.ones((3, 12, 10, 2), np.float32))
    if dims == (1,):
        with pytest.raises(ConfigError, match=r"shape \(\d, 10, 8\).*return \(N, C, \*spatial\), such as y.unsqueeze"):
            predict_module(trained, tmp_path / "x.npy", tmp_path / "y.npy")
    else:
        predict_module(trained, tmp_path / "x.npy", tmp_path / "y.npy")
        assert np.load(tmp_path / "y.npy").shape == (3, 4)
