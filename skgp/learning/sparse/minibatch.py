r"""Minimising the objectives by steps of Adam [1]_ on minibatches of the rows.

A step estimates the objective from a set B of b of the n rows, drawn without replacement,

.. math:: \hat{\mathcal L} = \frac nb \sum_{i \in B} w_i\, \ell_i + \beta\, \mathrm{KL}(q \,\|\, p),

whose mean over all such sets is the objective itself. It costs :math:`O(b M^2 + M^3)`, whatever n.

The steps are taken in the coordinates of :mod:`skgp.learning.sparse.coordinates`, where each kind
of parameter has a natural unit and so a learning rate of its own that suits most data. The rate
stays while it pays, then falls linearly to 0 over as many steps again, which averages the noise
away.

References
----------
.. [1] Kingma and Ba (2015), Adam: a method for stochastic optimization.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from skgp.data import Data
from skgp.inference.sparse.sparse import SparseState
from skgp.learning.sparse.coordinates import Coordinates
from skgp.learning.sparse.holdout import BestState
from skgp.learning.sparse.objective import Objective
from skgp.learning.sparse.training import Training, posterior_loss
from skgp.optim import Adam, LossPlateau, TrainingLoop, sample_without_replacement
from skgp.optim.stopping import StopRecorder

__all__ = ["BATCH_PER_INDUCING", "LEARNING_RATE", "MAX_ITER", "fit_minibatch"]

Callback = Callable[[int, dict], bool | None]

#: Of hyper-parameters, which are logarithms.
LEARNING_RATE = 0.03
MAX_ITER = 200
#: Rows of a minibatch for each inducing point: with fewer, the O(M^3) part of a step outweighs
#: the rows' part.
BATCH_PER_INDUCING = 4
_LEAST_BATCH = 1000
# Rates relative to `LEARNING_RATE`. The units are standard deviations of the starting posterior
# (alpha), length scales (Z), relative changes (the others).
_SHARES = {"alpha": 5.0, "triangle": 2.0, "theta": 1.0, "likelihood": 1.0, "Z": 1 / 3}
_MOMENTS = (0.9, 0.99)
_PATIENCE, _SMOOTHING = 30, 0.9
_WATCH_EVERY = 4  # steps, which are shorter and noisier than the iterations of a full search


def fit_minibatch(
    state: SparseState,
    data: Data,
    objective: Objective,
    *,
    generator: torch.Generator,
    batch_size: int | None = None,
    learning_rate: float | None = None,
    max_iter: int = MAX_ITER,
    tol: float = 1e-6,
    watch: BestState | None = None,
    callback: Callback | None = None,
) -> Training:
    r"""Learn q(u), and hyper-parameters with it, from minibatches or by stochastic gradients.

    Parameters
    ----------
    state : SparseState
        Where the search begins. Its posterior is also the unit of the steps: it should be near
        the optimum of its hyper-parameters.
    data : Data
    objective : Objective
        "log_loss" or "elbo", with any gradient.
    generator : torch.Generator
        Draws the minibatches, and the samples of stochastic gradients.
    batch_size : int, optional
        b, at most n. By default 4 M, at least 1000.
    learning_rate : float, optional
        Of the logarithms of hyper-parameters; the other rates are multiples of it. Default: .03.
    max_iter : int, default=200
        Steps.
    tol : float, default=1e-6
        Fall of the smoothed objective, relative to its whole fall so far, that counts as one. After
        30 steps without, the rate begins to fall; by default noise alone decides.
    watch : BestState, optional
        Hears of every fourth step, and scores the last state. Where it would stop, the rate begins
        to fall: the best state often comes then.
    callback : callable, optional
        ``callback(iteration, {"loss": float})``; True stops at once.

    Returns
    -------
    Training
        Its loss is estimated from the minibatches of the last tenth of the steps; it has converged
        if the rate began to fall before half of `max_iter`.

    Raises
    ------
    ValueError
        If `batch_size`, `learning_rate` or `max_iter` is not positive.
    NonFiniteLossError
        If the objective or its gradient is not finite.

    Notes
    -----
    :math:`O(c\,(b M^2 + M^3))` a step, and memory of O(c b M).

    Examples
    --------
    >>> import torch
    >>> from sklearn.gaussian_process.kernels import RBF
    >>> from skgp.likelihoods import Gaussian
    >>> X = torch.linspace(-1, 1, 300, dtype=torch.float64)[:, None]
    >>> family = Gaussian(0.1, bounds=(1e-3, 1.0))
    >>> state = SparseState.prior(RBF(0.5), family.initial(X), X[::30], X.new_zeros(1))
    >>> found = fit_minibatch(
    ...     state, Data(X, X.sin()), Objective(family), batch_size=50, max_iter=20,
    ...     generator=torch.Generator().manual_seed(0),
    ... )
    >>> len(found.history), found.history[-1] < found.history[0]
    (20, True)
    """
    n, total = len(data), data.total
    size = min(n, default_batch_size(len(state.Z)) if batch_size is None else batch_size)
    rate = LEARNING_RATE if learning_rate is None else learning_rate
    _check_positive(batch_size=size, learning_rate=rate, max_iter=max_iter)
    around = Coordinates(state, objective, data.X)
    leaves = {name: value.clone().requires_grad_() for name, value in around.start().items()}
    recorder = StopRecorder(callback)

    def loss(iteration: int) -> Tensor:
        batch = data
        if size < n:
            batch = data.take(sample_without_replacement(n, size, generator=generator))
        values, scale = around.values(leaves), n / size
        estimate = posterior_loss(state, batch, objective, values, scale=scale, generator=generator)
        return estimate / total

    def here() -> SparseState:
        return around.to_state({name: leaf.detach().clone() for name, leaf in leaves.items()})

    loop = _BoundedAdam(leaves, loss, around.bounds(), callback=recorder)
    converged = _flat_then_falling(loop, rate, max_iter, tol, _watching(watch, here), recorder)
    found = here()
    if watch is not None:
        watch.score(found)
    history = loop.history["loss"]
    last = history[-(-len(history) * 9 // 10) :] or history
    return Training(found, total * sum(last) / len(last), history, converged, recorder.stopped)


def default_batch_size(n_inducing: int) -> int:
    """Rows of a minibatch that make the most of the time, for M inducing points."""
    return max(_LEAST_BATCH, BATCH_PER_INDUCING * n_inducing)


class _BoundedAdam(TrainingLoop):
    """Steps of Adam, at a rate of its own for each kind of coordinate and within bounds."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        compute_loss: Callable[[int], Tensor],
        bounds: Mapping[str, tuple[Tensor, Tensor]],
        **options,
    ) -> None:
        groups = [{"params": [leaf], "share": _SHARES[name]} for name, leaf in parameters.items()]
        optimizer = Adam(groups, betas=_MOMENTS)
        super().__init__(parameters, compute_loss, optimizer, **options)
        self.bounds = bounds
        self.project()

    def set_learning_rate(self, iteration: int) -> None:
        super().set_learning_rate(iteration)
        for group in self.optimizer.param_groups:
            group["lr"] *= group["share"]

    def train_step(self, iteration: int) -> float:
        loss = super().train_step(iteration)
        self.project()
        return loss

    @torch.no_grad()
    def project(self) -> None:
        """Move parameters back inside their bounds."""
        for name, (low, high) in self.bounds.items():
            self.parameters[name].clamp_(low, high)


def _flat_then_falling(
    loop: TrainingLoop,
    rate: float,
    max_iter: int,
    tol: float,
    watching: Callable[[int, float], bool],
    recorder: StopRecorder,
) -> bool:
    """Run to the end; return whether a rule, and not `max_iter`, ended the first phase."""
    plateau = LossPlateau(tol=tol, patience=_PATIENCE, smoothing=_SMOOTHING)
    loop.schedule, loop.stopping = lambda iteration: rate, (plateau, watching)
    loop.run(max_iter - max_iter // 2)
    if recorder.stopped:
        return False
    converged, n_flat = loop.stopped_early, loop.n_iter
    n_falling = min(n_flat, max_iter - n_flat)
    loop.schedule = lambda iteration: rate * (1 - (iteration - n_flat) / n_falling)
    loop.stopping = (lambda iteration, loss: watching(iteration, loss) and False,)
    loop.run(n_falling)
    return converged


def _watching(
    watch: BestState | None, here: Callable[[], SparseState]
) -> Callable[[int, float], bool]:
    """A stopping rule that lets rows held out be scored now and then."""
    return lambda iteration, loss: (
        watch is not None and iteration % _WATCH_EVERY == 0 and watch(here)
    )


def _check_positive(**options: float) -> None:
    for name, value in options.items():
        if not value > 0:
            raise ValueError(f"{name} must be positive, got {value!r}; leave it at its default.")
