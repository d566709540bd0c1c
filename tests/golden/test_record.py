"""The record itself: `python -m tests.golden.record` says how it is used."""

import numpy as np
import pytest

import skgp
from tests.golden.cases import CASES
from tests.golden.problems import problem
from tests.golden.record import compare, difference, outcome, perturbed


def test_cases_have_every_estimator_and_problem_and_no_case_twice():
    assert sorted(CASES) == sorted(skgp.__all__)
    for name, cases in CASES.items():
        assert len(set(cases)) == len(cases), name
    for case in (case for cases in CASES.values() for case in cases):
        assert len(problem(case.problem).X) <= 150


def test_outcome_is_repeated():
    case = CASES["QSGPRegressor"][0]
    first, second = outcome(case), outcome(case)
    assert not compare(_keyed(second), _keyed(first))
    assert {"mean", "covariance", "kernel_.theta", "log_marginal_likelihood_value_"} <= set(first)


@pytest.mark.parametrize(
    ("quantity", "change"),
    [
        ("mean", lambda v: v + 1e-7 * np.abs(v).max()),
        ("mean", lambda v: v[:-1]),
        ("mean", lambda v: np.full_like(v, np.nan)),
        ("solver_", lambda v: "other"),
    ],
)
def test_compare_finds_what_differs(quantity, change, capsys):
    expected = {"mean": np.arange(3.0), "std": np.ones(3), "solver_": "cg", "seconds": 1.0}
    found = {**expected, quantity: change(expected[quantity])}
    assert compare(_keyed(found), _keyed(expected)) == 1
    assert quantity in capsys.readouterr().out


def test_compare_finds_what_is_missing_and_what_is_slower(capsys):
    expected = {"mean": np.ones(2), "seconds": 1.0}
    assert compare(_keyed({"seconds": 2.0}), _keyed(expected)) == 1
    printed = capsys.readouterr().out
    assert "only before" in printed and "slower  2.00" in printed


def test_compare_forgives_what_rounding_explains():
    expected = {"mean": np.ones(2), "mean | eps": 1e-5}
    assert not compare(_keyed({"mean": np.ones(2) + 5e-5}), _keyed(expected))
    assert compare(_keyed({"mean": np.ones(2) + 5e-3}), _keyed(expected)) == 1


def test_perturbed_data_differ_by_rounding_and_keep_equal_rows():
    before = problem("replicated")
    after = perturbed(before)
    assert 0 < difference(after.X, before.X) < 1e-13 and 0 < difference(after.y, before.y) < 1e-13
    assert len(np.unique(after.X, axis=0)) == len(np.unique(before.X, axis=0))


def test_difference_is_relative_to_the_largest_element():
    assert difference(np.array([0.0, 201.0]), np.array([1.0, 200.0])) == 1 / 200
    assert difference(np.array([np.inf, np.nan]), np.array([np.inf, np.nan])) == 0


def _keyed(quantities):
    return {f"Estimator | case | {name}": np.asarray(v) for name, v in quantities.items()}
