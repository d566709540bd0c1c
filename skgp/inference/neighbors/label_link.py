r"""From kriged labels to probabilities.

With :math:`\mu` the kriged label and q its variance (:mod:`skgp.inference.neighbors.kriging`),

.. math:: p_k \propto g\Big(t_k + \frac{\nu_k + d\, \nu_k^3}{\sqrt{a q + b}}\Big), \qquad
          \nu = \mu - m,

g the normal distribution function for two classes and exp for more. If labels were the signs of a
latent function with Gaussian noise, a would be 1, b the noise and d 0. If so many noisy labels were
averaged that :math:`\mu = 2 p - 1`, then :math:`\Phi^{-1}(p) = \sqrt{\pi/2}\,(\mu + \tfrac{\pi}{12}
\mu^3 + \dots)`. Labels are neither, so t, a, b and d >= 0 maximise the likelihood of labels
left out one by one (:mod:`skgp.learning.local.label_kriging`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from skgp.linalg.tensor_state import TensorState

__all__ = ["LabelLink"]


@dataclass(frozen=True)
class LabelLink(TensorState):
    r"""Class probabilities of kriged labels.

    .. math:: p_k = (1 - \epsilon)\, \tilde p_k + \epsilon \pi_k,

    with :math:`\tilde p` of the module's equation. That :math:`\epsilon` of all rows belong to
    any class keeps probabilities off 0 and 1 where neighbours all agree: n rows can tell nothing
    of events that are rarer than 1 / n.

    Attributes
    ----------
    intercept : Tensor of shape (c,)
        t.
    log_scales : Tensor of shape (3,)
        Logs of a, b and d.
    frequency : Tensor of shape (max(c, 2),)
        :math:`\pi`, of the classes.
    lapse : float
        :math:`\epsilon`.
    """

    intercept: Tensor
    log_scales: Tensor
    frequency: Tensor
    lapse: float

    def log_probabilities(self, mean: Tensor, var: Tensor) -> Tensor:
        """Log-probabilities (n, C) from kriged labels less their prior means (n, c), and q (n,)."""
        slope, floor, bend = self.log_scales.exp().unbind()
        signal = mean + bend * mean**3
        z = self.intercept + signal / (slope * var + floor).sqrt()[:, None]
        if z.shape[1] == 1:
            log_p = torch.special.log_ndtr(torch.cat([-z, z], 1))
        else:
            log_p = z.log_softmax(1)
        lapsed = math.log(self.lapse) + self.frequency.log()
        return torch.logaddexp(math.log1p(-self.lapse) + log_p, lapsed)
