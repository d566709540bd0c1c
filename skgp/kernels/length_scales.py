"""How far an input must move for a kernel expression, whatever its parts, to notice."""

import torch
from sklearn.gaussian_process.kernels import Kernel
from torch import Tensor

from .gram import gram, gram_diag
from .spreads import robust_std

__all__ = ["length_scales"]

_ROWS = 16


def length_scales(kernel: Kernel, X: Tensor) -> Tensor:
    r"""Return how far each column must move for the kernel to notice, shape (d,).

    .. math:: \ell_j = \delta_j \big/ \sqrt{-2 \log \rho(x, x + \delta_j e_j)},

    averaged over some rows x, with :math:`\rho` the kernel's correlation and :math:`\delta_j` a
    tenth of the spread of column j: the length scale of an RBF kernel, and its likeness in any
    other expression. Columns that the kernel ignores, or that are constant, get 1e6 times the
    largest.

    Parameters
    ----------
    kernel : Kernel
        Without noise.
    X : Tensor of shape (n, d)
        Float64.

    Returns
    -------
    Tensor of shape (d,)
        In the units of the columns; not differentiable.
    """
    with torch.no_grad():
        rows = X[:: -(-len(X) // _ROWS)]
        steps = 0.1 * X.new_tensor(robust_std(X.cpu().numpy()))
        steps[steps == 0] = 1.0
        moved = rows[:, None] + steps.diag()  # (p, d, d): one column moved at a time
        cross = gram(kernel, rows[:, None], moved)[:, 0]  # (p, d)
        norms = (gram_diag(kernel, rows)[:, None] * gram_diag(kernel, moved)).sqrt()
        # Where the kernel vanishes, as a linear one at 0, there is no correlation to lose.
        correlation = torch.where(norms > 0, cross / norms, 1.0)
        drop = -2 * correlation.clamp(1e-12, 1.0).log().mean(dim=0)
        scale = steps / drop.clamp_min(1e-300).sqrt()
        ignored = drop < 1e-14
        if ignored.all():
            return torch.ones_like(scale)
        return torch.where(ignored, 1e6 * scale[~ignored].max(), scale)
