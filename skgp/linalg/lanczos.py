r"""Stochastic Lanczos quadrature: log-determinants from the coefficients of conjugate gradients.

Conjugate gradients of A, preconditioned by P, from a right-hand side z ~ N(0, P) build the Lanczos
matrix T of :math:`P^{-1/2} A P^{-1/2}` begun at :math:`P^{-1/2} z`: of steps :math:`\alpha_j` and
conjugations :math:`\beta_j` it has the diagonal :math:`1 / \alpha_j + \beta_{j-1} / \alpha_{j-1}`
and beside it :math:`\sqrt{\beta_j} / \alpha_j`, and

.. math:: E\big[z^T P^{-1} z \; e_1^T \log(T)\, e_1\big] \approx \log |P^{-1} A|

up to the quadrature's error, which falls geometrically in the iterations [1]_.

References
----------
.. [1] Ubaru, Chen and Saad (2017), Fast estimation of tr(f(A)) via stochastic Lanczos quadrature.
"""

from __future__ import annotations

import torch
from torch import Tensor


def log_quadrature(coefficients: list[tuple[Tensor, Tensor]]) -> Tensor:
    """e_1' log(T) e_1 (k,) of the steps and conjugations (1, k) of each iteration."""
    steps, ratios = (torch.cat(each).T for each in zip(*coefficients, strict=True))  # (k, J)
    active = steps > 0
    inverse = torch.where(active, 1 / torch.where(active, steps, 1.0), 0.0)
    diagonal = torch.where(active, inverse, 1.0)
    diagonal[:, 1:] += torch.where(active[:, 1:], ratios[:, :-1] * inverse[:, :-1], 0.0)
    beside = torch.where(active[:, 1:], ratios[:, :-1].sqrt() * inverse[:, :-1], 0.0)
    T = torch.diag_embed(diagonal) + torch.diag_embed(beside, 1) + torch.diag_embed(beside, -1)
    values, vectors = torch.linalg.eigh(T)
    return (vectors[:, 0].square() * values.clamp_min(torch.finfo(T.dtype).tiny).log()).sum(1)
