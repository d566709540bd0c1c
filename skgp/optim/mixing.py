r"""Fixed-point iterations, mixed from their last few places as Anderson did [1]_.

Of a map :math:`x \mapsto G(x)` with residuals :math:`r = G(x) - x` the last places say, to first
order, how r changes with x. The next place is the image of the one where it would be least,

.. math:: G(x_k) - \sum_i \gamma_i (\Delta x_i + \Delta r_i), \qquad
          \gamma = \arg\min_\gamma \Big\| r_k - \sum_i \gamma_i \Delta r_i \Big\|,
          \qquad \Delta x_i = x_k - x_i,

a secant method of several secants [2]_ that needs no more evaluations than the iteration itself.

References
----------
.. [1] Anderson (1965), Iterative procedures for nonlinear integral equations.
.. [2] Walker and Ni (2011), Anderson acceleration for fixed-point iterations.
"""

from collections import deque
from collections.abc import Callable

from torch import Tensor

from skgp.linalg.runtime import namespace
from skgp.optim.defaults import MIXED_PLACES, MIXING_RIDGE


class AndersonMixing:
    """The places that an iteration has come through."""

    def __init__(self) -> None:
        self._places = deque[Tensor](maxlen=MIXED_PLACES + 1)

    def __len__(self) -> int:
        return len(self._places)

    def restart(self) -> None:
        """Forget them: the iteration jumped, or its map changed."""
        self._places.clear()

    def __call__(self, x: Tensor, image: Tensor, whiten: Callable[[Tensor], Tensor]) -> Tensor:
        """Where to go from x (...) with that image (...), tensors or arrays.

        `whiten` maps changes of x (k, ...) to vectors (k, p), whose norms say what counts.
        """
        xp = namespace(x)
        residual = image - x
        self._places.append(xp.stack([x, residual]))
        if len(self._places) == 1:
            return image
        *past, last = self._places
        changes = last - xp.stack(past)  # (k, 2, ...) of x and of its residual
        whitened = whiten(xp.concatenate([changes[:, 1], residual[None]]))
        A, rest = whitened[:-1], whitened[-1]
        gram = A @ A.T
        gram = gram + xp.diag(MIXING_RIDGE * gram.diagonal() + xp.finfo(gram.dtype).tiny)
        share = xp.linalg.solve(gram, A @ rest)
        return image - (share @ changes.sum(1).reshape(len(share), -1)).reshape(x.shape)
