"""Rows that are standard Gaussian one by one, and orthogonal where promised."""

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.linalg import hadamard

from skgp.kernels.spectra import GAUSSIAN_ROWS, fwht, hadamard_rows, orthogonal_rows

each_kind = pytest.mark.parametrize("kind", GAUSSIAN_ROWS)


@each_kind
@pytest.mark.parametrize("d", [1, 2, 5, 33, 64])
def test_rows_have_gaussian_projections(kind, d):
    x = np.random.default_rng(1).standard_normal(d)
    x /= np.linalg.norm(x)
    # One row of a group only: rows of one group are dependent, the test wants a sample.
    rngs = [np.random.default_rng(seed) for seed in range(600)]
    W = np.concatenate([GAUSSIAN_ROWS[kind](1, d, rng).numpy() for rng in rngs])
    assert W.shape == (600, d)
    assert stats.kstest(W @ x, "norm").pvalue > 1e-3
    assert stats.kstest((W**2).sum(1), "chi2", args=(d,)).pvalue > 1e-3
    # The first axis is the direction that signs and butterflies would treat worst.
    assert stats.kstest(W[:, 0], "norm").pvalue > 1e-3


@pytest.mark.parametrize(("rows", "d"), [(orthogonal_rows, 5), (hadamard_rows, 64)])
def test_rows_are_orthogonal_in_groups_with_independent_radii(rows, d):
    W = rows(2 * d + 3, d, np.random.default_rng(0))
    assert W.shape == (2 * d + 3, d)
    for group in (W[:d], W[d : 2 * d], W[2 * d :]):
        norms = group.norm(dim=1)
        directions = group / norms[:, None]
        torch.testing.assert_close(directions @ directions.T, torch.eye(len(group)).double())
        assert norms.unique().numel() == len(group)
    assert (W[:d] @ W[d : 2 * d].T).abs().max() > 0.1  # groups are independent


@pytest.mark.parametrize("d", [40, 64])
def test_hadamard_rows_are_the_product_of_their_factors(d):
    W = hadamard_rows(70, d, np.random.default_rng(0)).numpy()
    rng = np.random.default_rng(0)  # the same signs and radii, two groups of 64
    D1, D2, D3 = (rng.integers(0, 2, (3, 2, 1, 64)) * 2.0 - 1.0)[:, :, 0]
    radii = np.sqrt(rng.chisquare(64, 70))
    H = hadamard(64) / 8
    groups = [H @ np.diag(D1[g]) @ H @ np.diag(D2[g]) @ H @ np.diag(D3[g]) for g in (0, 1)]
    expected = radii[:, None] * np.concatenate(groups)[:70, :d]
    np.testing.assert_allclose(W, expected, atol=1e-12)


@each_kind
@pytest.mark.parametrize("d", [1, 3, 40])
def test_rows_may_be_none(kind, d):
    assert GAUSSIAN_ROWS[kind](0, d, np.random.default_rng(0)).shape == (0, d)


@pytest.mark.parametrize("size", [1, 2, 8, 32, 64])
def test_fwht_equals_the_hadamard_matrix(size):
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((2, 3, size)))
    H = torch.from_numpy(hadamard(size) / size**0.5)
    torch.testing.assert_close(fwht(x), x @ H)
    torch.testing.assert_close(fwht(fwht(x)), x)
    assert fwht(x.float()).dtype == torch.float32


def test_fwht_refuses_other_sizes():
    with pytest.raises(ValueError, match="power of two, got 6"):
        fwht(torch.zeros(2, 6))
