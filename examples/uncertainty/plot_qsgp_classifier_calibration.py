"""
Calibration of a classifier
===========================

Of the observations that a calibrated classifier gives a probability of 0.7, seven of ten are of the
class. The reliability diagram of scikit-learn and :func:`~skgp.displays.expected_calibration_error`
check it here for :class:`~skgp.QSGPClassifier`, logistic regression, a support-vector machine with
Platt's sigmoid, and scikit-learn's own Gaussian-process classifier.

The data are two normal classes in two columns, one inside the other, so that the true probability
of the class is known, and with it the best log-loss and the calibration error that chance alone
leaves.
"""

import time

import matplotlib.pyplot as plt
import numpy as np
from sklearn.calibration import CalibratedClassifierCV, CalibrationDisplay
from sklearn.gaussian_process import GaussianProcessClassifier
from sklearn.gaussian_process.kernels import RBF
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import accuracy_score, log_loss
from sklearn.svm import SVC

from skgp import QSGPClassifier
from skgp.datasets import make_ringnorm
from skgp.displays import expected_calibration_error

X, y = make_ringnorm(500, n_features=2, random_state=0)
X_test, y_test = make_ringnorm(10_000, n_features=2, random_state=1)


# %%
# The true probability follows from the two densities: N(0, 4 I) for class 0, N(a 1, I) for class 1
# with a = 2 / sqrt(2).
def true_probability(X: np.ndarray) -> np.ndarray:
    """Probability of class 1 at each point."""
    log_wide = -0.125 * np.sum(X**2, axis=1) - 2 * np.log(2)
    log_narrow = -0.5 * np.sum((X - np.sqrt(2)) ** 2, axis=1)
    return 1 / (1 + np.exp(log_wide - log_narrow))


# %%
# All with their defaults, but for the kernel of scikit-learn's Gaussian process, which its
# default leaves without anything to learn.
models = {
    "QSGPClassifier": QSGPClassifier(random_state=0),
    "LogisticRegression": LogisticRegression(),
    "SVC, Platt's sigmoid": CalibratedClassifierCV(SVC(), ensemble=False),
    "GaussianProcessClassifier": GaussianProcessClassifier(1.0 * RBF(1.0), random_state=0),
}
probabilities = {"truth": true_probability(X_test)}
seconds = {"truth": 0.0}
for name, model in models.items():
    start = time.perf_counter()
    model.fit(X, y)
    seconds[name] = time.perf_counter() - start
    probabilities[name] = model.predict_proba(X_test)[:, 1]

print(f"{'':<28}{'ECE':>8}{'log-loss':>10}{'accuracy':>10}{'seconds':>9}")
for name, p in probabilities.items():
    ece = expected_calibration_error(y_test, p)
    scores = f"{ece:8.4f}{log_loss(y_test, p):10.4f}{accuracy_score(y_test, p > 0.5):10.4f}"
    print(f"{name:<28}{scores}{seconds[name]:9.2f}")

# %%
# The expected calibration error is the mean distance of the points from the diagonal, weighted by
# the observations of each bin. It says nothing of how much the probabilities tell: a constant, the
# share of the class, is calibrated. The log-loss counts both.
figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
for name, model in models.items():
    CalibrationDisplay.from_estimator(model, X_test, y_test, n_bins=15, name=name, ax=left)
left.set_title("reliability on 10000 test points")
shown = slice(0, 2000)
for name in models:
    right.plot(
        probabilities["truth"][shown], probabilities[name][shown], ".", ms=2, alpha=0.5, label=name
    )
right.plot([0, 1], [0, 1], "k:", lw=1)
right.set(xlabel="true probability", ylabel="predicted probability", title="point by point")
right.legend(markerscale=5)
plt.show()
