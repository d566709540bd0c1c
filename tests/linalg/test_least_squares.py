"""`skgp.linalg.cholesky` against rational arithmetic."""

from fractions import Fraction

import numpy as np
import pytest
import torch

from skgp.linalg.cholesky import ridge_by_rows


def _solved(A, b):
    """A^-1 b of lists of Fractions, by Gauss-Jordan elimination."""
    rows = [[*row, value] for row, value in zip(A, b, strict=True)]
    for j in range(len(rows)):
        pivot = next(i for i in range(j, len(rows)) if rows[i][j])
        rows[j], rows[pivot] = rows[pivot], rows[j]
        rows[j] = [value / rows[j][j] for value in rows[j]]
        for i in range(len(rows)):
            if i != j:
                rows[i] = [a - rows[i][j] * b for a, b in zip(rows[i], rows[j], strict=True)]
    return [row[-1] for row in rows]


@pytest.mark.parametrize("least", [1.0, 1e-10, 1e-18, 1e-22])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_ridge_by_rows_keeps_its_digits_whatever_the_ratio_of_noises(least, seed):
    rng = np.random.default_rng(seed)
    Phi, y = rng.standard_normal((6, 4)), rng.standard_normal(6)
    noise = np.array([least, 1e-2, least, 1.0, 1e-8, 1e-2])
    exact = np.vectorize(Fraction)
    P, D, t = exact(Phi), exact(noise), exact(y)
    A = (P.T / D) @ P + exact(np.eye(4))
    mean = _solved(A.tolist(), ((P.T / D) @ t).tolist())
    S = np.array([_solved(A.tolist(), e.tolist()) for e in exact(np.eye(4))]).astype(float)
    misfit = (t - P @ mean) @ ((t - P @ mean) / D) + np.dot(mean, mean)
    found = ridge_by_rows(*map(torch.tensor, (Phi, y, noise)))
    np.testing.assert_allclose(found.mean, np.array(mean, float), rtol=1e-11)
    np.testing.assert_allclose(found.root @ found.root.T, S, rtol=1e-9, atol=1e-13 * S.max())
    np.testing.assert_allclose(found.misfit, float(misfit), rtol=1e-5)
    assert (found.root.triu(1) == 0).all() and (found.root.diagonal() > 0).all()
