"""Where minimisation begins: evidence of few rows, priors, kernels; a wider q(u), more points."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.stats import norm
from sklearn.gaussian_process.kernels import RBF, ConstantKernel

from skgp.data import Data
from skgp.inference.sparse import SparseState, natural_gradients
from skgp.learning.laplace_evidence import LaplaceEvidence, laplace_predict
from skgp.learning.sparse import defaults
from skgp.learning.sparse.evidence import best_evidence, has_evidence
from skgp.learning.sparse.objective import Objective, Problem, Settings
from skgp.learning.sparse.search import broadened, less_noise, with_floor, with_noise_that_pays
from skgp.learning.sparse.start import best_of_labels, grown, kernels_that_predict, start_state
from skgp.likelihoods import Bernoulli, Gaussian, Laplace, Poisson, StudentT
from skgp.optim.stopping import StopRecorder
from tests.reference import sparse as dense
from tests.reference.sparse import GAUSSIAN, LIKELIHOODS, problem_of

PROBIT = Bernoulli("probit")
ZERO = torch.zeros(1, dtype=torch.float64)


def problem_for(problem, objective, settings, *, kernels=None, callback=None, offset=ZERO, seed=0):
    return Problem(
        kernels or [problem.kernel],
        problem.data,
        objective,
        settings,
        lambda kernel: problem.data.X,
        offset.to(problem.data.X),
        torch.Generator().manual_seed(seed),
        StopRecorder(callback),
    )


def search_of(problem, likelihood, *, max_iter=100, ratio_std=None, **options):
    settings = Settings(start_iter=max_iter, tol=1e-12, ratio_std=ratio_std)
    return best_evidence(problem_for(problem, Objective(likelihood), settings, **options))


def begin(problem, objective, settings, **options):
    return start_state(problem_for(problem, objective, settings, **options))


def log_density(problem, fit):
    """Of the targets under the hyper-parameters of a fit, a row of weight w counting w times."""
    noise, w = float(fit.likelihood.exp()), problem.row_weight
    A = fit.kernel(problem.X) + np.diag(noise / w)
    density = stats.multivariate_normal(np.zeros(len(A)), A).logpdf(problem.y)
    return density + 0.5 * np.sum((1 - w) * np.log(2 * np.pi * noise) - np.log(w))


@pytest.mark.parametrize("weighted", [False, True])
def test_gaussian_evidence_is_the_dense_density(weighted):
    problem = dense.make_problem(weighted=weighted)
    losses = []
    options = {"max_iter": 3, "callback": lambda i, info: losses.append(info["loss"])}
    found = search_of(problem, GAUSSIAN, **options)
    expected = -log_density(problem, found) / problem.row_weight.sum()
    assert found.loss == pytest.approx(expected, rel=1e-9)
    assert tuple(losses) == found.history and 3 <= len(losses) <= 3 * 3  # of three searches


def test_gaussian_evidence_is_the_bound_of_a_point_a_row():
    """Either search finds the same hyper-parameters, and the posterior is its optimum."""
    problem = dense.make_problem()
    objective = Objective(GAUSSIAN, learn_inducing=False)
    settings = Settings(start_iter=200, tol=1e-12)
    dense_start = begin(problem, objective, replace(settings, dense_start=True))
    bound = begin(problem, objective, settings)
    found, expected = dense_start.state, bound.state
    np.testing.assert_allclose(found.kernel.theta, expected.kernel.theta, atol=1e-2)
    assert float(found.likelihood) == pytest.approx(float(expected.likelihood), abs=1e-2)
    assert dense_start.loss == pytest.approx(bound.loss, rel=1e-4)
    elbo = replace(objective, name="elbo")
    assert elbo.total(found, problem.data) == pytest.approx(dense_start.loss, rel=1e-4)


def test_laplace_evidence_begins_near_the_bound_of_labels():
    problem = dense.make_problem(target="labels", n=60)
    objective = Objective(PROBIT, learn_inducing=False)
    settings = Settings(start_iter=150, tol=1e-9)
    few, bound = (
        begin(problem, objective, s).state for s in (replace(settings, dense_start=True), settings)
    )
    elbo = replace(objective, name="elbo")
    found, least, prior = (
        elbo.total(state, problem.data) for state in (few, bound, problem.state(ZERO[:0]))
    )
    assert found - least < 0.02 * (prior - least)


@pytest.mark.parametrize("likelihood", [GAUSSIAN, PROBIT])
def test_ratio_prior_draws_length_scales_to_those_of_the_kernel(likelihood):
    """Its optimum trades the evidence for the log ratios, whatever their common factor."""
    target = "gaussian" if likelihood is GAUSSIAN else "labels"
    problem = dense.make_problem(target=target)
    free = search_of(problem, likelihood)

    def ratio(fit):
        moved = fit.kernel.theta[1:] - problem.kernel.theta[1:]
        return abs(moved[0] - moved[1])

    ratios = [ratio(search_of(problem, likelihood, ratio_std=std)) for std in (1e-3, 0.3, 1e3)]
    assert ratios[0] < 1e-3 < ratios[1] < ratios[2]
    assert ratios[2] == pytest.approx(ratio(free), abs=1e-2)
    tied = search_of(problem, likelihood, ratio_std=1e-3)
    assert abs(tied.kernel.theta[1:] - problem.kernel.theta[1:]).min() > 0.01


def test_ratio_prior_counts_in_the_loss():
    problem = dense.make_problem()
    fit = search_of(problem, GAUSSIAN, ratio_std=0.3)
    moved = fit.kernel.theta[1:] - problem.kernel.theta[1:]
    log_prior = -0.5 * np.square(moved - moved.mean()).sum() / 0.3**2
    expected = -(log_density(problem, fit) + log_prior) / 40
    assert fit.loss == pytest.approx(expected, rel=1e-9)


def test_choose_takes_the_kernel_of_greatest_evidence():
    problem = dense.make_problem(target="labels", n=150)
    kernels = [ConstantKernel(1.0) * RBF(s, "fixed") for s in (0.01, 1.0, 100.0)]
    assert search_of(problem, PROBIT, kernels=kernels).kernel.k2.length_scale == 1.0


def test_choose_keeps_a_kernel_without_anything_free():
    problem, kernel = dense.make_problem(target="labels"), RBF(1.0, "fixed")
    assert search_of(problem, PROBIT, kernels=[kernel]).kernel == kernel


def test_start_by_the_evidence_keeps_fixed_noise_and_precision():
    problem = dense.make_problem()
    kept = Gaussian(0.2, bounds=(0.2, 0.2))
    data = Data(problem.data.X.float(), problem.data.y.float())
    single = type("Single", (), {"kernel": problem.kernel, "data": data})
    begun = begin(single, Objective(kept), Settings(dense_start=True))
    assert float(begun.state.likelihood.exp()) == pytest.approx(0.2, rel=1e-6)
    assert begun.state.mean.dtype == begun.state.likelihood.dtype == torch.float32
    assert not np.array_equal(begun.state.kernel.theta, problem.kernel.theta)


@pytest.mark.parametrize(
    ("likelihood", "options", "n_kernels", "expected"),
    [
        (GAUSSIAN, {}, 1, True),
        (GAUSSIAN, {}, 2, False),
        (GAUSSIAN, {"learn_likelihood": False}, 1, False),
        (PROBIT, {}, 2, True),
        (PROBIT, {"beta": 0.5}, 1, True),
        (PROBIT, {"beta": 0.5, "name": "elbo"}, 1, False),
        (PROBIT, {"learn_kernel": False}, 1, False),
        (Poisson("exp"), {}, 1, True),
        (Laplace(1.0), {}, 1, False),
        (StudentT(0.5, 4.0, scale_bounds=(0.03, 2.2), df_bounds=(2.1, 200.0)), {}, 1, False),
    ],
)
def test_has_evidence_where_it_is_known_and_free(likelihood, options, n_kernels, expected):
    assert has_evidence(Objective(likelihood, **options), [RBF()] * n_kernels) == expected


# ---- towards the log-loss ------------------------------------------------------------------------


def at_the_bound(likelihood, *, beta=1.0, learn_likelihood=True, **options):
    """A problem, a state at the optimum of its ELBO, and the log-loss objective."""
    problem, made, state = problem_of(likelihood, **options)
    objective = Objective(made, name="log_loss", beta=beta, learn_likelihood=learn_likelihood)
    made = objective.likelihood.with_parameters(state.likelihood)
    state = natural_gradients(state, problem.data, made, max_iter=100, tol=1e-12)
    return problem, state, objective


@pytest.mark.parametrize(
    ("likelihood", "beta", "weighted"),
    [(name, (0.01, 1.0, 8.0)[i % 3], i > 2) for i, name in enumerate(LIKELIHOODS)],
)
def test_broadened_does_not_raise_the_log_loss_and_keeps_the_mean(likelihood, beta, weighted):
    problem, state, objective = at_the_bound(likelihood, beta=beta, weighted=weighted)
    found = broadened(state, problem.data, objective)
    before, after = (objective.total(s, problem.data) for s in (state, found))
    assert after <= before + 1e-9 * abs(before)
    assert torch.equal(found.mean, state.mean) and torch.equal(found.root, found.root.tril())
    assert (found.root.diagonal(dim1=1, dim2=2) > 0).all()
    assert torch.equal(found.Z, state.Z) and found.kernel is state.kernel


def test_broadened_lowers_the_log_loss_where_little_regularisation_asks_for_width():
    problem, state, objective = at_the_bound("gaussian", beta=0.01, n=200)
    found = broadened(state, problem.data, objective)
    before, after = (objective.total(s, problem.data) for s in (state, found))
    assert after < before - 1
    widths = [torch.logdet(s.root[0] @ s.root[0].mT) for s in (state, found)]
    assert widths[1] > widths[0] + 1


def test_broadened_takes_the_best_pair_of_its_grid():
    """Against every pair by explicit inverses."""
    problem, state, objective = at_the_bound("gaussian", beta=0.1, n=100)
    S = (state.root[0] @ state.root[0].mT).numpy()
    eye = np.eye(9)
    losses = []
    for width in defaults.WIDTHS:
        wide = np.linalg.inv(eye + (np.linalg.inv(S) - eye) / width)
        root = torch.tensor(np.linalg.cholesky(wide))[None]
        for factor in defaults.LESS_NOISE:
            likelihood = (state.likelihood + np.log(factor)).clamp_min(np.log(1e-4))
            candidate = replace(state, root=root, likelihood=likelihood)
            losses.append(objective.total(candidate, problem.data))
    found = objective.total(broadened(state, problem.data, objective), problem.data)
    assert found == pytest.approx(min(losses), rel=1e-8)


def test_broadened_keeps_noise_within_bounds_and_degrees_of_freedom():
    problem, state, objective = at_the_bound("student_t", beta=0.01, n=200)
    narrow = StudentT(0.5, 4.0, scale_bounds=(0.2**0.5, 2.2), df_bounds=(2.1, 200.0))
    found = broadened(state, problem.data, replace(objective, likelihood=narrow))
    assert found.likelihood[0].exp() >= 0.2 - 1e-12
    assert found.likelihood[1] == state.likelihood[1]


def test_broadened_looks_at_some_rows_weighed_as_all(monkeypatch):
    """Every third row, the divergence a third: the same as those rows and a third of beta."""
    problem, state, objective = at_the_bound("gaussian", beta=0.3, n=120)
    monkeypatch.setattr(defaults, "GRID_ROWS", 40)
    found = broadened(state, problem.data, objective)
    some = problem.data.take(torch.arange(0, 120, 3))
    expected = broadened(state, some, replace(objective, beta=0.1))
    torch.testing.assert_close(found.root, expected.root)
    torch.testing.assert_close(found.likelihood, expected.likelihood)


def test_broadened_by_nothing_returns_its_posterior_in_either_precision(dtype, monkeypatch):
    """Also where variances of q(w) are below the rounding error of the greatest."""
    monkeypatch.setattr(defaults, "WIDTHS", (1.0,))
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


def test_broadened_does_not_raise_the_loss_of_a_posterior_wider_than_the_prior():
    """As a warm start by the log-loss can be, or the bound of Student's t."""
    problem, made, state = problem_of("gaussian", offset=3.0)
    objective = Objective(made, name="log_loss", beta=1e-3, learn_likelihood=False)
    state = state.with_posterior(state.mean, 2 * state.root)
    before = objective.total(state, problem.data)
    assert objective.total(broadened(state, problem.data, objective), problem.data) <= before


# ---- more inducing points ------------------------------------------------------------------------


def points(kernel, n_points=12):
    return torch.linspace(-3, 3, n_points, dtype=torch.float64)[:, None]


@pytest.mark.parametrize(("length_scale", "sizes"), [(3.0, {12}), (0.4, {24, 48}), (0.1, {48})])
def test_points_grow_where_held_out_data_gain(length_scale, sizes):
    rng = np.random.default_rng(0)
    X = rng.uniform(-3, 3, (600, 1))
    y = np.sin(2 * X[:, 0] / length_scale) + 0.2 * rng.standard_normal(600)
    problem = dense.Problem(RBF(length_scale), X, y, points(None).numpy())
    objective = Objective(Gaussian(0.04, bounds=(1e-4, 1.0)))
    noise = torch.tensor([math.log(0.04)], dtype=torch.float64)
    start = SparseState.prior(problem.kernel, noise, points(None), torch.zeros(1).double())
    problem = Problem(
        [problem.kernel],
        problem.data,
        objective,
        Settings(sizes=(24, 48)),
        points,
        start.offset,
        torch.Generator().manual_seed(0),
        StopRecorder(None),
    )
    found = grown(start, problem)
    assert len(found.Z) in sizes
    assert (found is start) == (len(found.Z) == 12)
    assert grown(start, replace(problem, settings=Settings())) is start


@pytest.mark.parametrize("size, raised", [(0.0, False), (3.0, True)])
def test_with_noise_that_pays_covers_gross_errors_among_rows_held_out(size, raised):
    """The noise of the bound where they are, that of the state where there are none."""
    rng = np.random.default_rng(0)
    X = torch.linspace(-1, 1, 200, dtype=torch.float64)[:, None]
    y = 0.1 * torch.as_tensor(rng.standard_normal((200, 1)))
    y[::50] += size
    objective = Objective(Gaussian(0.1, bounds=(1e-4, 10.0)))
    likelihood = objective.likelihood.initial(X)
    state = SparseState.prior(RBF(1.0), likelihood, X[::20], ZERO)
    state = state.with_posterior(state.mean, 0.1 * state.root)
    low = replace(state, likelihood=torch.tensor([0.01], dtype=torch.float64).log())
    found = with_noise_that_pays(low, less_noise(state, objective), Data(X, y), objective)
    assert torch.equal(found.likelihood, likelihood if raised else low.likelihood)
    assert torch.equal(found.root, low.root)


@pytest.mark.parametrize(
    ("noise", "name", "least"),
    [(0.02, "log_loss", 1e-4), (1e-6, "log_loss", 1e-6), (0.02, "elbo", 1e-8)],
)
def test_noise_of_the_log_loss_has_a_floor_unless_the_elbo_finds_less(noise, name, least):
    X = torch.linspace(-2, 2, 9, dtype=torch.float64)[:, None]
    likelihood = Gaussian(0.1, bounds=(1e-8, 1.0))
    state = SparseState.prior(RBF(), X.new_tensor([math.log(noise)]), X, X.new_zeros(1))
    found = with_floor(state, Objective(likelihood, name=name)).likelihood
    assert float(found.box(X)[0].exp()) == pytest.approx(least)
    kept = Objective(likelihood, name=name, learn_likelihood=False)
    assert with_floor(state, kept) is kept


# ---- kernels that predict labels -----------------------------------------------------------------


D = 12
SHARED, SEPARATE = (ConstantKernel(4.0) * RBF(each) for each in (4.0, np.full(D, 4.0)))


def labelled_problem(f, n, *, kernels=(SHARED, SEPARATE), seed=0):
    """Labels, for which f (n,) of the inputs (n, D) decides."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, D))
    y = np.where(f(X) > 0, 1.0, -1.0)
    data = Data(torch.from_numpy(X), torch.from_numpy(y)[:, None])
    generator, offset = torch.Generator().manual_seed(0), torch.zeros(1, dtype=torch.float64)
    objective, settings = Objective(Bernoulli("probit"), "elbo"), Settings(start_iter=15)
    return Problem(
        list(kernels),
        data,
        objective,
        settings,
        lambda kernel, n_points=None: data.X,
        offset,
        generator,
        StopRecorder(None),
    )


def test_kernels_that_predict_have_a_length_scale_a_column_where_few_columns_matter():
    found = kernels_that_predict(labelled_problem(lambda X: np.sin(2 * X[:, 0]) + X[:, 1], 240))
    assert len(found) == 1 and found[0] is SEPARATE


def test_kernels_that_predict_share_a_length_scale_where_all_columns_matter():
    found = kernels_that_predict(labelled_problem(lambda X: X.sum(1), 240))
    assert len(found) == 1 and found[0] is SHARED


@pytest.mark.parametrize("n, kernels", [(100, (SHARED, SEPARATE)), (240, (SHARED, SHARED))])
def test_kernels_that_predict_are_all_without_labels_or_kinds_to_choose(n, kernels):
    found = kernels_that_predict(labelled_problem(lambda X: X[:, 0], n, kernels=kernels))
    assert [id(kernel) for kernel in found] == [id(kernel) for kernel in kernels]


def test_best_of_labels_predicts_new_labels_better_than_the_likeliest_kernel():
    """A ball of labels: the evidence is greatest for a kernel of too small an amplitude."""
    problem, new = (
        labelled_problem(lambda X: (X**2).sum(1) - 11.3, n, kernels=[SHARED], seed=seed)
        for n, seed in ((150, 0), (1000, 1))
    )
    data, likelihood = problem.data, problem.objective.likelihood

    def loss(kernel):
        fit = LaplaceEvidence.of(kernel, data, likelihood, problem.offset).fit(kernel.theta)
        mean, var = laplace_predict(fit, kernel, data.X, new.data.X)
        z = (new.data.y * mean / (1 + var).sqrt()).numpy()
        return -norm.logcdf(z).mean()

    assert loss(best_of_labels(problem).kernel) < loss(best_evidence(problem).kernel) - 0.02
