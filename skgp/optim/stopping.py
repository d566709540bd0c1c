"""When to stop an iterative training: a noisy loss or a validation score that no longer improves.

A rule is a callable ``rule(iteration, loss) -> bool``; True stops. Rules keep their own state: make
new ones for each training.
"""

import math
from collections.abc import Callable


class Plateau:
    r"""Counts how long a value has not fallen noticeably.

    The value counts as fallen when it is below the best so far by more than ``tol`` times the
    whole fall since the first value, :math:`v < b - \mathrm{tol}\,(v_0 - b)`. The rule is the same
    for a loss in any units, whatever constant it leaves out.

    ``patience`` updates without a fall are too many.

    Examples
    --------
    >>> plateau = Plateau(tol=0.01, patience=2)
    >>> [plateau.update(value) for value in [10.0, 5.0, 4.99, 4.98]]
    [False, False, False, True]
    """

    def __init__(self, *, tol: float, patience: int) -> None:
        self.tol = tol
        self.patience = patience
        self.first: float | None = None
        self.best = math.inf
        self.n_without_fall = 0

    def update(self, value: float) -> bool:
        """Take the next value; return True when ``patience`` is exhausted."""
        if self.first is None:
            self.first = self.best = value
            return False
        if value < self.best - self.tol * (self.first - self.best):
            self.best = value
            self.n_without_fall = 0
        else:
            self.n_without_fall += 1
        return self.n_without_fall >= self.patience


def settled(losses: list[float]) -> float:
    """Mean of the last tenth of an iteration's noisy losses; 0 of none."""
    last = losses[-(-len(losses) * 9 // 10) :] or losses
    return sum(last) / max(len(last), 1)


class LossPlateau:
    r"""Stop when the smoothed loss no longer falls.

    The loss of a minibatch is noisy, so this watches its exponential moving average, corrected
    for its start at 0 as in Adam:
    :math:`a_t = s\,a_{t-1} + (1 - s)\,\ell_t`, smoothed loss :math:`a_t / (1 - s^t)`. The first
    1 / (1 - s) averages are as noisy as the losses themselves and are passed over: one lucky
    minibatch at the start would be hard to beat.

    `patience` counts iterations; the average spans about 1 / (1 - s) of them.
    """

    def __init__(self, *, tol: float = 1e-3, patience: int = 50, smoothing: float = 0.95) -> None:
        self.plateau = Plateau(tol=tol, patience=patience)
        self.smoothing = smoothing
        self.average = 0.0
        self.n_updates = 0

    def __call__(self, iteration: int, loss: float) -> bool:
        """Take the loss of an iteration; return whether to stop."""
        self.n_updates += 1
        self.average = self.smoothing * self.average + (1 - self.smoothing) * loss
        if self.n_updates * (1 - self.smoothing) < 1:
            return False
        return self.plateau.update(self.average / (1 - self.smoothing**self.n_updates))


class ValidationPlateau:
    """Stop when a score on held-out rows no longer rises.

    ``score()`` evaluates the current parameters every so many iterations; greater is better.
    `patience` counts evaluations, and `scores` holds (iteration, score) of each.
    """

    def __init__(
        self, score: Callable[[], float], *, every: int = 10, patience: int = 5, tol: float = 1e-3
    ) -> None:
        self.score = score
        self.every = every
        self.plateau = Plateau(tol=tol, patience=patience)
        self.scores: list[tuple[int, float]] = []

    def __call__(self, iteration: int, loss: float) -> bool:
        """Evaluate the score when it is time; return whether to stop."""
        if (iteration + 1) % self.every:
            return False
        score = float(self.score())
        self.scores.append((iteration, score))
        return self.plateau.update(-score)


class Stopped(Exception):
    """Raised by :meth:`StopRecorder.check`: the callback returned True."""


class StopRecorder:
    """A callback that counts its calls and remembers that it was told to stop.

    It calls ``callback(n_calls, info)``, whatever iteration the solver reports: several solvers in
    a row make one sequence. True, once, is the answer to every later call. `n_longest` is the
    number of iterations of the longest of the parts told of by :meth:`end_part`.
    """

    def __init__(self, callback: Callable[[int, dict], bool | None] | None) -> None:
        self.callback = callback
        self.stopped = False
        self.n_calls = 0
        self.n_longest = 0

    def __call__(self, iteration: int, info: dict) -> bool:
        """Tell the callback; whether it has ever returned True."""
        self.n_calls += 1
        if self.stopped or self.callback is None:  # told to stop, it is not asked again
            return self.stopped
        if self.callback(self.n_calls, info):
            self.stopped = True
        return self.stopped

    def end_part(self, n_iter: int) -> None:
        """Tell that one of several solvers in a row took `n_iter` iterations."""
        self.n_longest = max(self.n_longest, n_iter)

    def check(self, info: dict) -> None:
        """As a call, but raises :class:`Stopped` where that returns True."""
        if self(0, info):
            raise Stopped


class LossRecorder(StopRecorder):
    """The same of searches that tell losses: minus these are its ``history``."""

    def __init__(self, callback: Callable[[int, dict], bool | None] | None) -> None:
        super().__init__(callback)
        self.history: list[float] = []

    def tell(self, loss: float) -> bool:
        """Keep a loss and tell the callback, ``{"loss": loss}``; whether to stop."""
        self.history.append(-float(loss))
        return self(len(self.history), {"loss": float(loss)})
