r"""The golden record: what every estimator predicts on small problems, to compare trees by.

::

    python -m tests.golden.record write main.npz
    python -m tests.golden.record compare main.npz --only QSGPClassifier --match fourier

``write`` fits `tests.golden.cases.CASES` and keeps predictions, evidence, hyper-parameters, choices
and seconds of the processor. ``compare`` does the same in the present tree and lists what differs,

.. math:: \max_i |a_i - b_i| / \max_i |b_i| > \text{tolerance},

largest first; what exceeds 1e-4 is marked ``!!``. Its exit status is 1 where anything differs, or
a quantity is missing. ``--with other.npz`` compares two records without fits.

A search of hyper-parameters can turn a change of the last digit into one of the fifth. ``write``
therefore fits every case once more to the same data but for rounding (`perturbed`), and ``compare``
prints by how much that alone moved a quantity, where it is more than the tolerance; what differs by
no more than ten times as much is listed with ``~`` and is no fault.

The numbers depend on the processor, the versions of the libraries and the number of threads: a
record is compared on the machine that wrote it, with one thread, and never committed.
"""

import os

os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")

import argparse  # noqa: E402
import sys  # noqa: E402
import time  # noqa: E402
import warnings  # noqa: E402
from collections.abc import Callable  # noqa: E402
from dataclasses import replace  # noqa: E402

import numpy as np  # noqa: E402
import torch  # noqa: E402

from tests.golden.cases import CASES, GoldenCase  # noqa: E402
from tests.golden.problems import Problem, problem  # noqa: E402

TOLERANCE = 1e-8
MARKED = 1e-4
_SLOWER = 1.3
_REPEATS = 3
_SECONDS = "seconds"
#: Fitted attributes that are compared where an estimator has them, besides ``kernel_.theta``.
_ATTRIBUTES = """
    beta_ calibration_ coupling_ elbo_ intercept_ kl_weight_ log_marginal_likelihood_value_ loss_
    map_ moderation_ n_basis_ n_inducing_ n_iter_ n_kept_ n_neighbors_ noise_variance_ offset_
    polished_ validation_loss_ y_mean_ y_scale_
    basis_ covariance_ sampler_ solver_
""".split()


def record(only: list[str], match: str, before: dict | None = None) -> dict[str, np.ndarray]:
    """Return the quantities of the cases asked for, by ``estimator | case | quantity``.

    With a record ``before``, what seems slower than there is timed anew, as a busy machine may have
    been the reason; without one, the sensitivity to rounding comes under ``... | quantity | eps``.
    """
    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    found = {}
    for estimator, cases in CASES.items():
        if only and estimator not in only:
            continue
        outcome(cases[0])  # imports and caches are not timed
        for case in cases:
            if match not in str(case):
                continue
            key = f"{estimator} | {case} | "
            quantities = outcome(case)
            if before is None:
                quantities |= _sensitivity(quantities, outcome(case, perturbed))
            for _ in range(_REPEATS):
                if _is_slower(quantities.get(_SECONDS), (before or {}).get(key + _SECONDS)):
                    again = outcome(case)[_SECONDS]
                    quantities[_SECONDS] = min(quantities[_SECONDS], again)
            found |= {key + name: np.asarray(values) for name, values in quantities.items()}
    return found


def _is_slower(now, before) -> bool:
    """Whether seconds rose by more than the clock can err; None is not slow."""
    return None not in (now, before) and now > max(_SLOWER * before, before + 0.05)


def perturbed(data: Problem) -> Problem:
    """Return the data with other last digits; rows that are equal remain so."""
    units = 1 + 1e-14 * np.arange(1, data.X.shape[1] + 1)
    numbers = data.y.dtype.kind == "f" and (data.y != np.round(data.y)).any()
    y = data.y * (1 + 1e-14 * np.cos(np.arange(len(data.y)))) if numbers else data.y
    return replace(data, X=data.X * units, X_test=data.X_test * units, y=y)


def _sensitivity(found: dict, moved: dict) -> dict:
    """Return by how much rounding moved each quantity, under its name and ``| eps``."""
    return {
        f"{name} | eps": difference(np.asarray(moved[name]), np.asarray(found[name]))
        for name in found.keys() & moved.keys() - {_SECONDS}
    }


def outcome(case: GoldenCase, change: Callable[[Problem], Problem] = lambda data: data) -> dict:
    """Fit one case and return its quantities, ``seconds`` of the fit among them.

    What is refused has the kind of the exception for its only quantity.
    """
    data = change(problem(case.problem))
    estimator = case.make(data.X.shape[1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        start = time.process_time()
        try:
            fit_parts(estimator, case.calls, data)
        except Exception as error:  # compared as well
            print("refused:", case.estimator, case, error, file=sys.stderr)
            return {"refused": type(error).__name__}
        seconds = time.process_time() - start
        return {_SECONDS: seconds, **state(estimator), **predictions(estimator, data)}


def fit_parts(estimator, calls: str, data: Problem) -> None:
    """Give the estimator the rows as a case says: at once, twice, or in parts."""
    if calls != "parts":
        for _ in range(2 if calls == "refit" else 1):
            estimator.fit(data.X, data.y, **data.fit)
        return
    extra = {"classes": np.unique(data.y)} if hasattr(estimator, "predict_proba") else {}
    # Rows that take turns, so that the first part has every class; a series in its order.
    parts = [slice(None, None, 2), slice(1, None, 2)]
    for rows in parts:
        weights = {name: values[rows] for name, values in data.fit.items()}
        estimator.partial_fit(data.X[rows], data.y[rows], **weights, **extra)
        extra = {}


def state(estimator) -> dict:
    """Return the fitted attributes that a user reads."""
    found = {name: getattr(estimator, name, None) for name in _ATTRIBUTES}
    found = {name: value for name, value in found.items() if value is not None}
    kernels = {"kernel_": getattr(estimator, "kernel_", None)}
    return {**{f"{k}.theta": v.theta for k, v in kernels.items() if v is not None}, **found}


def predictions(estimator, data: Problem) -> dict:
    """Return what the methods say of the test rows."""
    X, given = data.X_test, data.predict
    mean, var = estimator.latent_mean_and_variance(X)
    found = {"latent mean": mean, "latent variance": var}
    if hasattr(estimator, "predict_proba"):
        return found | {
            "labels": estimator.predict(X).astype(str),
            "probability": estimator.predict_proba(X),
            "decision": estimator.decision_function(X),
            "log density": estimator.log_predictive_density(X, data.y_test),
        }
    mean, std = estimator.predict(X, return_std=True, **given)
    found |= {
        "mean": mean,
        "std": std,
        "mean alone": estimator.predict(X, **given),
        "covariance": estimator.predict(X, return_cov=True, **given)[1],
        "quantiles": estimator.predict_quantiles(X, [0.05, 0.5, 0.9], **given),
        "interval": np.transpose(estimator.predict_interval(X, 0.95, **given)),
        "log density": estimator.log_predictive_density(X, data.y_test, **given),
    }
    if hasattr(estimator, "predict_components"):
        for name, part in zip(
            ("components", "component std"),
            estimator.predict_components(X, return_std=True),
            strict=True,
        ):
            found[name] = np.asarray(list(part.values()) if isinstance(part, dict) else part)
    return found


def difference(found: np.ndarray, expected: np.ndarray) -> float:
    """Return the largest difference by the largest element; infinite where kinds differ."""
    if found.shape != expected.shape or (found.dtype.kind in "US") != (expected.dtype.kind in "US"):
        return np.inf
    if found.dtype.kind in "US":
        return 0.0 if (found == expected).all() else np.inf
    found, expected = found.astype(float), expected.astype(float)
    same = (found == expected) | (np.isnan(found) & np.isnan(expected))
    if same.all():
        return 0.0
    scale = np.abs(expected[np.isfinite(expected)]).max(initial=0.0) or 1.0
    with np.errstate(invalid="ignore"):
        distance = np.where(same, 0.0, np.abs(found - expected)) / scale
    return float(np.where(np.isnan(distance), np.inf, distance).max())


def compare(found: dict, expected: dict, tolerance: float = TOLERANCE) -> int:
    """Print what differs and what became slower; return the number of faults."""
    differences = []  # (is a fault, size, text)
    cases = _cases(expected) & _cases(found)
    for key in sorted(expected.keys() | found.keys()):
        if key.endswith((_SECONDS, " | eps")) or tuple(key.split(" | ")[:2]) not in cases:
            continue
        if key not in found or key not in expected:
            text = f"{key}: only {'before' if key in expected else 'now'}"
            differences.append((True, np.inf, text))
            continue
        size = difference(found[key], expected[key])
        if size > tolerance:
            eps = float(expected.get(f"{key} | eps", 0.0))
            text = f"{key} (rounding: {eps:.1e})" if eps > tolerance else key
            differences.append((size > 10 * eps, size, text))
    for is_fault, size, text in sorted(differences, key=lambda found: -found[1]):
        mark = "!!" if size > MARKED else "  "
        print(f"{mark if is_fault else ' ~'} {size:8.1e}  {text}")
    _print_seconds(found, expected)
    faults = sum(is_fault for is_fault, *_ in differences)
    print(
        f"{_sizes(expected)}: {faults} differ, {len(differences) - faults} more by rounding; "
        f"tolerance {tolerance:g}"
    )
    if alone := len(_cases(expected) ^ _cases(found)):
        print(f"{alone} cases are in one of the two alone and not compared")
    return faults


def _cases(record: dict) -> set[tuple[str, ...]]:
    return {tuple(key.split(" | ")[:2]) for key in record}


def _sizes(record: dict) -> str:
    quantities = sum(not key.endswith(" | eps") for key in record)
    return f"{len(_cases(record))} fits, {quantities} quantities"


def _print_seconds(found: dict, expected: dict) -> None:
    """Print the ratios of seconds, case by case where one is slow enough to tell, and in sum."""
    total: dict[str, np.ndarray] = {}
    for key in found.keys() & expected.keys():
        case, _, name = key.rpartition(" | ")
        if name != _SECONDS:
            continue
        now, before = float(found[key]), float(expected[key])
        if _is_slower(now, before):
            print(f"slower {now / before:5.2f}  {case}: {before:.2f} s, now {now:.2f} s")
        estimator = case.partition(" | ")[0]
        total[estimator] = total.get(estimator, np.zeros(2)) + (now, before)
    for estimator, (now, before) in sorted(total.items()):
        mark = " slower" if now > _SLOWER * before else ""
        print(f"{estimator:24} {before:7.2f} s, now {now:7.2f} s: {now / before:.2f}{mark}")


def _read(path: str, only: list[str], match: str) -> dict[str, np.ndarray]:
    with np.load(path) as stored:
        return {
            key: stored[key]
            for key in stored.files
            if (not only or key.split(" | ")[0] in only) and match in key.split(" | ")[1]
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("command", choices=["write", "compare"])
    parser.add_argument("path", help="the record, an .npz outside of the repository")
    parser.add_argument("--only", nargs="+", default=[], choices=[*CASES], metavar="ESTIMATOR")
    parser.add_argument("--match", default="", help="cases whose text contains this")
    parser.add_argument("--with", dest="other", help="another record, to compare without fits")
    parser.add_argument("--tolerance", type=float, default=TOLERANCE)
    chosen = parser.parse_args()
    if chosen.command == "compare":
        expected = _read(chosen.path, chosen.only, chosen.match)
        if chosen.other:
            found = _read(chosen.other, chosen.only, chosen.match)
        else:
            found = record(chosen.only, chosen.match, expected)
        return int(compare(found, expected, chosen.tolerance) > 0)
    found = record(chosen.only, chosen.match)
    np.savez_compressed(chosen.path, **found)
    seconds = sum(float(values) for key, values in found.items() if key.endswith(_SECONDS))
    print(f"{_sizes(found)}, {seconds:.1f} s of fits: {chosen.path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
