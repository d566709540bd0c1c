"""The properties of `tests.contracts.properties` over the cases of `tests.contracts.cases`.

By default a few cases an estimator and property, always the same; ``-m slow`` draws 2000.
"""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import skgp
from tests.contracts.cases import ESTIMATORS, NARROW, Case, cases, documented_values, plain_cases
from tests.contracts.properties import (
    check_case,
    check_order,
    check_sequence,
    check_units,
    check_value,
)
from tests.covering import slow_case

_N_CASES = [6, slow_case(2000)]
_N_DATA = [2, slow_case(2000)]
_N_SEQUENCES = [2, slow_case(200)]
_HEALTH = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]

_STEPS = st.lists(
    st.tuples(
        st.sampled_from(["fit", "bad y", "raise", "interrupt", "other data"]), st.integers(1, 6)
    ),
    min_size=2,
    max_size=4,
)


def _run(check, n_examples, **strategies):
    settings(max_examples=n_examples, suppress_health_check=_HEALTH)(given(**strategies)(check))()


@pytest.mark.parametrize("n_cases", _N_CASES)
@pytest.mark.parametrize("name", ESTIMATORS)
def test_awkward_input_fits_or_is_refused(name, n_cases):
    fitted = []
    _run(lambda case: fitted.append(check_case(case)), n_cases, case=cases(name))
    assert sum(fitted) > 0.25 * len(fitted)


@pytest.mark.parametrize("n_cases", _N_DATA)
@pytest.mark.parametrize("name", ESTIMATORS)
def test_defaults_take_awkward_data(name, n_cases):
    fitted = []
    strategy = cases(name, params=0)
    _run(lambda case: fitted.append(check_case(case)), n_cases, case=strategy)
    assert sum(fitted) > 0.25 * len(fitted)


@pytest.mark.slow  # of plain data: tests/estimators/test_fitting.py
@pytest.mark.parametrize("name", ESTIMATORS)
def test_failures_and_interrupts_leave_what_was(name):
    strategy = cases(name, params=1, defects=0)
    _run(check_sequence, 200, case=strategy, steps=_STEPS)


@pytest.mark.parametrize("n_cases", _N_SEQUENCES)
@pytest.mark.parametrize("name", ESTIMATORS)
def test_order_of_rows_says_nothing(name, n_cases):
    _run(check_order, n_cases, case=plain_cases(name, ["rbf", "fixed", "matern32"]))


@pytest.mark.parametrize("n_cases", _N_SEQUENCES)
@pytest.mark.parametrize("name", ESTIMATORS)
def test_units_are_but_units(name, n_cases):
    exponents = st.sampled_from([-30, -3, 5, 30])
    _run(check_units, n_cases, case=plain_cases(name, ["default"]), exponent=exponents)


@pytest.mark.parametrize("kernel", [NARROW, slow_case("default")])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_documented_value_of_every_parameter(name, kernel):
    # State-space models of one kernel iterate for longer than a search begins.
    kernel = "default" if name.startswith("StateSpace") else kernel
    target = "two" if name.endswith("Classifier") else "smooth"
    plain = Case(name, (), kernel, 20, 1, frozenset(), target, "none", "C", 0)
    default = getattr(skgp, name)().get_params()
    fitted = []
    for parameter, values in documented_values(name).items():
        # A search takes part in what the first value does.
        kept = () if parameter == "optimizer" else (("optimizer", None),)
        for k, value in enumerate(v for v in values if v != default[parameter]):
            params = ((parameter, value), *kept * (k > 0))
            fitted.append(check_value(replace(plain, params=params)))
    assert sum(fitted) > 0.7 * len(fitted)
