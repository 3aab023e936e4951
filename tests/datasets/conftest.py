from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"


@pytest.fixture(scope="session")
def official_mnist():
    folder = SHARED / "mnist"
    if not folder.is_dir():
        pytest.skip("the official MNIST files are not in shared/data/mnist beside the repository")
    return folder
