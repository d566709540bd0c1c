"""DLMGPClassifier: the contract of every classifier, and what is its own."""

from skgp import DLMGPClassifier
from tests.contracts.classifiers import ClassifierContract, sklearn_checks

test_sklearn = sklearn_checks(DLMGPClassifier(n_inducing=20, max_iter=20, random_state=0))


class TestContract(ClassifierContract):
    offers_state = False

    def make(self, **params):
        return DLMGPClassifier(**{"n_inducing": 40, "max_iter": 20, "random_state": 0, **params})
