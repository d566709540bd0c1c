"""Dense regressors of counts and with Student-t noise, to test what the base makes of a likelihood.

The posterior of f is that of Gaussian pseudo-observations: no good approximation, and all that the
base needs to know.
"""

import numpy as np
from scipy.special import expit
from sklearn.gaussian_process.kernels import ConstantKernel, WhiteKernel

from skgp.estimators._kernels import refuse_noise
from skgp.estimators._parameters import StrOptions
from skgp.kernels import split_noise
from skgp.likelihoods import Poisson, StudentT
from tests.estimators import _dense
from tests.estimators._dense import DenseGPRegressor


class DenseStudentRegressor(DenseGPRegressor):
    """Exact GP whose predictions have Student-t noise of the scale that the WhiteKernel gives."""

    df = 4.0

    def _set_state(self, **state):
        super()._set_state(**state)
        factor = (self.df - 2) / self.df if self.df > 2 else 1.0
        self._likelihood = StudentT(float(np.sqrt(factor * self._noise_variance)), self.df)


class DenseCountRegressor(DenseGPRegressor):
    """GP on the link of the counts, with the noise that the delta method gives them."""

    _parameter_constraints = {
        **DenseGPRegressor._parameter_constraints,
        "link": [StrOptions({"exp", "softplus"})],
    }

    def __init__(
        self,
        kernel=None,
        *,
        link="exp",
        optimizer="auto",
        max_iter=5,
        normalize_y=True,
        random_state=None,
        device="auto",
        dtype="float64",
        n_jobs=None,
        memory_budget=None,
        verbose=0,
    ):
        super().__init__(
            kernel,
            optimizer=optimizer,
            max_iter=max_iter,
            normalize_y=normalize_y,
            random_state=random_state,
            device=device,
            dtype=dtype,
            n_jobs=n_jobs,
            memory_budget=memory_budget,
            verbose=verbose,
        )
        self.link = link

    _counts = True
    _is_additive = False

    def _learn(self, data, session, backend, *, stream=False):
        X, y = data.X.numpy(), data.y.numpy()
        weights = np.ones(len(y)) if data.weight is None else data.weight.numpy()
        self._likelihood = Poisson(self.link)
        f, precision = pseudo_observations(y, self.link)
        self.offset_ = float(np.average(f, weights=weights * precision))
        f = f - self.offset_
        kernel = default_kernel(X, f, weights) if self.kernel is None else self._given_kernel(X)
        refuse_noise(kernel, self)
        kernel, weights = kernel + WhiteKernel(1.0, "fixed"), weights * precision
        self.n_iter_ = 1
        if self.optimizer is not None:
            kernel = self._search(kernel, X, f, weights, backend, session)
        state = _dense.posterior(kernel, X, f, weights, backend)
        self._set_state(**{**state, "kernel_": split_noise(kernel)[0]})

    def _latent_mean(self, X):
        return self.offset_ + super()._latent_mean(X)

    def _latent_mean_and_variance(self, X):
        mean, var = super()._latent_mean_and_variance(X)
        return self.offset_ + mean, var

    def _latent_mean_and_covariance(self, X):
        mean, covariance = super()._latent_mean_and_covariance(X)
        return self.offset_ + mean, covariance


def pseudo_observations(y, link):
    """Return the link of the counts and the reciprocals of its variances."""
    rate = y + 0.5
    if link == "exp":
        return np.log(rate), rate
    f = rate + np.log(-np.expm1(-rate))
    return f, expit(f) ** 2 / rate


def default_kernel(X, f, weights):
    """Return that of the exact GP, without its noise and with an amplitude."""
    amplitude = max(float(np.average(f**2, weights=weights)), 0.1)
    return ConstantKernel(amplitude) * split_noise(_dense.default_kernel(X, weights))[0].k2
