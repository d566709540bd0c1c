r"""Losses :math:`-\log E_{f \sim N(m, v)}[p(y \mid f)]` with the gradient estimators of the paper.

With :math:`d_1, d_2` the derivatives of :math:`\log p(y \mid f)` in f, :math:`f = m + \sqrt v\, e`
and :math:`\tilde q(f) \propto N(f; m, v)\, p(y \mid f)`, each estimator of the gradient of
:math:`\log E[p]` is an average over samples :math:`f_l` with weights :math:`w_l`:

==============  ================  =========================================================
``gradient``    samples           weights
==============  ================  =========================================================
``bmc``         :math:`N(m, v)`   :math:`p_l / \sum_k p_k`: biased by O(1 / L); eqs. (7), (8)
``smooth_bmc``  :math:`N(m, v)`   :math:`p_l / (\sum_k p_k + L \nu)`; supplement, section 2
``ups``         :math:`\tilde q`  :math:`1 / L`: unbiased; Proposition 1
==============  ================  =========================================================

==============  ==================================  ============================================
``form``        derivative in m                     derivative in v
==============  ==================================  ============================================
``pathwise``    :math:`d_1`                         :math:`d_1 e / 2 \sqrt v`
``score``       :math:`e / \sqrt v`                 :math:`(e^2 - 1) / 2 v`
``combined``    :math:`\dfrac{G}{1 + h v}`          :math:`\dfrac{G^2 - h^2 v + d_2}{2 (1 + h v)^2}`
==============  ==================================  ============================================

The first is one of the two formulas of eq. (6), the second is eq. (1), for ups only. Under
:math:`\tilde q` all have the same mean: those in m by :math:`E[\psi'(e)] = 0`, where
:math:`\psi'(e) = \sqrt v\, d_1 - e`, those in v by :math:`E[e\, \psi'(e)] = -1` and
:math:`E[\psi''(e) + \psi'(e)^2] = 0`. The combined form, for ups only and not in the paper, has

.. math:: G = d_1 + h \sqrt v\, e,

for any constant :math:`h \ge 0`: it runs from the other formula of eq. (6), whose derivative in v
is :math:`(d_1^2 + d_2) / 2`, at h = 0 to ``score`` for :math:`h \to \infty`. Here h is
:math:`-d_2` near the mode of :math:`\tilde q`. With a Gaussian likelihood, of
:math:`-d_2 = 1 / \sigma^2`, both of its derivatives are free of noise:
:math:`G = (y - m) (1 + h v) / (v + \sigma^2)`.

Noise of one ups draw, relative to the length of the gradient of 400 rows, for logit, probit,
Poisson and Student-t likelihoods (latent variances uniform up to .25 or up to 1): `combined` .02 to
.24 in m and .09 to .4 in v, `pathwise` .2 to 1.5 and 1.7 to 14, `score` 2 to 12 and 14 to 1400.
That of `score`, and of `pathwise` in v, has no bound for :math:`v \to 0`. For bmc the pathwise form
is the gradient of the value that is returned; the other one of eq. (6) is better at small v and far
worse where one sample takes all the weight (10 samples, Poisson, v up to 1: 9 against .8).

Deviations and errata
---------------------
- The paper adds :math:`\nu` to the sum over the samples where it defines the step, and to their
  mean where it analyses it, a factor L. Here it is added to the mean, as the proof needs.
- Likelihood parameters, which the paper does not mention, get :math:`\sum_l w_l \nabla \log p_l`:
  for ups, Fisher's identity, unbiased.

References
----------
.. [1] Wei, Sheth and Khardon (2021), Direct loss minimization for sparse Gaussian processes.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from skgp.likelihoods import Likelihood, defaults
from skgp.likelihoods.product_sampling import Target, draw
from skgp.likelihoods.quadrature import aligned, check_var

#: Forms of each sampled gradient, the default first.
FORMS = {
    "bmc": ("pathwise",),
    "smooth_bmc": ("pathwise",),
    "ups": ("combined", "pathwise", "score"),
}
GRADIENTS = ("exact", "quadrature", *FORMS)


def log_expectation_loss(
    likelihood: Likelihood,
    y: Tensor,  # observations; it, mean and var broadcast to (...)
    mean: Tensor,
    var: Tensor,  # not negative
    *,
    gradient: str = "exact",  # one of `GRADIENTS`
    form: str | None = None,  # of a sampled gradient: one of `FORMS`
    n_samples: int = 10,  # L, of every element
    smoothing: float = defaults.SMOOTHING,  # nu of "smooth_bmc", in the units of p(y | f)
    generator: torch.Generator | None = None,  # required by sampled gradients
) -> Tensor:
    r"""Log loss of each observation, :math:`-\log E_{f \sim N(m, v)}[p(y \mid f)]`.

    Backpropagation gives the derivatives in `mean`, `var` and the likelihood's own parameters that
    `gradient` names; not in `y`, and no second derivatives.

    "exact" and "quadrature" are ``-likelihood.log_predictive(...)``: a closed form where the
    likelihood has one, quadrature elsewhere. The others are in the tables above. The `form` is
    "pathwise" by default for bmc and smooth_bmc, "combined" for ups ("pathwise" where log p has a
    kink, whose second derivative is a delta function).

    In nats, of shape (...). Its value is exact, or as exact as quadrature, for "exact",
    "quadrature" and "ups"; :math:`-\log L^{-1} \sum_l p_l`, which is too large on average, for
    "bmc"; and :math:`-\log(L^{-1} \sum_l p_l + \nu)` for "smooth_bmc". A ValueError refuses an
    unknown `gradient` or `form`, `n_samples` below 1, a generator that is missing, and what
    ``likelihood.log_predictive`` refuses.
    """
    if gradient not in GRADIENTS:
        raise ValueError(f"gradient must be one of {GRADIENTS}; got {gradient!r}.")
    if gradient not in FORMS:
        return -likelihood.log_predictive(y, mean, var)
    form = _checked_form(likelihood, gradient, form)
    if generator is None:
        raise ValueError(f"gradient={gradient!r} draws samples: pass generator=torch.Generator().")
    y, mean, var = aligned(y=y, mean=mean, var=var)
    check_var(var)
    if gradient == "ups":
        loss, slopes = _product_sampling(likelihood, y, mean, var, form, n_samples, generator)
    else:
        nu = smoothing if gradient == "smooth_bmc" else 0.0
        loss, slopes = _monte_carlo(likelihood, y, mean, var, form, n_samples, nu, generator)
    # The value stays; the derivatives in mean and var are put in by hand.
    in_mean, in_var = slopes
    return loss - in_mean * (mean - mean.detach()) - in_var * (var - var.detach())


def _checked_form(likelihood: Likelihood, gradient: str, form: str | None) -> str:
    allowed = tuple(f for f in FORMS[gradient] if likelihood.is_smooth or f != "combined")
    if form is None:
        return allowed[0]
    if form not in allowed:
        raise ValueError(
            f"form must be one of {allowed} for gradient={gradient!r} and "
            f"{type(likelihood).__name__}; got {form!r}."
        )
    return form


def _product_sampling(
    likelihood: Likelihood,
    y: Tensor,
    mean: Tensor,
    var: Tensor,
    form: str,
    n_samples: int,
    generator: torch.Generator,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Loss (...), differentiable in the likelihood's parameters only, and slopes of its negative.

    Proposition 1, and Fisher's identity for the parameters.
    """
    mean, var = mean.detach(), var.detach()
    e, precision = product_noise(likelihood, y, mean, var, n_samples=n_samples, generator=generator)
    f = mean + _std(var) * e
    with torch.no_grad():
        value = -likelihood.log_predictive(y, mean, var)
        slopes = _slopes(form, likelihood, y, f, e, var, 1 / n_samples, precision)
    log_prob = likelihood.log_prob(y, f).mean(0)
    return value - (log_prob - log_prob.detach()), slopes


def _monte_carlo(
    likelihood: Likelihood,
    y: Tensor,
    mean: Tensor,
    var: Tensor,
    form: str,
    n_samples: int,
    nu: float,
    generator: torch.Generator,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """As `_product_sampling`, by eqs. (7), (8) with nu in the denominator."""
    if not isinstance(n_samples, int) or n_samples < 1:
        raise ValueError(f"n_samples must be a positive integer such as 10; got {n_samples!r}.")
    mean, var = mean.detach(), var.detach()
    shape = (n_samples, *mean.shape)
    e = torch.randn(shape, dtype=mean.dtype, device=generator.device, generator=generator)
    e = e.to(mean.device)
    f = mean + _std(var) * e
    log_prob = likelihood.log_prob(y, f) - math.log(n_samples)
    log_nu = torch.full_like(mean, nu).log()
    # As a log of sums of exponentials: densities may underflow.
    loss = -torch.logaddexp(log_prob.logsumexp(0), log_nu)
    with torch.no_grad():
        weights = (log_prob + loss).exp()
        slopes = _slopes(form, likelihood, y, f, e, var, weights, None)
    return loss, slopes


def _slopes(
    form: str,
    likelihood: Likelihood,
    y: Tensor,
    f: Tensor,
    e: Tensor,
    var: Tensor,
    weights: Tensor | float,
    precision: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Derivatives (...) of log E[p] in mean and var from samples (n_samples, ...): table above."""
    std = _std(var)
    # Divisions by the standard deviation give noise without bound for var -> 0, and at 0 itself a
    # gradient of 0, as in quadrature.
    inverse_std = torch.where(var > torch.finfo(var.dtype).tiny, 1 / std, 0.0)
    first, second = likelihood.derivatives(y, f)
    if form == "score":
        in_mean, in_var = e * inverse_std, 0.5 * (e**2 - 1) * inverse_std**2
    elif form == "pathwise":
        in_mean, in_var = first, 0.5 * first * e * inverse_std
    else:
        assert precision is not None
        h, total = precision, 1 + precision * var
        G = first + h * std * e
        in_mean, in_var = G / total, (G**2 - h**2 * var + second) / (2 * total**2)
    return (weights * in_mean).sum(0), (weights * in_var).sum(0)


def _std(var: Tensor) -> Tensor:
    return var.clamp_min(torch.finfo(var.dtype).tiny).sqrt()


class ProductNoise(NamedTuple):
    """Draws in standardised form."""

    noise: Tensor  # (n_samples, ...): e, such that m + sqrt(v) e is a draw of q~
    # (...): -d^2 log p / df^2 >= 0 near the mode of q~, that of the Gaussian likelihood that is
    # most like this one there.
    precision: Tensor


def product_noise(
    likelihood: Likelihood,  # log-concave or StudentT
    y: Tensor,  # observations; it, mean and var broadcast to (...)
    mean: Tensor,
    var: Tensor,  # not negative
    *,
    n_samples: int = 1,  # independent, exact draws of every element
    generator: torch.Generator,
) -> ProductNoise:
    r"""Draws of the product in the variable :math:`e = (f - m) / \sqrt v`.

    Unlike differences of f from the mean, they keep their precision where the variance is tiny.

    Computed in float64, of the dtype of `mean`. Two or three rounds of proposals for all elements,
    after some 30 evaluations of :math:`\psi` per element for the envelope (60 with Student-t). A
    ValueError refuses shapes, dtypes and values that do not fit, or a likelihood that calls itself
    log-concave and is not; a TypeError other likelihoods. An entry still without a draw after ten
    times the proposals expected is a RuntimeError: a likelihood 1e8 standard deviations away from
    the Gaussian may bring it about.
    """
    if not isinstance(n_samples, int) or n_samples < 1:
        raise ValueError(f"n_samples must be a positive integer such as 10; got {n_samples!r}.")
    y, mean, var = aligned(y=y, mean=mean, var=var)
    check_var(var)
    for name, tensor in {"mean": mean, "var": var}.items():
        if not tensor.isfinite().all():
            raise ValueError(f"{name} contains NaN or inf; the step before this one diverged.")
    with torch.no_grad():
        target = Target(likelihood, y.double(), mean.double(), var.double())
        noise, precision = draw(likelihood, target, n_samples, generator)
    return ProductNoise(noise.to(mean.dtype), precision.to(mean.dtype))
