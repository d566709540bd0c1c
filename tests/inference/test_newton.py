"""Newton's method for the weights against dense oracles and scikit-learn."""

import warnings

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import RBF

from skgp.inference import newton_steps
from skgp.inference.newton import fit_newton, newton_problem
from skgp.inference.newton_steps import CGDirections, exact_directions, subsampled_factor
from skgp.inference.weights.design import StreamedDesign
from skgp.kernels.spectral import FourierFeatures
from skgp.likelihoods import Bernoulli
from skgp.linalg import NumericalWarning
from tests.reference import laplace as reference
from tests.reference.weights import dense_features
from tests.same import assert_same

N, M, C = 150, 24, 3
BASIS = FourierFeatures(4.0 * RBF(1.2), M, 2, seed=3, block_size=5)
LOGIT = Bernoulli()
TIGHT = {"tol": 1e-11, "loss_tol": 0.0, "max_iter": 60}
ROUTES = {
    "exact": {"solver": "exact"},
    "cg": {"solver": "cg", "preconditioner_rows": 60},
}


def fit(design, Y, *, likelihood=LOGIT, **options):
    """Newton's method with the rows of the preconditioner seeded."""
    names = {"offset", "prior_variance", "row_weight"} & options.keys()
    data = {name: options.pop(name) for name in names}
    problem = newton_problem(design, Y, likelihood, **data)
    return fit_newton(problem, generator=torch.Generator().manual_seed(0), **options)


def one_vs_rest(labels, n_classes=C):
    """Columns of -1 and +1."""
    return 2.0 * (labels[:, None] == torch.arange(n_classes)).double() - 1


@pytest.fixture
def X(rng):
    return torch.from_numpy(rng.standard_normal((N, 2)))


@pytest.fixture
def labels(X, rng):
    noisy = X[:, 0] + torch.sin(3 * X[:, 1]) + 0.5 * torch.from_numpy(rng.standard_normal(N))
    return torch.bucketize(noisy, torch.tensor([-0.7, 0.6], dtype=torch.float64))


@pytest.fixture
def Y(labels):
    return one_vs_rest(labels)


@pytest.fixture(params=ROUTES, ids=list(ROUTES))
def route(request):
    return ROUTES[request.param]


def test_newton_equals_the_dense_oracle_with_all_options(X, Y, rng, route):
    """Offsets, prior variances and row weights that differ from column to column."""
    offset, a = np.array([-1.0, 0.3, 0.0]), np.array([0.5, 2.0, 8.0])
    weight = rng.uniform(0.0, 3.0, (N, C))
    result = fit(
        StreamedDesign(BASIS, X),
        Y,
        offset=torch.from_numpy(offset),
        prior_variance=torch.from_numpy(a),
        row_weight=torch.from_numpy(weight),
        **route,
        **TIGHT,
    )
    Phi = dense_features(BASIS, X)
    for j in range(C):
        options = offset[j], a[j], weight[:, j]
        w = reference.mode(Phi, Y[:, j].numpy(), *options)
        np.testing.assert_allclose(result.weights[:, j].numpy(), w, atol=1e-9)
        np.testing.assert_allclose(result.latent[:, j].numpy(), offset[j] + Phi @ w, atol=1e-8)
        expected = reference.loss(Phi, Y[:, j].numpy(), w, *options)
        np.testing.assert_allclose(float(result.loss[j]), expected, rtol=1e-12)


def test_newton_default_tolerances_reach_the_mode(X, Y, route):
    """Within 1e-5 nats a row, what the predictions can show."""
    design = StreamedDesign(BASIS, X)
    excess = fit(design, Y, **route).loss - fit(design, Y, **route, **TIGHT).loss
    assert bool((excess >= -1e-9).all()) and bool((excess < 1e-5 * N).all())


@pytest.mark.parametrize("tolerance", ["tol", "loss_tol"])
def test_newton_either_tolerance_ends_the_fit(X, Y, tolerance):
    loose = {"tol": 0.0, "loss_tol": 0.0} | {tolerance: 1e-2}
    result = fit(StreamedDesign(BASIS, X), Y, **loose)
    assert result.converged and result.n_iter < 6
    if tolerance == "tol":
        assert float(result.gradient_norm.max()) <= 1e-2


def test_newton_starts_from_start(X, Y, route):
    design = StreamedDesign(BASIS, X)
    mode = fit(design, Y, **route, **TIGHT)
    again = fit(design, Y, start=mode.weights, **route)
    assert again.n_iter == 0 and again.converged
    assert_same(again.weights, mode.weights)
    np.testing.assert_allclose(again.latent.numpy(), mode.latent.numpy(), atol=1e-10)
    nearby = fit(design, Y, start=mode.weights, prior_variance=1.3, **route)
    assert nearby.n_iter < fit(design, Y, prior_variance=1.3, **route).n_iter


def test_newton_loss_falls_from_step_to_step(X, Y, route, monkeypatch):
    monkeypatch.setattr(newton_steps.defaults, "MAX_CG", 20)
    """Also from a start so far off that whole steps would overshoot."""
    start = torch.full((M, C), 40.0, dtype=torch.float64)
    result = fit(StreamedDesign(BASIS, X), Y, start=start, prior_variance=1e4, **route)
    losses = np.array([info["loss"] for info in result.history])
    assert (np.diff(losses) <= 1e-12 * losses[:-1]).all()
    assert min(info["step"] for info in result.history) < 1
    assert result.converged
    latent = dense_features(BASIS, X) @ result.weights.numpy()
    np.testing.assert_allclose(result.latent.numpy(), latent, atol=1e-8)


def test_newton_callback_stops_and_keeps_the_state(X, Y, route):
    seen = []

    def stop_at_two(step, info):
        seen.append((step, info["loss"]))
        return step == 2

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = fit(StreamedDesign(BASIS, X), Y, callback=stop_at_two, **route, **TIGHT)
    assert [step for step, _ in seen] == [1, 2] and result.n_iter == 2
    assert not result.converged
    Phi = dense_features(BASIS, X)
    losses = [reference.loss(Phi, Y[:, j].numpy(), result.weights[:, j].numpy()) for j in range(C)]
    np.testing.assert_allclose(result.loss.numpy(), losses, rtol=1e-10)
    np.testing.assert_allclose(seen[-1][1], sum(losses), rtol=1e-10)


def test_newton_warns_when_it_falls_short(X, Y, route):
    with pytest.warns(NumericalWarning, match="ended after max_iter=1 steps"):
        result = fit(StreamedDesign(BASIS, X), Y, max_iter=1, **route)
    assert result.n_iter == 1 and not result.converged


@pytest.mark.filterwarnings("ignore::skgp.linalg.NumericalWarning")
@pytest.mark.parametrize(
    "case", ["separable", "one label", "one row", "duplicated rows", "no weight", "huge prior"]
)
def test_newton_degenerate_data_are_finite(X, Y, route, case):
    a, weight = 1.0, None
    if case == "separable":
        Y, a = torch.where(X[:, :1] > 0, 1.0, -1.0).double(), 1e6
    elif case == "one label":
        Y = torch.ones_like(Y)
    elif case == "one row":
        X, Y = X[:1], Y[:1]
    elif case == "duplicated rows":
        X, Y = X[:1].expand(N, 2), Y
    elif case == "no weight":
        weight = torch.zeros(N, dtype=torch.float64)
    else:
        a = 1e10
    result = fit(StreamedDesign(BASIS, X), Y, prior_variance=a, row_weight=weight, **route)
    for values in (result.weights, result.latent, result.loss, result.gradient_norm):
        assert bool(values.isfinite().all())
    # Some rows cannot precondition a Hessian that the prior leaves nearly singular.
    assert result.converged or (case == "huge prior" and route is ROUTES["cg"])


@pytest.mark.parametrize(
    "directions",
    [exact_directions, CGDirections(70, torch.Generator().manual_seed(0)).solve],
    ids=["exact", "cg"],
)
def test_newton_directions_solve_with_the_hessian_of_each_column(X, rng, directions, monkeypatch):
    monkeypatch.setattr(newton_steps.defaults, "MAX_CG", 60)
    curvature, a = rng.uniform(0.0, 0.25, (N, C)), np.array([0.5, 3.0, 20.0])
    B = rng.standard_normal((M, C))
    direction = directions(
        StreamedDesign(BASIS, X),
        torch.from_numpy(1 / a),
        torch.from_numpy(curvature),
        torch.from_numpy(B),
        torch.full((C,), 1e-10, dtype=torch.float64),
    )
    Phi = dense_features(BASIS, X)
    for j in range(C):
        expected = np.linalg.solve(reference.hessian(Phi, curvature[:, j], a[j]), B[:, j])
        np.testing.assert_allclose(direction.weights[:, j].numpy(), expected, atol=1e-8)
        np.testing.assert_allclose(direction.image[:, j].numpy(), Phi @ expected, atol=1e-8)


def test_subsampled_factor_of_all_rows_is_that_of_the_hessian(X, rng, generator):
    c = rng.uniform(0.0, 0.25, N)
    c[5] = 0.0
    L = subsampled_factor(
        StreamedDesign(BASIS, X), torch.from_numpy(c), 0.5, N, generator=generator
    )
    expected = reference.hessian(dense_features(BASIS, X), c, prior_variance=2.0)
    np.testing.assert_allclose((L @ L.mT).numpy(), expected, atol=1e-12)


def test_subsampled_factor_is_unbiased_up_to_its_ridge(X, rng, generator):
    """z-test of one quadratic form over many draws, the expected ridge taken off each."""
    c = torch.from_numpy(rng.uniform(0.0, 0.25, N) ** 3)
    design = StreamedDesign(BASIS, X)
    u = torch.from_numpy(rng.standard_normal((M, 1)))
    v = torch.from_numpy(rng.standard_normal((M, 1)))
    v -= u * (u * v).sum() / u.square().sum()  # orthogonal: the ridge drops out
    draws = []
    for _ in range(400):
        L = subsampled_factor(design, c, 1.0, 20, generator=generator)
        draws.append(float(u.mT @ (L @ L.mT) @ v))
    H = reference.hessian(dense_features(BASIS, X), c.numpy())
    expected = float(u[:, 0].numpy() @ H @ v[:, 0].numpy())
    z = (np.mean(draws) - expected) / (np.std(draws) / len(draws) ** 0.5)
    assert abs(z) < 4


def test_newton_refuses_invalid_input(X, Y):
    design = StreamedDesign(BASIS, X)
    weighted = StreamedDesign(BASIS, X, sample_weight=torch.ones(N))
    bad_weight = torch.ones(N)
    bad_weight[3] = -1.0
    for message, arguments, options in [
        ("must have no sample_weight", (weighted, Y), {}),
        (r"Y must have shape \(150, c\); got \(149, 3\)", (design, Y[1:]), {}),
        ("offset must be 3 finite numbers", (design, Y), {"offset": torch.zeros(2)}),
        ("prior_variance must be positive", (design, Y), {"prior_variance": 0.0}),
        ("prior_variance must be .* 3", (design, Y), {"prior_variance": torch.ones(2)}),
        ("row_weight must have shape", (design, Y), {"row_weight": torch.ones(N, 2)}),
        ("row_weight must be finite and not neg", (design, Y), {"row_weight": bad_weight}),
        (r"start must have shape \(24, 3\)", (design, Y), {"start": torch.zeros(M, 2)}),
    ]:
        with pytest.raises(ValueError, match=message):
            fit(*arguments, **options)


def test_newton_names_a_gradient_that_is_not_finite(X, Y, route):
    X[3, 0] = float("nan")
    with pytest.raises(FloatingPointError, match="not finite after 0 Newton steps"):
        fit(StreamedDesign(BASIS, X), Y, **route)
