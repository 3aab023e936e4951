from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"


@pytest.fixture(scope="session")
def official_cifar10():
    file = SHARED / "cifar10" / "cifar-10-binary.tar.gz"
    if not file.is_file():
        pytest.skip("the CIFAR-10 subset is not in shared/data/cifar10 beside the repository")
    return file


@pytest.fixture(scope="session")
def official_mnist():
    folder = SHARED / "mnist"
    if not folder.is_dir():
        pytest.skip("the official MNIST files are not in shared/data/mnist beside the repository")
    return folder
