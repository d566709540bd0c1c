"""The walk over amplitude and KL weight: systems scaled are systems computed; when it stops."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from skgp.data import Data
from skgp.inference.natural import fit_natural_sites
from skgp.inference.neighbors.conditionals import Tiles
from skgp.inference.neighbors.search import NeighborSearch
from skgp.inference.neighbors.system import RowWeights, local_system, row_weights
from skgp.kernels.scales import scale_amplitude
from skgp.learning.calibration import COUPLINGS, best_coupling
from skgp.learning.local import prior as module
from skgp.learning.local.prior import choose_prior, negative_log_score, rescaled
from skgp.likelihoods import Bernoulli, Poisson
from tests.covering import covering
from tests.reference import swsgp as dense

TIGHT = {"tol": 1e-14, "cg_tol": 1e-12, "cg_max_iter": 500, "max_iter": 80}
TARGETS = {
    "gaussian": Bernoulli("probit"),
    "labels": Bernoulli("probit"),
    "counts": Poisson("exp"),
}


def system_of(problem, kernel=None, kl_factor=1.0):
    X, _, Z, active, _, weight = problem.tensors
    tiles = Tiles(problem.kernel if kernel is None else kernel, X, Z, active)
    return local_system(tiles, kl_weight=kl_factor * problem.kl_weight, weight=weight)


def problem_of(target, **options):
    return dense.make_problem("matern", target=target, n_latent=2, weighted=True, **options)


def part_of(weights, rows=slice(None), dtype=torch.float64):
    """Some rows of a sparse matrix of weights, in another precision."""
    n, H = len(weights), len(weights._values) // len(weights)
    active, values = (each.view(n, H)[rows] for each in (weights._rows[1], weights._values))
    return RowWeights(active, values.to(dtype), weights.variance[rows].to(dtype), weights.shape[1])


# ---- scaled systems ------------------------------------------------------------------------------


@covering(scales=[(9.0, 1.0), (1.0, 0.3), (1 / 27, 0.1)], target=["labels", "counts"])
def test_rescaled_is_the_system_of_the_scaled_kernel(scales, target):
    amplitude, kl_factor = scales
    problem = problem_of(target)
    found = rescaled(system_of(problem), amplitude, kl_factor)
    expected = system_of(problem, scale_amplitude(problem.kernel, amplitude), kl_factor)
    _, Y, _, _, offset, _ = problem.tensors
    fits = [
        fit_natural_sites(each, Y, TARGETS[target], offset=offset, **TIGHT)
        for each in (found, expected)
    ]
    torch.testing.assert_close(fits[0].q.mean, fits[1].q.mean, rtol=1e-7, atol=1e-8)
    torch.testing.assert_close(fits[0].q.var, fits[1].q.var, rtol=1e-7, atol=1e-9)
    assert fits[0].bound == pytest.approx(fits[1].bound, rel=1e-9)
    q = fits[1].q
    for left, right in zip(found.moments(q), expected.moments(q), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-12)
    assert float(found.divergence(q)) == pytest.approx(float(expected.divergence(q)), rel=1e-9)
    torch.testing.assert_close(found.prior.variance, expected.prior.variance, rtol=1e-12, atol=0)
    dense_Q = [each.prior.matrix.to_dense() for each in (found, expected)]
    torch.testing.assert_close(*dense_Q, rtol=1e-9, atol=1e-9)


def test_rescaled_leaves_the_original_alone():
    system = system_of(problem_of("labels"))
    before = system.rows.variance.clone(), system.prior.matrix.values().clone()
    rescaled(system, 3.0, 0.1)
    assert torch.equal(system.rows.variance, before[0])
    assert torch.equal(system.prior.matrix.values(), before[1])


# ---- the walk ------------------------------------------------------------------------------------


def walk_of(amplitude=1.0, prior=1.0, n=300, n_classes=2, seed=0, M=60, H=8, **options):
    """The choice for labels of a function of variance `amplitude`, a prior of variance `prior`."""
    rng = np.random.default_rng(seed)
    X = rng.uniform(-2, 2, (2 * n, 2))
    f = np.stack([np.sin(2 * X[:, 0] + k) + np.cos(2 * X[:, 1] - k) for k in range(n_classes)], 1)
    noisy = np.sqrt(amplitude) * f + rng.standard_normal(f.shape)
    if n_classes == 2:
        Y = np.where(noisy[:, :1] > 0, 1.0, -1.0)
    else:
        Y = np.where(noisy.argmax(1)[:, None] == np.arange(n_classes), 1.0, -1.0)
    X, Y = torch.tensor(X), torch.tensor(Y)
    kernel, Z = dense.KERNELS["matern"](), X[:M] + 0.01
    kernel = scale_amplitude(kernel, prior / float(kernel.diag(X[:1].numpy())[0]))
    search = NeighborSearch(kernel, Z)
    parts = [Tiles(kernel, rows, Z, search.query(rows, H)) for rows in X.split(n)]
    system, held_out = local_system(parts[0], kl_weight=M / H), row_weights(parts[1])
    likelihood = Bernoulli("probit")
    offset = X.new_zeros(Y.shape[1])
    data, out = Data(X[:n], Y[:n]), Data(X[n:], Y[n:])
    arguments = (system, data, held_out, out, likelihood, offset)
    return choose_prior(*arguments, **options), arguments


@pytest.mark.parametrize(
    ("amplitude", "prior", "least", "most"),
    [(1.0, 300.0, 1 / 250, 1 / 9), (30.0, 1.0, 3, 243)],
)
def test_amplitude_follows_the_labels_and_stays_in_its_bounds(amplitude, prior, least, most):
    found, _ = walk_of(amplitude, prior)
    assert least <= found.amplitude <= most
    assert found.score in found.history
    assert len(found.history) >= 3 and found.kl_factor == 1.0
    bounded, _ = walk_of(amplitude, prior, amplitudes=(1 / 3.5, 3.5))
    assert 3 <= max(bounded.amplitude, 1 / bounded.amplitude) <= 3.5
    assert (bounded.amplitude > 1) == (amplitude > 1)
    fixed, _ = walk_of(amplitude, prior, amplitudes=(1.0, 1.0))
    assert fixed.amplitude == 1.0 and len(fixed.history) == 1


def test_choice_is_no_worse_than_its_neighbours_by_chance():
    found, (system, data, held_out, out, likelihood, offset) = walk_of(30.0)

    def losses(amplitude):
        fit = fit_natural_sites(rescaled(system, amplitude, 1.0), data.y, likelihood, offset=offset)
        var = amplitude * held_out.variance[:, None] + held_out.project_squares(fit.q.var)
        return negative_log_score(likelihood, out.y, held_out.project(fit.q.mean), var)

    best = losses(found.amplitude)
    assert float(best.mean()) == pytest.approx(found.score, abs=0.01)
    for factor in (1 / 3, 3.0):
        difference = best - losses(found.amplitude * factor)
        assert float(difference.mean()) < 2 * float(difference.std()) / 400**0.5


@pytest.mark.parametrize("kl_weight", [1.0, 5.0, 25.0])
def test_kl_weight_falls_no_lower_than_that_of_the_paper(kl_weight):
    found, _ = walk_of(30.0, n=200, M=200, kl_weight=kl_weight)
    assert 1 / kl_weight <= found.kl_factor * (1 + 1e-12) and found.kl_factor <= 1
    assert found.kl_factor < 1 or kl_weight == 1.0  # M / H = 25 restrains these too much


def test_callback_ends_the_walk():
    seen = []
    found, _ = walk_of(30.0, callback=lambda i, info: seen.append((i, info["loss"])) or True)
    assert len(seen) == 1 and len(found.history) == 2 and seen[0] == (2, found.history[1])


def test_weights_of_rows_held_out_count_as_repeated_rows():
    _, (system, data, held_out, out, likelihood, offset) = walk_of(3.0)
    times = torch.arange(len(out)) % 3
    rows = torch.arange(len(out)).repeat_interleave(times)
    options = {"amplitudes": (1.0, 1.0)}  # else the error of a mean is that of more rows
    weighted, repeated = (
        choose_prior(system, data, A, each, likelihood, offset, **options)
        for A, each in (
            (held_out, replace(out, weight=times.double())),
            (part_of(held_out, rows), out.take(rows)),
        )
    )
    assert weighted.score == pytest.approx(repeated.score, rel=1e-10)


# ---- classes -------------------------------------------------------------------------------------


def test_score_of_several_classes_is_that_of_the_true_one():
    rng = np.random.default_rng(0)
    mean, var = torch.tensor(rng.normal(size=(6, 3))), torch.tensor(rng.uniform(size=(6, 3)))
    labels = np.array([0, 1, 2, 0, 1, 2])
    Y = torch.tensor(np.where(labels[:, None] == np.arange(3), 1.0, -1.0))
    likelihood = Bernoulli("probit")
    p = likelihood.log_predictive(torch.ones_like(Y), mean, var).exp().numpy()
    expected = -np.log(p[np.arange(6), labels] / p.sum(1))
    found = negative_log_score(likelihood, Y, mean, var)
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    p = p / (1 - p) ** 0.75
    expected = -np.log(p[np.arange(6), labels] / p.sum(1))
    found = negative_log_score(likelihood, Y, mean, var, 0.75)
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    far = negative_log_score(likelihood, Y.float(), 1e30 * mean.float(), var.float(), 0.75)
    assert far.dtype == torch.float32 and torch.isfinite(far).all()
    single = negative_log_score(likelihood, Y[:, :1], mean[:, :1], var[:, :1])
    one = likelihood.log_predictive(Y[:, :1], mean[:, :1], var[:, :1])[:, 0]
    torch.testing.assert_close(single, -one)


def test_coupling_is_the_best_for_the_rows_held_out():
    found, (system, data, held_out, out, likelihood, offset) = walk_of(
        10.0, n_classes=3, amplitudes=(1.0, 1.0)
    )
    options = {"max_iter": 16, "tol": 1e-3, "cg_max_iter": 15, "cg_tol": 3e-3}
    fit = fit_natural_sites(system, data.y, likelihood, offset=offset, **options)
    var = held_out.variance[:, None] + held_out.project_squares(fit.q.var)
    best = best_coupling(likelihood, out.y, held_out.project(fit.q.mean), var)
    assert best > 0
    scores = [
        float(negative_log_score(likelihood, out.y, held_out.project(fit.q.mean), var, each).mean())
        for each in COUPLINGS
    ]
    assert found.score == pytest.approx(scores[COUPLINGS.index(best)], rel=1e-9)
    assert found.score < min(scores) + 0.01  # no worse than the best, beyond noise
    two, (*_, out, likelihood, _) = walk_of(10.0)
    density = likelihood.log_predictive(out.y, two.mean, two.var)
    assert two.score == pytest.approx(-float(density.mean()), rel=1e-9)


def test_float32_walks_the_same_way():
    found, (system, data, held_out, out, likelihood, offset) = walk_of(30.0)
    prior = system.prior
    matrix = prior.matrix.to(torch.float32)
    parts = {k: getattr(prior, k).float() for k in ("diagonal", "mass", "constant", "variance")}
    system32 = replace(
        system,
        rows=part_of(system.rows, dtype=torch.float32),
        prior=replace(prior, matrix=matrix, **parts),
    )
    A = part_of(held_out, dtype=torch.float32)
    data, out = data.to(torch.float32), out.to(torch.float32)
    again = choose_prior(system32, data, A, out, likelihood, offset.float())
    assert again.amplitude == found.amplitude
    assert again.score == pytest.approx(found.score, abs=1e-3)


@pytest.mark.parametrize(
    ("n_errors", "kl_factor", "amplitude"), [(0.7, 1.0, 1.0), (1.5, 1.0, 3.0), (2.5, 0.1, 3.0)]
)
def test_kl_weight_must_gain_by_two_standard_errors_and_the_amplitude_by_one(
    n_errors, kl_factor, amplitude, monkeypatch
):
    """Each of the first steps gains so many standard errors of the rows held out, others lose."""
    fit = module._Search._fit
    noise = np.random.default_rng(0).standard_normal(200)
    noise = (noise - noise.mean()) / noise.std(ddof=1)
    gain = torch.tensor(noise + n_errors / 200**0.5)

    def made_up(self, amplitude, kl_factor, start):
        losses = torch.full((200,), 5.0, dtype=torch.float64)
        losses = losses - gain * ((kl_factor < 1) + (amplitude == 3.0))
        losses = losses + 1.0 * (amplitude not in (1.0, 3.0) or kl_factor not in (1.0, 0.1))
        return replace(fit(self, amplitude, kl_factor, start), losses=losses)

    monkeypatch.setattr(module._Search, "_fit", made_up)
    found, _ = walk_of(30.0, n=200, M=100, kl_weight=12.5)
    assert (found.kl_factor, found.amplitude) == pytest.approx((kl_factor, amplitude))
