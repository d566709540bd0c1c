"""Sparse triangular systems against dense ones."""

import pytest
import torch

from skgp.linalg import sparse_triangular
from skgp.linalg.sparse_triangular import UnitLower


@pytest.mark.parametrize("most", [0, 1000], ids=["by levels", "by rows"])
@pytest.mark.parametrize("k", [1, 25])
def test_solutions_are_those_of_the_dense_matrix(k, most, monkeypatch):
    monkeypatch.setattr(sparse_triangular, "LEVELLED_NUMBERS", most)
    generator = torch.Generator().manual_seed(0)
    n, H = 30, 4
    order = torch.rand(n, n, generator=generator).tril(-1).argsort(dim=1, descending=True)
    own = torch.arange(n)[:, None]
    index = torch.where(order[:, :H] < own, order[:, :H], own)  # places left have the own index
    b = torch.randn(n, H, dtype=torch.float64, generator=generator)
    dense = torch.eye(n, dtype=torch.float64)
    for i in range(n):
        for j, value in zip(index[i], b[i], strict=True):
            if j < i:
                dense[i, j] -= value
    V = torch.randn(n, k, dtype=torch.float64, generator=generator)
    matrix = UnitLower(index, b)
    torch.testing.assert_close(dense @ matrix.solve(V), V)
    torch.testing.assert_close(dense.T @ matrix.rsolve(V), V)
