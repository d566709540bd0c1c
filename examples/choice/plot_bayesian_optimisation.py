r"""
Minimising a function that is expensive to evaluate
===================================================

Bayesian optimisation asks a Gaussian process where the next evaluation promises most: the expected
improvement on the best value so far,

.. math:: \mathrm{EI}(x) = E[\max(y_{\min} - f(x), 0)]
          = (y_{\min} - \mu)\, \Phi(z) + \sigma \varphi(z), \qquad z = (y_{\min} - \mu) / \sigma .

Its maximum is found by its gradient, which needs those of the mean and of the standard deviation:
``predict`` returns them with ``return_mean_grad=True`` and ``return_std_grad=True``, in the order
of scikit-optimize's regressor, whose ``Optimizer`` takes ours as ``base_estimator`` as it is.
"""

import matplotlib.pyplot as plt
import numpy as np
from scipy.optimize import minimize
from scipy.stats import norm
from sklearn.gaussian_process.kernels import ConstantKernel, Matern

from skgp import GaussianProcessRegressor

LOW, HIGH = np.array([-5.0, 0.0]), np.array([10.0, 15.0])


def branin(x):
    """Branin's function of rows (n, 2), which has three minima of 0.397887."""
    a, b = x.T
    square = (b - 5.1 * a**2 / (4 * np.pi**2) + 5 * a / np.pi - 6) ** 2
    return square + 10 * (1 - 1 / (8 * np.pi)) * np.cos(a) + 10


def negative_improvement(x, model, least):
    """Minus the expected improvement at x (2,), and its gradient."""
    found = model.predict(x[None], return_std=True, return_mean_grad=True, return_std_grad=True)
    mean, std, mean_grad, std_grad = (each[0] for each in found)
    if std == 0:
        return 0.0, np.zeros_like(x)
    z = (least - mean) / std
    value = (least - mean) * norm.cdf(z) + std * norm.pdf(z)
    # The derivatives of z cancel: phi'(z) = -z phi(z).
    return -value, norm.cdf(z) * mean_grad - norm.pdf(z) * std_grad


def next_point(model, least, rng):
    """The best of searches from where a thousand points have the greatest improvement."""
    some = rng.uniform(LOW, HIGH, (1000, 2))
    mean, std = model.predict(some, return_std=True)
    z = (least - mean) / std
    order = np.argsort(-((least - mean) * norm.cdf(z) + std * norm.pdf(z)))
    bounds = list(zip(LOW, HIGH, strict=True))
    runs = [
        minimize(negative_improvement, x, (model, least), jac=True, bounds=bounds, tol=1e-12)
        for x in some[order[:5]]
    ]
    return min(runs, key=lambda run: run.fun).x


# %%
# Eight evaluations at random, then as many as the model asks for. The kernel is in the units of x.
rng = np.random.default_rng(1)
X = rng.uniform(LOW, HIGH, (8, 2))
kernel = ConstantKernel(1.0, (1e-2, 1e3)) * Matern([5.0, 5.0], (0.5, 50.0), nu=2.5)
model = GaussianProcessRegressor(kernel, alpha=1e-6, normalize_y=True)
for _ in range(17):
    y = branin(X)
    model.fit(X, y)
    X = np.vstack([X, next_point(model, y.min(), rng)])
y = branin(X)
print("least value found:", y.min(), "at", X[y.argmin()])

# %%
# Most evaluations were spent near the minima.
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
a, b = np.meshgrid(np.linspace(-5, 10, 120), np.linspace(0, 15, 120))
grid = np.column_stack([a.ravel(), b.ravel()])
left.contourf(a, b, np.log(branin(grid)).reshape(a.shape), levels=15, cmap="Greys_r")
left.plot(*X[:8].T, "o", color="tab:blue", label="at random")
left.plot(*X[8:].T, "^", color="tab:red", label="by expected improvement")
left.set(xlabel="x1", ylabel="x2", title="log of Branin's function, and where it was evaluated")
left.legend(loc="lower left")
right.semilogy(
    np.arange(1, 26), np.minimum.accumulate(y) - 0.39788735772973816, drawstyle="steps-post"
)
right.axvline(8.5, color="0.7")
right.set(xlabel="evaluations", ylabel="regret", title="best value so far less the minimum")
plt.show()
