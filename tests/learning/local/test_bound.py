"""The ELBO: against dense oracles, SVGP, and autograd."""

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import ConstantKernel, DotProduct, Matern

from skgp.data import Data
from skgp.inference.neighbors.conditionals import local_conditionals
from skgp.inference.neighbors.posterior import SWSGPState
from skgp.kernels.gram import gram, gram_diag
from skgp.learning.local.bound import (
    LocalObjective,
    bound,
    latent_moments,
    local_moments,
    total_bound,
)
from skgp.likelihoods import Bernoulli, Gaussian
from tests.reference import svgp

GAUSSIAN = Gaussian(0.1, bounds=(1e-3, 1.0))
PROBIT = Bernoulli("probit")
MATERN = ConstantKernel(1.3) * Matern([0.9, 1.4], nu=2.5)
LINEAR = Matern([0.9, 1.4], nu=1.5) + 0.5 * DotProduct(0.7)
NAMES = ("theta", "likelihood", "Z", "mean", "spread")


def problem(n=12, M=8, H=4, c=2, *, kernel=MATERN, labels=False, full=False, weighted=False):
    """A state off its optimum, rows, active sets, and the objective."""
    rng = np.random.default_rng(1)
    X, Z = (torch.tensor(rng.normal(size=(size, 2))) for size in (n, M))
    y = torch.tensor(rng.normal(size=(n, c)))
    weight = torch.tensor(rng.uniform(0.5, 2.0, n)) if weighted else None
    objective = LocalObjective(PROBIT if labels else GAUSSIAN, M / H)
    mean, var = torch.tensor(rng.normal(size=(M, c))), torch.tensor(rng.uniform(0.1, 1, (M, c)))
    root = None
    if full:
        root = torch.tensor(rng.normal(size=(c, M, M))).tril(-1) * 0.2 + var.T.sqrt().diag_embed()
    offset = torch.tensor([0.3, -0.2, 0.5])[:c].double()
    state = SWSGPState(
        kernel, objective.likelihood.initial(Z), Z, mean, None if full else var, root, offset
    )
    active = torch.cdist(X, Z).argsort()[:, :H]
    return state, Data(X, y.sign() if labels else y, weight), active, objective


def leaves_of(state):
    """Copies that require gradients, and the state made of them."""
    spread = state.root if state.var is None else state.var
    tensors = (torch.tensor(state.kernel.theta), state.likelihood, state.Z, state.mean, spread)
    leaves = {k: v.clone().requires_grad_() for k, v in zip(NAMES, tensors, strict=True)}
    kind = {"root": leaves["spread"]} if state.var is None else {"var": leaves["spread"]}
    made = SWSGPState(
        state.kernel,
        leaves["likelihood"],
        leaves["Z"],
        leaves["mean"],
        kind.get("var"),
        kind.get("root"),
        state.offset,
    )
    return leaves, made


def gradients(value, leaves):
    return torch.autograd.grad(value, list(leaves.values()), materialize_grads=True)


def oracle(state, theta, data, objective, function, *args, **options):
    """A dense bound, summed over the latent functions."""

    def dense_gram(A, B):
        return gram(state.kernel, A, B, theta=theta)

    likelihood = objective.likelihood.with_parameters(state.likelihood)
    value = 0.0
    for i in range(state.n_latent):
        if state.var is None:
            S = state.root[i] @ state.root[i].T
        else:
            S = torch.diag(state.var[:, i])
        value = value + function(
            dense_gram,
            likelihood.expected_log_prob,
            data.X,
            data.y[:, i],
            state.Z,
            *args,
            state.mean[:, i],
            S,
            offset=state.offset[i],
            weight=data.weight,
            **options,
        )
    return value


def assert_same_gradients(ours, theirs, tol):
    for name, left, right in zip(NAMES, ours, theirs, strict=True):
        scale = max([1.0, *right.abs().flatten().tolist()])
        torch.testing.assert_close(left, right, rtol=0, atol=tol * scale, msg=name)


@pytest.mark.parametrize("labels", [False, True])
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("kernel", [MATERN, LINEAR])
def test_bound_and_its_fast_gradients_equal_autograd_of_the_definition(kernel, full, labels):
    weighted = full ^ labels ^ (kernel is LINEAR)  # every pair of the four
    state, data, active, objective = problem(
        kernel=kernel, full=full, labels=labels, weighted=weighted
    )
    leaves, state = leaves_of(state)
    value = bound(state, data, active, objective, theta=leaves["theta"])
    expected = oracle(
        state, leaves["theta"], data, objective, svgp.local_bound, active, kl_weight=8 / 4
    )
    assert value.item() == pytest.approx(expected.item(), rel=1e-10)
    assert_same_gradients(gradients(value, leaves), gradients(expected, leaves), 1e-10)


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_bound_of_all_points_active_is_that_of_svgp(full, weighted):
    state, data, _, objective = problem(H=8, full=full, weighted=weighted)
    active = torch.stack([torch.randperm(8, generator=seeded(i)) for i in range(12)])
    leaves, state = leaves_of(state)
    value = bound(state, data, active, objective, theta=leaves["theta"])
    expected = oracle(state, leaves["theta"], data, objective, svgp.svgp_bound)
    assert value.item() == pytest.approx(expected.item(), rel=1e-8)
    assert_same_gradients(gradients(value, leaves), gradients(expected, leaves), 1e-8)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def random_locals(b=3, H=4, c=2, dtype=torch.float64):
    """Arguments of `local_moments`: a factor of joint, m_I, var, and a factor of S."""
    generator = seeded()

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    var = normal(b, H, c).square() + 0.3
    return normal(b, H + 1, H + 1), normal(b, H, c), var, normal(c, b, H, H)


def with_own_variance(factor):
    eye = torch.eye(factor.shape[-1], dtype=factor.dtype)
    return factor @ factor.mT + 0.5 * eye


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("free", ["all", "joint", "mean", "spread"])
def test_local_moments_pass_gradcheck(full, free):
    factor, mean, var, root = random_locals()
    spread = root if full else var
    leaves = {"joint": factor, "mean": mean, "spread": spread}
    for name, leaf in leaves.items():
        leaf.requires_grad_(free in ("all", name))

    def function(factor, mean, spread):
        S = {"covariance": with_own_variance(spread)} if full else {"var": spread}
        return tuple(local_moments(with_own_variance(factor), mean, **S))

    assert torch.autograd.gradcheck(function, tuple(leaves.values()), fast_mode=True)


def test_local_moments_of_both_covariances_agree():
    factor, mean, var, _ = random_locals()
    joint, S = with_own_variance(factor), var.permute(2, 0, 1).diag_embed()
    for left, right in zip(
        local_moments(joint, mean, var=var), local_moments(joint, mean, covariance=S), strict=True
    ):
        torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-12)


def test_local_moments_differentiate_once():
    factor, mean, var, _ = random_locals()
    mean.requires_grad_()
    moments = local_moments(with_own_variance(factor), mean, var=var)
    (gradient,) = torch.autograd.grad(moments.kl.square().sum(), mean, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


@pytest.mark.parametrize("kernel", [MATERN, LINEAR])
def test_moments_are_those_of_the_local_conditionals(kernel):
    state, data, active, _ = problem(kernel=kernel)
    local = local_conditionals(kernel, data.X, state.Z, active)
    mean, var = latent_moments(state, data.X, active)
    a = local.weights[..., None]
    expected = (a * state.mean[active]).sum(1) + state.offset
    torch.testing.assert_close(mean, expected, rtol=1e-10, atol=1e-10)
    expected = local.variance[:, None] + (a.square() * state.var[active]).sum(1)
    torch.testing.assert_close(var, expected, rtol=1e-10, atol=1e-10)


def test_bound_counts_a_row_of_weight_two_twice():
    state, data, active, objective = problem()
    weight = torch.ones(len(data), dtype=torch.float64)
    weight[3] = 2.0
    index = torch.tensor([*range(len(data)), 3])
    weighted = bound(state, Data(data.X, data.y, weight), active, objective)
    twice = bound(state, data.take(index), active[index], objective)
    assert float(weighted) == pytest.approx(float(twice), rel=1e-13)


@pytest.mark.parametrize("full", [False, True])
def test_total_bound_adds_tiles(full, monkeypatch):
    state, data, active, objective = problem(full=full, weighted=True)
    expected = float(bound(state, data, active, objective))
    moments = latent_moments(state, data.X, active)
    monkeypatch.setattr("skgp.learning.local.bound.BOUND_NUMBERS", 150)
    assert total_bound(state, data, active, objective) == pytest.approx(expected, rel=1e-12)
    for left, right in zip(latent_moments(state, data.X, active), moments, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-12)


def test_kl_weight_one_is_the_paper_and_greater_ones_lower_the_bound():
    state, data, active, objective = problem()
    values = [
        float(bound(state, data, active, LocalObjective(objective.likelihood, weight)))
        for weight in (1.0, 2.0, 5.0)
    ]
    assert values[0] > values[1] > values[2]


@pytest.mark.parametrize("full", [False, True])
def test_bound_in_single_precision_is_near_that_in_double(full):
    state, data, active, objective = problem(full=full)
    expected = float(bound(state, data, active, objective))
    tensors = (state.likelihood, state.Z, state.mean, state.var, state.root, state.offset)
    single = [None if t is None else t.float() for t in tensors]
    state32, data32 = SWSGPState(state.kernel, *single), Data(data.X.float(), data.y.float())
    value = bound(state32, data32, active, objective)
    assert value.dtype == torch.float32
    assert float(value) == pytest.approx(expected, rel=1e-3)


def test_variance_at_an_inducing_point_is_positive():
    state, data, active, objective = problem()
    at_points = torch.cdist(state.Z, state.Z).argsort()[:, :4]
    state = state.with_posterior(state.mean, var=torch.full_like(state.var, 1e-12))
    _, var = latent_moments(state, state.Z, at_points)
    assert (var > 0).all() and (var < 1e-2 * gram_diag(MATERN, state.Z)[:, None]).all()
