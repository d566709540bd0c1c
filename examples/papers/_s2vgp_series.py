"""Solar irradiance and a quasi-periodic vowel: exact, S2VGP, SVGP (4.1, 4.2, figures 3 to 5).

SVGP has Gaussian noise here, and then its best q and with it its bound have the closed form of
Titsias (2009): `InducingValues` is that, in NumPy, and what any optimiser of SVGP could reach.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _s2vgp_study import (
    GaussianFit,
    Row,
    Study,
    condition_gaussian,
    gaussian_scores,
    learn_gaussian,
    read,
    seconds_of,
)
from scipy.optimize import minimize
from sklearn.gaussian_process.kernels import ConstantKernel, Matern
from torch import Tensor

from skgp.inference.markov.series import Series, make_series
from skgp.kernels import Cosine, state_space
from skgp.learning.markov.objectives import GaussianEvidence
from skgp.optim.bfgs import minimize_lbfgs

_JITTER = 1e-8  # relative to the variance
_N_KNOTS = 60
_LENGTH_SCALES = (1.0, 10.0, 50.0)  # years, to start from
_N_CURVE = 800

_RATE, _N_SAMPLES = 8000.0, 2400  # Hz; the paper's vowel lasts .3 s too
_PITCH = (60.0, 400.0)  # Hz, where the fundamental is looked for
_LEAST_NOISE = 0.01
_GAP = 168  # samples, of the 2400 what 338 are of 4879 in figure 5


class InducingValues:
    """The best sparse variational GP on values of f at `z`, for Gaussian noise.

    Parameters
    ----------
    kernel : Kernel
        Of scikit-learn.
    noise : float
    z : ndarray of shape (M,)
    x, y : ndarray of shape (n,)

    Attributes
    ----------
    value : float
        The bound, in nats.
    """

    def __init__(
        self, kernel: Any, noise: float, z: np.ndarray, x: np.ndarray, y: np.ndarray
    ) -> None:
        self.kernel, self.noise, self.z = kernel, noise, z[:, None]
        self.variance = float(kernel.diag(self.z[:1])[0])
        gram = kernel(self.z) + _JITTER * self.variance * np.eye(len(z))
        self.root = np.linalg.cholesky(gram)
        A = np.linalg.solve(self.root, kernel(self.z, x[:, None])) / math.sqrt(noise)
        self.inner = np.linalg.cholesky(np.eye(len(z)) + A @ A.T)
        self.weights = np.linalg.solve(self.inner, A @ y) / math.sqrt(noise)
        log_det = len(y) * math.log(2 * math.pi * noise) + 2 * np.log(np.diag(self.inner)).sum()
        fit = y @ y / noise - self.weights @ self.weights
        trace = len(y) * self.variance / noise - (A**2).sum()
        self.value = float(-0.5 * (log_det + fit + trace))

    def predict(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Mean and variance (n,) of new observations."""
        a = np.linalg.solve(self.root, self.kernel(self.z, x[:, None]))
        b = np.linalg.solve(self.inner, a)
        return b.T @ self.weights, self.variance - (a**2).sum(0) + (b**2).sum(0) + self.noise

    @staticmethod
    def learn(
        kernels: list[Any], noise: float, z: np.ndarray, x: np.ndarray, y: np.ndarray
    ) -> "InducingValues":
        """The same with hyper-parameters by the bound; the best of several starts."""

        def make(kernel: Any, theta: np.ndarray) -> InducingValues:
            return InducingValues(kernel.clone_with_theta(theta[:-1]), math.exp(theta[-1]), z, x, y)

        found = []
        for kernel in kernels:
            start = np.append(kernel.theta, math.log(noise))
            bounds = [*kernel.bounds, (math.log(1e-5), math.log(10.0))]
            loss = lambda theta, kernel=kernel: -make(kernel, theta).value / len(y)  # noqa: E731
            ended = minimize(loss, start, method="L-BFGS-B", bounds=bounds)
            found.append(make(kernel, ended.x))
        return max(found, key=lambda fit: fit.value)


# ---- solar irradiance ------------------------------------------------------------------------


def solar(folder: Path, quick: bool) -> Study:
    """Figure 3, for the text's Matern-3/2 and for the 5/2 of figure 1."""
    X, y, test = read(folder, "solar")
    x, z = X[:, 0], (y - y[~test].mean()) / y[~test].std()
    knots = torch.linspace(x.min(), x.max(), _N_KNOTS, dtype=torch.float64)
    grid = np.linspace(x.min(), x.max(), _N_CURVE)
    study = Study({}, {"x": x, "y": z, "test": test, "grid": grid, "knots": knots.numpy()})
    for nu in (1.5,) if quick else (1.5, 2.5):
        fits = _solar_fits(nu, x[~test], z[~test], knots)
        title = f"solar, Matern-{round(2 * nu)}/2, y standardised"
        study.tables[title] = _solar_table(fits, x, z, test)
        if nu == 1.5:
            study.curves["fits"] = {name: fit.predict(grid) for name, (fit, _) in fits.items()}
    return study


def _solar_fits(nu: float, x: np.ndarray, z: np.ndarray, knots: Tensor) -> dict[str, Any]:
    """Fits and their seconds."""
    kernels = [
        ConstantKernel(1.0, (1e-4, 1e4)) * Matern(scale, (1e-2, 1e4), nu=nu)
        for scale in _LENGTH_SCALES
    ]
    series = make_series(torch.from_numpy(x), torch.from_numpy(z))
    return {
        "exact": seconds_of(learn_gaussian, kernels, series),
        f"S2VGP-{len(knots)}": seconds_of(learn_gaussian, kernels, series, knots),
        f"SVGP-{len(knots)}": seconds_of(InducingValues.learn, kernels, 0.1, knots.numpy(), x, z),
    }


def _solar_table(fits: dict[str, Any], x: np.ndarray, z: np.ndarray, test: np.ndarray) -> list[Row]:
    """Scores in the gaps, and how far the predictions are from the exact ones."""
    reference = fits["exact"][0].predict(x)[0]
    exact = gaussian_scores(z[test], *(part[test] for part in fits["exact"][0].predict(x)))
    table = []
    for name, (fit, seconds) in fits.items():
        mean, var = fit.predict(x)
        scores = gaussian_scores(z[test], mean[test], var[test])
        apart = (mean - reference) ** 2
        table.append(
            {
                "model": name,
                "bound": fit.value,
                "test_rmse": scores["rmse"],
                "off_exact_%": 100 * abs(scores["rmse"] / exact["rmse"] - 1),
                "test_nlpd": scores["nlpd"],
                "train_rmse": gaussian_scores(z[~test], mean[~test], var[~test])["rmse"],
                "from_exact_in": np.sqrt(apart[~test].mean()),
                "from_exact_gap": np.sqrt(apart[test].mean()),
                "noise": fit.noise,
                "seconds": seconds,
            }
        )
    return table


# ---- a vowel ---------------------------------------------------------------------------------


def speech(folder: Path, quick: bool) -> Study:
    """Figures 4 and 5: divergence from the exact posterior by the number of inducing states."""
    x, y = _vowel(folder)
    if quick:
        x, y = x[:600], y[:600]
    test = np.random.default_rng(0).random(len(x)) < 0.1
    gap = slice(len(x) // 2, len(x) // 2 + _GAP * len(x) // _N_SAMPLES)
    hidden = test.copy()
    hidden[gap] = True
    series = make_series(torch.from_numpy(x[~hidden]), torch.from_numpy(y[~hidden]))
    study = Study({}, {"x": x, "y": y, "hidden": hidden})
    for n_harmonics in (1, 2) if quick else (1, 2, 4, 12):
        kernel, noise = learn_harmonics(series, n_harmonics)
        exact = condition_gaussian(kernel, noise, series)
        rows = [_speech_row("exact", exact, 0.0, exact.value, x, y, test, gap)]
        for M in (16, 64) if quick else 2 ** np.arange(4, 10):
            knots = torch.linspace(x[0], x[-1], int(M), dtype=torch.float64)
            ours = seconds_of(condition_gaussian, kernel, noise, series, knots)
            theirs = seconds_of(
                InducingValues, kernel, noise, knots.numpy(), x[~hidden], y[~hidden]
            )
            for name, fit in (("S2VGP", ours), ("SVGP", theirs)):
                rows.append(_speech_row(f"{name}-{M}", *fit, exact.value, x, y, test, gap))
        study.tables[_speech_title(kernel, noise, n_harmonics)] = rows
        study.curves[f"KL {n_harmonics}"] = rows
    knots = torch.linspace(x[0], x[-1], 16 * len(x) // 120, dtype=torch.float64)
    shown = condition_gaussian(kernel, noise, series, knots)
    return Study(study.tables, {**study.curves, "knots": knots.numpy(), "fit": shown.predict(x)})


def _vowel(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Times in seconds, and values of unit variance, of the loudest .3 s of a word."""
    _, y, _ = read(folder, "speech_nine")
    loudness = np.convolve(y**2, np.ones(_N_SAMPLES), mode="valid")
    vowel = y[loudness.argmax() :][:_N_SAMPLES]
    return np.arange(_N_SAMPLES) / _RATE, (vowel - vowel.mean()) / vowel.std()


def learn_harmonics(series: Series, n_harmonics: int) -> tuple[Any, float]:
    r"""Learn the kernel of eq. C.2 and the noise by the exact likelihood.

    .. math:: k(\tau) = e^{-\tau / \ell} \sum_j \gamma_j^2 \cos(2 \pi j f_0 \tau)

    The logarithms of the kernel's parameters are a linear function of :math:`\log \ell`,
    :math:`-\log f_0` and :math:`\log \gamma_j^2`: each period is a fraction of the first.
    """
    period = 1 / _fundamental(series)
    kernel = _harmonic_kernel(0.02, period, n_harmonics)
    form, objective = state_space(kernel), GaussianEvidence(series)
    tie = torch.zeros(1 + 2 * n_harmonics, 2 + n_harmonics, dtype=torch.float64)
    harmonic = torch.arange(n_harmonics)
    tie[0, 0] = tie[2::2, 1] = tie[1 + 2 * harmonic, 2 + harmonic] = 1.0
    shift = torch.zeros(len(tie), dtype=torch.float64)
    shift[2::2] = -(harmonic + 1.0).log()

    def loss(leaves: dict[str, Tensor]) -> Tensor:
        parameters, noise = form.parameters(tie @ leaves["free"] + shift), leaves["noise"]
        found = objective([form.at(parameters.detach())], noise.detach())
        # A plane through the value with the known slopes carries them into torch's graph.
        plane = (parameters - parameters.detach()) @ found.gradients()[0]
        plane = plane + (noise - noise.detach()) @ found.likelihood_gradient
        return -(found.value + plane) / series.total

    free = torch.tensor([0.02, period, *[1 / n_harmonics] * n_harmonics], dtype=torch.float64).log()
    low, high = free - 7.0, free + 7.0
    low[1], high[1] = free[1] - 0.05, free[1] + 0.05  # the pitch and none of its multiples
    least, most = torch.tensor([[_LEAST_NOISE], [1.0]], dtype=torch.float64).log()
    found = minimize_lbfgs(
        loss,
        {"free": free, "noise": least + 2.0},
        max_iter=100,
        tol=1e-6,
        bounds={"free": (low, high), "noise": (least, most)},
    )
    theta = tie @ found.parameters["free"] + shift
    return kernel.clone_with_theta(theta.numpy()), float(found.parameters["noise"].exp())


def _harmonic_kernel(length_scale: float, period: float, n_harmonics: int) -> Any:
    """Matern-1/2 times a sum of cosines at a period and its fractions."""
    parts = [ConstantKernel(1.0) * Cosine(period / j) for j in range(1, n_harmonics + 1)]
    return Matern(length_scale, nu=0.5) * sum(parts[1:], start=parts[0])


def _fundamental(series: Series) -> float:
    """Frequency within the range of voices at which the autocorrelation peaks, in Hz."""
    grid = np.arange(float(series.times[0]), float(series.times[-1]), 1 / _RATE)
    y = np.interp(grid, series.times.numpy(), series.y.numpy())
    correlation = np.correlate(y, y, mode="full")[len(y) - 1 :]
    first, last = (int(_RATE / frequency) for frequency in reversed(_PITCH))
    return _RATE / (first + correlation[first:last].argmax())


def _speech_row(
    name: str,
    fit: GaussianFit | InducingValues,
    seconds: float,
    evidence: float,
    x: np.ndarray,
    y: np.ndarray,
    test: np.ndarray,
    gap: slice,
) -> Row:
    """Divergence and errors of a fit; the gap's are in the second pair of columns."""
    mean, var = fit.predict(x)
    scattered = gaussian_scores(y[test], mean[test], var[test])
    inside = gaussian_scores(y[gap], mean[gap], var[gap])
    return {
        "model": name,
        "bound": fit.value,
        "KL": evidence - fit.value,
        "rmse": scattered["rmse"],
        "nlpd": scattered["nlpd"],
        "gap_rmse": inside["rmse"],
        "gap_nlpd": inside["nlpd"],
        "seconds": seconds,
    }


def _speech_title(kernel: Any, noise: float, n_harmonics: int) -> str:
    scale, _, period = np.exp(kernel.theta[:3])
    return (
        f"speech, {n_harmonics} harmonics of {1 / period:.0f} Hz, length scale "
        f"{1e3 * scale:.1f} ms, noise variance {noise:.3f}"
    )
