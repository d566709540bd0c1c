"""Which cases of a test run by default; all others run with ``-m slow``."""

import itertools

import pytest


def slow_case(*values):
    """Return a case that is slow."""
    return pytest.param(*values, marks=pytest.mark.slow)


def slow(cases, *, but=()):
    """Return cases of one value each, all slow but those in `but`."""
    return [case if case in but else slow_case(case) for case in cases]


def covering(**values):
    """Parametrise a test by every combination; by default those that show each value once.

    The names are those of arguments; lists of unlike length go round.
    """
    lists = [list(each) for each in values.values()]
    shown = {tuple(k % len(each) for each in lists) for k in range(max(map(len, lists)))}
    cases = []
    for index in itertools.product(*(range(len(each)) for each in lists)):
        case = [each[k] for each, k in zip(lists, index, strict=True)]
        cases.append(pytest.param(*case) if index in shown else slow_case(*case))
    return pytest.mark.parametrize(tuple(values), cases)
