r"""The filter at the end of a series: forecasts in O(1), new observations in O(1) each.

Beyond the last time nothing but the state filtered there matters: mean and covariance, of each of S
columns (the targets and, of a series with terms, the scaled features), and the sums
:math:`\sum_n g_n v_n v_n^\top` of :mod:`.columns`, which give the coefficients.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from skgp.kernels.sde import Dynamics
from skgp.linalg.runtime import tile_rows


@dataclass(frozen=True)
class FilterEnd:
    """The filter after the last of some observations."""

    time: float
    mean: np.ndarray  # (d, S)
    cov: np.ndarray  # (d, d)
    gram: np.ndarray  # (S, S)

    def advanced(self, dynamics: Dynamics, times: Tensor, C: Tensor, weight: Tensor) -> "FilterEnd":
        """After more observations, not earlier (k,), of columns C (k, S) and weights (k,)."""
        gaps = times.diff(prepend=times.new_tensor([self.time]))
        F, Q = (each.movedim(-1, 0).numpy() for each in dynamics.transition(gaps.cpu()))
        H = dynamics.observation.numpy()
        m, P, gram = self.mean, self.cov, self.gram
        for F_j, Q_j, c, w in zip(F, Q, C.cpu().numpy(), weight.cpu().numpy(), strict=True):
            m, P = F_j @ m, F_j @ P @ F_j.T + Q_j
            k, v = P @ H, c - H @ m
            g = w / (1 + w * (H @ k))
            m, P = m + np.outer(k, g * v), P - g * np.outer(k, k)
            gram = gram + g * np.outer(v, v)
        return replace(self, time=float(times[-1]), mean=m, cov=P, gram=gram)

    def forecast(self, dynamics: Dynamics, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """States, (d, S, n) and (d, d, n), at times x (n,) not before the last observation.

        And the sums (S, S), which tell of the coefficients.
        """
        F, Q = dynamics.transition(x - self.time)
        mean, cov, gram = (torch.from_numpy(a).to(x) for a in (self.mean, self.cov, self.gram))
        moved = torch.einsum("ijn,jk,lkn->iln", F, cov, F)
        return torch.einsum("ijn,js->isn", F, mean), moved + Q, gram


def coefficients(gram: Tensor) -> tuple[Tensor, Tensor]:
    """Mean (..., q) and Cholesky factor (..., q, q) of the precision, from sums (..., S, S).

    The first column is of the targets.
    """
    A = gram[..., 1:, 1:] + torch.eye(gram.shape[-1] - 1, dtype=gram.dtype, device=gram.device)
    L = torch.linalg.cholesky(A)
    return torch.cholesky_solve(gram[..., 1:, :1], L)[..., 0], L


def forecast_moments(
    row: Tensor, mean: Tensor, cov: Tensor, gram: Tensor, Psi: Tensor
) -> tuple[Tensor, Tensor]:
    """Mean and variance (n,) of ``row s + Psi u``, from states as of `forecast`.

    `row` (d,), scaled features Psi (n, q); the sums are (S, S), or (n, S, S).
    """
    f = torch.einsum("d,dsn->ns", row, mean)
    u, L = coefficients(gram)
    away = Psi - f[:, 1:]
    root = torch.linalg.solve_triangular(L, away[..., None], upper=False)[..., 0]
    var = torch.einsum("i,ijn,j->n", row, cov, row) + root.square().sum(-1)
    return f[:, 0] + (away * u).sum(-1), var


def running_sums(v: Tensor, g: Tensor, counts: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Sums of ``g v v'`` over the first points, as many as the counts (k,) say, part by part.

    Yields places among the counts (p,), and the sums there (p, S, S); v is (n, S), g (n,).
    """
    S = v.shape[1]
    size, total = tile_rows(8 * 3 * S * S), v.new_zeros(S, S)
    for start in range(0, len(v) + 1, size):
        rows = slice(start, start + size)
        outer = (g[rows, None] * v[rows])[:, :, None] * v[rows, None]
        sums = total + torch.cat([torch.zeros_like(total)[None], outer.cumsum(0)])
        here = ((counts >= start) & (counts < start + size)).nonzero()[:, 0]
        for places in here.split(size):
            yield places, sums[counts[places] - start]
        total = sums[-1]
