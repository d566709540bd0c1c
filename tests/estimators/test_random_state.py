"""What fits draw, and from where."""

import numpy as np
import pytest

from skgp import StateSpaceGPClassifier, StateSpaceGPRegressor
from tests.contracts.catalogue import CHEAP, cheap, rows

pytestmark = pytest.mark.filterwarnings("ignore")
all_estimators = pytest.mark.parametrize("make", CHEAP, ids=lambda c: c.__name__)


@pytest.fixture(autouse=True)
def global_state():
    """NumPy's global generator, put back afterwards."""
    before = np.random.get_state()
    np.random.seed(0)
    yield
    np.random.set_state(before)


def position():
    _, key, index, *_ = np.random.get_state()
    return key.tobytes(), index


@all_estimators
def test_random_state_none_draws_one_seed_at_most(make):
    X, y = rows(make)
    estimator = cheap(make, random_state=None)
    before = position()
    estimator.fit(X, y)
    draws_nothing = make in (StateSpaceGPRegressor, StateSpaceGPClassifier)
    after = position()
    estimator.predict(X)
    estimator.log_predictive_density(X, y)
    assert position() == after  # predictions draw nothing
    np.random.seed(0)
    if not draws_nothing:
        np.random.randint(2**31 - 1)
    assert after == position()
    assert draws_nothing == (after == before)


@all_estimators
def test_random_state_none_follows_the_global_seed(make):
    X, y = rows(make)
    found = []
    for _ in range(2):
        np.random.seed(3)
        found.append(cheap(make, random_state=None).fit(X, y).latent_mean_and_variance(X))
    np.testing.assert_allclose(*found, rtol=1e-10)
