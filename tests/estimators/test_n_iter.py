"""What ``max_iter`` bounds and ``n_iter_`` counts."""

import pytest

from tests.contracts.catalogue import CHEAP, cheap, rows

pytestmark = pytest.mark.filterwarnings("ignore")

#: Settings under which `max_iter` bounds something.
ITERATIVE = [
    *((make, {"objective": o}) for make in list(CHEAP)[2:4] for o in ("log_loss", "elbo")),
    (list(CHEAP)[2], {"objective": "square_loss"}),
    (list(CHEAP)[2], {"batch_size": 8}),
    (list(CHEAP)[2], {"beta": "auto"}),
    *((make, {"solver": "sgd"}) for make in list(CHEAP)[:2]),
    (list(CHEAP)[0], {"likelihood": "laplace"}),
    *((make, {}) for make in list(CHEAP)[4:8]),
    *((make, {"solver": "adam"}) for make in list(CHEAP)[4:6]),
]


@pytest.mark.parametrize(
    ("make", "params"), ITERATIVE, ids=lambda v: getattr(v, "__name__", str(v))
)
@pytest.mark.parametrize("max_iter", [1, 3])
def test_n_iter_is_at_most_max_iter(make, params, max_iter):
    X, y = rows(make)
    estimator = cheap(make, **{"max_iter": max_iter, **params}).fit(X, y)
    assert 1 <= estimator.n_iter_ <= max_iter
