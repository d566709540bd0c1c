"""Fits on a device beside those on the CPU: equal results, and what crosses between the two.

The cases are lines of the golden record (`tests.golden.cases`), or written as such. On the
pretended device the numbers are those of the CPU to the last bits; on a real one sums take another
order and random numbers are of another stream, so that only predictions are compared, in units of
their standard deviations.
"""

import contextlib
import pickle
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from unittest import mock

import numpy as np

from skgp.kernels import pairwise
from skgp.linalg import cholesky, runtime
from tests.devices.pretended_cuda import PretendedCuda
from tests.golden.cases import GoldenCase, read_cases
from tests.golden.problems import Problem, problem
from tests.golden.record import difference, fit_parts, predictions, state

#: Largest relative difference of a quantity between the CPU and the pretended device.
EQUAL = 1e-10
#: Root mean square of the difference of predicted means on a real device, in predicted standard
#: deviations of f; of routes that draw random numbers, whose streams differ.
CLOSE = 0.5
#: Up to which searches are NumPy's on every device; 150 outside of these tests.
FEW_ROWS = 20
#: What a model says that has no gradients in X.
NO_GRADIENTS = "Gradients in X are not there"


@dataclass(frozen=True)
class Device:
    """Where a case runs beside the CPU.

    Attributes
    ----------
    name : str
        Of the parameter ``device``.
    is_real : bool
    """

    name: str = "cuda"
    is_real: bool = False

    @contextlib.contextmanager
    def entered(self) -> Iterator[Counter]:
        """The device is there; counts so far, which a real one does not keep."""
        runtime._kept.cache_clear()  # as in a new process
        if self.is_real:
            yield Counter()
            return
        with PretendedCuda() as cuda:
            yield cuda.counts


PRETENDED, REAL = Device(), Device(is_real=True)


def cases(text: str) -> list[GoldenCase]:
    """Cases from lines such as those of ``tests/golden/cases.txt``, under their estimators."""
    return [case for found in read_cases(text).values() for case in found]


@dataclass
class Account:
    """What a case did on a device.

    Attributes
    ----------
    fit, once, predict : Counter
        "operations", "to_device", "to_host" and "synchronisations" of the fit, of one prediction
        with standard deviations or probabilities, and of all prediction methods together.
    differences : dict of str to float
        From the CPU, by quantity, relative to its largest element.
    distance : float
        Root mean square of the difference of latent means, in standard deviations of f.
    """

    fit: Counter = field(default_factory=Counter)
    once: Counter = field(default_factory=Counter)
    predict: Counter = field(default_factory=Counter)
    differences: dict[str, float] = field(default_factory=dict)
    distance: float = 0.0

    @property
    def worst(self) -> float:
        return max(self.differences.values(), default=0.0)


def account(case: GoldenCase, device: Device = PRETENDED) -> Account:
    """Fit a case on the CPU and on a device; what differs and what it cost."""
    data = problem(case.problem)
    with _quiet():
        expected = _found(_fitted(case, data, "cpu"), data)
    with device.entered() as counts, _quiet():
        model = _fitted(case, data, device.name)
        fit = Counter(counts)
        _predict(model, data)
        once = counts - fit
        found = _found(model, data)
        stored = pickle.dumps(model)
    with _quiet():  # without the device
        restored = {f"unpickled {k}": v for k, v in predictions(pickle.loads(stored), data).items()}
    expected |= {key: expected[key.removeprefix("unpickled ")] for key in restored}
    found |= restored
    assert found.keys() == expected.keys()
    return Account(
        fit,
        once,
        counts - fit,
        {key: difference(np.asarray(found[key]), np.asarray(expected[key])) for key in expected},
        _distance(found, expected),
    )


def check(
    case: GoldenCase,
    device: Device,
    *,
    tolerance: float = EQUAL,
    but: tuple[str, ...] = (),
    crossed: tuple[int, int] = (1, 1),
) -> None:
    """Assert that a case gives on a device what it gives on the CPU.

    Quantities whose names end as those in `but` are not compared. A prediction has at most
    `crossed` transfers to the device and back.
    """
    done = account(case, device)
    if device.is_real:
        assert done.distance < CLOSE
        return
    assert all(np.less_equal(crossings(done.once), crossed)), crossings(done.once)
    differ = {
        key: size
        for key, size in done.differences.items()
        if size > tolerance and not key.endswith(but)
    }
    assert not differ, dict(sorted(differ.items(), key=lambda item: -item[1])[:8])


def fit_counts(case: GoldenCase, change: Callable[[Problem], Problem] | None = None, **options):
    """Counts of a fit on the pretended device, of a model with other options or other data."""
    data = problem(case.problem)
    with PRETENDED.entered() as counts, _quiet():
        _fitted(case, data if change is None else change(data), PRETENDED.name, **options)
        return Counter(counts)


def predict_counts(case: GoldenCase, method: str = "predict", **arguments) -> Counter:
    """Counts of one call of a prediction method on the pretended device."""
    data = problem(case.problem)
    with PRETENDED.entered() as counts, _quiet():
        model = _fitted(case, data, PRETENDED.name)
        before = Counter(counts)
        getattr(model, method)(data.X_test, **arguments)
        return counts - before


def crossings(counts: Counter) -> tuple[int, int]:
    """Transfers to the device and back."""
    return counts["to_device"], counts["to_host"]


def check_rows_join_a_stored_model(case: GoldenCase, n_first: int = 40) -> None:
    """Assert that a stored model takes further rows on the device as the model itself does."""
    data = problem(case.problem)
    with PRETENDED.entered():
        model = case.make(data.X.shape[1], device="cuda")
        model.partial_fit(data.X[:n_first], data.y[:n_first])
        stored = pickle.loads(pickle.dumps(model))  # on the CPU, and the device is there
        for each in (model, stored):
            each.partial_fit(data.X[n_first:], data.y[n_first:])
        np.testing.assert_array_equal(stored.predict(data.X_test), model.predict(data.X_test))


def assert_few_transfers(case: GoldenCase, evaluations: Callable, *, others: int = 40) -> None:
    """Assert that a fit has one transfer each way an evaluation, and some `others` in all.

    ``evaluations(model)`` is the number of evaluations of objectives by a fitted model.
    """
    data = problem(case.problem)
    with PRETENDED.entered() as counts, _quiet():
        model = _fitted(case, data, PRETENDED.name)
        found = Counter(counts)
    n_evaluations = evaluations(model)
    assert n_evaluations > 0
    assert found["to_device"] <= n_evaluations + others
    assert found["to_host"] <= n_evaluations + others


def more_rows(data: Problem, factor: int = 3) -> Problem:
    """The data with copies of its rows, moved a little, `factor` times as many in all."""
    X = np.concatenate([data.X + 1e-3 * k for k in range(factor)])
    repeated = {name: np.tile(values, factor) for name, values in data.fit.items()}
    return replace(data, X=X, y=np.tile(data.y, factor), fit=repeated)


def _fitted(case: GoldenCase, data: Problem, device: str, **options):
    """The estimator of a case, fitted on a device."""
    model = case.make(data.X.shape[1], device=device, **options)
    fit_parts(model, case.calls, data)
    return model


def _predict(model, data: Problem) -> None:
    """Means and standard deviations, or probabilities."""
    if hasattr(model, "sample_y"):
        model.predict(data.X_test, return_std=True, **data.predict)
    else:
        model.predict_proba(data.X_test)


def _found(model, data: Problem) -> dict[str, np.ndarray]:
    """Attributes, predictions, draws and score."""
    found = {**state(model), **predictions(model, data)}
    found["score"] = model.score(data.X_test, data.y_test, **data.predict)
    if hasattr(model, "sample_y"):
        # Of few inputs: a covariance that is singular up to rounding has no root of many digits.
        given = {name: values[:3] for name, values in data.predict.items()}
        found["samples"] = model.sample_y(data.X_test[:3], 4, random_state=0, **given)
        found["draws of f"] = model.sample_f(data.X_test[:3], 4, random_state=0)
        found |= _gradients(model, data)
    return found


def _gradients(model, data: Problem) -> dict[str, np.ndarray]:
    """Of mean and standard deviation in X; none where the model says that it has none."""
    asked = dict(return_std=True, return_mean_grad=True, return_std_grad=True)
    try:
        found = model.predict(data.X_test, **asked, **data.predict)[2:]
    except ValueError as error:
        if NO_GRADIENTS not in str(error):
            raise
        return {}
    return dict(zip(("gradient of the mean", "gradient of std"), found, strict=True))


def _distance(found: dict, expected: dict) -> float:
    """Root mean square of the difference of latent means, in standard deviations of f."""
    gap = found["latent mean"] - expected["latent mean"]
    var = np.maximum(expected["latent variance"], 1e-4 * np.var(expected["latent mean"]))
    return float(np.sqrt(np.mean(gap**2 / var)))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without warnings, the evidence in tensors from few rows on, and factors by torch alone."""
    few_rows = mock.patch.object(pairwise, "FEW_ROWS", FEW_ROWS)
    by_torch = mock.patch.object(cholesky, "_is_plain", lambda A: False)
    with few_rows, by_torch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
