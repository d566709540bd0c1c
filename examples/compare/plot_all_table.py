"""
All estimators on one table
===========================

The diabetes data, 442 patients and ten columns, as numbers and, above or below the median, as
classes: every estimator of skgp by its defaults beside those of scikit-learn that one would try
first. Three folds; the negative log predictive density (NLPD) tells what standard deviations and
probabilities are worth.
"""

import time

import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_diabetes
from sklearn.ensemble import RandomForestClassifier
from sklearn.gaussian_process.kernels import RBF, WhiteKernel
from sklearn.linear_model import BayesianRidge, LogisticRegression
from sklearn.metrics import log_loss
from sklearn.model_selection import KFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import skgp

X, y = load_diabetes(return_X_y=True)
high = (y > np.median(y)).astype(int)
X = StandardScaler().fit_transform(X)
kernel = 1.0 * RBF(3.0)

regressors = {
    "BayesianRidge (scikit-learn)": BayesianRidge(),
    "GaussianProcess": skgp.GaussianProcessRegressor(kernel + WhiteKernel(), normalize_y=True),
    "QSGP": skgp.QSGPRegressor(random_state=0),
    "DLMGP": skgp.DLMGPRegressor(random_state=0),
    "SWSGP": skgp.SWSGPRegressor(random_state=0),
    "VecchiaGP": skgp.VecchiaGPRegressor(random_state=0),
    "StateSpaceGP, additive": skgp.StateSpaceGPRegressor(),
    "BayesianGP": skgp.BayesianGPRegressor(kernel + WhiteKernel(), random_state=0),
}
classifiers = {
    "LogisticRegression (scikit-learn)": make_pipeline(StandardScaler(), LogisticRegression()),
    "RandomForest (scikit-learn)": RandomForestClassifier(random_state=0),
    "GaussianProcess": skgp.GaussianProcessClassifier(kernel),
    "QSGP": skgp.QSGPClassifier(random_state=0),
    "DLMGP": skgp.DLMGPClassifier(random_state=0),
    "SWSGP": skgp.SWSGPClassifier(random_state=0),
    "VecchiaGP": skgp.VecchiaGPClassifier(random_state=0),
    "StateSpaceGP, additive": skgp.StateSpaceGPClassifier(),
}
folds = list(KFold(3, shuffle=True, random_state=0).split(X))


def nlpd(model, X, y):
    """Mean negative log density of targets, or log-loss of classes (nats)."""
    if hasattr(model, "predict_proba"):
        return log_loss(y, np.clip(model.predict_proba(X), 1e-12, 1))
    mean, std = model.predict(X, return_std=True)
    return np.mean(0.5 * np.log(2 * np.pi * std**2) + 0.5 * ((y - mean) / std) ** 2)


def evaluate(models, target):
    """Name -> (score, NLPD), means of three folds."""
    found = {}
    for name, model in models.items():
        start = time.perf_counter()
        each = [
            (model.fit(X[a], target[a]).score(X[b], target[b]), nlpd(model, X[b], target[b]))
            for a, b in folds
        ]
        found[name] = np.mean(each, axis=0)
        seconds = (time.perf_counter() - start) / len(folds)
        print(f"{name:<34} score {found[name][0]:.3f}, NLPD {found[name][1]:.3f}, {seconds:.2f} s")
    return found


print("Regression: R2, and nats per observation")
numbers = evaluate(regressors, y)
print("Classification: accuracy, and nats per observation")
classes = evaluate(classifiers, high)

figure, axes = plt.subplots(2, 1, figsize=(8, 6), layout="constrained")
for axis, found, title in ((axes[0], numbers, "regression"), (axes[1], classes, "classes")):
    axis.plot([values[1] for values in found.values()], list(found), "o")
    axis.grid(axis="y", alpha=0.3)
    axis.invert_yaxis()
    axis.set(title=title, xlabel="NLPD (nats per observation; less is better)")
plt.show()
