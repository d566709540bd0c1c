"""Where inducing points are: rows chosen by the prior variance that they leave."""

import torch
from torch import Tensor

from skgp.kernels.gram import gram, gram_diag
from skgp.linalg.cholesky import jittered_cholesky, pivoted_rows


def greedy_variance(kernel, X: Tensor, n_points: int, *, tol: float | None = None) -> Tensor:
    """Rows of X (n, d) chosen one by one where those before leave the greatest prior variance [1]_.

    The pivots of a Cholesky decomposition of K(X, X), of which only the columns chosen are
    evaluated where these are the lesser part; fewer where the rest has no variance left, beyond
    `tol` (eps) times the largest. O(n n_points^2) time. A NotPositiveDefiniteError where a variance
    left is below 0 by more than rounding: the kernel is no covariance.

    .. [1] Burt, Rasmussen and van der Wilk (2020), Convergence of sparse variational inference in
       Gaussian processes regression, section 4.3.
    """
    eps, prior = torch.finfo(X.dtype).eps, gram_diag(kernel, X)
    least = float(prior.max()) * (eps if tol is None else tol)
    if 2 * n_points > len(X):
        chosen, left = pivoted_rows(gram(kernel, X, X), n_points, least)
    else:
        chosen, left = _greedy_rows(kernel, X, n_points, least)
    if float(left.min()) < -(eps**0.5) * float(prior.max()):
        jittered_cholesky(gram(kernel, X[[*chosen, int(left.argmin())]]))  # says what is wrong
    return torch.tensor(chosen, device=X.device, dtype=torch.int64)


def _greedy_rows(kernel, X: Tensor, n_points: int, least: float) -> tuple[list[int], Tensor]:
    """The pivots of K(X, X) above `least`, column by column, and what is left of each variance."""
    left = gram_diag(kernel, X)
    rows = X.new_empty(n_points, len(X))  # of the Cholesky factor, transposed
    chosen = list[int]()
    for i in range(n_points):
        pivot = int(left.argmax())
        if left[pivot] <= least:
            break
        column = gram(kernel, X[pivot : pivot + 1], X)[0] - rows[:i, pivot] @ rows[:i]
        rows[i] = column / left[pivot].sqrt()
        left = left - rows[i].square()
        left[pivot] = 0.0
        chosen.append(pivot)
    return chosen, left
