"""What holds of every estimator, however it is called: see `check_case` and `check_sequence`."""

import contextlib
import os
import pickle
import signal
import warnings

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.exceptions import NotFittedError

from skgp.linalg import NotPositiveDefiniteError
from tests.contracts.cases import REFUSABLE_DEFECTS, REFUSABLE_KERNELS

#: What belongs to the inside of skgp or torch and tells a user nothing.
_INTERNAL = ("INTERNAL ASSERT", "torch.linalg", "linalg.cholesky", "aten::", "Expected all tensors")
#: Words by which a message can point at what is wrong, parameters aside.
_SUBJECTS = ("X", "y", "sample_weight", "class", "weights", "rows", "kernel", "length_scale")
_N_SAMPLES = 200


def global_state():
    """Return what a fit or a prediction must leave as it was."""
    return {
        "numpy": repr(np.random.get_state()),
        "torch": torch.get_rng_state().numpy().tobytes(),
        "threads": torch.get_num_threads(),
        "dtype": torch.get_default_dtype(),
        "environment": dict(os.environ),
        "numpy errors": np.geterr(),
        "SIGINT": signal.getsignal(signal.SIGINT),
        "filters": list(warnings.filters),
        "gradients": torch.is_grad_enabled(),
    }


def rows_between_and_far(X):
    """Return rows near those of X (6, d), and rows far from them (5, d): 1e3 to 1e300 spreads."""
    X = np.asarray(X, dtype=float)
    ordinary = X[np.abs(X).max(1) < 1e50] if (np.abs(X).max(1) < 1e50).any() else 0 * X
    # A training row far away moves none of them.
    ordinary = ordinary[np.abs(ordinary).max(1) <= 1e4 * np.median(np.abs(ordinary).max(1))]
    centre = np.median(ordinary, axis=0)
    spread = np.median(np.abs(ordinary - centre), axis=0)
    spread = np.where(spread > 1e-9 * np.abs(centre), spread, 1.0)
    rng = np.random.default_rng(0)
    chosen = ordinary[rng.integers(0, len(ordinary), 6)]
    near = chosen + np.repeat([[0.0], [0.3]], 3, axis=0) * spread
    far = [centre + np.minimum(size * spread, 1e300) for size in (1e3, 1e6, 1e8, 1e10, 1e300)]
    return near, np.array(far)


def predictions(estimator, X):
    """Return every kind of prediction at the rows of X, by name, one row along the first axis."""
    mean, var = estimator.latent_mean_and_variance(X)
    found = {"latent mean": mean, "latent variance": var}
    if hasattr(estimator, "classes_"):
        found["probability"] = estimator.predict_proba(X)
        found["decision"] = estimator.decision_function(X)
    else:
        found["mean"] = estimator.predict(X)
        found["mean beside std"], found["std"] = estimator.predict(X, return_std=True)
        found["quantiles"] = estimator.predict_quantiles(X, [0.025, 0.5, 0.975])
    return found


def check_case(case):
    """Fit as the case says and check all that follows; return whether it was fitted.

    Either the fit is refused by a ValueError or TypeError that says why, which only a case with
    something to refuse may be; or what comes out is finite, consistent, reproducible, picklable,
    the same for a row whatever rows come with it, and nothing outside the estimator has changed.
    """
    X, y, weight = case.data()
    estimator = case.make()
    before = global_state()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", category=DeprecationWarning)
        inside = global_state()["filters"]
        try:
            fit(estimator, X, y, weight)
        except (ValueError, TypeError) as error:
            check_refusal(case, estimator, X, error)
            return False
        finally:
            after = global_state()["filters"]
            assert after == inside, [f for f in after if f not in inside]
        try:
            alone, scale = check_predictions(case, estimator, X, weight)
        except NotPositiveDefiniteError:
            # The first is no covariance function; of the other, rounding is all that is left.
            assert (case.kernel == "periodic" and case.d > 1) or case.is_ill_conditioned
            return True
        check_copies(estimator, (X, y, weight), alone, scale)
    changed = [name for name, value in global_state().items() if value != before[name]]
    assert not changed, changed
    return True


def check_value(case):
    """One documented value of one parameter: it fits and predicts finite numbers, or is refused."""
    X, y, weight = case.data()
    estimator = case.make()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            fit(estimator, X, y, weight)
        except (ValueError, TypeError) as error:
            check_refusal(case, estimator, X, error)
            return False
        check_finite(case, predictions(estimator, rows_between_and_far(X)[0]))
    return True


def fit(estimator, X, y, weight):
    return estimator.fit(X, y) if weight is None else estimator.fit(X, y, sample_weight=weight)


def check_refusal(case, estimator, X, error):
    """Check that there was something to refuse, and that the message names it and no internals."""
    message = str(error)
    assert not any(word in message for word in _INTERNAL), message
    names = [*estimator.get_params(deep=False), *_SUBJECTS]
    assert any(name in message for name in names), message
    refusable = (
        case.params
        or case.kernel in REFUSABLE_KERNELS
        or case.defects & REFUSABLE_DEFECTS
        or (case.is_classifier and len(np.unique(y_of(case))) in (0, 1, len(y_of(case))))
        or case.target == "singleton"
        or case.weight == "one row"
        or case.n < 3
    )
    assert refusable, message
    try:
        estimator.predict(X)
    except NotFittedError:
        return
    raise AssertionError("a refused fit left an estimator that predicts")


def y_of(case):
    """Return the targets of positive weight."""
    _, y, weight = case.data()
    return y if weight is None else y[weight > 0]


def check_predictions(case, estimator, X, weight):
    """Finite, consistent with each other, and the same for a row in any company.

    Returns what is predicted near X, and the unit of its errors.
    """
    near, _ = rows_between_and_far(X)
    # Far for the rows that the estimator has seen.
    seen = np.asarray(X, dtype=float) if weight is None else np.asarray(X, dtype=float)[weight > 0]
    _, far = rows_between_and_far(seen)
    alone = predictions(estimator, near)
    check_finite(case, alone)
    assert (alone["latent variance"] >= 0).all()
    scale = company_scale(case, estimator, near, alone)
    with contextlib.suppress(ValueError):  # says that X is too far, checked below
        together = predictions(estimator, np.concatenate([near, far]))
        for name, values in together.items():
            assert not np.isnan(values).any(), f"{name} far away"
        for name, values in alone.items():
            _assert_close(together[name][: len(near)], values, 1e-6 * scale(name), name)
        if case.is_classifier:
            check_classes(estimator, np.concatenate([near, far]), together)
    one_by_one = [predictions(estimator, row[None]) for row in near[::2]]
    for name, values in alone.items():
        rows = np.concatenate([row[name] for row in one_by_one])
        tolerance = np.broadcast_to(1e-6 * scale(name), values.shape)[::2]
        _assert_close(rows, values[::2], tolerance, f"{name} row by row")
    if case.is_classifier:
        check_classes(estimator, near, alone)
    else:
        check_numbers(case, estimator, near, alone, scale)
        if case.kernel == "default" and not case.params:
            # Of fewer than 20 inputs a far one is no outlier but sets the scale: nearer ones are
            # not far.
            is_outlier = len(np.unique(seen, axis=0)) >= 20
            check_prior_far_away(estimator, far[2:] if is_outlier else far[-1:])
    return alone, scale


def check_finite(case, found):
    """All is finite, save the standard deviation of Student-t noise of two degrees or fewer."""
    for name, values in found.items():
        heavy = name == "std" and dict(case.params).get("likelihood") == "student_t"
        assert (np.isfinite(values) | (heavy and values > 0)).all(), name


def company_scale(case, estimator, near, alone):
    """Return the function that gives the unit in which a prediction may err, by its name.

    Rounding errs by the digits of the prior variance, which that of a linear kernel grows with x,
    and by their quotient with the noise, the condition number of K + D: of a signal of 1e5 over
    noise of 1e-10, which nearly equal rows of unlike targets ask for, no digit is left, and none of
    a linear kernel of inputs of 1e9. Labels are as good as noise of at least 1, the inverse of the
    largest curvature of probit.
    """
    var = alone["latent variance"].max()
    loss = 1e4 if case.kernel == "noise-free" or case.is_ill_conditioned else 1.0
    prior, noise = estimator.kernel_.diag(near).max(), 1.0
    if not case.is_classifier:
        prior *= estimator.y_scale_**2
        var = max(var, 1e-6 * prior)
        noise = getattr(estimator, "noise_variance_", np.inf)  # counts have none
    rounding = np.finfo(float).eps * prior / noise if noise > 0 else 0.0
    # Singular up to rounding, it says nothing of where in the span of y a prediction is.
    loss += 1e7 * rounding if case.n * rounding < 0.1 else np.inf
    std = np.sqrt(var) + 1e-300
    # Of an exponential of f the relative error is the error of f.
    grows = case.counts or case.of_log
    rates = {n: 1 + np.abs(alone[n]) for n in ("mean", "std", "quantiles") if grows}
    rates |= {"mean beside std": rates["mean"]} if grows else {}
    size = {
        "latent variance": var,
        "probability": 1.0,
        "decision": np.abs(alone.get("decision", np.zeros(1))).max() + 1,
    }
    latent = std + np.abs(alone["latent mean"]).max()
    return lambda name: loss * size.get(name, latent) * rates.get(name, 1.0)


def check_classes(estimator, near, alone):
    probability = alone["probability"]
    assert (probability >= 0).all() and (probability <= 1).all()
    np.testing.assert_allclose(probability.sum(1), 1, rtol=1e-9)
    labels = estimator.predict(near)
    assert np.isin(labels, estimator.classes_).all()
    best = probability[np.arange(len(near)), np.searchsorted(estimator.classes_, labels)]
    assert (best >= probability.max(1) - 1e-9).all()


def check_numbers(case, estimator, near, alone, scale):
    mean, std, quantiles = alone["mean"], alone["std"], alone["quantiles"]
    assert (std > 0).all() or case.target == "constant", std
    _assert_close(mean, alone["mean beside std"], 1e-8 * (1 + np.abs(mean)), "mean")
    assert (np.diff(quantiles, axis=1) >= 0).all()
    lower, upper = estimator.predict_interval(near, 0.95)
    _assert_close(lower, quantiles[:, 0], 1e-9 * (1 + np.abs(lower)), "lower end")
    _assert_close(upper, quantiles[:, 2], 1e-9 * (1 + np.abs(upper)), "upper end")
    middle = np.round(quantiles[:, 1]) if case.counts else quantiles[:, 1]
    assert np.isfinite(estimator.log_predictive_density(near, middle)).all()
    samples = estimator.sample_y(near, _N_SAMPLES, random_state=0)
    assert samples.shape == (len(near), _N_SAMPLES) and np.isfinite(samples).all()
    median = quantiles[:, [1]]
    slack = np.broadcast_to(1e-6 * scale("quantiles"), quantiles.shape)[:, [1]]
    least = 0.5 - 5 * np.sqrt(0.25 / _N_SAMPLES)
    assert ((samples <= median + slack).mean(1) > least).all(), "samples lie above the median"
    if not case.counts:
        assert ((samples >= median - slack).mean(1) > least).all(), "samples lie below the median"


def check_prior_far_away(estimator, far):
    """Far from all data the mean is that of y, and the variance no longer depends on x."""
    try:
        mean, var = estimator.latent_mean_and_variance(far)
    except ValueError as error:
        assert "X" in str(error)
        return
    spread = np.sqrt(var.max()) + estimator.y_scale_
    _assert_close(mean, np.full(len(mean), estimator.y_mean_), 1e-3 * spread, "prior mean")
    _assert_close(var, np.full(len(var), var.max()), 1e-3 * var.max(), "prior variance")


def check_copies(estimator, data, alone, scale):
    """Pickles and clones that are fitted predict the same."""
    near, _ = rows_between_and_far(data[0])
    copies = {
        "pickle": pickle.loads(pickle.dumps(estimator)),
        "clone": fit(clone(estimator), *data),
    }
    for kind, other in copies.items():
        for name, values in predictions(other, near).items():
            _assert_close(values, alone[name], 1e-9 * scale(name), f"{name} of the {kind}")


def _assert_close(actual, expected, tolerance, name):
    finite = np.isfinite(expected)
    difference = np.abs(np.where(finite, actual, 0) - np.where(finite, expected, 0))
    assert (difference <= tolerance).all(), f"{name}: {actual} instead of {expected}"


def check_order(case):
    """The order of the training rows says nothing, where nothing is drawn at random."""
    X, y, weight = case.data()
    near, _ = rows_between_and_far(X)
    order = np.random.default_rng(case.seed).permutation(case.n)
    shuffled = np.asarray(X)[order], y[order], None if weight is None else weight[order]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first, second = (
            predictions(fit(case.make(optimizer=None), *data), near)
            for data in ((np.asarray(X), y, weight), shuffled)
        )
    _assert_same(second, first, "of shuffled rows", rtol=1e-5)


def check_units(case, exponent):
    """Other units of X and y give the same predictions in these units.

    The units are powers of two, so that a fit that scales its inputs computes with the same digits.
    """
    X, y, weight = case.data()
    X = np.asarray(X, dtype=float)
    near, _ = rows_between_and_far(X)
    unit = 2.0**exponent
    y_unit = 1.0 if case.is_classifier else 2.0 ** (3 - exponent)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first = predictions(fit(case.make(), X, y, weight), near)
        y_scaled = y if case.is_classifier else y * y_unit
        second = predictions(fit(case.make(), unit * X, y_scaled, weight), unit * near)
    for name in second:
        second[name] = second[name] / (y_unit**2 if name == "latent variance" else y_unit)
    _assert_same(second, first, f"in units of {unit}", rtol=1e-3)


class _Abort(Exception):
    """Raised by a callback in the middle of a fit."""


class AbortAt:
    """A callback of ``sklearn.callback`` that raises, or presses Ctrl-C, at the k-th iteration."""

    def __init__(self, k, action):
        pytest.importorskip("sklearn.callback", reason="callbacks need scikit-learn 1.9")
        self.k, self.action, self.seen = k, action, 0

    def setup(self, estimator, context):
        self.seen = 0

    def teardown(self, estimator, context):
        pass

    def on_fit_task_begin(self, estimator, context):
        pass

    def on_fit_task_end(self, estimator, context):
        if context.task_name == "iteration":
            self.seen += 1
            if self.seen == self.k:
                if self.action == "raise":
                    raise _Abort
                signal.raise_signal(signal.SIGINT)
        return False


def check_sequence(case, steps):
    """Fits, failures and interrupts one after the other: each leaves what it should.

    A step that fails leaves the estimator as it was; one that ends is what a fresh estimator would
    be, unless it starts from the one before; one that Ctrl-C stops predicts finite numbers.
    """
    X, y, weight = case.data()
    near, _ = rows_between_and_far(X)
    estimator = case.make()
    state = None  # predictions at `near` that must still hold
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for action, k in steps:
            # A callback stays with an estimator: each step has its own, and the state goes along.
            estimator = _without_callbacks(estimator)
            if action in ("raise", "interrupt"):
                estimator.set_callbacks(AbortAt(k, action))
            try:
                if action == "bad y":
                    fit(estimator, X, np.full(len(y), np.nan), weight)
                elif action == "other data":
                    fit(estimator, np.asarray(X, dtype=float) * 2, y, weight)
                else:
                    fit(estimator, X, y, weight)
            except _Abort:
                assert action == "raise"
            except (ValueError, TypeError):
                if action != "bad y":
                    return  # the case itself is refused: checked elsewhere
            else:
                assert action != "bad y"
                state = predictions(estimator, near)
                check_finite(case, state)
                if action == "fit" and not dict(case.params).get("warm_start"):
                    fresh = predictions(fit(case.make(), X, y, weight), near)
                    _assert_same(state, fresh, f"after {action}")
                continue
            if state is None:
                with np.testing.assert_raises(NotFittedError):
                    estimator.predict(near)
            else:
                _assert_same(predictions(estimator, near), state, f"after {action}")


def _without_callbacks(estimator):
    if getattr(estimator, "_skl_callbacks", None):
        estimator.set_callbacks()
    return estimator


def _assert_same(actual, expected, when, rtol=1e-9):
    for name, values in expected.items():
        finite = values[np.isfinite(values)]
        size = np.abs(finite).max() if finite.size else 0.0
        _assert_close(actual[name], values, rtol * size, f"{name} {when}")
