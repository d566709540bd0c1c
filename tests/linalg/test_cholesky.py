"""Cholesky factors against NumPy, and the promises about jitter."""

import numpy as np
import pytest
import torch

from skgp.linalg import NotPositiveDefiniteError, NumericalWarning, cholesky
from skgp.linalg.cholesky import (
    _cause,
    cho_inverse,
    cho_solve,
    jittered_cholesky,
    log_det,
    reverse_cholesky,
    semidefinite_root,
    tri_solve,
)

DTYPES = [torch.float32, torch.float64]


def _spd(*shape, seed=0, dtype=torch.float64):
    rng = np.random.default_rng(seed)
    root = rng.standard_normal((*shape, 2 * shape[-1]))
    return torch.as_tensor(root @ root.swapaxes(-1, -2), dtype=dtype)


def _singular(n=6, rank=3, seed=1, dtype=torch.float64):
    root = torch.as_tensor(np.random.default_rng(seed).standard_normal((n, rank)), dtype=dtype)
    return root @ root.T - 1e-9 * torch.eye(n, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_jittered_cholesky_equals_numpy_without_jitter(dtype):
    A = _spd(5, dtype=dtype)
    factor, jitter = jittered_cholesky(A)
    assert jitter == 0.0 and factor.dtype == dtype
    np.testing.assert_allclose(
        factor, np.linalg.cholesky(A.double().numpy()), rtol=50 * torch.finfo(dtype).eps
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_jittered_cholesky_reports_the_jitter_it_added(dtype):
    A = _singular(dtype=dtype)
    before = A.clone()
    factor, jitter = jittered_cholesky(A)
    assert 0 < jitter <= 1e-4 * float(A.diagonal().mean())
    expected = A + jitter * torch.eye(6, dtype=dtype)
    torch.testing.assert_close(factor @ factor.T, expected)
    assert torch.equal(A, before)


def test_jittered_cholesky_escalates_by_ten_and_stops_at_first_success():
    A = _singular()
    jitter = jittered_cholesky(A).jitter
    relative = jitter / float(A.diagonal().mean())
    steps = np.log10(relative / torch.finfo(A.dtype).eps)
    assert steps == pytest.approx(round(steps), abs=1e-8)
    shrunk = A + jitter / 10 * torch.eye(6, dtype=A.dtype)
    assert np.linalg.eigvalsh(shrunk.numpy()).min() < 0


def test_jittered_cholesky_reaches_max_jitter_itself():
    # Smallest eigenvalue -0.05, mean diagonal 1.3: only the last try, 0.05 relative, is enough.
    A = torch.diag(torch.tensor([-0.05, 1.0, 2.0, 2.25], dtype=torch.float64))
    assert jittered_cholesky(A, max_jitter=0.05).jitter == pytest.approx(0.05 * 1.3)
    with pytest.raises(NotPositiveDefiniteError):
        jittered_cholesky(A, max_jitter=0.03)


def test_jittered_cholesky_batch_raises_only_the_failing_matrices():
    good, bad = _spd(6), _singular()
    A = torch.stack([good, bad, 2 * good]).reshape(3, 1, 6, 6)
    factor, jitter = jittered_cholesky(A)
    assert factor.shape == (3, 1, 6, 6) and jitter > 0
    torch.testing.assert_close(factor[0, 0], torch.linalg.cholesky(good), rtol=1e-12, atol=0)
    torch.testing.assert_close(factor[2, 0], torch.linalg.cholesky(2 * good), rtol=1e-12, atol=0)
    assert jittered_cholesky(bad).jitter == jitter


def test_jittered_cholesky_scales_with_the_matrix():
    A = _singular()
    assert jittered_cholesky(1e6 * A).jitter == pytest.approx(1e6 * jittered_cholesky(A).jitter)


@pytest.mark.parametrize("offset", [0.0, -1e-7])
def test_jittered_cholesky_is_differentiable(offset):
    # The negative offset makes the matrix indefinite, so that the jittered path is differentiated.
    root = torch.as_tensor(np.random.default_rng(3).standard_normal((4, 4)))
    root[3] = root[2] if offset else root[3]

    def log_determinant(scale):
        A = (root * scale) @ (root * scale).T + offset * torch.eye(4, dtype=root.dtype)
        return log_det(jittered_cholesky(A).factor)

    scale = torch.ones((), dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(log_determinant(scale), scale)
    if not offset:
        assert float(gradient) == pytest.approx(8.0)  # log |s^2 A| = 2 n log s + const
    assert torch.isfinite(gradient)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_jittered_cholesky_names_non_finite_entries(value):
    A = _spd(3)
    A[0, 0] = value
    A[1, 1] = -1
    with pytest.raises(NotPositiveDefiniteError, match="NaN or inf"):
        jittered_cholesky(A)


def test_jittered_cholesky_failure_names_its_cause():
    one = torch.eye(4, dtype=torch.float64)
    negative = one.clone()
    negative[2, 2] = -1.0
    indefinite = torch.full((4, 4), -0.9, dtype=torch.float64) + 1.9 * one
    far = indefinite.clone()
    far[3, 3] = 1e12
    equal = one.clone()
    equal[3, 1] = equal[1, 3] = 1.0
    near = one.clone()
    near[3, 1] = near[1, 3] = 1 - 1e-9
    for A, max_jitter, message in (
        (
            -one,
            1e-4,
            "max_jitter=0.0001 .* Row 0 has a variance of -1: the kernel is no",
        ),
        (negative, 1e-4, "Row 2 has a variance of -1"),
        (
            indefinite,
            1e-4,
            "indefinite: an eigenvalue of -1.7 .* ExpSineSquared .*ActiveDims",
        ),
        (far, 1e-14, "Row 3 lies far from the others: its variance of 1e.12 .* Remove the row"),
    ):
        with pytest.raises(NotPositiveDefiniteError, match=message):
            jittered_cholesky(A, max_jitter=max_jitter)
    assert "Rows 1 and 3 are duplicates" in _cause(equal, 1e-4)
    assert "length scales are long" in _cause(near, 1e-4)
    near[3, 1] = near[1, 3] = 1 - 3e-7
    assert "dtype='float64'" in _cause(near.float(), 1e-4)


@pytest.mark.parametrize("shape", [(3,), (3, 2)])
def test_jittered_cholesky_rejects_non_square(shape):
    with pytest.raises(ValueError, match="square"):
        jittered_cholesky(torch.ones(shape))


@pytest.mark.parametrize("shape", [(1,), (5,), (2, 5)])
def test_reverse_cholesky_gives_the_factor_of_the_inverse(shape):
    A = _spd(*shape)
    U, jitter = reverse_cholesky(A)
    assert jitter == 0.0
    assert torch.equal(U, U.triu())
    torch.testing.assert_close(U @ U.mT, A, rtol=1e-13, atol=0)
    inverse_factor = np.linalg.cholesky(np.linalg.inv(A.numpy()))
    np.testing.assert_allclose(torch.linalg.inv(U).mT, inverse_factor, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("batch", [(), (2,)])
def test_cho_solve_and_log_det_equal_numpy(batch):
    A = _spd(*batch, 4)
    L = jittered_cholesky(A).factor
    B = torch.as_tensor(np.random.default_rng(5).standard_normal((*batch, 4, 3)))
    np.testing.assert_allclose(cho_solve(L, B), np.linalg.solve(A.numpy(), B.numpy()), rtol=1e-10)
    vector = cho_solve(L, B[..., 0])
    assert vector.shape == (*batch, 4)
    torch.testing.assert_close(vector, cho_solve(L, B)[..., 0])
    np.testing.assert_allclose(log_det(L), np.linalg.slogdet(A.numpy())[1], rtol=1e-12)


def test_exceptions_are_what_callers_catch():
    assert issubclass(NotPositiveDefiniteError, ValueError)
    assert issubclass(NumericalWarning, UserWarning)


def test_semidefinite_root_of_a_difference_that_is_rounding_alone():
    A = torch.tensor([[1e-11, 2e-11], [2e-11, -3e-11]], dtype=torch.float64)
    root = semidefinite_root(A)
    eigenvalues, vectors = torch.linalg.eigh(A)
    expected = vectors @ torch.diag(eigenvalues.clamp_min(0)) @ vectors.T
    torch.testing.assert_close(root @ root.T, expected, rtol=1e-9, atol=0)
    torch.testing.assert_close(root, root.T)  # the one root that does not jump with rounding
    positive = A.diagonal().abs().diag()
    torch.testing.assert_close(semidefinite_root(positive), positive.sqrt())
    with pytest.raises(NotPositiveDefiniteError):
        semidefinite_root(A * torch.nan)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("least", [0, 1000])  # by SciPy, and by torch
def test_libraries_agree(dtype, least, monkeypatch):
    monkeypatch.setattr(cholesky, "LAPACK_ROWS", least)
    monkeypatch.setattr(cholesky, "BLAS_COLUMNS", least)
    A = _spd(6, dtype=dtype)
    at, exact = A.clone().requires_grad_(), A.double().numpy()
    L, tolerance = jittered_cholesky(A).factor, {"rtol": 0, "atol": 50 * torch.finfo(dtype).eps}
    np.testing.assert_allclose(L, np.linalg.cholesky(exact), **tolerance)
    np.testing.assert_allclose(cho_inverse(L), np.linalg.inv(exact), **tolerance)
    assert log_det(jittered_cholesky(at).factor).requires_grad
    singular = _singular(dtype=dtype)
    factor, jitter = jittered_cholesky(singular)
    raised = singular + jitter * torch.eye(6, dtype=dtype)
    np.testing.assert_allclose(factor @ factor.T, raised, **tolerance)
    with pytest.raises(NotPositiveDefiniteError, match="NaN"):
        jittered_cholesky(torch.where(A == A[3, 1], torch.nan, A))
    with pytest.raises(NotPositiveDefiniteError, match="is no covariance"):
        jittered_cholesky(A - 2 * A.diagonal().diag() * (torch.arange(6) % 2))
    wide = torch.arange(18.0, dtype=dtype).reshape(3, 6)
    for B in (wide.T, wide.T.contiguous(), wide.T[:, :1], wide.T[:, :0]):
        for a, upper in ((L, False), (L.mT, True), (L.mT.contiguous(), True)):
            expected = np.linalg.solve(a.double().numpy(), B.double().numpy())
            np.testing.assert_allclose(tri_solve(a, B, upper=upper), expected, rtol=1e-4, atol=1e-6)
    assert tri_solve(L[:0, :0], wide.T[:0, :1], upper=False).shape == (0, 1)
