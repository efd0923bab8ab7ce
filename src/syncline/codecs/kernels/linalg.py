"""Orthonormal columns and columns of norm 1, without a host sync, for matrices of any rank."""

import torch
from torch import Tensor

# Relative to the trace: far above float64's rounding of the Gram matrix, far below float32's of the input.
SHIFT = 1e-13
# Added to the shift, so that a matrix of zeros can be factored.
FLOOR = 1e-290


def orthonormal(m: Tensor) -> Tensor:
    """Orthonormal columns spanning those of m (..., n, r).

    A column that depends on the others exactly becomes zero; one that does so up to rounding becomes what its
    rounding points to, the same on every rank that has the same bits. Shifted Cholesky QR, twice, with the Gram
    matrix in float64: the shift keeps the factorisation from failing on a deficient or zero matrix, the second
    pass takes the shift's effect out again.
    """
    q = _pass(_pass(m.double()))
    exists = torch.linalg.vecdot(q, q, dim=-2).unsqueeze(-2)
    # Multiplying instead of selecting lets nan through: a broken gradient must not look like an empty one.
    out: Tensor = q * ~(exists < 0.25)
    return out.to(m.dtype)


def unit_columns(factor: Tensor, fresh: Tensor) -> Tensor:
    """Columns of norm 1; columns of zeros are replaced by those of `fresh`."""
    norm = torch.linalg.vector_norm(factor, dim=-2, keepdim=True)
    return torch.where(norm == 0, fresh, factor / norm)


def _pass(m: Tensor) -> Tensor:
    gram = m.mT @ m
    shift = gram.diagonal(dim1=-2, dim2=-1).sum(-1, keepdim=True) * SHIFT + FLOOR
    factor, _ = torch.linalg.cholesky_ex(gram + torch.diag_embed(shift.expand(gram.shape[:-1])), upper=True)
    q: Tensor = torch.linalg.solve_triangular(factor, m, upper=True, left=False)
    return q
