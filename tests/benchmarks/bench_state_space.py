"""State-space GPs of long series, next to celerite2 (C++), a loop in NumPy and gpytorch's SVGP.

Run with ``OMP_NUM_THREADS=1 pytest tests/benchmarks/bench_state_space.py -m benchmark -s``; what is
measured is printed after each test. Peers are compared where they are installed (extra ``bench``),
the ECG where ``SKGP_DATA_DIR`` has it. Times are of the processor, which a busy machine changes
less, and of evidences the least of a few rounds; the peak memory is that of the whole process.
RMSE and NLPD (nats a row) are of test rows, y standardised by its training part.
"""

import math
import resource
import sys

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import ExpSineSquared, Matern

from skgp import StateSpaceGPRegressor
from skgp.inference.markov.exact_sites import fit_sites
from skgp.inference.markov.posterior import Posterior
from skgp.inference.markov.series import make_series
from skgp.inference.markov.smoother import evidence
from skgp.kernels import SHO
from skgp.kernels.sde import state_space
from skgp.likelihoods import Bernoulli, Poisson, StudentT
from tests.benchmarks.data import ROOT, arrays_of, seconds_of
from tests.reference.state_space import kalman_loop, smoother_loop

# Appended and not prepended: a file there must not hide a package of the same name.
sys.path.append(str(ROOT / "examples" / "papers"))

import _swsgp_peers as peers  # noqa: E402

pytestmark = pytest.mark.benchmark
N, VARIANCE, LENGTH_SCALE, NOISE = 10**6, 1.3, 2.0, 0.09
LOOP = 5000  # points of the NumPy loop, whose time is scaled up
SVGP_SECONDS = 100.0  # twenty times what a fit of 1e5 rows may take


def series(n):
    """Irregular times, ten a unit, and noisy values."""
    rng = np.random.default_rng(0)
    x = np.sort(rng.uniform(0, n / 10, n))
    return x, np.sin(x) + NOISE**0.5 * rng.standard_normal(n)


def sites(x, y):
    """Gaps, beta and weight of Gaussian noise."""
    x, y = torch.tensor(x), torch.tensor(y)
    return x.diff(prepend=x[:1]), y / NOISE, torch.full_like(y, 1 / NOISE)


def dynamics_of(kernel):
    return state_space(kernel).at()


def seconds(function, rounds=5):
    """Least processor time of some rounds."""
    return min(seconds_of(function)[1] for _ in range(rounds))


def loop_seconds(dynamics, gaps, beta, weight):
    """Times of a Kalman filter, and with a smoother, in NumPy; the transitions are not counted."""
    F, Q = (np.moveaxis(t.numpy(), -1, 0) for t in dynamics.transition(gaps[:LOOP]))
    P0, H = dynamics.stationary.numpy(), dynamics.observation.numpy()
    first = (beta[:LOOP].numpy(), weight[:LOOP].numpy())
    _, *states = kalman_loop(F, Q, P0, H, *first)
    forwards = seconds(lambda: kalman_loop(F, Q, P0, H, *first), rounds=2)
    back = seconds(lambda: smoother_loop(F, H, *states), rounds=2)
    return forwards * len(gaps) / LOOP, (forwards + back) * len(gaps) / LOOP


def celerite_seconds(term, x, y):
    """Time and value of celerite2's log-likelihood."""
    process = pytest.importorskip("celerite2").GaussianProcess(term)

    def log_likelihood():
        process.compute(x, yerr=np.full(len(x), NOISE**0.5))
        return process.log_likelihood(y)

    return seconds(log_likelihood), log_likelihood()


@pytest.fixture
def terms():
    return pytest.importorskip("celerite2", reason="install the extra `bench`").terms


@pytest.fixture(autouse=True)
def one_thread():
    """Torch on one thread, as the others are."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def peak_gigabytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


# ---- evidences and predictions of given hyper-parameters ---------------------------------------


def test_bench_million_points_against_celerite2_and_a_loop(terms):
    x, y = series(N)
    dynamics, data = dynamics_of(VARIANCE * Matern(LENGTH_SCALE, nu=1.5)), sites(x, y)
    term = terms.Matern32Term(sigma=VARIANCE**0.5, rho=LENGTH_SCALE)
    peer, peer_value = celerite_seconds(term, x, y)
    full = seconds(lambda: evidence(dynamics, *data))
    loop, loop_both = loop_seconds(dynamics, *data)
    value = evidence(dynamics, *data).log_normalizer
    value -= 0.5 * (N * math.log(2 * math.pi * NOISE) + float(y @ y) / NOISE)
    print(f"\nN = {N}, Matern-3/2, one thread; peak memory {peak_gigabytes():.2f} GB")
    print(f"celerite2 log-likelihood        {peer:7.3f} s   value {peer_value:.3f}")
    print(
        f"with gradient and all marginals {full:7.3f} s   value {value:.3f}   x {full / peer:.2f}"
    )
    print(f"NumPy loop, log-likelihood      {loop:7.1f} s")
    print(f"NumPy loop, marginals           {loop_both:7.1f} s   {loop_both / full:.0f} times ours")
    assert full < 4 * peer and 50 * full < loop_both
    assert peak_gigabytes() < 3


@pytest.mark.parametrize("n", [10_000, 100_000])
@pytest.mark.parametrize("name", ["oscillators", "quasi-periodic"])
def test_bench_sums_of_complex_exponentials_against_celerite2(terms, name, n):
    """The likelihood alone there, with its gradient here; J = d in either."""
    if name == "oscillators":
        kernel = SHO(1.0, 10.0) + SHO(3.0, 10.0) + SHO(7.0, 10.0)
        parts = [terms.SHOTerm(sigma=1.0, rho=rho, tau=10.0) for rho in (1.0, 3.0, 7.0)]
    else:
        kernel = Matern(20.0, nu=0.5) * ExpSineSquared(1.2, 3.0)
        waves = (2 * math.pi * j / 3 for j in range(1, 9))
        parts = [terms.ComplexTerm(a=0.1, b=0.0, c=0.05, d=d) for d in waves]
        parts.append(terms.RealTerm(a=0.1, c=0.05))
    x, y = series(n)
    dynamics, data = dynamics_of(kernel), sites(x, y)
    peer, _ = celerite_seconds(terms.TermSum(*parts), x, y)
    ours = seconds(lambda: evidence(dynamics, *data).parameter_gradient)
    print(f"\n{name}, d = {dynamics.n_states}, n = {n}: celerite2 {peer:.4f} s, ours {ours:.3f} s")
    print(f"x {ours / peer:.1f}; peak memory {peak_gigabytes():.2f} GB")


def test_bench_posterior():
    x, y = series(N)
    gaps, beta, weight = sites(x, y)
    dynamics = dynamics_of(VARIANCE * Matern(LENGTH_SCALE, nu=1.5))
    times, new = torch.tensor(x), torch.linspace(-1, N / 10, 10_000, dtype=torch.float64)
    print(f"\ncondition {seconds(lambda: Posterior(dynamics, times, beta, weight), 2):.3f} s")
    found = Posterior(dynamics, times, beta, weight)
    print(f"marginals at 10^4 times {seconds(lambda: found.marginals(new), 2):.4f} s")
    generator = torch.Generator().manual_seed(0)
    print(f"10 joint samples there {seconds(lambda: found.sample(new, 10, generator), 1):.3f} s")
    covariance = seconds(lambda: found.covariance(new[:1000]), 1)
    print(f"joint covariance at 1000 of them {covariance:.3f} s")


@pytest.mark.parametrize("n", [100_000, 1_000_000])
@pytest.mark.parametrize("name", ["logit", "probit", "poisson", "student_t"])
def test_bench_sites(name, n):
    """One hundred rows a unit of time; for labels by the logit, at most 15 s at n = 1e6."""
    generator = torch.Generator().manual_seed(0)
    x = n / 100 * torch.rand(n, generator=generator, dtype=torch.float64)
    f = 2 * torch.sin(x) + torch.cos(0.37 * x)  # a wave that bends, as in GPML's demo
    likelihood = {
        "logit": Bernoulli(),
        "probit": Bernoulli("probit"),
        "poisson": Poisson(),
        "student_t": StudentT(0.3, 4.0),
    }[name]
    if name == "poisson":
        y = torch.poisson(f.exp(), generator=generator)
    elif name == "student_t":
        y = likelihood.sample(f, generator)
    else:
        y = 2 * torch.bernoulli(torch.sigmoid(f), generator=generator) - 1
    dynamics = dynamics_of(4.0 * Matern(1.5, nu=1.5))
    found, taken = seconds_of(lambda: fit_sites(dynamics, make_series(x, y), likelihood))
    print(f"\n{name} {n=}: {taken:.2f} s, {found.n_iter} sweeps, {taken / found.n_iter:.3f} each")
    assert found.converged
    assert name != "logit" or taken < 15


# ---- fits by default ---------------------------------------------------------------------------


def ecg(n):
    """First n samples of the ECG, of which there are 650000, and its random tenth of test rows."""
    arrays = arrays_of("ecg100")
    X, y = arrays["X"][:n].astype(np.float64), arrays["y"][:n].astype(np.float64)
    return X, y, arrays["test_mask"][:n, 0]


def simulated(n):
    """Two waves of which one bends, at irregular times, ten a unit; noise of variance .09."""
    rng = np.random.default_rng(0)
    x = np.sort(rng.uniform(0, n / 10, n))
    f = np.sin(x) + 0.5 * np.sin(0.31 * x + 2 * np.sin(0.05 * x))
    return x[:, None], f + 0.3 * rng.standard_normal(n), rng.random(n) < 0.1


@pytest.mark.parametrize(("n", "limit"), [(100_000, 5.0), (1_000_000, 30.0)])
@pytest.mark.parametrize("make", [ecg, simulated])
def test_bench_fit_by_default(make, n, limit):
    """Of 1e5 rows in a twentieth of the time of SVGP, which predicts worse."""
    warm_up = simulated(1000)  # the first fit of a process is slower
    StateSpaceGPRegressor().fit(*warm_up[:2])
    X, y, test = make(n)
    y = (y - y[~test].mean()) / y[~test].std()
    model, taken = seconds_of(lambda: StateSpaceGPRegressor().fit(X[~test], y[~test]))
    nlpd = -float(model.log_predictive_density(X[test], y[test]).mean())
    rmse = float(np.sqrt(np.mean((model.predict(X[test]) - y[test]) ** 2)))
    print(
        f"\n{make.__name__}, {sum(~test)} training rows: {taken:.1f} s, {model.n_iter_} iterations,"
        f" RMSE {rmse:.4f}, NLPD {nlpd:.4f}\n    {model.kernel_}"
    )
    assert taken <= limit
    if n > 100_000:
        return
    pytest.importorskip("gpytorch", reason="install the extra `bench`")
    # Length scale in times of unit variance: about the spacing of 500 points, whose covariance
    # fails in single precision.
    start = {"nu": 1.5, "batch_size": 1024, "initial_length_scale": 0.01, "dtype": "float64"}
    peer = peers.SVGP(500, max_seconds=SVGP_SECONDS, **start).fit(X[~test], y[~test])
    scores = peer.score(X[test], y[test])
    print(
        f"    SVGP, M = 500: {peer.fit_seconds_:.0f} s, {peer.n_steps_} steps, "
        f"RMSE {scores['loss']:.4f}, NLPD {scores['nll']:.4f}"
    )
    assert nlpd < scores["nll"]
    assert taken <= peer.fit_seconds_ / 20
