"""Stochastic gradients of the log posterior less what their noise has in common with an anchor."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from skgp.models.bayesian.stochastic_gradient import GradientEstimate, Probes, StochasticGradient

__all__ = ["AnchoredGradient"]

Tell = Callable[[dict], None]


class AnchoredGradient:
    r"""Control variate between u and an anchor :math:`u_0`, over a bank of probes.

    .. math:: G(u) = \hat g(u, e_k) - \hat g(u_0, e_k) + \frac1B \sum_j \hat g(u_0, e_j),
              \qquad k \text{ uniform on } 1 \dots B .

    The same probes at both points: what is left of their noise falls with the distance to the
    anchor. Given the bank, the expectation is the mean gradient over it, which errs by
    ``noise_covariance / B``, in the same way at all u; :meth:`refresh` draws another.

    Parameters
    ----------
    field : StochasticGradient
        With its pivots chosen; they must stay.
    anchor : ndarray of shape (n_dims,)
    n_entries : int, default=32
        B. Each entry holds ``field.n_probes`` probes, ``n + rank`` numbers each.
    generator : torch.Generator
    tol : float, default=1e-4
        Of the solutions at the anchor, which flip no coins.
    tell : callable, optional
        ``tell({"n_entries": int})`` after each of them; what it raises ends the bank.

    Attributes
    ----------
    mean : ndarray of shape (n_dims,)
        Gradient at the anchor.
    n_iter : int
        Products spent on the bank.
    converged : bool
        Whether all solutions at the anchor met `tol`.
    """

    def __init__(
        self,
        field: StochasticGradient,
        anchor: np.ndarray,
        generator: torch.Generator,
        *,
        n_entries: int = 32,
        tol: float = 1e-4,
        tell: Tell | None = None,
    ) -> None:
        self.field, self.anchor, self.n_entries, self._tol = field, anchor, n_entries, tol
        self.refresh(generator, tell)

    def refresh(self, generator: torch.Generator, tell: Tell | None = None) -> None:
        """Draw a new bank; `n_entries` exact gradients at the anchor."""
        self._bank: Sequence[Probes] = [
            self.field.draw_probes(generator) for _ in range(self.n_entries)
        ]
        warm, gradients, self.n_iter, self.converged = None, [], 0, True
        for probes in self._bank:
            at = self.field.estimate(
                self.anchor, probes, generator, warm=warm, stop=0.0, tol=self._tol
            )
            warm = at.warm
            gradients.append(at.gradient)
            self.n_iter += at.n_iter
            self.converged &= at.converged
            if tell is not None:
                tell({"n_entries": len(gradients)})
        self.warm = warm
        self._gradients = np.array(gradients)
        self.mean = self._gradients.mean(0)

    @property
    def noise_covariance(self) -> np.ndarray:
        """Covariance (n_dims, n_dims) of the estimates at the anchor over the bank."""
        return np.atleast_2d(np.cov(self._gradients, rowvar=False))

    def estimate(
        self,
        u: np.ndarray,
        generator: torch.Generator,
        *,
        entry: int | None = None,
        warm: Tensor | None = None,
    ) -> GradientEstimate:
        """Gradient at u (n_dims,); `entry` of the bank is drawn where it is not given."""
        if entry is None:
            entry = int(torch.randint(self.n_entries, (), generator=generator))
        start = self.warm if warm is None else warm
        at = self.field.estimate(u, self._bank[entry], generator, warm=start)
        gradient = at.gradient - self._gradients[entry] + self.mean
        return GradientEstimate(
            gradient, at.n_iter, at.residual, at.truncated, at.converged, at.warm
        )
