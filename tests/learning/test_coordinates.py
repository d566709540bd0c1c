"""From a state of sparse or local posteriors to the tensors of an optimiser."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import RBF, ConstantKernel

from skgp.inference.neighbors.posterior import SWSGPState
from skgp.kernels import ActiveDims
from skgp.learning.local.bound import LocalObjective
from skgp.learning.local.minibatch import LocalCoordinates
from skgp.learning.sparse.objective import Objective
from skgp.learning.sparse.search import SparseCoordinates
from skgp.likelihoods import Bernoulli, Gaussian, StudentT
from tests.reference import sparse as dense

LIKELIHOOD = Gaussian(0.3, bounds=(1e-4, 2.0))
KINDS = ["whitened", "collapsed", "diagonal", "full"]
TENSORS = ("likelihood", "Z", "mean", "root", "var", "offset")


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


def state_of(kind, kernel=None, dtype=torch.float64):
    """Two latent functions at 9 points, off the prior."""
    problem = dense.make_problem("sum")
    mean, root = dense.random_posterior(9, 2)
    state = problem.state(n_latent=2).with_posterior(mean, root)
    if kind in ("diagonal", "full"):
        state = SWSGPState.prior(state.kernel, state.likelihood, state.Z, state.offset)
        full = kind == "full"
        var = None if full else root.diagonal(dim1=1, dim2=2).T
        state = state.with_posterior(mean, var=var, root=root if full else None)
    tensors = {k: v.to(dtype) for k, v in vars(state).items() if isinstance(v, torch.Tensor)}
    return replace(state, kernel=kernel or state.kernel, **tensors)


def around(kind, state, likelihood=LIKELIHOOD, **options):
    if kind in ("diagonal", "full"):
        options = {"learn_inducing": True} | options
        return LocalCoordinates(state, LocalObjective(likelihood, 1.0, **options))
    X = torch.tensor(dense.make_problem("sum").X)
    objective = Objective(likelihood, **options)
    return SparseCoordinates(state, objective, X, free_posterior=kind == "whitened")


def assert_equal(found, expected):
    np.testing.assert_allclose(found.kernel.theta, expected.kernel.theta, rtol=1e-12)
    for name in TENSORS:
        pair = getattr(found, name, None), getattr(expected, name, None)
        if pair != (None, None):
            torch.testing.assert_close(*pair, rtol=1e-12, atol=1e-12)


def moved(coordinates, rng):
    return {
        name: value + 0.1 * torch.tensor(rng.standard_normal(value.shape)).tril().to(value)
        if name == "spread" and value.ndim == 3
        else value + 0.1 * torch.tensor(rng.standard_normal(value.shape)).to(value)
        for name, value in coordinates.start().items()
    }


def test_coordinates_of_the_start_are_the_state(kind):
    state = state_of(kind)
    coordinates = around(kind, state)
    start = coordinates.start()
    of_q = {"whitened": {"alpha", "triangle"}, "collapsed": set()}.get(kind, {"mean", "spread"})
    assert set(start) == {"theta", "likelihood", "Z"} | of_q
    assert_equal(coordinates.to_state(start), state)
    assert_equal(coordinates.values(start), state)


def test_coordinates_round_trip_through_another_point(kind, rng):
    """The coordinates around a point reached describe that very point."""
    first = around(kind, state_of(kind))
    parts = moved(first, rng)
    reached = first.to_state(parts)
    np.testing.assert_allclose(reached.kernel.theta, parts["theta"], rtol=1e-12)
    assert torch.equal(reached.likelihood, parts["likelihood"])
    assert torch.equal(first.values(parts).mean, reached.mean)
    second = around(kind, reached)
    assert_equal(second.to_state(second.start()), reached)


def test_coordinates_hold_only_what_is_free(kind):
    state = state_of(kind)
    fixed = {"learn_kernel": False, "learn_likelihood": False, "learn_inducing": False}
    alone = set(around(kind, state, **fixed).start())
    for name, part in zip(fixed, ("theta", "likelihood", "Z"), strict=True):
        coordinates = around(kind, state, **(fixed | {name: True}))
        assert set(coordinates.start()) == alone | {part}
        assert_equal(coordinates.to_state(coordinates.start()), state)


def test_coordinates_of_what_has_no_parameters_are_absent(kind):
    state = state_of(kind, ConstantKernel(1.0, "fixed") * RBF(1.0, "fixed"))
    state = replace(state, likelihood=torch.empty(0))
    coordinates = around(kind, state, Bernoulli("probit"))
    assert not {"theta", "likelihood"} & set(coordinates.start()) and coordinates.bounds() == {}
    assert coordinates.to_state(coordinates.start()).kernel.theta.shape == (0,)


def test_coordinates_are_finite_where_the_kernel_ignores_a_column(kind):
    state = state_of(kind, ActiveDims(RBF(0.5), [1]))
    coordinates = around(kind, state)
    start = coordinates.start()
    assert all(value.isfinite().all() for value in start.values())
    torch.testing.assert_close(coordinates.values(start).Z, state.Z)


def test_coordinates_have_the_bounds_of_kernel_and_likelihood(kind):
    kernel = ConstantKernel(1.0, (0.5, 3.0)) * RBF([1.0, 2.0], [(0.1, 9.0), (0.2, 8.0)])
    likelihood = StudentT(0.3**0.5, 4.0, scale_bounds=(0.01, 1.5), df_bounds=(2.1, 200.0))
    state = replace(state_of(kind, kernel), likelihood=likelihood.initial(torch.ones(1)))
    bounds = around(kind, state, likelihood).bounds()
    assert set(bounds) == {"theta", "likelihood"}
    np.testing.assert_allclose(bounds["theta"][0].exp(), [0.5, 0.1, 0.2])
    np.testing.assert_allclose(bounds["theta"][1].exp(), [3.0, 9.0, 8.0])
    np.testing.assert_allclose(torch.stack(bounds["likelihood"]).exp(), [[1e-4, 2.1], [2.25, 200]])


def test_coordinates_keep_dtype_and_leave_the_state_alone(kind, dtype, rng):
    state = state_of(kind, dtype=dtype)
    before = {k: v.clone() for k, v in vars(state).items() if isinstance(v, torch.Tensor)}
    coordinates = around(kind, state)
    parts = {k: v.requires_grad_() for k, v in moved(coordinates, rng).items()}
    assert {value.dtype for value in parts.values()} == {dtype}
    reached = coordinates.to_state(parts)
    for name, value in before.items():
        assert getattr(reached, name).dtype == dtype and not getattr(reached, name).requires_grad
        assert torch.equal(getattr(state, name), value)
