r"""Relevance vectors by stochastic gradients on the logarithms of their precisions.

The route of appendix I.3 of Evans and Nair, "Quadruply Stochastic Gaussian Processes" (2020): the
bound of :math:`q(w) = N(\mu, \operatorname{diag}(c^2))` is raised in :math:`\mu` and
:math:`\log s` at once, from minibatches of rows and, if asked, of basis functions, with the control
variate of Proposition 3. As c takes its optimum (Proposition 1), the gradients are those of
`estimators.quadratic_loss` and

.. math:: \frac{\partial(-\text{ELBO})}{\partial \log s_j} = \tfrac12 (s_j (\mu_j^2 + c_j^2) - 1),
          \qquad c_j^2 = \frac{1}{\beta\, \phi_j^T \phi_j + s_j}.

Why it prunes: with s and c at their optima a weight pays
:math:`\tfrac12 \min_s s \mu_j^2 + \log(1 + \beta \phi_j^T\phi_j / s)`, which near 0 is proportional
to :math:`|\mu_j|` (as the lasso) and far from it logarithmic. The optimum of a weight that this
holds at 0 is :math:`s_j = \infty`, approached by steps of bounded length in log s.

Deviations from the paper:

- A function leaves when the data determine less than a hundredth of its weight,
  :math:`1 - s_j c_j^2 < .01`, which has no units; the paper's :math:`s_j < 10^4` has.
- Means move along block Newton directions out of the control variate's features: the prior of a
  function on its way out is stiffer than the data by orders of magnitude, and a step of AdaGrad
  that suits the one destroys the other.
- In place of dense columns of C (a chevron), which belong to functions numbered before it is known
  which will remain: `polish` maximises the exact evidence of the survivors, with their full
  covariance, over all rows.

Measured (one core, sinc with noise 0.1, RBF(2), seed 0; time, vectors, RMSE to the true function,
log evidence):

===========================  ===========================  =====================================
route                        n = 500, m = 500             n = 1e5, m = 2000 candidates
===========================  ===========================  =====================================
sequential                   .04 s, 8, .015, 426.6        20 s, 10, .0014, 88516
stochastic, polished         14 s, 7, .024, 418.2         110 s, 10, .0020, 88507
stochastic alone             14 s, 7, .024                110 s, 144, .0029
===========================  ===========================  =====================================

The sequential algorithm is better wherever the Gram matrix of the candidates fits in memory, for
any n. What remains for this one is a cost and a memory that do not depend on n: 90 MB above the
start at n = 1e5, polish not counted.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from skgp.inference import defaults
from skgp.inference.relevance.evidence import RelevanceFit, fit_relevance
from skgp.inference.stochastic.basis import (
    Array,
    IndexSet,
    InducingBasis,
    KernelColumns,
    SparseAdam,
    everything,
    take_rows,
)
from skgp.inference.stochastic.engine import SGDOptions, StochasticSolver
from skgp.inference.stochastic.estimators import (
    LowRankControlVariate,
    quadratic_loss,
    sample_design,
    support_features,
)
from skgp.inference.weights.gram import optimal_std
from skgp.inference.weights.posterior import LinearWeightsPosterior
from skgp.linalg.runtime import Callback
from skgp.optim import host_generator, sample_without_replacement


def fit_relevance_stochastic(
    kernel: Any,
    X: Array,  # (n, d); a memory map is read by rows, as they are sampled
    y: Array,  # (n,), centred
    options: SGDOptions,
    *,
    noise_variance: float | None = None,  # to start from, or to keep; half the mean square of y
    learn_noise: bool = True,
    candidates: Tensor | None = None,  # rows that may become relevance vectors; all by default
    n_support: int = 500,  # rows of the control variate, which give the Newton directions
    generator: torch.Generator,
    callback: Callback | None = None,
) -> RelevanceFit:
    r"""Find relevance vectors by minibatches; the covariance is mean-field (see `polish`).

    Less functions a sample than all that are left add noise that the correlated functions of smooth
    kernels amplify, the more the larger n: lower the learning rate with it, the part of a Newton
    step of the mean, which falls exponentially to a tenth. It is halved, and the mean begun anew,
    whenever the mean fits worse than 0 does. The history, and the loss that the callback is told,
    are the mean squared errors on the support rows; the log evidence is NaN.

    An iteration is O((n_batch + n_support) m d + n_support^2 m) for the m functions left; memory
    O((n_batch + n_support) m).
    """
    rows = torch.arange(len(X)) if candidates is None else candidates
    generator = host_generator(generator)
    device = X.device if isinstance(X, Tensor) else torch.device("cpu")
    state = RelevanceState.start(kernel, X, y, rows, noise_variance, n_support, generator, device)
    solver = RelevanceSolver(X, y, state.basis, state, options, generator)
    solver.learn_noise = learn_noise
    watch = None if callback is None else lambda iteration, info: callback(iteration + 1, info)
    return state.result(solver.run(watch)["loss"])


def polish(
    rough: RelevanceFit, kernel: Any, X: Array, y: Array, *, learn_noise: bool
) -> RelevanceFit:
    """Maximise the exact evidence of the vectors found, over all rows: O(n r^2) for r of them.

    `history` remains that of the gradients; `converged` tells whether no step is left.
    """
    if not len(rough.indices):
        return rough
    start: dict[str, Any] = {"noise_variance": rough.noise_variance, "learn_noise": learn_noise}
    fit = fit_relevance(kernel, X, y, candidates=rough.indices, **start)
    return replace(fit, n_iter=rough.n_iter, history=rough.history)


class SparseBasis(InducingBasis):
    r""":math:`\Phi = K(X, Z)` with S = diag(s), in place of S = K(Z, Z); keeps log s (m,)."""

    diagonal_precision = True
    Z: Tensor

    def __init__(self, kernel: Any, Z: Tensor, log_precision: Tensor) -> None:
        super().__init__(kernel, Z, device=Z.device)
        self.log_precision = log_precision

    def precision_diag(self, indices: Tensor, theta: Tensor | None = None) -> Tensor:
        """Return s."""
        return self.log_precision[indices].exp()


@dataclass
class RelevanceState:
    """The functions that are left, and where their parameters are.

    q(w) is N(mu, diag(c^2)) over them; c follows from Proposition 1 and is never stored.
    """

    basis: SparseBasis
    rows: Tensor  # (m,), of X that the functions are centred on
    mean: Tensor  # (m, 1)
    noise_variance: float | Tensor
    n: int  # rows of the data
    X_support: Tensor  # (n_support, d)
    y_support: Tensor  # (n_support,)
    optimizer: SparseAdam  # of log s
    control: LowRankControlVariate  # its sums are the mean on the support rows
    mean_squares: Tensor  # (m,), of the functions on the support rows
    rate_factor: float | Tensor = 1.0  # what divergence left of the learning rate
    n_iter: int = 0

    @classmethod
    def start(
        cls,
        kernel: Any,
        X: Array,
        y: Array,
        rows: Tensor,
        noise_variance: float | None,
        n_support: int,
        generator: torch.Generator,
        device: torch.device | str = "cpu",
    ) -> "RelevanceState":
        """Start from mu = 0 and hardly any prior, with support rows drawn from the data."""
        n = len(X)
        support = sample_without_replacement(n, min(n_support, n), generator=generator)
        X_support, y_support = (take_rows(A, support, torch.float64, device) for A in (X, y))
        scale = float(y_support.square().mean()) or 1.0
        Z = take_rows(X, rows, torch.float64, device)
        # A prior variance of the size of y for every weight: hardly any prior at all.
        basis = SparseBasis(kernel, Z, Z.new_full((len(rows),), -math.log(scale)))
        mean = Z.new_zeros(len(rows), 1)
        state = cls(
            basis=basis,
            rows=rows.to(device),
            mean=mean,
            noise_variance=float(noise_variance or defaults.SGD_START_NOISE * scale),
            n=n,
            X_support=X_support,
            y_support=y_support,
            optimizer=SparseAdam(mean),
            control=LowRankControlVariate(support_features(basis, X_support), mean[:0]),
            mean_squares=mean[:, 0],
        )
        state.set_control()
        return state

    @property
    def std(self) -> Tensor:
        """The c of all functions, shape (m,), by Proposition 1."""
        data = self.n * self.mean_squares / self.noise_variance
        return optimal_std(data + self.basis.log_precision.exp())

    def determined(self) -> Tensor:
        """Part of each weight that the data determine, ``1 - s c^2``, shape (m,)."""
        data = self.n * self.mean_squares / self.noise_variance
        return data / (data + self.basis.log_precision.exp())

    def prune(self, threshold: float) -> None:
        """Drop the functions whose weights the data determine by less than `threshold`."""
        keep = self.determined() > threshold
        if bool(keep.all()):
            return
        self.rows, self.mean = self.rows[keep], self.mean[keep]
        self.optimizer.state = {key: A[keep] for key, A in self.optimizer.state.items()}
        basis = self.basis
        self.basis = SparseBasis(basis.kernel, basis.Z[keep], basis.log_precision[keep])
        self.set_control()

    def set_control(self) -> None:
        """Sum the support rows anew, O(n_support m)."""
        factor = support_features(self.basis, self.X_support)
        B = factor(everything(self.basis))
        self.control = LowRankControlVariate(factor, B @ self.mean)
        self.mean_squares = B.square().mean(0)

    def support_error(self) -> Tensor:
        """Mean squared error of the mean on the support rows, shape ()."""
        return (self.y_support - self.control.sums[:, 0]).square().mean()

    def result(self, history: list[float]) -> RelevanceFit:
        """Wrap the mean-field posterior."""
        posterior = LinearWeightsPosterior(
            KernelColumns(self.basis.kernel, self.basis.Z),
            self.mean[:, 0],
            self.mean.new_zeros(len(self.rows), 0),
            self.std,
        )
        return RelevanceFit(
            self.rows,
            posterior,
            float(self.noise_variance),
            self.basis.log_precision.exp(),
            log_evidence=float("nan"),
            n_iter=len(history),
            converged=False,
            history=history,
        )


class RelevanceSolver(StochasticSolver):
    """Moves the mean and log s of the functions sampled, then the noise variance; prunes."""

    default_decay = defaults.SGD_DECAY
    learn_noise = True
    precision_rate = defaults.PRECISION_RATE

    @property
    def n_samples(self) -> int:  # type: ignore[override]
        """None where every function is at hand."""
        return 2 if self.options.basis_batch_size < len(self.state.rows) else 0

    def n_ahead(self, n_numbers: int) -> int:
        """Until the next pruning, at most."""
        left = defaults.PRUNE_EVERY - self.n_done % defaults.PRUNE_EVERY
        return min(left, super().n_ahead(n_numbers))

    def iterate(self, iteration: int) -> dict[str, Tensor]:
        """One iteration; "loss" is the mean squared error on the support rows, after it."""
        state, self.n_done = self.state, iteration
        if len(state.rows):
            self.step(iteration)
        loss = state.support_error()
        if len(state.rows) and self.learn_noise:
            self.move_noise(loss)
        if (iteration + 1) % defaults.PRUNE_EVERY == 0:
            state.prune(defaults.PRUNE)
        numbers = {"noise_variance": state.noise_variance, "n_vectors": len(state.rows)}
        return {"loss": loss, **{name: loss.new_zeros(()) + x for name, x in numbers.items()}}

    def step(self, iteration: int) -> None:
        """Theorem 1 with its control variate, and the moves of both samples."""
        state, noise = self.state, self.state.noise_variance
        self.basis = state.basis  # of the functions that are left
        self.batch = self.draw_rows()
        # A sample of every function is exact: the second would repeat the first.
        self.whole = None if self.n_samples else everything(state.basis)
        i, j = (self.whole or self.draw_sample() for _ in range(2))
        X, y = self.batch
        design = sample_design(state.basis, X, i, j, n=self.n)
        V_i, V_j = state.mean[i.indices], state.mean[j.indices]
        B_i = state.control.columns(i)
        B_j = B_i if j is i else state.control.columns(j)
        scale = self.n / (len(state.X_support) * noise)
        estimate = quadratic_loss(design, V_i, V_j, noise, y=y)
        estimate = estimate + state.control.estimate(i, j, B_i, B_j, V_i, V_j, scale)
        rate = state.rate_factor * self.rate(self.options.learning_rate, iteration)
        self.move_both(i, estimate.grad_i / i.weight, B_i, rate)
        if j is not i:
            self.move_both(j, estimate.grad_j / j.weight, B_j, rate)
        diverged = ~(state.support_error() <= 2 * state.y_support.square().mean())
        state.rate_factor = torch.where(diverged, 0.5, 1.0) * state.rate_factor
        state.mean.masked_fill_(diverged, 0)
        state.control.sums.masked_fill_(diverged, 0)

    def move_both(self, sample: IndexSet, gradient: Tensor, B: Tensor, rate: float) -> None:
        """A part of a Newton step of the mean, then a step of Adam on log s."""
        state, indices = self.state, sample.indices
        root = B * (self.n / (len(B) * state.noise_variance)) ** 0.5
        precision = state.basis.precision_diag(indices)
        change = -rate * newton_direction(root, precision, gradient)
        state.mean[indices] += change
        state.control.sums += B @ change
        slope = log_precision_gradient(precision, state.mean[indices, 0], state.std[indices])
        # Bounded below by -1/2; above, s mu^2 of a mean that is still moving is without bound.
        slope = slope.clamp_max(0.5)[:, None]
        step, moments = state.optimizer.step(indices, slope, self.precision_rate)
        state.optimizer.commit(indices, moments)
        state.basis.log_precision[indices] += step[:, 0]

    def move_noise(self, support_error: Tensor) -> None:
        r"""Move towards the optimum :math:`(\|y - \Phi\mu\|^2 + \sum_j c_j^2 \phi_j^T \phi_j) / n`.

        The residuals are the batch's where every function is at hand, and else the support rows'.
        """
        state, (X, y) = self.state, self.batch
        error = support_error
        if self.whole is not None:
            fitted = state.basis.features(X, self.whole.indices) @ state.mean
            error = (y - fitted[:, 0]).square().mean()
        target = error + state.noise_variance * state.determined().sum() / self.n
        bound = state.y_support.square().mean()
        bound = torch.where(bound > 0, bound, 1)
        rate = defaults.NOISE_RATE
        moved = (1 - rate) * state.noise_variance + rate * target
        state.noise_variance = moved.clamp(defaults.NOISE_FLOOR * bound, bound)


def log_precision_gradient(precision: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    r"""Gradient of -ELBO with respect to log s, :math:`\tfrac12 (s (\mu^2 + c^2) - 1)`, (k,).

    Of a sample, times its weight, an unbiased estimate of the whole gradient.
    """
    return 0.5 * (precision * (mean.square() + std.square()) - 1)


def newton_direction(root: Tensor, precision: Tensor, gradient: Tensor) -> Tensor:
    """Solve ``(root' root + diag(precision)) x = gradient``, in O(k r min(k, r)).

    `root` is (r, k), `precision` (k,) positive, `gradient` and x (k, q).
    """
    if root.shape[1] <= root.shape[0]:
        return torch.linalg.solve_ex(root.mT @ root + torch.diag(precision), gradient).result
    scaled = root / precision
    inner = scaled @ root.mT  # (r, r)
    inner.diagonal().add_(1)
    solved = torch.linalg.solve_ex(inner, scaled @ gradient).result
    return gradient / precision[:, None] - scaled.mT @ solved
