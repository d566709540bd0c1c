"""Newton's method on sums over blocks is the one on all observations."""

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import RBF

from skgp.blocks import sum_of_neighbors
from skgp.data import Data
from skgp.inference.laplace import ClassRows, fit_newton_sums, laplace_covariance, log_evidence
from skgp.inference.newton import fit_newton, newton_problem
from skgp.inference.weights.bases import WhitenedInducingBasis
from skgp.inference.weights.design import StreamedDesign
from skgp.inference.weights.gram import hessian_covariance
from skgp.likelihoods import Bernoulli
from skgp.linalg import NumericalWarning

N, C = 60, 2
TIGHT = {"tol": 1e-12, "loss_tol": 0.0}


class Slices:
    """Observations in blocks that end at `ends`; counts passes."""

    def __init__(self, data, ends=(7, 8, 41, N)):
        self.data, self.ends, self.n_passes = data, ends, 0

    def sum(self, statistic, callback=None):
        self.n_passes += 1
        pairs = zip((0, *self.ends), self.ends, strict=False)
        return sum_of_neighbors(statistic(self.data.take(slice(*pair))) for pair in pairs)


def case(link="logit", weighted=False):
    rng = np.random.default_rng(0)
    X = torch.from_numpy(rng.standard_normal((N, 2)))
    Y = torch.from_numpy(np.sign(np.column_stack([X[:, 0] * X[:, 1], X[:, 0] + 0.3])))
    weight = torch.from_numpy(rng.integers(0, 3, N).astype(float)) if weighted else None
    basis = WhitenedInducingBasis(RBF(0.7), X[::5])
    offset = torch.tensor([0.2, -0.4], dtype=torch.float64)
    return Data(X, Y, weight), ClassRows(basis, Bernoulli(link), offset)


def in_memory(data, rows, a, start=None, **limits):
    design = StreamedDesign(rows.basis, data.X)
    problem = newton_problem(
        design,
        data.y,
        rows.likelihood,
        offset=rows.offset,
        prior_variance=a,
        row_weight=data.weight,
    )
    generator = torch.Generator().manual_seed(0)
    fit = fit_newton(problem, solver="exact", start=start, generator=generator, **limits)
    return fit, design, problem.curvature(fit.latent)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("link", "a"), [("logit", 1.0), ("probit", 30.0)])
def test_modes_of_blocks_are_those_of_all_observations(link, a, weighted):
    data, rows = case(link, weighted=weighted)
    expected, design, curvature = in_memory(data, rows, a, **TIGHT)
    found = fit_newton_sums(Slices(data), rows, prior_variance=a, **TIGHT)
    assert found.converged and found.n_iter == expected.n_iter
    np.testing.assert_allclose(found.weights, expected.weights, rtol=1e-8, atol=1e-8)
    np.testing.assert_allclose(found.loss, expected.loss, rtol=1e-12)
    for kind in ("full", "chevron", "diagonal"):
        settings = {"kind": kind, "n_dense_columns": 3}
        q = hessian_covariance(found.hessian, torch.full((C,), 1 / a).double(), **settings)
        other = laplace_covariance(design, curvature, prior_variance=a, **settings)
        Phi = design.features(0)
        for one, two in zip(q, other, strict=True):
            np.testing.assert_allclose(one.variance(Phi), two.variance(Phi), rtol=1e-7)
    q = hessian_covariance(found.hessian, torch.full((C,), 1 / a).double())
    full = laplace_covariance(design, curvature, prior_variance=a)
    values = (
        log_evidence(found, q, prior_variance=a),
        log_evidence(expected, full, prior_variance=a),
    )
    np.testing.assert_allclose(*values, rtol=1e-7)


def test_a_pass_a_step_and_the_same_steps_as_in_memory():
    """Losses after each step, at the tolerances of a fit, and from a start that overshoots."""
    (data, rows), a = case(), 1.0
    for start in (None, 8 * torch.ones(rows.basis.n_features, C).double()):
        expected, *_ = in_memory(data, rows, a, start)
        blocks = Slices(data)
        found = fit_newton_sums(blocks, rows, prior_variance=a, start=start)
        losses = [[info["loss"] for info in fit.history] for fit in (found, expected)]
        np.testing.assert_allclose(*losses, rtol=1e-9)
        assert blocks.n_passes == found.n_iter + 1 or start is not None
        assert found.converged and losses[0] == sorted(losses[0], reverse=True)


def test_what_ends_early_keeps_its_last_step_and_says_so():
    (data, rows), a = case(), 1.0
    with pytest.warns(NumericalWarning, match="max_iter=2"):
        found = fit_newton_sums(Slices(data), rows, prior_variance=a, max_iter=2)
    stopped = fit_newton_sums(
        Slices(data), rows, prior_variance=a, callback=lambda iteration, info: iteration == 2
    )
    np.testing.assert_array_equal(stopped.weights, found.weights)
    assert stopped.n_iter == 2 and not stopped.converged


def test_columns_that_have_ended_are_passed_over_no_more():
    """One that starts at its mode takes no step; its Hessian is that of the mode, too."""
    (data, rows), a = case(), 1.0
    mode = fit_newton_sums(Slices(data), rows, prior_variance=a, **TIGHT)
    start, seen = mode.weights.clone(), []
    start[:, 1] += 1.0

    class Told(Slices):
        def sum(self, statistic, callback=None):
            seen.append(statistic.keywords["columns"].tolist())
            return super().sum(statistic, callback)

    found = fit_newton_sums(Told(data), rows, prior_variance=a, start=start, tol=1e-10)
    assert seen[0] == [0, 1] and len(seen) > 3 and all(part == [1] for part in seen[1:])
    np.testing.assert_array_equal(found.weights[:, 0], mode.weights[:, 0])
    np.testing.assert_allclose(found.weights, mode.weights, atol=1e-6)
    np.testing.assert_allclose(found.hessian, mode.hessian, atol=1e-6)


def test_blocks_name_what_is_not_finite_and_a_start_of_another_shape():
    data, rows = case()
    with pytest.raises(ValueError, match=r"start must have shape \(12, 2\)"):
        fit_newton_sums(Slices(data), rows, prior_variance=1.0, start=torch.zeros(12, 1))
    data.X[3, 0] = float("nan")
    with pytest.raises(FloatingPointError, match="not finite after 0 Newton steps"):
        fit_newton_sums(Slices(data), rows, prior_variance=1.0)
