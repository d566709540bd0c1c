"""The models of `benchmark.py`, behind two methods: `fit`, and `score` with its seconds.

Every peer standardises the columns of X by the training rows. Those whose answer is a number get a
Gaussian law around it, whose variance is that of the residuals of three folds of the training rows.
Those of gpytorch have a budget of processor seconds that grows with n (:func:`seconds`); their
settings are those of `_dlm_peers` and `_swsgp_peers`, chosen on training rows of kin40k held out.
"""

import importlib
import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from _dlm_peers import SGPR
from _swsgp_peers import NNVGP, SVGP, target_scores
from scipy.stats import norm
from sklearn.base import clone
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.gaussian_process import GaussianProcessClassifier, GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, Matern, WhiteKernel
from sklearn.linear_model import LogisticRegressionCV, RidgeCV
from sklearn.model_selection import cross_val_predict
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import skgp

Array = np.ndarray
Scores = dict[str, float]
LEAST_PROBABILITY = 1e-12
HALF_WIDTH = norm.ppf(0.975)  # of 95% intervals, in standard deviations


def seconds(n: int) -> float:
    """Budget of a stochastic fit: those of a processor, 20 to 240."""
    return float(np.clip(n / 100, 20, 240))


class Model(Protocol):
    """What `benchmark.py` asks of a model."""

    def fit(self, X: Array, y: Array) -> Any: ...

    def score(self, X: Array, y: Array) -> Scores: ...


def gaussian_scores(y: Array, mean: Array, std: Array, scale: float, start: float) -> Scores:
    """RMSE and NLPD of y / scale, share of 95% intervals that hold y, seconds since `start`."""
    spent = time.process_time() - start
    scores = target_scores(y / scale, mean / scale, std / scale)
    inside = np.abs(y - mean) <= HALF_WIDTH * std
    return {
        "error": scores["loss"],
        "nlpd": scores["nll"],
        "coverage": float(inside.mean()),
        "predict_seconds": spent,
    }


class Ours:
    """A regressor of skgp, by default, on columns and targets as they are."""

    def __init__(self, name: str, **params: Any) -> None:
        self.name, self.params = name, params

    def fit(self, X: Array, y: Array) -> Any:
        if self.name == "GaussianProcessRegressor":  # whose default kernel is scikit-learn's
            kernel = ConstantKernel(1.0) * Matern(X.std(0) + 1e-9, nu=1.5) + WhiteKernel(0.1)
            self.params = {"kernel": kernel, "normalize_y": True, **self.params}
        self.scale = y.std()
        self.model = make_ours(self.name, self.params).fit(X, y)
        return self

    def score(self, X: Array, y: Array) -> Scores:
        start = time.process_time()
        mean, _ = self.model.predict(X, return_std=True)
        spent = time.process_time() - start
        low, high = self.model.predict_interval(X)
        density = self.model.log_predictive_density(X, y) + np.log(self.scale)
        return {
            "error": float(np.sqrt(np.mean((mean - y) ** 2)) / self.scale),
            "nlpd": -float(density.mean()),
            "coverage": float(np.mean((low <= y) & (y <= high))),
            "predict_seconds": spent,
        }


class OurClasses:
    """A classifier of skgp, by default."""

    def __init__(self, name: str, **params: Any) -> None:
        self.name, self.params = name, params

    def fit(self, X: Array, y: Array) -> Any:
        if self.name == "GaussianProcessClassifier":  # whose default kernel is fixed
            self.params = {"kernel": 1.0 * RBF(X.std(0) + 1e-9), **self.params}
        self.model = make_ours(self.name, self.params).fit(X, y)
        return self

    def score(self, X: Array, y: Array) -> Scores:
        return class_scores(self.model, X, y)


def make_ours(name: str, params: dict[str, Any]) -> Any:
    """An estimator of skgp with a seed where it takes one."""
    model = getattr(skgp, name)(**params)
    return model.set_params(random_state=0) if "random_state" in model.get_params() else model


def class_scores(model: Any, X: Array, y: Array) -> Scores:
    """Share of wrong classes and NLPD of a classifier with `predict_proba`."""
    start = time.process_time()
    probability = model.predict_proba(X)
    spent = time.process_time() - start
    right = probability[np.arange(len(y)), np.searchsorted(model.classes_, y)]
    wrong = model.classes_[probability.argmax(1)] != y
    nlpd = -float(np.log(np.clip(right, LEAST_PROBABILITY, None)).mean())
    return {"error": float(wrong.mean()), "nlpd": nlpd, "predict_seconds": spent}


class Classes:
    """A classifier of scikit-learn on standardised columns."""

    def __init__(self, classifier: Any) -> None:
        self.model = make_pipeline(StandardScaler(), classifier)

    def fit(self, X: Array, y: Array) -> Any:
        self.model.fit(X, y)
        return self

    def score(self, X: Array, y: Array) -> Scores:
        return class_scores(self.model, X, y)


class Numbers:
    """A regressor of scikit-learn that answers with numbers, and the law of its residuals."""

    def __init__(self, regressor: Any) -> None:
        self.model = make_pipeline(StandardScaler(), regressor)

    def fit(self, X: Array, y: Array) -> Any:
        self.scale = y.std()
        self.std = np.sqrt(np.mean((cross_val_predict(clone(self.model), X, y, cv=3) - y) ** 2))
        self.model.fit(X, y)
        return self

    def score(self, X: Array, y: Array) -> Scores:
        start = time.process_time()
        mean = self.model.predict(X)
        return gaussian_scores(y, mean, np.full(len(y), self.std), self.scale, start)


class ScikitLearn:
    """The exact GP of scikit-learn: Matern-5/2, a length scale a column, and noise."""

    def fit(self, X: Array, y: Array) -> Any:
        shape = Matern(np.full(X.shape[1], X.shape[1] ** 0.5), (1e-3, 1e4), nu=2.5)
        kernel = ConstantKernel(1.0, (1e-4, 1e4)) * shape + WhiteKernel(0.1, (1e-6, 1e1))
        gp = GaussianProcessRegressor(kernel, normalize_y=True)
        self.model, self.scale = make_pipeline(StandardScaler(), gp).fit(X, y), y.std()
        return self

    def score(self, X: Array, y: Array) -> Scores:
        start = time.process_time()
        mean, std = self.model.predict(X, return_std=True)
        return gaussian_scores(y, mean, std, self.scale, start)


class GPyTorch:
    """SGPR, SVGP or VNNGP of gpytorch."""

    def __init__(self, make: Callable[..., Any], **params: Any) -> None:
        self.make, self.params = make, params

    def fit(self, X: Array, y: Array) -> Any:
        budget = {} if self.make is SGPR else {"max_seconds": seconds(len(X))}
        self.scale = y.std()
        self.model = self.make(**self.params, **budget).fit(X, y)
        return self

    def score(self, X: Array, y: Array) -> Scores:
        start = time.process_time()
        if self.make is SGPR:
            return gaussian_scores(y, *self.model.predict(X), self.scale, start)
        mean, variance = self.model.latent(X)
        if self.params.get("likelihood") == "bernoulli":
            return self._classes(y, norm.cdf(mean / np.sqrt(1 + variance)), start)
        std = np.sqrt(variance + float(self.model._likelihood.noise.detach()))
        mean, std = self.model._mean + self.model._scale * mean, self.model._scale * std
        return gaussian_scores(y, mean, std, self.scale, start)

    @staticmethod
    def _classes(y: Array, probability: Array, start: float) -> Scores:
        return binary_scores(y, probability, start)


def binary_scores(y: Array, probability: Array, start: float) -> Scores:
    """Scores of the probability of class 1 of two, 0 and 1."""
    spent = time.process_time() - start
    right = np.clip(np.where(y > 0, probability, 1 - probability), LEAST_PROBABILITY, None)
    error = float(np.mean((probability > 0.5) != (y > 0)))
    return {"error": error, "nlpd": -float(np.log(right).mean()), "predict_seconds": spent}


class GPBoost:
    """Vecchia's approximation of GPBoost, Matern-3/2, alone or beside inducing points.

    Parameters
    ----------
    approximation : {"vecchia", "full_scale_vecchia"}
    likelihood : {"gaussian", "bernoulli_logit"}
    n_neighbors, n_inducing : int
        The latter of "full_scale_vecchia" alone.
    """

    def __init__(
        self,
        approximation: str = "vecchia",
        likelihood: str = "gaussian",
        n_neighbors: int = 20,
        n_inducing: int = 500,
    ) -> None:
        self.options: dict[str, Any] = {
            "gp_approx": approximation,
            "likelihood": likelihood,
            "num_neighbors": n_neighbors,
            "cov_function": "matern_ard",
            "cov_fct_shape": 1.5,
            "num_parallel_threads": 1,
        }
        self.n_inducing = None if approximation == "vecchia" else n_inducing

    def fit(self, X: Array, y: Array) -> Any:
        gpboost = importlib.import_module("gpboost")
        varies = X.std(0) > 0
        self.inputs = make_pipeline(_Columns(varies), StandardScaler()).fit(X)
        binary = self.options["likelihood"] != "gaussian"
        self.mean, self.scale = (0.0, 1.0) if binary else (y.mean(), y.std())
        if self.n_inducing is not None:
            self.options["num_ind_points"] = min(self.n_inducing, len(X) // 2)
        self.model = gpboost.GPModel(gp_coords=self.inputs.transform(X), **self.options)
        self.model.fit(y=(y - self.mean) / self.scale, X=np.ones((len(X), 1)))
        return self

    def score(self, X: Array, y: Array) -> Scores:
        start = time.process_time()
        law = self.model.predict(
            gp_coords_pred=self.inputs.transform(X),
            X_pred=np.ones((len(X), 1)),
            predict_var=True,
            predict_response=True,
        )
        if self.options["likelihood"] != "gaussian":
            return binary_scores(y, law["mu"], start)
        std = self.scale * np.sqrt(law["var"])
        return gaussian_scores(y, self.mean + self.scale * law["mu"], std, self.scale, start)


class _Columns:
    """Those columns that vary."""

    def __init__(self, kept: Array) -> None:
        self.kept = kept

    def fit(self, X: Array, y: Array | None = None) -> "_Columns":
        return self

    def transform(self, X: Array) -> Array:
        return X[:, self.kept]


def _ours(names: tuple[str, ...], make: Callable[..., Model]) -> dict[str, Callable[[], Model]]:
    return {name: lambda name=name: make(name) for name in names}  # type: ignore[misc]


REGRESSORS: dict[str, Callable[[], Model]] = {
    **_ours(
        ("QSGPRegressor", "DLMGPRegressor", "SWSGPRegressor", "GaussianProcessRegressor"), Ours
    ),
    "StateSpaceGPRegressor": lambda: Ours("StateSpaceGPRegressor"),
    "BayesianGPRegressor": lambda: Ours("BayesianGPRegressor"),
    "VecchiaGPRegressor": lambda: Ours("VecchiaGPRegressor"),
    "GPBoost, Vecchia": GPBoost,
    "HistGradientBoosting": lambda: Numbers(HistGradientBoostingRegressor(random_state=0)),
    "ridge": lambda: Numbers(RidgeCV(np.logspace(-3, 3, 13))),
    "scikit-learn GPR": ScikitLearn,
    "gpytorch SGPR": lambda: GPyTorch(SGPR, n_inducing=512, initial_length_scale=1.0),
    "gpytorch SVGP": lambda: GPyTorch(SVGP, n_inducing=512),
    "gpytorch VNNGP": lambda: GPyTorch(NNVGP),
    "GPBoost, full scale": lambda: GPBoost("full_scale_vecchia"),
}

CLASSIFIERS: dict[str, Callable[[], Model]] = {
    **_ours(
        (
            "QSGPClassifier",
            "DLMGPClassifier",
            "SWSGPClassifier",
            "GaussianProcessClassifier",
            "StateSpaceGPClassifier",
            "VecchiaGPClassifier",
        ),
        OurClasses,
    ),
    "HistGradientBoosting": lambda: Classes(HistGradientBoostingClassifier(random_state=0)),
    "logistic": lambda: Classes(LogisticRegressionCV(max_iter=1000)),
    "scikit-learn GPC": lambda: Classes(GaussianProcessClassifier(1.0 * RBF())),
    "gpytorch SVGP": lambda: GPyTorch(SVGP, n_inducing=512, likelihood="bernoulli"),
    "GPBoost, Vecchia": lambda: GPBoost(likelihood="bernoulli_logit"),
}

#: Rows up to which a model is tried; the others have no bound.
MOST_ROWS = {
    "BayesianGPRegressor": 500,
    "scikit-learn GPR": 2000,
    "scikit-learn GPC": 1000,
}
