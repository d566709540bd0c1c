"""Forecasts by default beside a seasonal naive and statsmodels' UnobservedComponents.

Run with ``pytest tests/benchmarks/bench_forecast.py -m benchmark -s``, or as a script with names of
series; statsmodels is compared where it is installed. The periods that the peers are given are
known to whoever calls them; ours finds its own. Data sets co2 and solar are read from the folder
that ``SKGP_DATA`` names, where it is set.

Rolling origins: the last half of a series is cut into ten parts, each predicted from all before.
The naive forecast is the value of the season before plus the mean change from season to season, its
spread that of such forecasts on the training part, growing with the root of the seasons ahead.

Errors along a path go together: a test part has few independent events. Coverages are therefore
compared with those of draws from the fits themselves (`own_draws`), of which these are right.
"""

import os
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from skgp import StateSpaceGPRegressor

try:
    import statsmodels.api as statsmodels
except ImportError:
    statsmodels = None

pytestmark = pytest.mark.benchmark
N_ORIGINS = 10


def hourly(n=24 * 7 * 8):
    """A day's wave, higher from Monday to Friday, about a wandering level."""
    rng, t = np.random.default_rng(0), np.arange(n, dtype=float)
    day = np.sin(2 * np.pi * t / 24) + 0.4 * np.cos(4 * np.pi * t / 24)
    level = np.cumsum(0.02 * rng.standard_normal(n))
    weekday = (t // 24) % 7 < 5
    return t, 10 + (1 + 0.5 * weekday) * day + weekday + level + 0.2 * rng.standard_normal(n), 168


def daily(n=7 * 120):
    """Sales of shops that close on Sundays, growing, with an annual wave and holidays."""
    rng, t = np.random.default_rng(1), np.arange(n, dtype=float)
    week = np.array([0.3, 0.0, 0.1, 0.2, 0.6, 1.0, -1.5])[(t % 7).astype(int)]
    holiday = -1.0 * (rng.uniform(size=n) < 0.01)
    trend = 0.004 * t + 0.3 * np.sin(2 * np.pi * t / 365.25)
    return t, 5 + trend + week + holiday + 0.25 * rng.standard_normal(n), 7


def walk(n=160):
    """A random walk with drift, seen with noise."""
    rng = np.random.default_rng(2)
    return np.arange(n, dtype=float), np.cumsum(0.1 + 0.5 * rng.standard_normal(n)), 4


def logistic(n=160):
    """Growth that comes to an end."""
    rng, t = np.random.default_rng(3), np.arange(n, dtype=float)
    return t, 20 / (1 + np.exp((80 - t) / 20)) + 0.5 * rng.standard_normal(n), 4


def monthly(n=160):
    """A constant slope and a season of twelve."""
    rng, t = np.random.default_rng(4), np.arange(n, dtype=float)
    return t, 0.05 * t + np.sin(2 * np.pi * t / 12) + 0.4 * rng.standard_normal(n), 12


def stationary(n=160):
    """An autoregression about its mean, seen with noise."""
    rng, f = np.random.default_rng(5), np.zeros(n)
    for i in range(1, n):
        f[i] = 0.9 * f[i - 1] + 0.4 * rng.standard_normal()
    return np.arange(n, dtype=float), f + 0.3 * rng.standard_normal(n), 4


def passengers(n=160):
    """Growth by a factor, with a season and noise that are shares of the level."""
    rng, t = np.random.default_rng(6), np.arange(n, dtype=float)
    season = 0.2 * np.sin(2 * np.pi * t / 12) + 0.1 * np.cos(np.pi * t / 3)
    growth = 0.01 * t + np.cumsum(0.02 * rng.standard_normal(n))
    return t, 100 * np.exp(growth + season + 0.05 * rng.standard_normal(n)), 12


def stored(name, period):
    path = Path(os.environ.get("SKGP_DATA", "data")) / f"{name}.npz"
    if not path.exists():
        return None
    with np.load(path, allow_pickle=False) as data:
        x, y = data["X"][:, 0].astype(float), data["y"].astype(float)
    order = np.argsort(x)
    return x[order], y[order], period


SERIES = {
    "co2": lambda: stored("co2", 1.0),
    "solar": lambda: stored("solar", 11.0),
    "hourly": hourly,
    "daily": daily,
    "walk": walk,
    "logistic": logistic,
    "monthly": monthly,
    "stationary": stationary,
    "passengers": passengers,
}


def ours(x, y, new, period):
    return law_of(StateSpaceGPRegressor(), x, y, new)


def of_y(x, y, new, period):
    """Never of log y."""
    return law_of(StateSpaceGPRegressor(likelihood="gaussian"), x, y, new)


def law_of(model, x, y, new):
    mean, var = model.fit(x[:, None], y).latent_mean_and_variance(new[:, None])
    std = np.sqrt(var + model.noise_variance_)
    of_log = model.likelihood_ == "lognormal"
    return stats.lognorm(std, scale=np.exp(mean)) if of_log else stats.norm(mean, std)


def naive(x, y, new, period):
    """Value a season before, plus drift."""
    grid = (len(x) - 1) * period / (x[-1] - x[0])
    lag = max(1, round(grid))
    change = y[lag:] - y[:-lag]
    drift = change.mean()
    steps = np.round((new - x[-1]) / (x[-1] - x[0]) * (len(x) - 1)).astype(int).clip(1)
    seasons = (steps + lag - 1) // lag
    place = len(y) - 1 + steps - seasons * lag
    spread = np.maximum(change.std(), 1e-9)
    mean = y[place.clip(0, len(y) - 1)] + seasons * drift
    return stats.norm(mean, spread * np.sqrt(seasons))


def unobserved_components(x, y, new, period):
    """A local linear trend, an autoregression and a season of six harmonics."""
    step = np.median(np.diff(x))
    last = int(round((x[-1] - x[0]) / step))
    values = np.full(last + 1, np.nan)
    values[np.round((x - x[0]) / step).astype(int)] = y
    harmonics = int(min(6, period / step // 2))
    season = [{"period": period / step, "harmonics": harmonics}]
    if period == 168:
        season.append({"period": 24, "harmonics": 6})
    model = statsmodels.tsa.UnobservedComponents(
        values, level="local linear trend", autoregressive=1, freq_seasonal=season
    )
    fit = model.fit(disp=False, maxiter=200)
    ahead = np.round((new - x[-1]) / step).astype(int)
    forecast = fit.get_forecast(int(ahead.max()))
    mean, std = np.asarray(forecast.predicted_mean), np.asarray(forecast.se_mean)
    return stats.norm(mean[ahead - 1], std[ahead - 1])


METHODS = {"ours": ours, "of y": of_y, "naive": naive}
if statsmodels is not None:
    METHODS["components"] = unobserved_components


def scores(law, y):
    lower, upper = law.interval(0.95)
    inside = (lower < y) & (y < upper)
    return np.sqrt(np.mean((y - law.median()) ** 2)), inside.mean(), -law.logpdf(y).mean()


def splits(x, kind):
    """Places where training ends and the test part does."""
    n = len(x)
    if kind == "rolling":
        ends = np.linspace(n // 2, n, N_ORIGINS + 1).astype(int)
        return list(zip(ends[:-1], ends[1:], strict=True))
    if kind == "last tenth":
        return [(n - n // 10, n)]
    return [(int(np.searchsorted(x, x[-1] - 5.0)), n)]


def table(name, kinds, methods=tuple(METHODS)):
    """Print the scores of one series, means over the origins."""
    found = SERIES[name]()
    if found is None:
        print(f"{name}: set SKGP_DATA to the folder that holds it")
        return
    x, y, period = found
    for kind in kinds:
        for method in methods:
            rows, start = [], time.process_time()
            for first, last in splits(x, kind):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    law = METHODS[method](x[:first], y[:first], x[first:last], period)
                rows.append(scores(law, y[first:last]))
            rmse, coverage, nlpd = np.mean(rows, 0)
            seconds = (time.process_time() - start) / len(rows)
            print(
                f"{name:12s}{kind:12s}{method:12s}{rmse:9.3f}{coverage:8.2f}{nlpd:9.3f}"
                f"{seconds:8.1f} s",
                flush=True,
            )


def own_draws(name, kind, n_draws=400):
    """Print the coverage of a series and those of draws from the fits, independent ones a part."""
    found = SERIES[name]()
    if found is None:
        return
    x, y, _ = found
    seen, drawn, rng = [], [], np.random.default_rng(0)
    for first, last in splits(x, kind):
        new, model = x[first:last, None], StateSpaceGPRegressor().fit(x[:first, None], y[:first])
        lower, upper = model.predict_interval(new)
        draws = model.sample_y(new, n_draws, random_state=0).T
        seen.append(np.mean((lower < y[first:last]) & (y[first:last] < upper)))
        drawn.append(rng.permutation(((lower < draws) & (draws < upper)).mean(1)))
    mean, own = np.mean(seen), np.mean(drawn, 0)
    print(
        f"{name:12s}{kind:12s}cover {mean:.3f}, of own draws {own.mean():.3f} ({own.std():.3f}), "
        f"no more in {np.mean(own <= mean):.3f} of them",
        flush=True,
    )


@pytest.mark.parametrize("name", list(SERIES))
def test_bench_own_draws(name):
    print()
    own_draws(name, "rolling")
    if name == "co2":
        own_draws(name, "last tenth")


@pytest.mark.parametrize("name", list(SERIES))
def test_bench_forecast(name):
    print("\nseries  split       method          RMSE   cover     NLPD")
    table(name, ("rolling",))
    if name == "co2":
        table(name, ("last tenth", "last 5"))


if __name__ == "__main__":
    for each in sys.argv[1:] or SERIES:
        table(each, ("last tenth", "last 5", "rolling") if each == "co2" else ("rolling",))
