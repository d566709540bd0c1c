"""DLMGPRegressor: the contracts."""

from skgp import DLMGPRegressor
from tests.contracts.estimators import RegressorContract, sklearn_checks

SMALL = dict(n_inducing=30, max_iter=20, random_state=0)
# As they are, and with fewer points than the rows of the checks have.
test_sklearn = sklearn_checks(
    *[DLMGPRegressor(objective=o) for o in ("log_loss", "elbo", "square_loss", "fitc")],
    DLMGPRegressor(hyperparameters="fixed"),
    DLMGPRegressor(**SMALL),
    DLMGPRegressor(likelihood="student_t", **SMALL),
)


class TestContract(RegressorContract):
    offers_state = False

    def make(self, **params):
        return DLMGPRegressor(**{**SMALL, **params})


class TestSquareLossContract(RegressorContract):
    offers_state = False
    weight_rtol = 1e-6  # of a standard deviation that is learned

    def make(self, **params):
        return DLMGPRegressor(**{"objective": "square_loss", **SMALL, **params})


class TestStudentTContract(RegressorContract):
    offers_state = False
    gaussian = False
    easy_r2 = 0.8  # in few iterations

    def make(self, **params):
        return DLMGPRegressor(**{"likelihood": "student_t", **SMALL, **params})
