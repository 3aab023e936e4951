from pathlib import Path

import pytest
from image_samples import SIZES, make_sample, save

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


@pytest.fixture
def write_files(tmp_path):
    def write(suffix):
        for n in range(len(SIZES)):
            image, mask = make_sample(n)
            save(tmp_path / "images" / f"{n}{suffix}", image)
            save(tmp_path / "masks" / f"{n}{suffix}", mask)
        return {"images": f"{tmp_path}/images/*{suffix}", "labels": f"{tmp_path}/masks/*{suffix}"}

    return write
