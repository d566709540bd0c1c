r"""
A model of one's own, from parts
================================

Seeds that germinate, of those sown; voters for, of those asked: :math:`y` successes in
:math:`t` trials, :math:`y \sim \mathrm{Binomial}(t, \sigma(f(x)))`. No estimator offers this
likelihood, but the parts that the estimators are made of compose into it: a kernel expression, a
likelihood with what it must know of itself, a posterior of f at inducing points by natural
gradients (:mod:`skgp.inference.sparse`), and hyper-parameters by the evidence lower bound

.. math:: \sum_i E_{q(f_i)}[\log p(y_i \mid f_i)] - \mathrm{KL}(q(u) \,\|\, p(u)).
"""

import matplotlib.pyplot as plt
import numpy as np
import torch
from scipy.optimize import minimize
from scipy.special import expit
from sklearn.gaussian_process.kernels import RBF
from torch.nn.functional import softplus

from skgp.data import Data
from skgp.inference.sparse import SparseState, kl_from_standard_normal, natural_gradients
from skgp.likelihoods import Likelihood

rng = np.random.default_rng(0)
x = np.sort(rng.uniform(0, 10, 150))
truth = expit(2 * np.sin(x) - 0.5)
trials = rng.integers(1, 30, 150)
successes = rng.binomial(trials, truth)


# %%
# The likelihood: its log-density in nats, two derivatives in f, the mode, and the moments of y.
# Expectations under :math:`f \sim N(m, v)` come from quadrature.
class Binomial(Likelihood):
    def __init__(self, trials):
        super().__init__()
        self.trials = trials

    def _log_prob(self, y, f):
        choices = torch.lgamma(self.trials + 1) - torch.lgamma(y + 1)
        choices = choices - torch.lgamma(self.trials - y + 1)
        return choices + y * f - self.trials * softplus(f)

    def _derivatives(self, y, f):
        p = torch.sigmoid(f)
        return y - self.trials * p, -self.trials * p * (1 - p)

    def _mode(self, y):
        return torch.logit(y / self.trials)

    def _conditional_mean(self, f):
        return self.trials * torch.sigmoid(f)

    def _conditional_var(self, f):
        p = torch.sigmoid(f)
        return self.trials * p * (1 - p)


# %%
# The model: q(u) of given hyper-parameters by natural gradients, and the hyper-parameters that
# maximise the ELBO. The inducing points are 20 of the inputs; several latent functions would be
# columns of ``y``.
X, y, t = (torch.tensor(a[:, None], dtype=torch.float64) for a in (x, successes, trials))
data, likelihood, kernel = Data(X, y), Binomial(t), 1.0 * RBF(1.0)


def state_at(theta):
    signal = kernel.clone_with_theta(theta)
    prior = SparseState.prior(signal, likelihood.initial(y), X[::8], y.new_zeros(1))
    return natural_gradients(prior, data, likelihood, max_iter=50, tol=1e-6)


def negative_elbo(theta):
    state = state_at(theta)
    mean, var = state.posterior().mean_and_variance(X)
    expected = likelihood.expected_log_prob(y, mean, var).sum()
    return float(kl_from_standard_normal(state.mean, state.root) - expected)


found = minimize(negative_elbo, kernel.theta, method="Nelder-Mead", options={"fatol": 1e-3})
posterior = state_at(found.x).posterior()
print(f"ELBO {-found.fun:.1f} nats, kernel {posterior.kernel}")

# %%
# The posterior predicts f at new points; its quantiles map through the sigmoid.
grid = torch.linspace(0, 12, 300, dtype=torch.float64)
mean, var = (each[:, 0].numpy() for each in posterior.mean_and_variance(grid[:, None]))
figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
axes.scatter(x, successes / trials, s=2 * trials, c="0.6", label="successes / trials")
axes.plot(x, truth, "k--", label="truth")
axes.plot(grid, expit(mean), label="median")
axes.fill_between(grid, *(expit(mean + z * np.sqrt(var)) for z in (-1.96, 1.96)), alpha=0.3)
axes.set(xlabel="x", ylabel="probability of a success", ylim=(0, 1))
axes.legend()
plt.show()
