"""Inducing points chosen among the rows."""

import torch
from torch import Tensor

from skgp.kernels.gram import gram, gram_diag

__all__ = ["greedy_variance"]


def greedy_variance(kernel, X: Tensor, n_points: int) -> Tensor:
    """Rows of X (n, d) chosen one by one where those before leave the greatest prior variance [1]_.

    The pivots of a Cholesky decomposition of K(X, X), of which only the columns chosen are
    evaluated; fewer where the rest has no variance left. O(n n_points^2) time.

    .. [1] Burt, Rasmussen and van der Wilk (2020), Convergence of sparse variational inference in
       Gaussian processes regression, section 4.3.
    """
    left = gram_diag(kernel, X)
    least = torch.finfo(X.dtype).eps * left.max()
    rows = X.new_empty(n_points, len(X))  # of the Cholesky factor, transposed
    chosen: list[int] = []
    for i in range(n_points):
        pivot = int(left.argmax())
        if left[pivot] <= least:
            break
        column = gram(kernel, X[pivot : pivot + 1], X)[0] - rows[:i, pivot] @ rows[:i]
        rows[i] = column / left[pivot].sqrt()
        left = (left - rows[i].square()).clamp_min(0.0)
        left[pivot] = 0.0
        chosen.append(pivot)
    return torch.tensor(chosen, device=X.device)
