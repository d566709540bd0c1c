"""The steps of a fit: what each branch returns, what is learned, and when it stops."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import norm
from sklearn.gaussian_process.kernels import RBF, ConstantKernel

from skgp.data import Data
from skgp.inference.defaults import SHARED_JITTER
from skgp.inference.neighbors.posterior import SWSGPPosterior
from skgp.inference.neighbors.search import active_sets
from skgp.kernels.scales import scale_amplitude
from skgp.learning.local.bound import LocalObjective, total_bound
from skgp.learning.local.prior import Settings, find_prior, split_rows
from skgp.likelihoods import Bernoulli, Gaussian, Poisson, StudentT
from skgp.models import swsgp as module
from skgp.models.swsgp import fit_swsgp
from tests.covering import slow_case
from tests.reference import swsgp as dense
from tests.reference.gaussian import left_out

KERNEL = ConstantKernel(1.0, (1e-3, 1e3)) * RBF([0.8, 0.8])
QUICK = Settings(n_neighbors=6, learn_hyperparameters=False)
LIKELIHOODS = {
    "gaussian": Gaussian(0.25, bounds=(1e-4, 10.0)),
    "student_t": StudentT(0.5, 4.0, scale_bounds=(0.01, 10.0**0.5), df_bounds=(2.1, 200.0)),
    "labels": Bernoulli("probit"),
    "counts": Poisson("exp"),
}
each_likelihood = pytest.mark.parametrize("name", LIKELIHOODS)


def data_of(name, n=150, c=1, seed=0, dtype=torch.float64):
    """Rows of smooth functions; and 20 inducing points, 12 of which are rows."""
    problem = dense.make_problem(target=name, n=n, n_latent=c, seed=seed)
    X, Y = (torch.tensor(part, dtype=dtype) for part in (problem.X, problem.Y))
    others = np.random.default_rng(9).uniform(-2, 2, (8, 2))
    Z = torch.cat([X[: min(n, 12)], torch.tensor(others, dtype=dtype)])
    position = torch.full((n,), -1)
    position[:12] = torch.arange(min(n, 12))
    return Data(X, Y), Z, position


def fit(name, settings=QUICK, n=150, c=1, data=None, kernel=KERNEL, **options):
    rows, Z, position = data_of(name, n, c)
    rows = rows if data is None else data
    return fit_swsgp(
        kernel,
        LIKELIHOODS[name],
        rows,
        Z,
        position,
        offset=rows.X.new_zeros(rows.y.shape[1]),
        settings=settings,
        generator=torch.Generator().manual_seed(0),
        **options,
    )


def log_score(name, found, n=200, c=1):
    """Mean log predictive density of other rows."""
    rows = data_of(name, n, c, seed=5)[0]
    predict = SWSGPPosterior(found.state, 6).mean_and_variance
    likelihood = LIKELIHOODS[name].with_parameters(found.state.likelihood)
    return float(likelihood.log_predictive(rows.y, *predict(rows.X)).sum(1).mean())


def oracle(name, kl_weight, n_neighbors=6, weight=None):
    """The dense problem of `data_of`."""
    rows, Z, _ = data_of(name)
    X, Z = rows.X.numpy(), Z.numpy()
    active = dense.nearest(X, Z, n_neighbors)
    offset = np.zeros(rows.y.shape[1])
    return dense.Problem(KERNEL, X, rows.y.numpy(), Z, active, offset, weight, kl_weight, 0.25)


# ---- closed forms and natural gradients ----------------------------------------------------------


@pytest.mark.parametrize("kl_weight", [None, 1.0])
def test_gaussian_fit_is_the_closed_form(kl_weight):
    found = fit("gaussian", replace(QUICK, kl_weight=kl_weight))
    assert found.kl_weight == (20 / 6 if kl_weight is None else 1.0)
    problem = oracle("gaussian", found.kl_weight)
    lam, eta = dense.gaussian_sites(problem)
    np.testing.assert_allclose(found.state.mean, dense.optimal_mean(problem, lam, eta), atol=1e-6)
    np.testing.assert_allclose(found.state.var, dense.optimal_var(problem, lam), rtol=1e-9)
    covariance = dense.diagonal(found.state.var.numpy())
    expected = dense.bound(
        problem, dense.gaussian_log_prob(0.25), found.state.mean.numpy(), covariance
    )
    assert found.elbo == pytest.approx(expected, rel=1e-9)
    assert found.n_iter == 1 and found.left_out is None and not found.polished
    assert found.summary.precision.shape == (20, 1)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("student_t", Settings(n_neighbors=6)),
        ("counts", Settings(n_neighbors=6)),
        ("labels", replace(QUICK, covariance="full", max_iter=20)),
        ("student_t", replace(QUICK, covariance="full", n_neighbors=20)),
        ("counts", replace(QUICK, learn_inducing=True, max_iter=20)),
        ("gaussian", replace(QUICK, learn_inducing=True, max_iter=20)),
        ("labels", Settings(n_neighbors=6, solver="adam", max_iter=20)),
        slow_case("student_t", Settings(n_neighbors=6, solver="adam", max_iter=20)),
    ],
    ids=str,
)
def test_every_branch_predicts_and_reports_its_bound(name, settings):
    found = fit(name, settings)
    expected = log_score(name, fit(name))
    assert log_score(name, found) > expected - (0.35 if settings.max_iter else 0.15)
    active = active_sets(
        found.state.kernel, data_of(name)[0].X, found.state.Z, settings.n_neighbors
    )
    objective = LocalObjective(LIKELIHOODS[name], found.kl_weight)
    bound = total_bound(found.state, data_of(name)[0], active, objective)
    # With all points active the jitter is less.
    closed = settings.covariance == "full" and settings.n_neighbors >= found.state.n_inducing
    assert found.elbo == pytest.approx(bound, rel=1e-2 if closed else 1e-8)
    assert (found.state.root is not None) == (settings.covariance == "full")
    diagonal_and_fixed = settings.covariance == "diagonal" and not settings.moves_inducing
    assert (found.summary is not None) == diagonal_and_fixed
    assert found.n_iter >= 1 and np.isfinite(found.history["solve"]).all()


@pytest.mark.parametrize("name", ["gaussian", "labels"])
def test_natural_fit_does_not_depend_on_what_the_search_for_a_prior_hands_on(name, monkeypatch):
    """Its system of all rows, reordered and rescaled, is the one computed anew."""
    settings = Settings(n_neighbors=6, tol=1e-13, max_iter=100)
    kernel = scale_amplitude(KERNEL, 0.02 if name != "gaussian" else 1.0)
    found = fit(name, settings, kernel=kernel)
    assert found.state.kernel.k1.constant_value > 0.05 or name == "gaussian"  # it was rescaled

    def plain(*arguments):
        return replace(find_prior(*arguments), system=None, start=None)

    monkeypatch.setattr(module, "find_prior", plain)
    expected = fit(name, settings, kernel=kernel)
    assert found.elbo == pytest.approx(expected.elbo, rel=1e-6)
    torch.testing.assert_close(found.state.mean, expected.state.mean, rtol=1e-3, atol=1e-3)
    assert found.kl_weight == expected.kl_weight


def test_student_t_learns_scale_and_degrees_of_freedom():
    rng = np.random.default_rng(0)
    X = rng.uniform(-2, 2, (800, 2))
    f = np.sin(2 * X[:, :1]) + 0.5 * X[:, 1:]
    position = torch.full((800,), -1)
    Z = torch.tensor(rng.uniform(-2, 2, (60, 2)))
    ends = []
    for noise in (0.3 * rng.standard_t(3, f.shape), 0.3 * rng.standard_normal(f.shape)):
        found = fit_swsgp(
            KERNEL,
            LIKELIHOODS["student_t"],
            Data(torch.tensor(X), torch.tensor(f + noise)),
            Z,
            position,
            offset=torch.zeros(1, dtype=torch.float64),
            settings=Settings(n_neighbors=10),
            generator=torch.Generator().manual_seed(0),
        )
        scale, df = np.exp(found.state.likelihood.numpy() * [0.5, 1.0])
        assert scale == pytest.approx(0.3, rel=0.15)
        ends.append(df)
    assert 2.1 <= ends[0] < 5 and ends[1] > 3 * ends[0]
    kept = fit("student_t").state.likelihood
    torch.testing.assert_close(kept, LIKELIHOODS["student_t"].initial(kept))


# ---- full covariance -----------------------------------------------------------------------------


@each_likelihood
def test_full_covariance_of_all_points_is_svgp_in_closed_form(name, monkeypatch):
    monkeypatch.setattr(dense, "JITTER", SHARED_JITTER)
    settings = replace(QUICK, n_neighbors=20, covariance="full", tol=1e-13, max_iter=100)
    found = fit(name, settings)
    assert found.kl_weight == 1.0 and found.state.root is not None and found.n_iter <= 100
    problem = oracle(name, 1.0, n_neighbors=20)
    S = (found.state.root @ found.state.root.mT).numpy()
    if name == "gaussian":
        lam, eta = dense.gaussian_sites(problem)
        np.testing.assert_allclose(
            found.state.mean, dense.optimal_mean(problem, lam, eta), atol=1e-5
        )
        np.testing.assert_allclose(S, dense.optimal_covariance(problem, lam), atol=1e-6)
    log_prob = {
        "gaussian": dense.gaussian_log_prob(0.25),
        "student_t": dense.LOG_PROB["student_t"],
        "labels": dense.LOG_PROB["probit"],
        "counts": dense.LOG_PROB["poisson"],
    }[name]
    expected = dense.bound(problem, log_prob, found.state.mean.numpy(), S)
    assert found.elbo == pytest.approx(expected, rel=1e-6)


def test_learned_amplitude_leaves_full_covariance_closed():
    """The search for the prior ends with a diagonal covariance, which is no start for a full."""
    settings = Settings(n_neighbors=20, covariance="full")
    found = fit("labels", settings)
    assert found.state.root is not None and found.n_iter <= 14
    assert len(found.history["prior"]) >= 2


# ---- Algorithm 1, polish -------------------------------------------------------------------------


def test_learned_inducing_points_move_and_nothing_else_does():
    found = fit("labels", replace(QUICK, learn_inducing=True, max_iter=60))
    Z = data_of("labels")[1]
    assert float((found.state.Z - Z).abs().max()) > 1e-3
    np.testing.assert_allclose(found.state.kernel.theta, KERNEL.theta, atol=1e-12)
    assert found.elbo > fit("labels").elbo


def test_adam_moves_hyperparameters_where_it_may():
    moved = fit("gaussian", Settings(n_neighbors=6, solver="adam", max_iter=60))
    assert np.abs(moved.state.kernel.theta - KERNEL.theta).max() > 0.05
    before = LIKELIHOODS["gaussian"].initial(moved.state.likelihood)
    assert float((moved.state.likelihood - before).abs()) > 0.01
    still = fit("gaussian", replace(QUICK, solver="adam", max_iter=60))
    np.testing.assert_allclose(still.state.kernel.theta, KERNEL.theta, atol=1e-12)
    assert still.n_iter == 60 and moved.elbo > still.elbo


@pytest.mark.parametrize("name", ["gaussian", slow_case("counts")])
def test_polish_is_kept_if_rows_held_out_gain(name):
    wrong = ConstantKernel(1.0, (1e-3, 1e3)) * RBF([0.1, 0.1])
    settings = Settings(n_neighbors=6, polish=True, max_iter=100)
    found = fit(name, settings, kernel=wrong)
    assert found.polished and found.summary is not None
    assert found.state.kernel.k2.length_scale.min() > 0.15
    plain = fit(name, replace(settings, polish=False), kernel=wrong)
    assert log_score(name, found) > log_score(name, plain) + 0.02
    # q(u) is that of all rows: the bound is stationary where only hyper-parameters were polished.
    again = fit(name, replace(QUICK, kl_weight=found.kl_weight), start=found.state)
    assert again.elbo == pytest.approx(found.elbo, rel=2e-3)


def test_polish_that_does_not_pay_is_taken_back(monkeypatch):
    settings = Settings(n_neighbors=6, polish=True, max_iter=5)
    original = module.polish

    def refused(*arguments, **options):
        return arguments[0], False, original(*arguments, **options)[2]

    monkeypatch.setattr(module, "polish", refused)
    found = fit("gaussian", settings)
    plain = fit("gaussian", replace(settings, polish=False))
    assert not found.polished and found.summary is not None and found.history["polish"]
    # What is left is q and the noise that suits it, under the kernel given.
    assert found.state.kernel == plain.state.kernel and found.elbo > plain.elbo
    again = fit("gaussian", replace(settings, polish=False), start=found.state)
    torch.testing.assert_close(again.state.mean, found.state.mean, rtol=0.01, atol=0.01)


# ---- the prior -----------------------------------------------------------------------------------


def test_several_classes_share_kernel_and_points_and_leave_labels_out():
    rows, Z, position = data_of("labels", 300, c=3)
    labels = rows.y.sum(1).clamp(-1, 1).long() + 1
    Y = 2 * torch.nn.functional.one_hot(labels, 3).double() - 1
    data = Data(rows.X, Y)
    found = fit("labels", Settings(n_neighbors=6), n=300, c=3, data=data)
    assert found.state.mean.shape == found.state.var.shape == (20, 3)
    assert found.left_out.mean.shape == found.left_out.var.shape == (100, 3)
    posterior = SWSGPPosterior(found.state, 6)
    assert float((posterior.mean(rows.X).argmax(1) == labels).double().mean()) > 0.7
    few = Data(rows.X[:90], Y[:90])
    assert fit("labels", Settings(n_neighbors=6), n=90, c=3, data=few).left_out is None


def test_labels_left_out_of_a_full_covariance_are_those_of_the_other_sites():
    n = 40
    data = data_of("labels", n)[0]
    settings = Settings(n_neighbors=n, covariance="full", max_iter=50, tol=1e-12)
    model = KERNEL, LIKELIHOODS["labels"], data, data.X, torch.arange(n)
    offset, generator = torch.zeros(1).double(), torch.Generator()
    found = fit_swsgp(*model, offset=offset, settings=settings, generator=generator)
    # Sites at the fixed point, from moments of q by quadrature.
    nodes, shares = np.polynomial.hermite_e.hermegauss(60)
    mean, var = (part.numpy()[:, 0] for part in (found.state.mean, found.state.variance()))
    y, f = data.y.numpy(), mean[:, None] + np.sqrt(var)[:, None] * nodes
    ratio = norm.pdf(f) / norm.cdf(y * f)
    expect = shares / shares.sum()
    slope, precision = (y * ratio) @ expect, (ratio * (ratio + y * f)) @ expect
    K = KERNEL(data.X.numpy())
    for i in (0, 7, 21):
        expected, spread = left_out(K, 1 / precision, mean + slope / precision, i)
        np.testing.assert_allclose(found.left_out.mean[i, 0], expected, rtol=1e-3, atol=1e-3)
        np.testing.assert_allclose(found.left_out.var[i, 0], spread, rtol=1e-3)


def test_given_kl_weight_is_kept_and_automatic_ones_lie_between_the_papers_and_m_over_h():
    assert fit("labels", Settings(n_neighbors=6, kl_weight=2.5)).kl_weight == 2.5
    auto = fit("labels", Settings(n_neighbors=6)).kl_weight
    assert 1.0 <= auto <= 20 / 6 * (1 + 1e-12)
    assert fit("labels").kl_weight == pytest.approx(20 / 6)
    assert fit("labels", Settings(n_neighbors=50)).kl_weight == 1.0


@pytest.mark.parametrize(("kind", "all_rows"), [("some", False), ("all", True)])
def test_rows_held_out_are_no_inducing_points(kind, all_rows, monkeypatch):
    """Nor is anything else about the fit of all rows lost for it."""
    rows, Z, position = data_of("labels")
    if all_rows:
        Z, position = rows.X, torch.arange(150)
    seen = []
    original = module.find_prior

    def spy(*arguments):
        seen.append(original(*arguments))
        return seen[-1]

    monkeypatch.setattr(module, "find_prior", spy)
    found = fit_swsgp(
        KERNEL,
        LIKELIHOODS["labels"],
        rows,
        Z,
        position,
        offset=Z.new_zeros(1),
        settings=Settings(n_neighbors=6),
        generator=torch.Generator().manual_seed(0),
    )
    (prior,) = seen
    assert (prior.system is None) == all_rows
    assert found.state.n_inducing == len(Z)
    assert {tuple(x) for x in prior.data.X.tolist()} == {tuple(x) for x in rows.X.tolist()}


@pytest.mark.parametrize("name", [slow_case("counts"), "labels"])
def test_a_rival_is_taken_where_it_predicts_rows_held_out_better(name):
    smooth, rough = (KERNEL.k1 * RBF([scale] * 2, "fixed") for scale in (0.8, 0.01))
    found = fit(name, Settings(n_neighbors=6), kernel=smooth)
    for kernel, rival in ((smooth, rough), (rough, smooth)):
        other = fit(name, Settings(n_neighbors=6, rival=rival), kernel=kernel)
        assert other.state.kernel == found.state.kernel
        assert other.elbo == pytest.approx(found.elbo)


def test_split_prefers_rows_and_holds_out_enough():
    generator = torch.Generator().manual_seed(0)
    preferred = torch.zeros(1000, dtype=torch.bool)
    preferred[::2] = True
    y = torch.arange(100_000, dtype=torch.float64)[:, None]
    kept, held_out = split_rows(y[:1000], Settings(), generator, preferred)
    assert len(held_out) == 333 and bool(preferred[held_out].all())
    assert sorted([*kept.tolist(), *held_out.tolist()]) == list(range(1000))
    for n, expected in ((6000, 600), (100_000, 4000), (150, 50)):
        assert len(split_rows(y[:n], Settings(), generator)[1]) == expected
    rare = torch.where(torch.arange(1000) % 50 == 0, 1.0, -1.0)[:, None]  # 20 of 1000
    for seed in range(5):
        _, held_out = split_rows(rare, Settings(), torch.Generator().manual_seed(seed))
        assert abs(int((rare[held_out] > 0).sum()) - 20 / 3) < 1.5


# ---- starts and stops ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gaussian", "student_t"])
def test_fit_goes_on_from_a_state(name):
    first = fit(name, Settings(n_neighbors=6))
    again = fit(name, replace(QUICK, kl_weight=first.kl_weight), start=first.state)
    np.testing.assert_allclose(again.state.kernel.theta, first.state.kernel.theta, atol=1e-12)
    torch.testing.assert_close(again.state.likelihood, first.state.likelihood)
    assert again.elbo >= first.elbo - 1e-3 * abs(first.elbo)
    assert again.n_iter <= max(2, first.n_iter) and not again.history["prior"]
    # A state of another covariance lends its kernel.
    for settings in (replace(QUICK, covariance="full", n_neighbors=20), QUICK):
        state = again.state
        if settings is QUICK:
            root = state.var.T.sqrt().diag_embed()
            state = state.with_posterior(state.mean, root=root)
        other = fit(name, settings, start=state)
        np.testing.assert_allclose(other.state.kernel.theta, first.state.kernel.theta, atol=1e-12)


@pytest.mark.parametrize("name", ["student_t", "labels"])
def test_float32_is_near_float64(name):
    rows, Z, position = data_of(name, dtype=torch.float32)
    found = fit_swsgp(
        KERNEL,
        LIKELIHOODS[name],
        rows,
        Z,
        position,
        offset=Z.new_zeros(1),
        settings=Settings(n_neighbors=6),
        generator=torch.Generator().manual_seed(0),
    )
    expected = fit(name, Settings(n_neighbors=6))
    assert found.state.mean.dtype == torch.float32
    assert found.elbo == pytest.approx(expected.elbo, rel=2e-3)
    X = data_of(name)[0].X
    left = SWSGPPosterior(found.state.to(torch.float64), 6).mean(X)
    right = SWSGPPosterior(expected.state, 6).mean(X)
    torch.testing.assert_close(left, right, rtol=0.05, atol=0.05)
