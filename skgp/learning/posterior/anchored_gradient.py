r"""Stochastic gradients of the log posterior less what their noise has in common with an anchor.

What an estimate takes beside its linear systems (the kernel matrix, its derivatives, the
preconditioner) does not depend on the number of probes, and a product with the kernel matrix is
bound by memory up to some dozens of rows: for the mean of many estimates at one place, those of 64
probes each are several times as fast as those of four.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from skgp.learning.posterior.stochastic_gradient import GradientEstimate, Probes, StochasticGradient

__all__ = ["AnchoredGradient", "wide_estimates"]

Tell = Callable[[dict], None]

_WIDE = 64  # probes of an estimate where many are averaged


def wide_estimates(
    field: StochasticGradient,
    u: np.ndarray,
    n_probes: int,
    generator: torch.Generator,
    *,
    tol: float,
    warm: Tensor | None = None,
) -> Iterator[tuple[GradientEstimate, int]]:
    """Estimates at u (n_dims,) without coins, and how many probes each has: `n_probes` in all."""
    while n_probes > 0:
        size = min(_WIDE, n_probes)
        n_probes -= size
        probes = field.draw_probes(generator, size)
        at = field.estimate(u, probes, generator, warm=warm, stop=0.0, tol=tol)
        warm = at.warm
        yield at, size


class AnchoredGradient:
    r"""Control variate between u and an anchor :math:`u_0`, over a bank of probes.

    .. math:: G(u) = \hat g(u, e_k) - \hat g(u_0, e_k) + \bar g(u_0),
              \qquad k \text{ uniform on } 1 \dots B .

    The same probes at both points: what is left of their noise falls with the distance to the
    anchor. :math:`\bar g` is the mean over the probes of the bank and, where these are too few,
    over others. It errs by ``mean_covariance``, in the same way at all u; :meth:`refresh` draws
    another.

    Parameters
    ----------
    field : StochasticGradient
        With its pivots chosen; they must stay.
    anchor : ndarray of shape (n_dims,)
    n_entries : int, default=32
        B. Each entry holds ``field.n_probes`` probes, ``n + rank`` numbers each.
    generator : torch.Generator
    n_probes : int, default=0
        Of the mean, at least; those of the bank are among them.
    tol : float, default=1e-4
        Of the solutions at the anchor, which flip no coins.
    tell : callable, optional
        ``tell({"n_at_anchor": int})`` after each gradient there; what it raises ends the bank.

    Attributes
    ----------
    mean : ndarray of shape (n_dims,)
        Gradient at the anchor.
    mean_covariance : ndarray of shape (n_dims, n_dims)
        Of its error.
    n_gradients, n_iter : int
        Estimates, and products with the kernel matrix, spent at the anchor.
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
        n_probes: int = 0,
        tol: float = 1e-4,
        tell: Tell | None = None,
    ) -> None:
        self.field, self.anchor, self.n_entries, self._tol = field, anchor, n_entries, tol
        self._n_probes = n_probes
        self.refresh(generator, tell)

    def refresh(self, generator: torch.Generator, tell: Tell | None = None) -> None:
        """Draw a new bank; `n_entries` exact gradients at the anchor, and others for the mean."""
        self._bank: Sequence[Probes] = [
            self.field.draw_probes(generator) for _ in range(self.n_entries)
        ]
        self.warm: Tensor | None = None
        self.n_gradients, self.n_iter, self.converged = 0, 0, True
        gradients, sizes = [], []
        for at, size in self._at_anchor(generator):
            self.warm = at.warm
            gradients.append(at.gradient)
            sizes.append(size)
            self.n_gradients += 1
            self.n_iter += at.n_iter
            self.converged &= at.converged
            if tell is not None:
                tell({"n_at_anchor": len(gradients)})
        self._gradients = np.array(gradients[: self.n_entries])
        self.mean = np.average(gradients, axis=0, weights=sizes)
        noise = np.atleast_2d(np.cov(self._gradients, rowvar=False))
        self.mean_covariance = noise * self.field.n_probes / sum(sizes)

    def _at_anchor(self, generator: torch.Generator) -> Iterator[tuple[GradientEstimate, int]]:
        """Estimates at the anchor and their numbers of probes: those of the bank come first."""
        for probes in self._bank:
            at = self.field.estimate(
                self.anchor, probes, generator, warm=self.warm, stop=0.0, tol=self._tol
            )
            yield at, self.field.n_probes
        others = self._n_probes - self.n_entries * self.field.n_probes
        yield from wide_estimates(
            self.field, self.anchor, others, generator, tol=self._tol, warm=self.warm
        )

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
