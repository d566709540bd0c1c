"""QSGPRegressor: the contracts of every regressor, and what is its own."""

from skgp import QSGPRegressor
from tests.contracts.estimators import RegressorContract, sklearn_checks

test_sklearn = sklearn_checks(QSGPRegressor(random_state=0))


class TestContract(RegressorContract):
    offers_state = False  # a posterior exists only when the solver has ended

    def make(self, **params):
        return QSGPRegressor(**{"random_state": 0, **params})
