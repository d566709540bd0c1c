"""The state of a sparse-within-sparse GP: what it holds, and that it pickles small."""

import pickle

import pytest
import torch
from sklearn.gaussian_process.kernels import RBF, ConstantKernel

from skgp.inference.neighbors.state import SWSGPState

KERNEL = ConstantKernel(2.0) * RBF([0.5, 0.7])


def prior(M=20, c=3, covariance="diagonal", dtype=torch.float64):
    Z = torch.linspace(0, 1, 2 * M, dtype=dtype).reshape(M, 2)
    likelihood = Z.new_tensor([-1.0])
    return SWSGPState.prior(KERNEL, likelihood, Z, Z.new_zeros(c), covariance=covariance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_prior_of_both_covariances_has_the_same_moments(dtype):
    diagonal, full = prior(dtype=dtype), prior(covariance="full", dtype=dtype)
    assert diagonal.is_diagonal and not full.is_diagonal
    torch.testing.assert_close(diagonal.variance(), torch.full((20, 3), 2.0, dtype=dtype))
    torch.testing.assert_close(full.variance(), diagonal.variance())
    assert full.root.shape == (3, 20, 20) and full.mean.dtype == dtype
    assert (diagonal.n_inducing, diagonal.n_latent) == (20, 3)


@pytest.mark.parametrize("covariance", ["diagonal", "full"])
def test_state_pickles_to_the_same_tensors(covariance):
    state = prior(covariance=covariance)
    again = pickle.loads(pickle.dumps(state))
    assert again.kernel == state.kernel
    for name in ("likelihood", "Z", "mean", "var", "root", "offset"):
        left, right = getattr(state, name), getattr(again, name)
        assert (left is None and right is None) or torch.equal(left, right), name


def test_state_pickles_to_its_own_size_though_it_views_more():
    many = torch.zeros(100_000, 2, dtype=torch.float64)
    state = SWSGPState.prior(KERNEL, many[0, :1], many[:50], many[0, :1])
    assert len(pickle.dumps(state)) < 5_000


def test_with_posterior_replaces_one_covariance_by_the_other():
    state = prior(covariance="full")
    changed = state.with_posterior(state.mean + 1, var=state.variance())
    assert changed.is_diagonal and changed.kernel is state.kernel
    assert float(changed.mean.min()) == 1.0


@pytest.mark.parametrize("both", [False, True])
def test_state_refuses_none_or_two_covariances(both):
    state = prior()
    extra = {"var": state.var, "root": torch.zeros(3, 20, 20)} if both else {}
    with pytest.raises(ValueError, match="got both" if both else "got neither"):
        state.with_posterior(state.mean, **extra)


def test_prior_names_the_covariances_it_knows():
    with pytest.raises(ValueError, match='"diagonal" or "full", got \'dense\''):
        prior(covariance="dense")
