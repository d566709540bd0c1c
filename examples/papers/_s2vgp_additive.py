"""Flight delays as a sum of functions of one column each, next to ridge and trees (4.3, table 2).

Where the paper compares two optimisers of one approximation, the estimator has two approximations,
each with its optimum found: the paper's product of processes and the exact posterior.
"""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from _runs import some_rows
from _s2vgp_study import Study, mean_and_spread, read, seconds_of
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.linear_model import Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from skgp import StateSpaceGPRegressor

_SIZES = (10_000, 100_000, None)  # rows of training and test together, as in the paper
_MODELS: dict[str, Callable[[], Any]] = {
    "S2VGP, mean field": partial(StateSpaceGPRegressor, posterior="mean_field"),
    "S2VGP, joint": partial(StateSpaceGPRegressor, posterior="joint"),
    "ridge": lambda **_: make_pipeline(StandardScaler(), Ridge(1e-3)),
    "boosted trees": lambda **_: HistGradientBoostingRegressor(random_state=0),
}
_N_GRID = 200


def delays(folder: Path, quick: bool) -> Study:
    """MSE and NLPD by number of rows: means and standard deviations over the published splits."""
    study = Study({})
    params = {"max_iter": 3, "n_inducing": 20} if quick else {}
    for size in (500,) if quick else _SIZES:
        found: dict[str, list[tuple[float, ...]]] = {name: [] for name in _MODELS}
        n_rows = 0
        for split in range(2 if quick else 5):
            X, y, test = _rows(folder, size, split)
            n_rows = len(y)
            for name, make in _MODELS.items():
                model, seconds = seconds_of(make(**params).fit, X[~test], y[~test])
                found[name].append((*_scores(model, X, y, test), seconds))
                if name == "S2VGP, joint" and split == 0:
                    study.curves["effects"] = _effects(model, X)
        columns = ("mse", "nlpd", "fit_seconds")
        study.tables[f"flight delays, N = {n_rows}, y standardised"] = [
            {"model": name}
            | {
                column: mean_and_spread(list(values))
                for column, values in zip(columns, zip(*rows, strict=True), strict=True)
            }
            for name, rows in found.items()
        ]
    return study


def _rows(folder: Path, size: int | None, split: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows of a split or some of them, y standardised by its training part."""
    X, y, test = read(folder, "flights_nyc13", split)
    rows = some_rows(len(y), size, seed=split)
    X, y, test = X[rows], y[rows], test[rows]
    return X, (y - y[~test].mean()) / y[~test].std(), test


def _scores(model: Any, X: np.ndarray, y: np.ndarray, test: np.ndarray) -> tuple[float, float]:
    """Test MSE and NLPD; of models without a predictive variance that of the training MSE."""
    error = y[test] - model.predict(X[test])
    mse = float(np.mean(error**2))
    if hasattr(model, "log_predictive_density"):
        return mse, -float(model.log_predictive_density(X[test], y[test]).mean())
    var = float(np.mean((y[~test] - model.predict(X[~test])) ** 2))
    return mse, 0.5 * (math.log(2 * math.pi * var) + mse / var)


def _effects(model: StateSpaceGPRegressor, X: np.ndarray) -> list[tuple[np.ndarray, ...]]:
    """Of each column: a grid, and mean and standard deviation of its function there."""
    grids = np.quantile(X, np.linspace(0, 1, _N_GRID), axis=0)
    mean, std = model.predict_components(grids, return_std=True)
    return [(grids[:, j], mean[:, j], std[:, j]) for j in range(X.shape[1])]
