r"""QSGP under a Gaussian likelihood by stochastic gradients whose cost depends neither on n nor m.

Evans and Nair, "Quadruply Stochastic Gaussian Processes" (2020), sections 2 and 4, appendices F and
I.1. An iteration draws rows :math:`\tilde l` and two samples :math:`\tilde i, \tilde j` of basis
functions, estimates the losses of the mean and of the dense columns of C with their sparse
gradients, corrects both by control variates (`estimators`) and moves the rows :math:`\tilde i` and
:math:`\tilde j` (`engine`). Columns of C without entries below the diagonal follow from
Proposition 1.

Beyond the paper: ``optimizer="nystrom"`` takes block Newton directions built from the control
variate's features. One thread, rank-500 control variate, RMSE of the mean on test rows:

=========================================  ======================  =========================
estimator, optimizer                       8-d waves, n = m = 2e4  kin40k, m = 1e5
=========================================  ======================  =========================
Theorem 1, AdaGrad, no control variate     .550 (500 iterations)
Theorem 1, AdaGrad (the paper)             .332 (12 s)
symmetric, AdaGrad                         .313 (12 s)             .421 (400 iterations, 30 s)
symmetric, nystrom                         .179 (10 s)             .272 (400, 35 s; .237: 115 s)
=========================================  ======================  =========================

Of no use in the same trials: averaged iterates (they lag), a coefficient of the control variate
learned by regression (at rank 500), the preconditioner applied to the whole space instead of the
sampled block (it diverges), one preconditioner shared by all blocks (it diverges) and constant
steps along the Newton directions (faster for a while, then divergent unless tuned; AdaGrad's
scaling needs no tuning).

Empirical Bayes (section 2.3)
-----------------------------
The paper maximises its bound, in which a tail of C without entries below the diagonal pays

.. math:: \sum_{r > k} \log\big(1 + \phi_r^T \phi_r / (\sigma^2 s_{rr})\big)
          \;\ge\; \log|I + K / \sigma^2|

(Hadamard) where a full C pays the right-hand side. The left one grows with m without limit: from m
about n on the best noise variance under the bound is of the size of the prior variance whatever the
data, and length scales go to their bounds. With support rows the right-hand side is taken from
these :math:`\bar n`, each of which stands for :math:`n / \bar n`,

.. math:: \log|I + \tfrac{n}{\bar n} K_{pp} / \sigma^2| ,

exact for all rows and otherwise a little small (Jensen), and nothing moves while the support rows
do not resolve the process: where its effective dimension exceeds half their number. Without support
rows it is the paper's bound.

======================================  ==================  =============  ========
sin 3x + noise of variance .1,          bound, mean-field   support        exact GP
n = 1000, 600 iterations                (length, noise)
======================================  ==================  =============  ========
from (2, .5), m = 100                   .83, .115           .92, .107      .64, .105
from (2, .5), m = 600                   .68, .144           1.02, .105     .64, .105
======================================  ==================  =============  ========
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from skgp.inference import defaults
from skgp.inference.stochastic.basis import (
    Array,
    IndexSet,
    StochasticBasis,
    index_set,
    product,
    take_rows,
)
from skgp.inference.stochastic.engine import SGDOptions, StochasticSolver
from skgp.inference.stochastic.estimators import (
    Estimate,
    LowRankControlVariate,
    SampledDesign,
    constant_loss,
    diagonal_loss,
    precision_loss,
    projection_weights,
    quadratic_loss,
    sample_design,
)
from skgp.inference.stochastic.state import HyperParameters, SGDState, check_learnable
from skgp.kernels import gram
from skgp.linalg.cholesky import tri_solve
from skgp.optim import ValidationPlateau


class Side(NamedTuple):
    """One of the two samples of basis functions, with what an iteration reads for it."""

    sample: IndexSet
    V: Tensor  # (|i|, 1 + k), rows of the weights
    B: Tensor  # (n_support, |i|), features of the support rows
    N: Tensor  # (n_support, |i|), Nystrom factor of S; no rows where S is diagonal


class SGDSolver(StochasticSolver):
    r"""Fits :math:`N(\mu, C C^T)` by Theorems 1 and 2, and theta by Proposition 2.

    Its history holds "loss", an estimate of -ELBO in nats (up to :math:`\tfrac12 \log|S|` for a
    dense S), "support_mse", the mean squared error of the mean on the support rows, each unit's
    part at the hyper-parameters of its last visit, and "noise_variance". Parameters, methods and
    errors are those of `StochasticSolver`, with an :class:`SGDState`.

    An iteration takes :math:`O((\tilde n + \bar n) \tilde m (d + k))`, "nystrom"
    :math:`O(200^2 \tilde m)` more. Between iterations it keeps :math:`O(m k)`.

    Examples
    --------
    >>> import torch
    >>> from sklearn.gaussian_process.kernels import RBF
    >>> from skgp.inference.stochastic.basis import FourierBasis
    >>> from skgp.kernels import FourierFeatures
    >>> X = torch.linspace(-1, 1, 200, dtype=torch.float64)[:, None]
    >>> y, generator = X[:, 0].sin(), torch.Generator().manual_seed(0)
    >>> basis = FourierBasis(FourierFeatures(RBF(0.5), 100, 1, seed=0, block_size=10))
    >>> state = SGDState.start(X, y, basis, 0.01, generator=generator)
    >>> solver = SGDSolver(X, y, basis, state, SGDOptions(max_iter=100), generator)
    >>> solver.run()["support_mse"][-1] < 1e-4
    True
    """

    default_decay = defaults.DECAY
    state: SGDState

    def __init__(
        self,
        X: Array,
        y: Array,
        basis: StochasticBasis,
        state: SGDState,
        options: SGDOptions,
        generator: torch.Generator,
    ) -> None:
        super().__init__(X, y, basis, state, options, generator)
        if options.learn_hyperparameters:
            check_learnable(basis)
            self.hyper = HyperParameters(state, basis.kernel, self.health, state.noise_variance)
            self.start_unit_theta()
        elif state.unit_theta is not None:  # of a fit that learned them
            state.sum_again(basis)
        self.by_support = len(state.X_support) > 0  # the complexity that theta pays for
        self.complexity: list[Tensor] | None = None  # its slopes
        self.n_slopes = 0
        self.features_cv: LowRankControlVariate | None = None
        self.precision_cv: LowRankControlVariate | None = None
        if self.by_support:
            rows = torch.arange(0, self.n, -(-self.n // defaults.PROJECTED_ROWS))
            # rows at even distances
            self.X_projected = take_rows(self.X, rows, torch.float64, basis.device)
            self.set_control_variates()

    def start_unit_theta(self) -> None:
        """Note at which hyper-parameters each unit is in the running sums."""
        state, m = self.state, self.basis.n_features
        self.projected = 0  # version that the projection is at
        self.version = 1  # of theta: the units of an earlier fit are at another
        if state.unit_theta is None:
            assert self.hyper is not None
            self.version = 0
            theta = self.hyper.theta.detach()
            state.unit_theta = theta.expand(self.basis.n_units, -1).clone()
        # Version at which a unit was last visited, known to the host; -1 where its weights are 0.
        is_zero = (state.weights == 0).all(1)
        is_zero = torch.nn.functional.pad(is_zero, (0, -m % self.basis.unit_size), value=True)
        zero_units = is_zero.view(-1, self.basis.unit_size).all(1).cpu()
        self.visited = torch.where(zero_units, -1, 0)

    def set_control_variates(self) -> None:
        """Build the control variates around the running sums of the state, at its theta."""
        state = self.state
        for factor, sums in state.running_sums(self.basis):
            if sums is state.precision_sums:
                self.precision_cv = LowRankControlVariate(factor, sums)
                continue
            inputs = state.X_support, self.X_projected
            A = projection_weights(self.basis.kernel, *inputs, state.theta)
            self.features_cv = LowRankControlVariate(factor, sums, weights=A)

    def iterate(self, iteration: int) -> dict[str, Tensor]:
        """One iteration; returns its entries of the history."""
        state, options = self.state, self.options
        moves = self.hyper is not None and iteration >= options.freeze_iterations
        resolved = moves and self.is_resolved()
        theta = self.hyper.theta if resolved else state.theta  # type: ignore[union-attr]
        X, y = self.draw_rows()
        i, j = (self.draw_side() for _ in range(2))
        design = sample_design(self.basis, X, i.sample, j.sample, n=self.n, theta=theta)
        plain = quadratic_loss(design.detached(), i.V, j.V, state.noise_variance, y=y)
        correction = self.correct(i, j)
        estimate = plain + correction
        errors = state.y_support - state.sums[:, 0]
        info = {
            "loss": self.loss(design.detached(), i, j, y, estimate),
            "support_mse": errors.square().mean(),
            "noise_variance": errors.new_zeros(()) + state.noise_variance,
        }
        if self.hyper is not None and moves:
            slopes = [torch.zeros_like(leaf) for leaf in self.hyper.leaves.values()]
            if resolved:
                slopes = self.hyper_slopes(design, y, i, j, correction.value)
            before = self.hyper.theta.detach().clone()
            self.hyper.move(iteration, slopes, self.hyper_rate(iteration))
            if not (self.on_cpu and torch.equal(before, self.hyper.theta)):
                self.version += 1
            state.noise_variance = self.hyper.leaves["noise_variance"].detach().exp()
        self.move_side(iteration, i, estimate.grad_i)
        self.move_side(iteration, j, estimate.grad_j)
        keep = 1.0 if self.hyper is None else defaults.FORGET
        good = self.health.failure == 0
        state.add_squares(i.sample.indices, design.Phi_i.detach(), keep, good)
        is_due = moves and self.by_support and iteration % defaults.PROJECTED == 0
        if is_due and self.projected != self.version:
            self.set_control_variates()
            self.projected = self.version
        return info

    def draw_side(self) -> Side:
        """Sample basis functions, and evaluate the control variates' factors there."""
        sample = self.draw_sample()
        V = self.state.weights[sample.indices]
        none = V.new_empty(0, len(sample))
        if self.hyper is not None and self.by_support:
            B = self.revisit(sample, V)
        else:
            B = none if self.features_cv is None else self.features_cv.columns(sample)
        N = none if self.precision_cv is None else self.precision_cv.columns(sample)
        return Side(sample, V, B, N)

    @torch.no_grad()
    def revisit(self, sample: IndexSet, V: Tensor) -> Tensor:
        """Support features (n_support, |i|) at the current theta; running sums follow them."""
        state, basis = self.state, self.basis
        assert state.unit_theta is not None
        B = basis.sampled(state.X_support, sample, state.theta)
        parts = zip(
            sample.units.tolist(),
            B.split(sample.unit_size, 1),
            V.split(sample.unit_size),
            strict=True,
        )
        for unit, new, v in parts:
            if 0 <= self.visited[unit] < self.version:
                one = index_set(basis, torch.tensor([unit]))
                old = basis.sampled(state.X_support, one, state.unit_theta[unit])
                state.sums += ((new - old) @ v).to(state.sums)
            if state.theta is not None:
                state.unit_theta[unit] = state.theta
            self.visited[unit] = self.version
        return B

    def correct(self, i: Side, j: Side) -> Estimate:
        """Sum the control variates' corrections, of expectation 0."""
        total = Estimate(i.V.new_zeros(i.V.shape[1]), torch.zeros_like(i.V), torch.zeros_like(j.V))
        if self.features_cv is not None:
            scale: Any = self.n / (len(self.state.X_support) * self.state.noise_variance)
            total = total + self.features_cv.estimate(i.sample, j.sample, i.B, j.B, i.V, j.V, scale)
        if self.precision_cv is not None:
            total = total + self.precision_correction(i, j)
        return total

    def precision_correction(self, i: Side, j: Side) -> Estimate:
        """That of v'Sv, for inducing points."""
        assert self.precision_cv is not None
        return self.precision_cv.estimate(i.sample, j.sample, i.N, j.N, i.V, j.V, 1.0)

    def loss(
        self, design: SampledDesign, i: Side, j: Side, y: Tensor, estimate: Estimate
    ) -> Tensor:
        """Estimate -ELBO; the tail of C is at its optimum (Prop. 1), where a term is 1 - 2 log c.

        While hyper-parameters stay, the running sums take the place of the sampled data terms:
        expectations over support rows instead, with far less noise.
        """
        state, basis, indices = self.state, self.basis, i.sample.indices
        values, noise = estimate.value.double(), state.noise_variance
        if self.features_cv is not None and self.hyper is None:
            errors = state.sums.clone()  # (n_support, 1 + k)
            errors[:, 0] -= state.y_support
            y = state.y_support
            weight = self.n / (len(y) * noise)
            prior = precision_loss(design, i.V, j.V).value
            if self.precision_cv is not None:
                prior = prior + self.precision_correction(i, j).value
            values = weight * errors.square().sum(0) + prior.to(torch.float64)
            # That of the mean holds y'y, which constant_loss adds.
            values[0] -= weight * y.square().sum()
        c = state.tail_std(basis, self.n, indices, state.theta)
        s = values.new_ones(1) if design.s_i is None else design.s_i
        constant = constant_loss(s, i.sample, y, noise, n=self.n, m=basis.n_features)
        tail = torch.where(indices >= state.n_dense, 1 - 2 * c.log(), 0).sum()
        covariance = i.sample.weight * tail.double()
        covariance = covariance - 2 * state.weights[:, 1:].diagonal().log().sum().double()
        return 0.5 * (values.sum() + covariance + constant)

    def move_side(self, iteration: int, side: Side, gradient: Tensor) -> None:
        """Take the step of one sample's rows and let the running sums follow (Prop. 3)."""
        state, indices = self.state, side.sample.indices
        if state.n_dense:
            upper, diagonal = state.pattern(indices)
            # Half of the gradient -2 / c of the logarithm; the other sample brings the other half.
            # The other side may have moved c since.
            c = state.weights[indices]
            slope = gradient - side.sample.weight / torch.where(diagonal, c, 1)
            gradient = torch.where(diagonal, slope, gradient).masked_fill(upper, 0)
        step = self.move(iteration, indices, gradient, side.B)
        if self.precision_cv is not None:
            state.precision_sums += (side.N @ step).to(state.precision_sums)

    # Hyper-parameters -----------------------------------------------------------------------------

    def hyper_slopes(
        self, design: SampledDesign, y: Tensor, i: Side, j: Side, correction: Tensor
    ) -> list[Tensor]:
        """Gradient of an unbiased estimate of -ELBO with respect to theta and log noise.

        The design has a graph to theta. `correction` (1 + k,) is what the control variates add, at
        the current noise variance, to which it is inversely proportional; their features are fixed
        (F.3).
        """
        assert self.hyper is not None
        state, basis, theta = self.state, self.basis, self.hyper.theta
        noise = self.hyper.leaves["noise_variance"].exp().to(basis.dtype)
        values = quadratic_loss(design, i.V, j.V, noise, y=y).value
        values = values + correction * (state.noise_variance / noise)
        indices = i.sample.indices
        s = basis.precision_diag(indices, theta)
        constant = constant_loss(s, i.sample, y, noise, n=self.n, m=basis.n_features)
        if self.by_support:  # of the full C, but for what it has in common with the constant
            covariance = i.sample.weight * s.log().sum()
        else:
            # The envelope theorem: at its optimum (Prop. 1) the tail of C may be held fixed.
            c = state.tail_std(basis, self.n, indices, theta.detach())
            tail = diagonal_loss(design, c, noise, indices >= state.n_dense)
            covariance = values[1:].sum() + tail
        slopes = self.hyper.slopes(0.5 * (values[0] + covariance + constant))
        if not self.by_support:
            return slopes
        *complexity, resolved = self.complexity  # type: ignore[misc]
        both = zip(slopes, complexity, strict=True)
        return [torch.where(resolved, a + b, 0) for a, b in both]

    def is_resolved(self) -> bool:
        """Whether hyper-parameters may move; True wherever the host had to wait for the answer."""
        if not self.by_support:
            return True
        if self.n_slopes % defaults.COMPLEXITY_EVERY == 0:
            self.complexity = self.support_complexity()
        self.n_slopes += 1
        return not self.on_cpu or bool(self.complexity[-1])  # type: ignore[index]

    def support_complexity(self) -> list[Tensor]:
        """Gradient of half the log-determinant (see the module), and whether it is resolved."""
        assert self.hyper is not None
        X = self.state.X_support.double()
        share = self.n / len(X) / self.hyper.leaves["noise_variance"].exp()
        A = share * gram(self.basis.kernel, X, theta=self.hyper.theta)  # (n_support, n_support)
        L = torch.linalg.cholesky_ex(A + torch.eye(len(X), dtype=A.dtype, device=A.device)).L
        inverse = tri_solve(L.detach(), torch.eye(len(X)).to(L), upper=False)
        dimension = len(X) - inverse.square().sum()  # tr A (A + I)^-1
        resolved = (dimension <= len(X) / 2) | (len(X) >= self.n)
        return [*self.hyper.slopes(L.diagonal().log().sum()), resolved]


def validation_rule(
    basis: StochasticBasis, state: SGDState, X: Tensor, y: Tensor, tol: float | None
) -> ValidationPlateau:
    """Stop once the error of the running mean on held-out rows has not fallen for five scores.

    A score, every 50 iterations, reads the state anew and takes O(n_held m). `tol` is the least
    fall, relative to the whole fall so far.
    """
    X, y = X.to(basis.device, basis.dtype), y.to(basis.device)

    def score() -> float:
        mean = product(basis, X, state.weights[:, :1], state.theta)[:, 0]
        return -float((y - mean).square().mean())

    return ValidationPlateau(
        score,
        every=defaults.SCORE_EVERY,
        patience=defaults.SCORE_PATIENCE,
        tol=defaults.SCORE_TOL if tol is None else tol,
    )
