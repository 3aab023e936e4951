"""Linear algebra on virtual ranks against a single process, in float64."""

import pytest

torch = pytest.importorskip("torch")

from case_selection import select_grids  # noqa: E402
from torch import nn  # noqa: E402
from torch_runs import FunctionModule, check_modules, split_into_groups  # noqa: E402

GRIDS = ((1, 1, 2), (1, 3, 1), (1, 2, 2), (2, 1, 2))


def compute_covariance(x):
    """Return the covariance of the channels, which are not partitioned."""
    y = x.flatten(2) - x.flatten(2).mean(-1, keepdim=True)
    return y @ y.mT / y.shape[-1] + 0.1 * torch.eye(x.shape[1]).to(x)


def make_square(x):
    """Return the cells of each channel as a regular matrix."""
    return x[..., :11, :] + 4 * torch.eye(11).to(x)


def make_symmetric(x):
    y = make_square(x)
    return y @ y.mT


def whiten(x):
    return torch.linalg.solve_triangular(torch.linalg.cholesky(compute_covariance(x)), x.flatten(2), upper=False)


def apply_inverse_roots(x):
    values, vectors = torch.linalg.eigh(compute_covariance(x))
    return (vectors * values.rsqrt()[:, None]) @ vectors.mT @ x.flatten(2)


def invert_pixel_metric(x):
    """Invert a matrix for each cell, partitioned like the cells."""
    y = x.movedim(1, -1)
    return torch.linalg.inv(y[..., None] * y[..., None, :] + torch.eye(3).to(x)).diagonal(dim1=-2, dim2=-1)


class Coupling(nn.Module):
    """An invertible 1 x 1 convolution, as in Glow."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3))

    def forward(self, x):
        y = nn.functional.conv2d(x, self.weight[..., None, None])
        return y, y.mean() * torch.linalg.slogdet(self.weight)[1]


def write_diagonal(x):
    y = x[..., :11, :] * 1.0
    torch.diagonal(y, 1, 2, 3).mul_(2)
    return y.diagonal_scatter(x[:, :, :9, 0], 2, 2, 3)


MODULES = {
    "whitened": lambda: FunctionModule(whiten),
    "inverse roots": lambda: FunctionModule(apply_inverse_roots),
    "a matrix for each cell": lambda: FunctionModule(invert_pixel_metric),
    "coupling": Coupling,
    "inverse": lambda: FunctionModule(lambda x: torch.linalg.inv(make_square(x)) * x[..., :11, :]),
    "solve": lambda: FunctionModule(lambda x: torch.linalg.solve(make_square(x), x[..., :11, :3])),
    "solve, a vector": lambda: FunctionModule(lambda x: torch.linalg.solve(compute_covariance(x), x.mean((2, 3)))),
    "determinants": lambda: FunctionModule(
        lambda x: torch.linalg.det(make_square(x) / 4) + torch.logdet(make_symmetric(x))
    ),
    "logarithms of determinants": lambda: FunctionModule(lambda x: torch.linalg.slogdet(make_square(x))[1]),
    "cholesky": lambda: FunctionModule(lambda x: torch.linalg.cholesky(make_symmetric(x)) + x[..., :11, :]),
    "eigenvalues": lambda: FunctionModule(lambda x: torch.linalg.eigvalsh(make_symmetric(x))),
    "singular values": lambda: FunctionModule(lambda x: torch.linalg.svdvals(x)),
    "svd": lambda: FunctionModule(lambda x: approximate(*torch.linalg.svd(x, full_matrices=False))),
    "qr": lambda: FunctionModule(lambda x: torch.linalg.qr(x)[1]),
    "pinv": lambda: FunctionModule(lambda x: torch.linalg.pinv(x)),
    "exponential": lambda: FunctionModule(lambda x: torch.matrix_exp(make_square(x) / 9)),
    "power": lambda: FunctionModule(lambda x: torch.linalg.matrix_power(make_square(x) / 4, 3)),
    "lu": lambda: FunctionModule(lambda x: torch.linalg.lu(make_square(x))[2]),
    "nuclear norm": lambda: FunctionModule(lambda x: torch.linalg.matrix_norm(x, "nuc")),
    "diagonal": lambda: FunctionModule(lambda x: x.diagonal(1, 2, 3) + x.diagonal(-2, 3, 2)[..., :10].mean()),
    "diagonal of channels and rows": lambda: FunctionModule(lambda x: x.diagonal(0, 1, 2)),
    "diagonal of cells and samples": lambda: FunctionModule(lambda x: torch.diag_embed(x[..., :4], 1, 0, 2)),
    "written diagonal": lambda: FunctionModule(write_diagonal),
    "trace": lambda: FunctionModule(lambda x: x[0, 0].trace() * x),
    "diag": lambda: FunctionModule(lambda x: torch.diag(x[0, 0, 0]) @ x.mT),
    "sums of products": lambda: FunctionModule(lambda x: torch.addbmm(x[0, 0, :11], x[0].mT, x[0], beta=0.5)),
    "products with more": lambda: FunctionModule(
        lambda x: torch.baddbmm(x[0].mT[..., :11], x[0].mT, x[0], alpha=2) + x[0, 0, 0].addmv(x[0, 1].mT, x[0, 2, :, 0])
    ),
    "outer product": lambda: FunctionModule(lambda x: torch.addr(x[0, 0], x[0, 0, :, 0], x[0, 1, 0], beta=2)),
    "kron": lambda: FunctionModule(lambda x: torch.kron(x[0, 0, :3], x[1, 1, :, :2])),
}


COVARIANCES = {
    "channels": lambda x: torch.cov(x.transpose(0, 1).flatten(1)),
    "cells": lambda x: torch.cov(x[0, 0], correction=0),
    "weighted cells": lambda x: torch.cov(x[0, 0], fweights=torch.arange(11) % 3, aweights=x[1, 1, 3].abs()),
    "one channel": lambda x: x[0, 0].flatten().cov() + torch.corrcoef(x[0, 0].flatten()),
    "complex cells": lambda x: torch.cov(torch.complex(x[0, 0], x[0, 1])).abs(),
    "correlation of channels": lambda x: torch.corrcoef(x.transpose(0, 1).flatten(1)),
    "correlation of complex cells": lambda x: torch.view_as_real(torch.corrcoef(torch.complex(x[0, 0], x[0, 1]))),
}
MODULES |= {f"covariance, {name}": lambda f=f: FunctionModule(f) for name, f in COVARIANCES.items()}


def approximate(u, s, vh):
    return (u[..., :2] * s[..., None, :2]) @ vh[..., :2, :]


@pytest.mark.parametrize("names", split_into_groups(MODULES), ids=lambda names: names[0])
@pytest.mark.long
def test_linear_algebra_matches_single_process(names):
    torch.manual_seed(0)
    modules = {name: MODULES[name]() for name in names}
    check_modules(modules, (2, 3, 13, 11), grids=select_grids(GRIDS), tolerance=1e-8)
