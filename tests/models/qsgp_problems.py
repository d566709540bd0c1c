"""Routes of `skgp.models.qsgp` called with everything spelled out."""

from skgp.data import Data
from skgp.models import qsgp


def fit_regression(kernel, data, noise, plan, options, *, state=None, generator, callback=None):
    problem = qsgp.Problem(kernel, data, noise, options, generator, callback)
    return qsgp.fit_regression(problem, plan, state=state)


def fit_classifier(
    kernel, X, Y, g, plan, options, *, offset, Z=None, row_weight=None, state=None, **controls
):
    controls = {"callback": None, **controls}
    problem = qsgp.Problem(
        kernel, Data(X, Y, row_weight), 0.0, options, likelihood=g, offset=offset, **controls
    )
    return qsgp.fit_classifier(problem, plan, Z=Z, state=state)
