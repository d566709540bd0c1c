"""
States of a series, one of which is missing for a while
=======================================================

A machine is idle, working or being cleaned, and each of 3000 readings says which, rightly in nine
of ten. :class:`~skgp.StateSpaceGPClassifier` smooths such labels: each class has a latent process
that is large where it is likely. Where there are no readings, probabilities go back to how often
each class occurs, at a pace that the length scale sets.
"""

import time

import matplotlib.pyplot as plt
import numpy as np
from sklearn.gaussian_process.kernels import ConstantKernel, Matern

from skgp import StateSpaceGPClassifier

NAMES = np.array(["cleaned", "idle", "working"])


def make_states(n: int = 3000, random_state: int = 0):
    """Times in hours, true states, and the states read: random jumps every few hours."""
    rng = np.random.default_rng(random_state)
    t = np.sort(rng.uniform(0, 96, n))
    jumps = np.cumsum(rng.gamma(3.0, 1.5, size=60))
    visits = rng.choice(3, p=[0.15, 0.4, 0.45], size=len(jumps) + 1)
    true = visits[np.searchsorted(jumps, t)]
    read = np.where(rng.uniform(size=n) < 0.9, true, rng.choice(3, size=n))
    return t[:, None], true, read


X, true, read = make_states()
gap = (X[:, 0] > 40) & (X[:, 0] < 46)  # nobody was there to read
kept = ~gap & (np.arange(len(X)) % 4 > 0)  # a quarter is held out

# %%
# Matern processes of nu 1/2 and 3/2, whose latent functions are rough and smoother. The evidence
# bound, summed over the three classes, says which describes the readings better.
test = ~gap & ~kept
models = {}
for nu in (0.5, 1.5):
    start = time.perf_counter()
    kernel = ConstantKernel(4.0, (0.1, 100.0)) * Matern(2.0, (0.05, 50.0), nu=nu)
    model = StateSpaceGPClassifier(kernel).fit(X[kept], NAMES[read[kept]])
    models[nu] = model
    density = model.log_predictive_density(X[test], NAMES[read[test]]).mean()
    found = np.mean(model.predict(X[test]) == NAMES[true[test]])
    print(
        f"nu = {nu}: bound {model.elbo_:.1f} nats, {time.perf_counter() - start:.1f} s; "
        f"held out {-density:.3f} nats per reading, true state found {found:.1%}"
    )
print(f"readings right {np.mean(read[test] == true[test]):.1%}")
best = max(models.values(), key=lambda model: model.elbo_)
print(best.kernel_)

# %%
# Probabilities along the four days. In the hours without readings they leave what was read on both
# sides for the shares of the classes.
hours = np.linspace(0, 96, 2000)[:, None]
proba = best.predict_proba(hours)
middle = best.predict_proba([[43.0]])[0]
for k, name in enumerate(best.classes_):
    share = np.mean(read[kept] == k)
    print(f"{name:<8} in the middle of the gap {middle[k]:.2f}, share of the readings {share:.2f}")

figure, axes = plt.subplots(
    2, 1, figsize=(11, 5), sharex=True, layout="constrained", height_ratios=[3, 1]
)
axes[0].stackplot(hours[:, 0], proba.T, labels=best.classes_, alpha=0.7)
axes[0].axvspan(40, 46, fill=False, ls="--")
axes[0].set(ylabel="probability", ylim=(0, 1))
axes[0].legend(loc="upper right")
axes[1].plot(X[kept], NAMES[read[kept]], "|", color="C3", ms=6)
axes[1].plot(X, NAMES[true], "k.", ms=1)
axes[1].set(xlabel="hour", xlim=(0, 96))
plt.show()
