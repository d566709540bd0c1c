"""Where searches begin: at the evidence bound, by natural gradients, then towards the log-loss."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from skgp.data import Data
from skgp.inference.sparse.collapsed import elbo_posterior, statistics
from skgp.learning.sparse import starts
from skgp.learning.sparse.objective import Objective
from skgp.learning.sparse.starts import broadened, natural_gradients
from skgp.learning.sparse.training import fit_posterior, total_loss
from skgp.likelihoods import Bernoulli, Gaussian, Poisson, StudentT
from tests.reference import sparse as dense

FIXED = {"learn_kernel": False, "learn_likelihood": False, "learn_inducing": False}
GAUSSIAN = Gaussian(0.3, bounds=(1e-4, 5.0))
STUDENT = StudentT(0.5, 4.0, scale_bounds=(0.03, 2.2), df_bounds=(2.1, 200.0))
OTHERS = {
    "probit": (Bernoulli("probit"), "labels"),
    "logit": (Bernoulli("logit"), "labels"),
    "poisson": (Poisson("exp"), "counts"),
    "softplus": (Poisson("softplus"), "counts"),
    "student_t": (STUDENT, "student_t"),
}
FAMILIES = {"gaussian": (GAUSSIAN, "gaussian")} | OTHERS
weights = pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])


def problem_of(family, n_latent=1, offset=0.3, **options):
    made, target = FAMILIES[family]
    problem = replace(dense.make_problem(target=target, **options), offset=offset)
    parameters = made.initial(torch.zeros(1, dtype=torch.float64))
    return problem, made, problem.state(parameters, n_latent)


# ---- natural gradients --------------------------------------------------------------------------


@weights
@pytest.mark.parametrize("beta", [0.2, 1.0, 4.0])
def test_natural_gradients_reach_the_optimum_for_gaussian_noise_in_one_step(beta, weighted):
    """From wherever they begin."""
    problem, made, state = problem_of("gaussian", offset=0.0, weighted=weighted)
    objective = Objective(made, name="elbo", beta=beta)
    sums = statistics(problem.kernel, problem.data, state.Z)
    mean, root = elbo_posterior(sums, problem.tensors[1], beta=beta)
    for start in (state, state.with_posterior(*dense.random_posterior(9))):
        found = natural_gradients(start, problem.data, objective, max_iter=1)
        torch.testing.assert_close(found.mean, mean, rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(found.root, root, rtol=1e-8, atol=1e-8)


def test_natural_gradients_take_the_offset_from_the_targets():
    problem, made, state = problem_of("gaussian", offset=0.7)
    objective = Objective(made, name="elbo")
    found = natural_gradients(state, problem.data, objective, max_iter=1)
    shifted = replace(problem, y=problem.y - 0.7, offset=0.0)
    expected = natural_gradients(shifted.state(), shifted.data, objective, max_iter=1)
    torch.testing.assert_close(found.mean, expected.mean)
    torch.testing.assert_close(found.root, expected.root)


@pytest.mark.parametrize("beta", [0.3, 1.0])
@pytest.mark.parametrize("family", OTHERS)
def test_natural_gradients_find_the_optimum_of_lbfgs(family, beta):
    problem, made, state = problem_of(family, weighted=True)
    objective = Objective(made, name="elbo", beta=beta, **FIXED)
    found = natural_gradients(state, problem.data, objective, max_iter=100, tol=1e-10)
    slow = fit_posterior(state, problem.data, objective, max_iter=500, tol=1e-13)
    loss = total_loss(found, problem.data, objective)
    # Negative curvatures, which Student's t has, are not counted: near the optimum only.
    assert loss == pytest.approx(slow.loss, rel=1e-2 if family == "student_t" else 1e-7)
    if family != "student_t":
        torch.testing.assert_close(found.mean, slow.state.mean, rtol=0, atol=3e-3)
        torch.testing.assert_close(found.root, slow.state.root, rtol=0, atol=3e-3)


@pytest.mark.parametrize("family", OTHERS)
def test_natural_gradients_are_near_the_optimum_after_ten_steps(family):
    problem, made, state = problem_of(family)
    objective = Objective(made, name="elbo", **FIXED)
    few = natural_gradients(state, problem.data, objective)
    many = natural_gradients(state, problem.data, objective, max_iter=100, tol=1e-10)
    before, after, least = (total_loss(s, problem.data, objective) for s in (state, few, many))
    assert after - least < 1e-3 * (before - least)


def test_natural_gradients_from_rates_far_too_low_for_a_count_do_not_lower_the_bound():
    """A full step would take the log-rate of 3 beyond 1000."""
    problem, made, _ = problem_of("poisson")
    problem = replace(problem, y=np.where(np.arange(len(problem.y)) == 5, 10_000.0, problem.y))
    objective = Objective(made, name="elbo", **FIXED)
    state = problem.state(torch.empty(0))
    for begun in (state, replace(state, offset=state.offset - 3)):
        found = natural_gradients(begun, problem.data, objective)
        before, after = (total_loss(s, problem.data, objective) for s in (begun, found))
        assert after < before
        means, _ = found.posterior().mean_and_variance(problem.data.X)
        assert means.max() < np.log(10_000) + 1


def test_natural_gradients_of_weights_are_those_of_repeated_rows():
    problem, made, state = problem_of("poisson")
    counts = np.random.default_rng(1).integers(1, 4, len(problem.y))
    objective = Objective(made, name="elbo")
    found, expected = (
        natural_gradients(state, p.data, objective, max_iter=5, tol=0.0)
        for p in (replace(problem, weight=counts.astype(float)), problem.repeated(counts))
    )
    torch.testing.assert_close(found.mean, expected.mean, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found.root, expected.root, rtol=1e-9, atol=1e-9)


def test_natural_gradients_of_several_functions_are_those_of_each():
    problem, made, state = problem_of("probit", n_latent=2)
    y = problem.data.y
    objective = Objective(made, name="elbo")
    options = {"max_iter": 6, "tol": 0.0}
    both = Data(problem.data.X, torch.cat([y, -y], dim=1))
    found = natural_gradients(state, both, objective, **options)
    for c, sign in enumerate((1, -1)):
        one = Data(problem.data.X, sign * y)
        expected = natural_gradients(problem.state(torch.empty(0)), one, objective, **options)
        torch.testing.assert_close(found.mean[:, c : c + 1], expected.mean)
        torch.testing.assert_close(found.root[c : c + 1], expected.root)


def test_natural_gradients_stop_at_their_tolerance(monkeypatch):
    problem, made, state = problem_of("gaussian")
    calls = []
    before = starts.posterior_from_precision
    monkeypatch.setattr(
        starts, "posterior_from_precision", lambda *args: calls.append(1) or before(*args)
    )
    natural_gradients(state, problem.data, Objective(made, name="elbo"), max_iter=50)
    assert len(calls) == 2  # the second step finds that the first was exact


# ---- towards the log-loss -----------------------------------------------------------------------


def at_the_bound(family, *, beta=1.0, learn_likelihood=True, **options):
    """A problem, a state at the optimum of its evidence bound, and the log-loss objective."""
    problem, made, state = problem_of(family, **options)
    objective = Objective(made, name="log_loss", beta=beta, learn_likelihood=learn_likelihood)
    bound = replace(objective, name="elbo", beta=1.0)
    state = natural_gradients(state, problem.data, bound, max_iter=100, tol=1e-10)
    return problem, state, objective


@weights
@pytest.mark.parametrize("beta", [0.01, 1.0, 8.0])
@pytest.mark.parametrize("family", FAMILIES)
def test_broadened_does_not_raise_the_log_loss_and_keeps_the_mean(family, beta, weighted):
    problem, state, objective = at_the_bound(family, beta=beta, weighted=weighted)
    found = broadened(state, problem.data, objective)
    before, after = (total_loss(s, problem.data, objective) for s in (state, found))
    assert after <= before + 1e-9 * abs(before)
    assert torch.equal(found.mean, state.mean) and torch.equal(found.root, found.root.tril())
    assert (found.root.diagonal(dim1=1, dim2=2) > 0).all()
    assert torch.equal(found.Z, state.Z) and found.kernel is state.kernel


def test_broadened_lowers_the_log_loss_where_little_regularisation_asks_for_width():
    problem, state, objective = at_the_bound("gaussian", beta=0.01, n=200)
    found = broadened(state, problem.data, objective)
    before, after = (total_loss(s, problem.data, objective) for s in (state, found))
    assert after < before - 1
    widths = [torch.logdet(s.root[0] @ s.root[0].mT) for s in (state, found)]
    assert widths[1] > widths[0] + 1


def test_broadened_takes_the_best_pair_of_its_grid():
    """Against every pair by explicit inverses."""
    problem, state, objective = at_the_bound("gaussian", beta=0.1, n=100)
    S = (state.root[0] @ state.root[0].mT).numpy()
    eye = np.eye(9)
    losses = []
    for width in starts._WIDTHS:
        wide = np.linalg.inv(eye + (np.linalg.inv(S) - eye) / width)
        root = torch.tensor(np.linalg.cholesky(wide))[None]
        for factor in starts._NOISES:
            likelihood = (state.likelihood + np.log(factor)).clamp_min(np.log(1e-4))
            candidate = replace(state, root=root, likelihood=likelihood)
            losses.append(total_loss(candidate, problem.data, objective))
    found = total_loss(broadened(state, problem.data, objective), problem.data, objective)
    assert found == pytest.approx(min(losses), rel=1e-8)


def test_broadened_keeps_what_is_not_free():
    for family in ("gaussian", "student_t"):
        problem, state, objective = at_the_bound(family, beta=0.1, learn_likelihood=False)
        found = broadened(state, problem.data, objective)
        assert torch.equal(found.likelihood, state.likelihood)


def test_broadened_keeps_noise_within_bounds_and_degrees_of_freedom():
    problem, state, objective = at_the_bound("student_t", beta=0.01, n=200)
    narrow = StudentT(0.5, 4.0, scale_bounds=(0.2**0.5, 2.2), df_bounds=(2.1, 200.0))
    found = broadened(state, problem.data, replace(objective, family=narrow))
    assert found.likelihood[0].exp() >= 0.2 - 1e-12
    assert found.likelihood[1] == state.likelihood[1]


def test_broadened_looks_at_some_rows_weighed_as_all(monkeypatch):
    """Every third row, the divergence a third: the same as those rows and a third of beta."""
    problem, state, objective = at_the_bound("gaussian", beta=0.3, n=120)
    monkeypatch.setattr(starts, "_GRID_ROWS", 40)
    found = broadened(state, problem.data, objective)
    some = problem.data.take(torch.arange(0, 120, 3))
    expected = broadened(state, some, replace(objective, beta=0.1))
    torch.testing.assert_close(found.root, expected.root)
    torch.testing.assert_close(found.likelihood, expected.likelihood)


def test_broadened_by_nothing_returns_its_posterior_in_either_precision(dtype, monkeypatch):
    """Also where variances of q(w) are below the rounding error of the greatest."""
    monkeypatch.setattr(starts, "_WIDTHS", (1.0,))
    problem, made, state = problem_of("gaussian")
    directions, _ = torch.linalg.qr(dense.random_posterior(9)[1][0])
    stds = torch.logspace(-5, 0.3, 9, dtype=torch.float64)
    upper = torch.linalg.qr((directions * stds).mT).R
    root = (upper * upper.diagonal().sign()[:, None]).mT[None]
    state = state.with_posterior(state.mean, root)
    names = ("likelihood", "Z", "mean", "root", "offset")
    state = replace(state, **{name: getattr(state, name).to(dtype) for name in names})
    data = Data(problem.data.X.to(dtype), problem.data.y.to(dtype))
    found = broadened(state, data, Objective(made, learn_likelihood=False))
    assert found.root.dtype == dtype
    scale = state.root.abs().amax(dim=2, keepdim=True)  # of each row
    error = ((found.root - state.root) / scale).abs().max()
    assert error < (1e-9 if dtype == torch.float64 else 1e-2)


@pytest.mark.parametrize("gradient", ["bmc", "smooth_bmc", "ups"])
def test_broadened_does_not_sample(gradient):
    problem, state, objective = at_the_bound("probit", beta=0.1)
    found = broadened(state, problem.data, replace(objective, gradient=gradient))
    torch.testing.assert_close(found.root, broadened(state, problem.data, objective).root)


def test_broadened_of_several_functions_shares_the_width():
    problem, made, state = problem_of("probit", n_latent=2)
    data = Data(problem.data.X, torch.cat([problem.data.y, -problem.data.y], dim=1))
    objective = Objective(made, name="log_loss", beta=0.01)
    state = natural_gradients(state, data, replace(objective, name="elbo", beta=1.0))
    found = broadened(state, data, objective)
    assert total_loss(found, data, objective) <= total_loss(state, data, objective) + 1e-9
    assert found.root.shape == (2, 9, 9)


def test_broadened_does_not_raise_the_loss_of_a_posterior_wider_than_the_prior():
    """As a warm start by the log-loss can be, or the bound of Student's t."""
    problem, made, state = problem_of("gaussian", offset=3.0)
    objective = Objective(made, name="log_loss", beta=1e-3, learn_likelihood=False)
    state = state.with_posterior(state.mean, 2 * state.root)
    before = total_loss(state, problem.data, objective)
    assert total_loss(broadened(state, problem.data, objective), problem.data, objective) <= before
