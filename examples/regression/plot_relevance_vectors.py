"""
A model of few basis functions: relevance vectors
=================================================

Five hundred noisy values of the sinc function, and the few of them that
:class:`~skgp.QSGPRegressor` keeps with ``basis="relevance"``. This is figure 3 of Evans and Nair,
"Quadruply stochastic Gaussian processes", 2020.

Every training point has a basis function, the kernel centred on it, and a prior precision of its
own. At the maximum of the evidence most precisions are infinite and their functions gone; the
observations left are the relevance vectors (Tipping, 2001). The paper's figure keeps 13.

The model is as small as its vectors: prediction and pickles do not depend on the number of training
points. Its error bars pay for that: every function vanishes far from its vector, and with it the
variance of f. For error bars that return to the prior use ``basis="inducing"``.
"""

import matplotlib.pyplot as plt
import numpy as np
from sklearn.gaussian_process.kernels import RBF, WhiteKernel

from skgp import QSGPRegressor
from skgp.datasets import make_sinc

X, y = make_sinc(n_samples=500, noise=0.1, random_state=0)
X_grid = np.linspace(-14, 14, 500)[:, None]

# %%
# The length-scale of the dictionary is learned first, as that of a Gaussian process.
model = QSGPRegressor(1.0 * RBF(2.0) + WhiteKernel(0.01), basis="relevance", random_state=0)
model.fit(X, y)
mean, std = model.predict(X_grid, return_std=True)
print(f"{model.n_relevance_vectors_} relevance vectors of {len(X)} points; {model.kernel_}")

# %%
# One standard deviation about the mean of a new observation, noise included.
figure, axis = plt.subplots(figsize=(9, 4), layout="constrained")
axis.fill_between(X_grid[:, 0], mean - std, mean + std, alpha=0.25, label="one standard deviation")
axis.plot(X_grid, mean, color="C0", label="mean")
axis.plot(X_grid, np.sinc(X_grid / np.pi), "k--", lw=1, label="sinc")
axis.plot(X, y, "k.", ms=3)
kept = model.relevance_
axis.plot(X[kept], y[kept], "ko", ms=9, label="relevance vectors")
axis.axvspan(-14, -10, color="0.95", zorder=-1)
axis.axvspan(10, 14, color="0.95", zorder=-1)
axis.set(xlabel="x", ylabel="y", xlim=(-14, 14), title="no data in the grey margins")
axis.legend(loc="upper right")

# %%
# More observations, not more vectors: the number grows with what there is to describe.
sizes = (100, 300, 1000, 3000)
counts = []
for n in sizes:
    X_n, y_n = make_sinc(n_samples=n, noise=0.1, random_state=1)
    # Hyper-parameters as learned above.
    other = QSGPRegressor(model.kernel_, basis="relevance", optimizer=None, random_state=0)
    counts.append(other.fit(X_n, y_n).n_relevance_vectors_)
figure, axis = plt.subplots(figsize=(5, 3.5), layout="constrained")
axis.semilogx(sizes, counts, "o-")
axis.set(xlabel="training points", ylabel="relevance vectors", ylim=(0, max(counts) + 3))
plt.show()
