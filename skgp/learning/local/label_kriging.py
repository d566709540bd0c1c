r"""Label kriging: classification as kriging of labels, with a link learned by leaving them out.

Few numbers are learned beside the kernel, whatever the number of rows, and confidence is earned on
labels that were not seen: t, a, b and d of :mod:`skgp.inference.neighbors.label_link` maximise the
likelihood of labels left out one by one. Copies of a row predict each other, which lets the link
trust neighbours too much.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from skgp.inference.neighbors.kriging import KrigingModel, LabelLink, is_shared, merge_rows
from skgp.kernels.gram import gram_diag
from skgp.learning.selection import choose
from skgp.optim.lbfgs import minimize_lbfgs

__all__ = ["fit_link", "krige_labels", "label_codes", "label_losses", "label_targets"]

_LINK_ROWS = 10_000
_PRIOR_STD = 3.0  # of t and the logs of a, b and d
_NOISE_RATIOS = (3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0)  # of the kernel's variance
_NOISE_START = 0.1
_NOISE_ROWS = 2_000


def label_targets(labels: Tensor, n_classes: int, dtype: torch.dtype) -> Tensor:
    """Labels 0 ... C - 1 as columns of -1 and +1: one column for two classes, else one a class."""
    if n_classes == 2:
        return 2 * labels[:, None].to(dtype) - 1
    return 2 * torch.nn.functional.one_hot(labels, n_classes).to(dtype) - 1


def label_codes(Y: Tensor) -> Tensor:
    """The way back from columns of -1 and +1 to labels 0 ... C - 1."""
    return (Y[:, 0] > 0).long() if Y.shape[1] == 1 else Y.argmax(1)


def krige_labels(
    kernel,
    noise: float | None,
    X: Tensor,
    labels: Tensor,
    *,
    n_classes: int,
    n_neighbors: int,
    generator: torch.Generator,
    weight: Tensor | None = None,
    neighbors: str = "auto",
    n_link_rows: int = _LINK_ROWS,
) -> KrigingModel:
    """Label kriging with a leave-one-out link.

    Parameters
    ----------
    kernel : sklearn kernel expression without noise
    noise : float or None
        Positive; None chooses it, of a coarse grid, by labels left out.
    X : Tensor of shape (n, d)
    labels : Tensor of int64, shape (n,)
        From 0 to ``n_classes - 1``.
    n_classes, n_neighbors : int
    generator : torch.Generator
        Draws the rows of the link where there are more than `n_link_rows`.
    weight : Tensor of shape (n,), optional
        Positive; 2 counts as the row twice.
    neighbors : {"auto", "exact", "faiss"}
    n_link_rows : int

    Returns
    -------
    KrigingModel
    """
    model = _labelled(
        kernel,
        noise,
        X,
        labels,
        n_classes=n_classes,
        n_neighbors=n_neighbors,
        weight=weight,
        neighbors=neighbors,
    )
    variance = float(gram_diag(kernel, model.X).mean())
    if noise is None:
        few = _draw(model, generator, _NOISE_ROWS)
        model = _with_noise(model, variance, few)[0]
    return fit_link(model, generator=generator, n_rows=n_link_rows)


def _labelled(
    kernel,
    noise: float | None,
    X: Tensor,
    labels: Tensor,
    *,
    n_classes: int,
    n_neighbors: int,
    weight: Tensor | None = None,
    neighbors: str = "auto",
) -> KrigingModel:
    """Labels as numbers, not linked yet; noise as given, or any."""
    targets = label_targets(labels, n_classes, X.dtype)
    X, targets, weight = merge_rows(X, targets, weight)
    each = X.new_ones(len(X)) if weight is None else weight
    offset = (each[:, None] * targets).sum(0) / each.sum()
    noise = 1.0 if noise is None else noise
    return KrigingModel(kernel, noise, X, targets, weight, offset, n_neighbors, neighbors=neighbors)


def label_losses(kernel, X: Tensor, labels: Tensor, **options) -> Tensor:
    """How well a kernel kriges labels that are left out; less is better.

    Parameters
    ----------
    kernel, X, labels, **options
        As of `krige_labels`, with noise that is chosen.

    Returns
    -------
    Tensor of shape (p,)
        Negative log-probabilities, in nats, of some 2000 labels or fewer, the same for all kernels;
        each times its weight over their mean.
    """
    generator = options.pop("generator")
    model = _labelled(kernel, None, X, labels, **options)
    variance = float(gram_diag(kernel, model.X).mean())
    some = _draw(model, generator, _NOISE_ROWS)
    return _with_noise(model, variance, some)[1]


@dataclass(frozen=True)
class _LeftOut:
    """Labels to leave out one by one.

    Attributes
    ----------
    row, label : Tensor of int64, shape (p,)
    weight, unit : Tensor of shape (p,)
        Of all equal labels at the row, and of one of them.
    others : tuple of Tensor or None
        The rows nearest to each and their influence; None where there is but one row.
    frequency : Tensor of shape (C,)
        Of the classes.
    lapse : float
        See `LabelLink`.
    """

    row: Tensor
    label: Tensor
    weight: Tensor
    unit: Tensor
    others: tuple[Tensor, Tensor] | None
    frequency: Tensor
    lapse: float


def _draw(model: KrigingModel, generator: torch.Generator, n_rows: int) -> _LeftOut:
    """Labels to leave out: all of them, or `n_rows` at random; the same for equal seeds.

    At a time goes what a single label weighs: 1, or what those of its class weigh at least. Where
    classes have weights none stays that is sure of itself, and of copies of a row all but one do.
    """
    row, label, weight = _each_label(model)
    frequency = weight.new_zeros(max(model.targets.shape[1], 2)).index_add_(0, label, weight)
    frequency = (frequency + 1) / (frequency + 1).sum()
    lapse = 1 / (float(weight.sum()) + 2)
    least = torch.full_like(frequency, math.inf).scatter_reduce(0, label, weight, "amin")
    unit = torch.minimum(weight, least.clamp_min(1.0)[label])
    if len(row) > n_rows:
        generator = torch.Generator().manual_seed(generator.initial_seed())
        some = torch.randperm(len(row), generator=generator)[:n_rows].to(row.device)
        row, label, weight, unit = row[some], label[some], weight[some], unit[some]
    others = None if len(model.X) < 2 else model.others(row, is_shared(weight, unit))
    return _LeftOut(row, label, weight, unit, others, frequency, lapse)


def _with_noise(
    model: KrigingModel, variance: float, labels: _LeftOut
) -> tuple[KrigingModel, Tensor]:
    """The model with the noise, of a grid, under which labels left out are most likely.

    From the middle of the grid downhill, to less noise and to more; more noise is simpler.
    """
    place = _NOISE_RATIOS.index(_NOISE_START)
    fits = [_linked(replace(model, noise=variance * _NOISE_START), labels)]
    for ratios in (_NOISE_RATIOS[:place][::-1], _NOISE_RATIOS[place + 1 :]):
        last = fits[0]
        for ratio in ratios:
            found = _linked(replace(model, noise=variance * ratio), labels)
            if not found[1].mean() < last[1].mean():
                break
            fits.append(found)
            last = found
    fits.sort(key=lambda fit: fit[0].noise, reverse=True)
    return fits[choose([losses for _, losses in fits])]


def fit_link(
    model: KrigingModel,
    *,
    generator: torch.Generator,
    n_rows: int = _LINK_ROWS,
) -> KrigingModel:
    r"""The model with the link under which labels left out are most likely.

    One label is left out at a time: where equal rows were merged the others stay. Beside the
    likelihood, t and the logs of a, b and d are drawn to their start (the class frequencies, 1,
    the noise and :math:`\pi / 12`) by normal priors of standard deviation 3: labels that the link
    separates perfectly still give finite numbers.

    Parameters
    ----------
    model : KrigingModel
        Targets as by `label_targets`, merged or not.
    generator : torch.Generator
    n_rows : int
        Labels that are left out, at random where there are more.

    Returns
    -------
    KrigingModel
        O(n_rows H^3).
    """
    return _linked(model, _draw(model, generator, n_rows))[0]


def _linked(model: KrigingModel, labels: _LeftOut) -> tuple[KrigingModel, Tensor]:
    """The model with its link, and the weighted losses (p,) of the labels left out."""
    frequency, lapse, weight = labels.frequency, labels.lapse, labels.weight
    start = _start(model, frequency)
    if labels.others is None:
        return replace(model, link=LabelLink(**start, frequency=frequency, lapse=lapse)), weight[:0]
    value = label_targets(labels.label, len(frequency), model.X.dtype)
    mean, var = model.leave_out(labels.row, labels.unit, value, labels.others)
    mean = mean - model.offset

    def losses(parts: dict[str, Tensor]) -> Tensor:
        link = LabelLink(**parts, frequency=frequency, lapse=lapse)
        log_p = link.log_probabilities(mean, var).gather(1, labels.label[:, None])[:, 0]
        return -log_p * weight / weight.mean()

    def objective(parts: dict[str, Tensor]) -> Tensor:
        prior = sum(((parts[name] - start[name]) / _PRIOR_STD).square().sum() for name in start)
        return 0.5 * prior / weight.sum() + losses(parts).mean()

    found = minimize_lbfgs(objective, start, max_iter=200, tol=1e-10).parameters
    link = LabelLink(**found, frequency=frequency, lapse=lapse)
    return replace(model, link=link), losses(found)


def _each_label(model: KrigingModel) -> tuple[Tensor, Tensor, Tensor]:
    """Row, label and weight of every label that was seen; equal ones at a row count as one."""
    share = (model.targets + 1) / 2
    if share.shape[1] == 1:
        share = torch.cat([1 - share, share], 1)
    counts = share if model.weight is None else share * model.weight[:, None]
    row, label = (share > 1e-9).nonzero(as_tuple=True)
    return row, label, counts[row, label]


def _start(model: KrigingModel, frequency: Tensor) -> dict[str, Tensor]:
    """t and the logs of a, b and d as the simple cases of the module's docstring have them."""
    intercept = frequency.log()
    if len(frequency) == 2:
        intercept = torch.special.ndtri(frequency[1:])
    scales = frequency.new_tensor([1.0, max(model.noise, 0.01), math.pi / 12])
    return {"intercept": intercept, "log_scales": scales.log()}
