"""Coordinates of q(w) around a reference, and the divergence, against dense formulas."""

import numpy as np
import pytest
import torch

from skgp.inference.sparse.collapsed import elbo_posterior, statistics
from skgp.inference.sparse.reference import ReferenceGaussian, kl_from_standard_normal
from skgp.learning.sparse.coordinates import Values
from skgp.learning.sparse.objective import Objective
from skgp.learning.sparse.training import posterior_loss
from skgp.likelihoods import Gaussian
from tests.reference import sparse as dense
from tests.same import assert_same

M, C = 5, 2


@pytest.fixture
def reference():
    return ReferenceGaussian(*dense.random_posterior(M, C))


@pytest.fixture
def coordinates(rng):
    return {
        "alpha": torch.tensor(rng.standard_normal((M, C))),
        "triangle": torch.tensor(0.4 * rng.standard_normal((C, M * (M + 1) // 2))),
    }


def test_reference_starts_at_itself(reference):
    start = reference.start()
    mean, root = reference.posterior(**start)
    assert_same(mean, reference.mean)
    assert_same(root, reference.root)
    assert start["alpha"].shape == (M, C) and start["triangle"].shape == (C, 15)


def test_reference_posterior_is_its_equation(reference, coordinates):
    mean, root = reference.posterior(**coordinates)
    for c in range(C):
        shift = reference.root[c] @ coordinates["alpha"][:, c]
        torch.testing.assert_close(mean[:, c], reference.mean[:, c] + shift)
        T = torch.zeros(M, M, dtype=torch.float64)
        entries = iter(coordinates["triangle"][c])
        for i in range(M):
            for j in range(i + 1):
                T[i, j] = next(entries)
        T.diagonal().exp_()
        torch.testing.assert_close(reference.triangle(coordinates["triangle"])[c], T)
        torch.testing.assert_close(root[c], reference.root[c] @ T)
    assert torch.equal(root, root.tril())
    assert (root.diagonal(dim1=1, dim2=2) > 0).all()


def test_reference_reaches_any_posterior(reference):
    """The coordinates of another Gaussian exist and lead to it."""
    mean, root = dense.random_posterior(M, C, seed=1)
    alpha = torch.linalg.solve_triangular(
        reference.root, (mean - reference.mean).mT[:, :, None], upper=False
    )[..., 0].mT
    T = torch.linalg.solve_triangular(reference.root, root, upper=False)
    T = T.diagonal_scatter(T.diagonal(dim1=1, dim2=2).log(), dim1=1, dim2=2)
    rows, columns = np.tril_indices(M)
    found = reference.posterior(alpha, T[:, rows, columns])
    torch.testing.assert_close(found[0], mean)
    torch.testing.assert_close(found[1], root)


def test_reference_posterior_has_the_gradients_of_finite_differences(reference, coordinates):
    inputs = [value.requires_grad_() for value in coordinates.values()]
    assert torch.autograd.gradcheck(reference.posterior, inputs)


def test_kl_from_standard_normal_is_the_dense_divergence():
    mean, root = dense.random_posterior(M, C)
    expected = sum(
        dense.divergence(a.numpy(), (R @ R.mT).numpy(), np.eye(M))
        for a, R in zip(mean.mT, root, strict=True)
    )
    assert float(kl_from_standard_normal(mean, root)) == pytest.approx(expected, rel=1e-12)


def test_kl_of_unwhitened_posteriors_is_the_same():
    """What whitening rests on: the divergence of u equals that of w."""
    problem = dense.make_problem()
    mean, root = dense.random_posterior(9)
    q = dense.unwhitened(problem.kernel, problem.Z, mean[:, 0].numpy(), root[0].numpy())
    expected = dense.divergence(*q, dense.inducing_gram(problem.kernel, problem.Z))
    assert float(kl_from_standard_normal(mean, root)) == pytest.approx(expected, rel=1e-8)


def test_kl_from_standard_normal_is_0_at_the_prior_and_positive_elsewhere():
    eye = torch.eye(M, dtype=torch.float64)[None]
    zero = torch.zeros(M, 1, dtype=torch.float64)
    assert float(kl_from_standard_normal(zero, eye)) == pytest.approx(0, abs=1e-12)
    for scale in (0.9, 1.1):
        assert float(kl_from_standard_normal(zero, scale * eye)) > 0


def test_kl_of_the_coordinates_is_the_divergence_from_the_reference(reference, coordinates):
    """In these coordinates a posterior that is the next prior is N(0, I) again."""
    mean, root = reference.posterior(**coordinates)
    expected = 0.0
    for c in range(C):
        shift = (mean - reference.mean)[:, c].numpy()
        S, prior = ((R[c] @ R[c].mT).numpy() for R in (root, reference.root))
        expected += dense.divergence(shift, S, prior)
    T = reference.triangle(coordinates["triangle"])
    found = float(kl_from_standard_normal(coordinates["alpha"], T))
    assert found == pytest.approx(expected, rel=1e-10)


def test_kl_from_standard_normal_has_the_gradients_of_finite_differences():
    inputs = [value.requires_grad_() for value in dense.random_posterior(M, C)]
    assert torch.autograd.gradcheck(kl_from_standard_normal, inputs)


@pytest.mark.parametrize("weighted", [False, True])
def test_reference_at_the_optimum_makes_the_hessian_the_identity(weighted):
    """In alpha. In the entries of T it is that of |T|^2 / 2 - log |T|: 1, and 2 on the diagonal."""
    problem = dense.make_problem(n_inducing=M, weighted=weighted)
    Z, noise = problem.tensors
    with torch.no_grad():
        optimum = elbo_posterior(statistics(problem.kernel, problem.data, Z), noise)
    reference, state = ReferenceGaussian(*optimum), problem.state()
    objective = Objective(Gaussian(problem.noise, bounds=(1e-4, 1.0)), name="elbo")
    theta = torch.tensor(problem.kernel.theta)

    def loss(alpha, triangle):
        values = Values(theta, state.likelihood, Z, *reference.posterior(alpha, triangle))
        return posterior_loss(state, problem.data, objective, values)

    start = tuple(reference.start().values())
    (in_alpha, across), (_, in_triangle) = torch.autograd.functional.hessian(loss, start)
    torch.testing.assert_close(
        in_alpha[:, 0, :, 0], torch.eye(M, dtype=torch.float64), rtol=0, atol=1e-7
    )
    np.testing.assert_allclose(across, 0, atol=1e-7)
    expected = np.where(np.equal(*np.tril_indices(M)), 2.0, 1.0)
    np.testing.assert_allclose(in_triangle[0, :, 0], np.diag(expected), atol=1e-7)
