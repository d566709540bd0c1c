"""Small processes are exact however little the noise, and however large the kernel beside it."""

import numpy as np
import pytest
from sklearn.gaussian_process.kernels import RBF, DotProduct, Matern, WhiteKernel

from skgp import DLMGPRegressor, QSGPRegressor, SWSGPRegressor, VecchiaGPRegressor
from tests.reference.gaussian import log_density, process

X = np.linspace(0, 10, 25)[:, None]
NEW = np.array([[2.5], [5.1], [12.0]])
YEARS = np.linspace(1960, 2020, 60)[:, None]
#: Rows, targets, others, and a kernel.
CASES = {
    "little noise": (X, np.sin(X[:, 0]), NEW, RBF(1.0) + WhiteKernel(1e-9)),
    "a line": (X, 2 * X[:, 0], NEW, 2000.0 * RBF(250.0) + WhiteKernel(1e-5)),
    "a trend far from the origin": (
        YEARS,
        0.02 * (YEARS[:, 0] - 1990) + np.sin(YEARS[:, 0]),
        np.array([[1950.0], [1999.3], [2030.0]]),
        0.01 * DotProduct(1.0) + Matern(2.0, nu=2.5) + WhiteKernel(0.05),
    ),
}
EXACT = {
    "qsgp": (QSGPRegressor, 1e-6),
    "dlm": (DLMGPRegressor, 1e-6),
    "swsgp": (SWSGPRegressor, 1e-3),  # of the noise: what inducing values have of their own
    "vecchia": (VecchiaGPRegressor, 1e-6),
}


def dense(kernel, X, z, weight, new):
    """Mean, covariance with noise, and log evidence of distinct rows of unit-scale targets."""
    signal, noise = kernel.k1, kernel.k2.noise_level
    mean, covariance = process(signal, X, z, noise / weight, new)
    evidence = log_density(signal(X) + np.diag(noise / weight), z)
    return mean, covariance + noise * np.eye(len(new)), evidence


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", EXACT)
def test_small_process_is_exact(name, case):
    rows, y, new, kernel = CASES[case]
    estimator, rtol = EXACT[name]
    model = estimator(kernel, optimizer=None, random_state=0).fit(rows, y)
    mean, std = model.predict(new, return_std=True)
    covariance = model.predict(new, return_cov=True)[1]
    z = (y - y.mean()) / y.std()
    expected, joint, evidence = dense(kernel, rows, z, np.ones(len(z)), new)
    np.testing.assert_allclose((mean - y.mean()) / y.std(), expected, rtol=0, atol=1e-4)
    np.testing.assert_allclose((std / y.std()) ** 2, np.diag(joint), rtol=2 * rtol)
    np.testing.assert_allclose(np.diag(covariance), std**2, rtol=1e-6)
    np.testing.assert_allclose(covariance / y.var(), joint, atol=2 * rtol * joint.max())
    if hasattr(model, "elbo_"):
        assert model.elbo_ == pytest.approx(evidence, abs=0.05)


def test_evidence_and_stream_of_dense_dlm():
    """Rows given twice, weights, and the posterior of a dense process as the prior of more rows."""
    rng = np.random.default_rng(0)
    y = np.sin(X[:, 0]) + 0.1 * rng.standard_normal(25)
    weight = rng.integers(1, 3, 25).astype(float)
    options = {"optimizer": None, "normalize_y": False, "objective": "elbo", "random_state": 0}
    kernel = Matern(1.0, nu=1.5) + WhiteKernel(0.01)
    model = DLMGPRegressor(kernel, **options).fit(X, y, sample_weight=weight)
    again = np.repeat(np.arange(25), weight.astype(int))
    repeated = DLMGPRegressor(kernel, **options).fit(X[again], y[again])
    evidence = QSGPRegressor(kernel, optimizer=None, normalize_y=False).fit(X[again], y[again])
    assert model.elbo_ == pytest.approx(evidence.log_marginal_likelihood_value_, abs=1e-6)
    assert repeated.elbo_ == pytest.approx(model.elbo_, abs=1e-6)
    # As many rows again, at the same inputs: the exact process of twice the weight.
    model.partial_fit(X, y, sample_weight=weight)
    mean, joint, _ = dense(kernel, X, y, 2 * weight, NEW)
    found, std = model.predict(NEW, return_std=True)
    np.testing.assert_allclose(found, mean, rtol=0, atol=1e-4)
    np.testing.assert_allclose(std**2, np.diag(joint), rtol=1e-4)
