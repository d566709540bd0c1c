"""Log-determinants by Lanczos quadrature."""

import torch

from skgp.linalg.cg import block_cg, log_quadrature


def problem(n=40, seed=0):
    """A (n, n), a diagonal P, and its inverse as a preconditioner."""
    generator = torch.Generator().manual_seed(seed)
    G = torch.randn(n, n, dtype=torch.float64, generator=generator)
    A = G @ G.T / n + torch.diag(torch.linspace(1, 30, n, dtype=torch.float64))
    P = A.diagonal().clone()
    return A, P, lambda V: V / P[:, None]


def test_log_quadrature_is_the_form_of_the_logarithm():
    A, P, precondition = problem()
    z = torch.randn(40, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    z[:, 3] = 0.0
    z[5, 3] = 1.0
    tol = torch.tensor([[1e-14, 1e-14, 1e-14, 1e-14, 1e-2, 1e-14]])  # one ends before the others
    found = block_cg(lambda V: A @ V, z, preconditioner=precondition, tol=tol, warn=False)
    root = P.rsqrt()
    values, vectors = torch.linalg.eigh(root[:, None] * A * root)
    whitened = vectors.T @ (root[:, None] * z)
    expected = (whitened.square() * values.log()[:, None]).sum(0)
    quadratures = log_quadrature(found.coefficients) * (z * precondition(z)).sum(0)
    exact = [0, 1, 2, 3, 5]
    torch.testing.assert_close(quadratures[exact], expected[exact], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(quadratures[4], expected[4], rtol=1e-3, atol=1e-3)


def test_probes_estimate_the_determinant_without_bias():
    A, P, precondition = problem()
    z = torch.randn(40, 2000, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    z *= P.sqrt()[:, None]
    found = block_cg(lambda V: A @ V, z, preconditioner=precondition, tol=1e-10)
    each = log_quadrature(found.coefficients) * (z * precondition(z)).sum(0)
    score = (each.mean() - (torch.logdet(A) - P.log().sum())) / (each.std() / 2000**0.5)
    assert abs(float(score)) < 4
