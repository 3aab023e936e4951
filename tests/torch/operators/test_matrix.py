"""Linear algebra on virtual ranks, against one process, in float64."""

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch_runs import Function, check_beside, groups, in_turn  # noqa: E402

GRIDS = ((1, 1, 2), (1, 3, 1), (1, 2, 2), (2, 1, 2))


def covariance(x):
    """Of channels, which every rank has."""
    y = x.flatten(2) - x.flatten(2).mean(-1, keepdim=True)
    return y @ y.mT / y.shape[-1] + 0.1 * torch.eye(x.shape[1]).to(x)


def square(x):
    """Each channel's cells as a matrix with a determinant."""
    return x[..., :11, :] + 4 * torch.eye(11).to(x)


def symmetric(x):
    y = square(x)
    return y @ y.mT


def whitened(x):
    return torch.linalg.solve_triangular(torch.linalg.cholesky(covariance(x)), x.flatten(2), upper=False)


def roots(x):
    values, vectors = torch.linalg.eigh(covariance(x))
    return (vectors * values.rsqrt()[:, None]) @ vectors.mT @ x.flatten(2)


def pixel_metric(x):
    """A matrix for each cell, which is cut with it."""
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


def written_diagonal(x):
    y = x[..., :11, :] * 1.0
    torch.diagonal(y, 1, 2, 3).mul_(2)
    return y.diagonal_scatter(x[:, :, :9, 0], 2, 2, 3)


MODULES = {
    "whitened": lambda: Function(whitened),
    "inverse roots": lambda: Function(roots),
    "a matrix for each cell": lambda: Function(pixel_metric),
    "coupling": Coupling,
    "inverse": lambda: Function(lambda x: torch.linalg.inv(square(x)) * x[..., :11, :]),
    "solve": lambda: Function(lambda x: torch.linalg.solve(square(x), x[..., :11, :3])),
    "solve, a vector": lambda: Function(lambda x: torch.linalg.solve(covariance(x), x.mean((2, 3)))),
    "determinants": lambda: Function(lambda x: torch.linalg.det(square(x) / 4) + torch.logdet(symmetric(x))),
    "logarithms of determinants": lambda: Function(lambda x: torch.linalg.slogdet(square(x))[1]),
    "cholesky": lambda: Function(lambda x: torch.linalg.cholesky(symmetric(x)) + x[..., :11, :]),
    "eigenvalues": lambda: Function(lambda x: torch.linalg.eigvalsh(symmetric(x))),
    "singular values": lambda: Function(lambda x: torch.linalg.svdvals(x)),
    "svd": lambda: Function(lambda x: low_rank(*torch.linalg.svd(x, full_matrices=False))),
    "qr": lambda: Function(lambda x: torch.linalg.qr(x)[1]),
    "pinv": lambda: Function(lambda x: torch.linalg.pinv(x)),
    "exponential": lambda: Function(lambda x: torch.matrix_exp(square(x) / 9)),
    "power": lambda: Function(lambda x: torch.linalg.matrix_power(square(x) / 4, 3)),
    "lu": lambda: Function(lambda x: torch.linalg.lu(square(x))[2]),
    "nuclear norm": lambda: Function(lambda x: torch.linalg.matrix_norm(x, "nuc")),
    "diagonal": lambda: Function(lambda x: x.diagonal(1, 2, 3) + x.diagonal(-2, 3, 2)[..., :10].mean()),
    "diagonal of channels and rows": lambda: Function(lambda x: x.diagonal(0, 1, 2)),
    "diagonal of cells and samples": lambda: Function(lambda x: torch.diag_embed(x[..., :4], 1, 0, 2)),
    "written diagonal": lambda: Function(written_diagonal),
    "trace": lambda: Function(lambda x: x[0, 0].trace() * x),
    "diag": lambda: Function(lambda x: torch.diag(x[0, 0, 0]) @ x.mT),
    "sums of products": lambda: Function(lambda x: torch.addbmm(x[0, 0, :11], x[0].mT, x[0], beta=0.5)),
    "products with more": lambda: Function(
        lambda x: torch.baddbmm(x[0].mT[..., :11], x[0].mT, x[0], alpha=2) + x[0, 0, 0].addmv(x[0, 1].mT, x[0, 2, :, 0])
    ),
    "outer product": lambda: Function(lambda x: torch.addr(x[0, 0], x[0, 0, :, 0], x[0, 1, 0], beta=2)),
    "kron": lambda: Function(lambda x: torch.kron(x[0, 0, :3], x[1, 1, :, :2])),
}


def low_rank(u, s, vh):
    return (u[..., :2] * s[..., None, :2]) @ vh[..., :2, :]


@pytest.mark.parametrize("names", groups(MODULES), ids=lambda names: names[0])
@pytest.mark.long
def test_matrices_are_those_of_one_process(names):
    torch.manual_seed(0)
    modules = {name: MODULES[name]() for name in names}
    check_beside(modules, (2, 3, 13, 11), grids=in_turn(GRIDS), tolerance=1e-8)
