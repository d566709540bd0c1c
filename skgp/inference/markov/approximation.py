r"""What the approximate state-space form of a kernel costs the evidence of a series.

With C the covariance of the observations, noise included, and E the error of that of the form,
:math:`R = C^{-1/2} E C^{-1/2}`; to second order the evidence of observations that C describes moves
by

.. math:: \Delta = \tfrac12 (\alpha^\top E \alpha - \operatorname{tr} R), \quad \alpha = C^{-1} y,
          \qquad E[\Delta^2] = v + v^2 / 4, \quad v = \tfrac12 \lVert R \rVert_F^2,

so that it is E beside the noise that counts, not E beside the variance of f.
"""

import math

import numpy as np
import torch
from torch import Tensor

from skgp.inference.defaults import ERROR_ROWS, LEAST_NOISE_SHARE
from skgp.inference.markov.series import Lags, Series
from skgp.kernels import gram
from skgp.kernels.expression import summands
from skgp.kernels.sde import StateSpace, state_space

_APART = np.finfo(float).tiny  # mathematical: at 0 dense covariances have what rounding adds


def evidence_error(form: StateSpace, series: Series, noise: float) -> float:
    """Error of the evidence in nats, of Gaussian noise, at the kernel's own hyper-parameters.

    The root of E[Delta^2], or the size of Delta if that is larger, on the densest stretch of some
    consecutive times, taken for all: O(256^3). 0 for kernels with an exact form.
    """
    with_terms = getattr(series, "features", None) is not None  # predicted by the filter
    dense = not with_terms and series.lags_of(form.at()) is not None
    if form.is_exact or (dense and form.slopes is not None):  # RBF among what is exact
        return 0.0
    times, n = series.times.cpu(), len(series.times)
    m = min(n, ERROR_ROWS)
    ends = torch.arange(m - 1, n, m)
    last = int(ends[(times[ends] - times[ends - m + 1]).argmin()])
    part = slice(last - m + 1, last + 1)
    counts = series.counts[part].cpu()
    K, E = _covariance_and_error(form, times[part], of_form=not dense)
    C = K + torch.diag(noise / counts.clamp(min=torch.finfo(counts.dtype).tiny))
    C.diagonal().add_(LEAST_NOISE_SHARE * K.diagonal())
    L, failed = torch.linalg.cholesky_ex(C)
    if int(failed):
        return math.inf
    half = torch.linalg.solve_triangular(L, E, upper=False)
    R = torch.linalg.solve_triangular(L, half.mT, upper=False)  # (m, m)
    y = series.totals[part].cpu() / counts
    alpha = torch.cholesky_solve(y[:, None], L)[:, 0]
    v = 0.5 * float(R.square().sum()) * n / m
    shift = 0.5 * float(alpha @ E @ alpha - R.trace()) * n / m
    return max(math.sqrt(v + v * v / 4), abs(shift))


def _covariance_and_error(
    form: StateSpace, times: Tensor, *, of_form: bool
) -> tuple[Tensor, Tensor]:
    """K (m, m) of the kernel, and what inference takes for it less K: of the form, or dense."""
    table = Lags.between(times.diff(prepend=times[:1])).tables[0]
    parts, m = summands(form.kernel), len(times)
    K, error = times.new_zeros(m, m), times.new_zeros(m, m)
    for part in parts:
        own = form if len(parts) == 1 else state_space(part, tolerance=form.tolerance)
        exact = gram(part, times[:, None])
        K += exact
        if not own.is_exact:
            lags = np.maximum(table.lags, _APART)
            approximate, *_ = own.at().covariance(lags, of_form=of_form)
            error += torch.from_numpy(approximate.take(table.pairs)) - exact
    return K, error
