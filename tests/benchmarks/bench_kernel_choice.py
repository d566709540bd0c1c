"""One length scale or one a column: what the rule of the default kernels gains on new data.

Run with ``OMP_NUM_THREADS=1 pytest tests/benchmarks/bench_kernel_choice.py -m benchmark -s``. The
constants of :class:`skgp.learning.starts.ChoiceSettings` that say how clear a gain is were
chosen by it. Of each problem both candidates that the search of `QSGPRegressor` chooses between
predict test observations: printed is what separate length scales gain over shared ones in negative
log predictive density (nats, standardised targets), of observations for which the rule takes them,
for which they gain two standard errors in density and in squared error, always, and where the test
observations say so.

``test_noise_free``: functions without noise or with little, of six seeds each, and subsets of the
training parts of `bench_few_points`. Last, by how many standard errors separate scales gain in
leave-one-out density where they lose on the test, at most.

``test_draws``: 25 to 400 observations of the training parts of eighteen sets, predicting others of
these, and of functions of 2 to 16 columns in units of any size: smooth, rough, with a step,
linear, without noise or with some, of even or uneven variance or heavy tails. One seed takes some
seven minutes. A gain counts for at most five nats, and, in a second line, for at most one; a third
has the errors, in spreads of the test targets.
"""

import numpy as np
import pytest

from skgp import QSGPRegressor
from skgp.learning import kernel_choice
from skgp.learning.selection import improves
from tests.benchmarks.bench_few_points import MANY_COLUMNS, few, scores
from tests.benchmarks.bench_noise_free import drawn
from tests.benchmarks.data import split_of

pytestmark = [
    pytest.mark.benchmark,
    pytest.mark.filterwarnings("ignore"),
]

RULES = ("the rule", "two errors in both", "separate scales", "the test's choice")
SETS = (
    *("abalone", "airfoil", "california", "concrete", "gas", "house_8L", "keggdirected"),
    *("kin40k", "naval", "pol", "powerplant", "protein", "pumadyn32nm", "sarcos_testpart"),
    *("skillcraft", "sml", "wine", "yacht"),
)
SIZES, N_TESTED = (25, 50, 100, 200, 400), 1000


def rough(U):
    k = np.arange(6)
    return (np.sin(3 * 2.3**k * U[:, :1] + k) / 1.5**k).sum(1) + 0.3 * U[:, -1]


KINDS = {
    "smooth": lambda U: np.sin(3 * U[:, 0]) + 0.5 * (U[:, 1:3] ** 2).sum(1),
    "rough": rough,
    "step": lambda U: 2.0 * (U[:, 0] > 0.2) + 0.5 * U[:, -1],
    "exponential": lambda U: np.exp(2 * U[:, 0]) + U[:, -1],
    "linear": lambda U: U @ np.arange(1, U.shape[1] + 1),
    "uneven noise": lambda U: np.sin(3 * U[:, 0]),
    "heavy tails": lambda U: np.sin(3 * U[:, 0]) + 0.3 * U[:, -1],
}


def generated(kind, n, d, noise, rng):
    """Inputs and targets of n observations and of `N_TESTED` others, in units of any size."""
    U = rng.uniform(-1, 1, (n + N_TESTED, d))
    f = KINDS[kind](U)
    e = rng.standard_t(3, len(f)) * 0.6 if kind == "heavy tails" else rng.normal(size=len(f))
    if kind == "uneven noise":
        e *= np.exp(1.2 * U[:, -1])
    X = 10 ** rng.uniform(-3, 3, d) * (U + rng.normal(0, 10, d))
    y = (f + noise * f.std() * e) * 10 ** rng.uniform(-3, 3)
    return X[:n], X[n:], y[:n], y[n:]


def draws(seed):
    """Names and data of one seed."""
    rng = np.random.default_rng(seed)
    for name in SETS:
        X, _, y, _ = split_of(name)
        for n in SIZES:
            if n <= 0.7 * len(X):
                order = rng.permutation(len(X))
                some, others = order[:n], order[n : n + N_TESTED]
                yield f"{name} {n}", (X[some], X[others], y[some], y[others])
    for kind in KINDS:
        least = 0.1 if kind in ("uneven noise", "heavy tails") else 0.0
        for n in SIZES:
            for d in (2, 4, 8, 16):
                noise = max(least, rng.choice([0.0, 0.1, 0.3, 1.0]))
                yield f"{kind} {n} {d}", generated(kind, n, d, noise, rng)


def noise_free():
    sizes = {
        "branin": (20, 40, 60, 200),
        "hartmann": (60, 150, 300),
        "borehole": (30, 60, 200),
        "friedman": (40, 80),
        "rosenbrock": (60, 100),
        "one column": (15, 30),
    }
    for name, each in sizes.items():
        for n in each:
            for noise in (0.0, 0.1) if n in (40, 60, 80) else (0.0,):
                yield (
                    f"{name} {n} {noise}",
                    [drawn(name, n, 50 + seed, noise) for seed in range(6)],
                )
    for name in MANY_COLUMNS:
        yield name, [others(name, seed) for seed in range(4)]


def others(name, seed):
    """Observations of a training part that `few` does not draw."""
    if name == "generated":
        return few(name, 100 + seed)
    X, X_test, y, y_test = split_of(name, seed)
    some = np.random.RandomState(100 + seed).permutation(len(X))[: MANY_COLUMNS[name]]
    return X[some], X_test, y[some], y_test


@pytest.fixture
def compare(monkeypatch):
    """Gains (4, 2) of the `RULES` in density and error, and the errors by which density gains.

    None where there is but one candidate.
    """
    found = {}
    simplest = kernel_choice._Search.simplest

    def watched(search, candidates):
        chosen = simplest(search, candidates)
        if not found and len(candidates) > 1:
            ends = candidates[0], candidates[-1]
            kernels = [kernel_choice.raised(e.kernel, simplest(search, [e])[1]) for e in ends]
            found.update(ends=ends, kernels=kernels, takes=chosen[0] is ends[1])
        return chosen

    monkeypatch.setattr(kernel_choice._Search, "simplest", watched)

    def compared(X, X_test, y, y_test):
        found.clear()
        QSGPRegressor(random_state=0).fit(X, y)
        if not found:
            return None
        losses = []
        for kernel in found["kernels"]:
            model = QSGPRegressor(kernel, optimizer=None).fit(X, y)
            density, _, error = scores(*model.predict(X_test, return_std=True), y_test, y.std())
            losses.append((density, error))
        gain = np.subtract(*losses)
        old, new = (kernel_choice._judged(fit, True) for fit in found["ends"])
        both = new is not None and all(
            improves(getattr(new, part), getattr(old, part), n_errors=2, least_effect=0)
            for part in ("loss", "square")
        )
        clear = 0.0 if new is None else old.loss - new.loss
        taken = np.array([found["takes"], both, True, gain[0] > 0])
        return taken[:, None] * gain, np.mean(clear) / (np.std(clear) or 1) * len(X) ** 0.5

    return compared


def tell(name, values):
    print(f"  {name:24s}" + "".join(f"{value:8.3f}" for value in values), flush=True)


def test_noise_free(compare):
    print(f"\ngain in nats of: {', '.join(RULES)}")
    gains, misled = [], -np.inf
    for name, cases in noise_free():
        found = [compare(*case) for case in cases]
        misled = max([misled, *(each[1] for each in found if each and each[0][2, 0] < 0)])
        gains.append(np.mean([each[0][:, 0] if each else np.zeros(4) for each in found], axis=0))
        tell(name, gains[-1])
    mean = np.mean(gains, axis=0)
    tell("mean", mean)
    print(f"  standard errors of losers: {misled:.1f}")
    assert mean[0] > mean[1]


@pytest.mark.parametrize("seed", range(9))
def test_draws(compare, seed):
    found = {}
    for name, case in draws(seed):
        result = compare(*case) if np.ptp(case[2]) else None
        if result is not None:
            found[name] = result[0]
    gains = np.array(list(found.values()))  # (draws, rules, density and error)
    print(f"\nseed {seed}, {len(gains)} draws, gain of: {', '.join(RULES)}")
    for most in (5, 1):
        tell(f"nats, each at most {most}", gains[:, :, 0].clip(-most, most).mean(0))
    tell("errors", gains[:, :, 1].mean(0))
    worst = min(found, key=lambda name: found[name][0, 0])
    tell(f"worst: {worst}", found[worst][:, 0])
