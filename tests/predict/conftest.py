"""Trained network for the prediction tests."""

import numpy as np
import pytest
from predict_runs import make_experiment

from neondist.comm import ProcessGrid


@pytest.fixture(scope="module")
def network_folder(tmp_path_factory):
    """A trained network, images larger than its training images, and its outputs by a plain pass."""
    import h5py

    folder = tmp_path_factory.mktemp("trained")
    experiment = make_experiment()
    experiment.run(ProcessGrid.serial(), output=folder / "run", hooks=[])
    (folder / "run" / "checkpoint.h5").rename(folder / "net.h5")
    x = np.random.default_rng(0).normal(size=(3, 40, 52, 2))
    np.save(folder / "x.npy", x)
    experiment.model.build(x.shape[1:], 3, ProcessGrid.serial(), None)
    state = {}
    with h5py.File(folder / "net.h5") as file:
        file["model"].visititems(
            lambda name, item: state.update({name: item[()]}) if isinstance(item, h5py.Dataset) else None
        )
    experiment.model.load_state(state)
    np.save(folder / "y.npy", experiment.model.fprop(x / 2 - 0.5, training=False))
    return folder
