r"""A series with terms: the process f beside features with Gaussian coefficients.

.. math:: \eta = f + \Psi u, \quad u \sim N(0, I), \qquad c = \eta + N(0, \Omega^{-1}),

with the scales of the coefficients in :math:`\Psi = \Phi S^{1/2}` (:mod:`.terms`). With V of
:mod:`.columns`, :math:`A = I + \Psi^\top V^{-1} \Psi`, :math:`\hat u = A^{-1} \Psi^\top V^{-1} c`
and :math:`e = c - \Psi \hat u`,

.. math:: \log N(c; 0, V + \Psi \Psi^\top) = -\tfrac12 \big( e^\top V^{-1} e + \hat u^\top \hat u
          + \log |A| + \log |2 \pi V| \big),

.. math:: \partial = \tfrac12 \alpha^\top \partial V \alpha
          - \tfrac12 \operatorname{tr} V^{-1} \partial V
          + \tfrac12 \sum_j a_j^\top \partial V a_j, \qquad
          \frac{\partial}{\partial \log s_k} = \hat u_k^2 - 1 + (A^{-1})_{kk},

:math:`\alpha = V^{-1} e`, and :math:`a_j` the columns of :math:`V^{-1} \Psi A^{-1/2}`. Wide scales
make it, but for a constant, the restricted likelihood of a diffuse prior [1]_. Wherever
:math:`k_* = \operatorname{cov}(f_*, f)`,

.. math:: E \eta_* = k_*^\top \alpha + \psi_*^\top \hat u, \quad
          V \eta_* = V[f_* \mid u] + w_*^\top A^{-1} w_*, \quad w_* = \psi_* - \Psi^\top V^{-1} k_*,

O(n (1 + q) d^2 + n q^2) after one run of the smoother. Rows of equal times stay apart, as their
features differ.

References
----------
.. [1] de Jong (1991), The diffuse Kalman filter.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from skgp.inference.markov.columns import ColumnStates, DenseColumns, SeriesColumns
from skgp.inference.markov.series import Series
from skgp.linalg import NotPositiveDefiniteError


@dataclass(frozen=True)
class RegressionSeries(Series):
    """Rows in the order of their times, equal ones apart, with features."""

    features: Tensor | None = None  # (n, q), before their scales

    def rows(self, rows: Tensor, breaks: Tensor | None = None) -> "RegressionSeries":
        """The series of some rows (k,), rising; `breaks` are positions among them."""
        columns = self.weight, self.log_exposure, self.features
        weight, exposure, features = (None if c is None else c[rows] for c in columns)
        return RegressionSeries(
            self.times[rows], None, self.y[rows], weight, breaks, exposure, features
        )


def make_regression_series(
    x: Tensor,
    y: Tensor,
    features: Tensor,
    weight: Tensor | None = None,
    log_exposure: Tensor | None = None,
) -> RegressionSeries:
    """Sort rows (n,) with features (n, q) by time."""
    x, order = x.double().sort(stable=True)
    weight, exposure = (None if c is None else c[order] for c in (weight, log_exposure))
    return RegressionSeries(x, None, y[order], weight, None, exposure, features[order])


class RegressionPosterior:
    """What sites at centres c (n,) with weights (n,) say of f and u; see the module.

    NotPositiveDefiniteError if negative weights leave no proper posterior.
    """

    def __init__(
        self,
        columns: SeriesColumns | DenseColumns,
        Psi: Tensor,
        centre: Tensor,
        weight: Tensor,
        sizes: list[int],
    ) -> None:
        self._columns, self._Psi, self._weight, self._sizes = columns, Psi, weight, sizes
        white, g = columns.whiten(torch.cat([centre[:, None], Psi], 1))
        self.gram = gram = white.T @ (g[:, None] * white)  # (1 + q, 1 + q)
        A = gram[1:, 1:] + torch.eye(Psi.shape[1], dtype=Psi.dtype, device=Psi.device)
        self.L, failed = torch.linalg.cholesky_ex(A)
        if int(failed) or not bool(self.L.isfinite().all()):
            raise NotPositiveDefiniteError(
                "The precision of the coefficients of the terms is not finite or indefinite."
            )
        self.u = torch.cholesky_solve(gram[1:, :1], self.L)[:, 0]  # (q,)
        residual = white[:, 0] - white[:, 1:] @ self.u
        quadratic = float(g @ residual.square() + self.u @ self.u)
        half_log_det = columns.half_log_det + float(self.L.diagonal().log().sum())
        self.log_normalizer = -0.5 * quadratic - half_log_det
        # Those of e, then of Psi A^-1/2.
        self._white = torch.cat([residual[:, None], self.by_root(white[:, 1:])], 1)

    def by_root(self, features: Tensor) -> Tensor:
        """Scaled features (n, q) times ``A^-1/2``: their squares sum to variances."""
        return torch.linalg.solve_triangular(self.L, features.T, upper=False).T

    @cached_property
    def states(self) -> ColumnStates | Tensor:
        """Of the columns e and ``Psi A^-1/2``."""
        return self._columns.smooth(self._white)

    @cached_property
    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean and variance (n,) of f + Psi u."""
        smoothed = self._columns.observe(self.states)  # type: ignore[arg-type]
        away = self.by_root(self._Psi) - smoothed[:, 1:]
        return smoothed[:, 0] + self.of_terms, self._columns.var + away.square().sum(1)

    @property
    def of_terms(self) -> Tensor:
        """Mean (n,) of Psi u."""
        return self._Psi @ self.u

    @property
    def mean(self) -> Tensor:
        """(n,)."""
        return self.moments[0]

    @property
    def var(self) -> Tensor:
        """(n,)."""
        return self.moments[1]

    @property
    def spread(self) -> float:
        """Sum of weight * var."""
        return float(self._weight @ self.var)

    def gradients(self) -> list[Tensor]:
        """Of the log normaliser in the dynamics' parameters, and in the log scales of each term.

        As many terms, of as many features, as `sizes` says.
        """
        pulled = self._columns.pull(self.states)  # type: ignore[arg-type]
        identity = torch.eye(len(self.L), dtype=self.L.dtype, device=self.L.device)
        slopes = self.u.square() - 1 + self.by_root(identity).square().sum(1)
        found = pulled - self._columns.half_trace
        return [found, *slopes.split(self._sizes)] if self._sizes else [found]
