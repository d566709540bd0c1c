"""The iterations of `fit_sgd`: sample, estimate, correct, move."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from skgp.inference.stochastic.basis import StochasticBasis
from skgp.inference.stochastic.control_variates import (
    LinearControlVariate,
    LowRankControlVariate,
    RegressionCoefficient,
    nystrom_factor,
    projection_weights,
    support_features,
)
from skgp.inference.stochastic.estimators import (
    Estimate,
    SampledDesign,
    constant_loss,
    precision_loss,
    quadratic_loss,
    sample_design,
)
from skgp.inference.stochastic.hyper import HyperParameters
from skgp.inference.stochastic.optimizers import gather, scatter, scatter_add
from skgp.inference.stochastic.sampling import IndexSet, sample_indices, take_rows
from skgp.inference.stochastic.state import (
    SGDResult,
    SGDState,
    chevron_pattern,
    head_log_det,
    raise_non_finite,
    sum_again,
)
from skgp.optim import LossPlateau, sample_without_replacement

__all__ = ["Options", "Solver"]

# Rows that the projection of the control variate is averaged over: far more than support rows.
PROJECTED_ROWS = 10_000
# Iterations between control variates while hyper-parameters move: a quarter more time at m = 1e5.
RECENTRED = 20

Callback = Callable[[int, dict], bool | None]


@dataclass(frozen=True)
class Options:
    """Arguments of `fit_sgd` that an iteration reads."""

    batch_size: int
    basis_batch_size: int
    column_batch_size: int | None
    learn_hyperparameters: bool
    complexity: str
    freeze_iterations: int
    symmetric: bool
    rate: Callable[[int], float]
    hyper_rate: Callable[[int], float]


@dataclass(frozen=True)
class Side:
    """One of the two samples of basis functions, with what an iteration reads for it.

    Attributes
    ----------
    sample : IndexSet
    V : Tensor of shape (|i|, q)
        Rows of the weights.
    B, N : Tensor of shape (n_support, |i|)
        Columns of the control variates' factors: features of the support rows, Nystrom of S. No
        rows where there is no such control variate.
    """

    sample: IndexSet
    V: Tensor
    B: Tensor
    N: Tensor


@dataclass(frozen=True)
class Draw:
    """All that one iteration sampled. Columns: the mean (0) and the dense columns (1..k)."""

    X: Tensor
    y: Tensor
    i: Side
    j: Side
    design: SampledDesign
    columns: Tensor | slice
    column_weight: float


class Solver:
    """State, data and control variates of a running fit.

    Parameters
    ----------
    X, y : Tensor or ndarray
    basis : StochasticBasis
    options : Options
    state : SGDState
        Changed in place.
    generator : torch.Generator
    """

    def __init__(
        self,
        X: Tensor | np.ndarray,
        y: Tensor | np.ndarray,
        basis: StochasticBasis,
        options: Options,
        state: SGDState,
        generator: torch.Generator,
    ) -> None:
        self.X, self.y, self.n = X, y, len(X)
        self.basis = basis
        self.options = options
        self.state = state
        self.generator = generator
        self.history: dict[str, list[float]] = {"loss": [], "support_mse": [], "noise_variance": []}
        self.hyper = (
            HyperParameters(state, basis, self.n, options.complexity)
            if options.learn_hyperparameters
            else None
        )
        self.features_cv: LowRankControlVariate | None = None
        self.precision_cv: LowRankControlVariate | None = None
        self.linear_cv: LinearControlVariate | None = None
        self.regression: RegressionCoefficient | None = None
        self.coefficient = 1.0

    def set_control_variates(
        self,
        control: str,
        scaling: str,
        coefficient: float | str,
        b: Tensor | None,
        memory_budget: int,
    ) -> None:
        """Build the control variates around the running sums of the state."""
        state, basis = self.state, self.basis
        self._controls = (control, scaling, coefficient, b, memory_budget)
        if len(state.X_support):
            factor = support_features(basis, state.X_support, state.initial_theta)
            self.features_cv = LowRankControlVariate(
                factor,
                state.sums,
                weights=self._support_weights() if control == "projection" else None,
                memory_budget=memory_budget,
                scaling=scaling,
            )
            if len(state.precision_sums):
                factor = nystrom_factor(basis, state.X_support, state.initial_theta)
                self.precision_cv = LowRankControlVariate(
                    factor, state.precision_sums, scaling=scaling
                )
        if b is not None:
            b = b.to(basis.dtype)
            self.linear_cv = LinearControlVariate(
                b,
                float(b @ state.weights[:, 0]),
                scaling=scaling,
                symmetric=self.options.symmetric,
            )
        if coefficient == "regression":
            self.regression = RegressionCoefficient()
        elif isinstance(coefficient, str):
            raise ValueError(f'coefficient must be a number or "regression", got {coefficient!r}.')
        else:
            self.coefficient = float(coefficient)

    def recentre(self) -> None:
        """Build the control variates anew, from features at the current hyper-parameters.

        Appendix F.3 leaves them at the initial ones, from which they soon are too far to be of use:
        a length scale that halves stretches the function. ``O(n_support m)``.
        """
        state = self.state
        if state.theta is None or not len(state.X_support):
            return
        state.initial_theta = state.theta.clone()
        sum_again(state, self.basis)
        self.set_control_variates(*self._controls)

    def _support_weights(self) -> Tensor:
        """Weights of the support rows by projection, from rows at even distances."""
        rows = torch.arange(0, self.n, -(-self.n // PROJECTED_ROWS))
        X = take_rows(self.X, rows, torch.float64)
        state = self.state
        return projection_weights(self.basis.kernel, state.X_support, X, state.initial_theta)

    def run(self, max_iter: int, rule: LossPlateau | None, callback: Callback | None) -> SGDResult:
        """Iterate until `max_iter`, the rule or the callback stops."""
        state, stopped = self.state, False
        for iteration in range(state.n_iter, state.n_iter + max_iter):
            info = self.iterate(iteration)
            state.n_iter = iteration + 1
            for name, value in info.items():
                self.history[name].append(value)
            rule_says = rule is not None and rule(iteration, info["loss"])
            caller_says = callback is not None and bool(callback(iteration, info))
            if rule_says or caller_says:
                stopped = True
                break
        return SGDResult(
            q=state.covariance(self.basis, self.n),
            theta=state.theta,
            noise_variance=state.noise_variance,
            n_iter=state.n_iter,
            stopped_early=stopped,
            history=self.history,
            state=state,
        )

    def iterate(self, iteration: int) -> dict[str, float]:
        """One iteration; returns its entries of the history."""
        options, state = self.options, self.state
        draw = self.draw()
        plain = quadratic_loss(
            draw.design,
            draw.i.V,
            draw.j.V,
            state.noise_variance,
            y=draw.y,
            symmetric=options.symmetric,
        )
        correction = self.correct(draw, plain)
        estimate = plain + correction
        info = {
            "loss": self.loss(draw, estimate),
            "support_mse": self.support_mse(),
            "noise_variance": state.noise_variance,
        }
        if self.hyper is not None and iteration >= options.freeze_iterations:
            gradient = self.hyper.gradient(
                draw.X,
                draw.y,
                (draw.i.sample, draw.i.V),
                (draw.j.sample, draw.j.V),
                draw.column_weight,
                correction.value,
            )
            self.hyper.move(iteration, gradient, options.hyper_rate(iteration))
        self.move(iteration, draw.i, estimate.grad_i, draw)
        self.move(iteration, draw.j, estimate.grad_j, draw)
        state.add_squares(draw.i.sample, draw.design.Phi_i, 1.0 if self.hyper is None else 0.95)
        if self.hyper is not None and iteration % RECENTRED == 0:
            self.recentre()
        return info

    # Sampling -----------------------------------------------------------------------------------

    def draw(self) -> Draw:
        """Sample rows, basis functions twice and dense columns, and evaluate their features."""
        options, basis = self.options, self.basis
        rows = sample_without_replacement(self.n, options.batch_size, generator=self.generator)
        X, y = (take_rows(a, rows, basis.dtype) for a in (self.X, self.y))
        columns, column_weight = self._draw_columns()
        i, j = (self._draw_side(columns) for _ in range(2))
        design = sample_design(basis, X, i.sample, j.sample, n=self.n, theta=self.state.theta)
        return Draw(X, y, i, j, design, columns, column_weight)

    def _draw_columns(self) -> tuple[Tensor | slice, float]:
        """Sample r of Theorem 2 among the dense columns, and its weight."""
        k, size = self.state.n_dense, self.options.column_batch_size
        if size is None or size >= k:
            return slice(None), 1.0
        chosen = sample_without_replacement(k, size, generator=self.generator)
        return torch.cat([torch.zeros(1, dtype=torch.int64), chosen + 1]), k / size

    def _draw_side(self, columns: Tensor | slice) -> Side:
        sample = sample_indices(self.basis, self.options.basis_batch_size, generator=self.generator)
        V = gather(self.state.weights, sample.indices, columns)
        none = V.new_empty(0, len(sample))
        return Side(
            sample,
            V,
            none if self.features_cv is None else self.features_cv.columns(sample),
            none if self.precision_cv is None else self.precision_cv.columns(sample),
        )

    # Estimating ---------------------------------------------------------------------------------

    def correct(self, draw: Draw, plain: Estimate) -> Estimate:
        """Sum the control variates' corrections, of expectation 0."""
        i, j = draw.i, draw.j
        pair = (i.sample, j.sample)
        total = Estimate(*(torch.zeros_like(t) for t in (plain.value, i.V, j.V)))
        if self.features_cv is not None:
            scale = self.n / (len(self.state.X_support) * self.state.noise_variance)
            beta = self.coefficient if self.regression is None else self.regression.value
            correction = self.features_cv.estimate(
                *pair, i.B, j.B, i.V, j.V, scale, columns=draw.columns
            )
            if self.regression is not None:
                self.regression.update(float(plain.value.sum()), -float(correction.value.sum()))
            total = total + correction.scaled(beta)
        if self.precision_cv is not None:
            total = total + self.precision_cv.estimate(
                *pair, i.N, j.N, i.V, j.V, 1.0, columns=draw.columns
            )
        if self.linear_cv is not None:
            linear = self.linear_cv.estimate(*pair, i.V[:, 0], j.V[:, 0], self.state.noise_variance)
            total.value[0] += linear.value
            total.grad_i[:, :1] += linear.grad_i
            total.grad_j[:, :1] += linear.grad_j
        return total

    def loss(self, draw: Draw, estimate: Estimate) -> float:
        """Estimate -ELBO; the tail of C is at its optimum (Prop. 1), where a term is 1 - 2 log c.

        While the support features are current, their running sums take the place of the sampled
        data terms: expectations over support rows instead, with far less noise.
        """
        state, basis, i = self.state, self.basis, draw.i.sample
        values, y = estimate.value, draw.y
        if self._support_is_current():
            y = state.y_support
            fit = self.n / (len(y) * state.noise_variance) * self._support_squares(draw.columns)
            values = fit + self._prior_values(draw)
            # `fit` of the mean holds y'y, which constant_loss adds.
            values[0] -= self.n / (len(y) * state.noise_variance) * y.square().sum()
        tail = i.indices[i.indices >= state.n_dense]
        c = state.tail_std(basis, self.n, tail, state.theta)
        log_s = torch.zeros(len(i), dtype=basis.dtype)
        if basis.diagonal_precision:
            log_s = basis.log_precision_diag(i.indices, state.theta)
        constant = constant_loss(log_s, i, y, state.noise_variance, n=self.n, m=basis.n_features)
        covariance = i.weight * float((1 - 2 * c.log()).sum()) + head_log_det(state)
        covariance += draw.column_weight * float(values[1:].sum())
        return 0.5 * (float(values[0]) + covariance + float(constant))

    def _support_is_current(self) -> bool:
        state = self.state
        if self.features_cv is None or self.hyper is not None:
            return False
        start, now = state.initial_theta, state.theta
        if start is None or now is None:
            return start is now
        return torch.equal(start, now)

    def _support_squares(self, columns: Tensor | slice) -> Tensor:
        """Squared errors of the mean, and squares of the dense columns, over the support rows."""
        values = self.state.sums[:, columns].clone()
        values[:, 0] -= self.state.y_support
        return values.square().sum(0)

    def _prior_values(self, draw: Draw) -> Tensor:
        prior = precision_loss(draw.design, draw.i.V, draw.j.V).value
        if self.precision_cv is not None:
            i, j = draw.i, draw.j
            prior = (
                prior
                + self.precision_cv.estimate(
                    i.sample, j.sample, i.N, j.N, i.V, j.V, 1.0, columns=draw.columns
                ).value
            )
        return prior.to(torch.float64)

    def support_mse(self) -> float:
        """Mean squared error of the mean on the support rows; NaN where there are none."""
        state = self.state
        return float((state.y_support - state.sums[:, 0]).square().mean())

    # Moving -------------------------------------------------------------------------------------

    def move(self, iteration: int, side: Side, gradient: Tensor, draw: Draw) -> None:
        """Take the step of one sample's rows and let the running sums follow (Prop. 3)."""
        state, sample, columns = self.state, side.sample, draw.columns
        indices = sample.indices
        V = gather(state.weights, indices, columns)  # the other side may have moved some rows
        upper, diagonal = chevron_pattern(indices, columns, state.n_dense)
        gradient[:, 1:] *= draw.column_weight
        # Half of the gradient -2 / c of the logarithm; the other sample brings the other half.
        gradient[diagonal] -= draw.column_weight * sample.weight / V[diagonal]
        gradient[upper] = 0
        rate = self.options.rate(iteration)
        step, moments = state.optimizer.step(indices, gradient, rate, columns, side.B)
        step = step * state.column_scale[columns]
        step[upper] = 0
        step[diagonal] = torch.maximum(step[diagonal], -0.5 * V[diagonal])
        if not bool(torch.isfinite(step).all()):
            mean_is_finite = bool(torch.isfinite(step[:, 0]).all())
            raise_non_finite(iteration, "C" if mean_is_finite else "mu", state)
        scatter_add(state.weights, indices, columns, step)
        for name, values in moments.items():
            scatter(state.optimizer.state[name], indices, columns, values)
        for cv, part in ((self.features_cv, side.B), (self.precision_cv, side.N)):
            if cv is not None:
                cv.update(part, step, columns)
        if self.linear_cv is not None:
            self.linear_cv.update(sample, step[:, 0])
