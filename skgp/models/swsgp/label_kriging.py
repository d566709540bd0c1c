r"""Label kriging: classification as kriging of labels, with a link learned by leaving them out.

Few numbers are learned beside the kernel, whatever the number of rows, and confidence is earned on
labels that were not seen: t, a, b and d of :mod:`skgp.models.swsgp.label_link` maximise the
likelihood of labels left out one by one. Copies of a row predict each other, which lets the link
trust neighbours too much.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from skgp.kernels.gram import gram_diag
from skgp.models.swsgp.kriging import KrigingModel, merge_rows
from skgp.models.swsgp.label_link import LabelLink
from skgp.training.lbfgs import minimize_lbfgs

__all__ = ["fit_link", "krige_labels", "label_loss", "label_targets"]

_LINK_ROWS = 10_000
_PRIOR_STD = 3.0  # of t and the logs of a, b and d
_NOISE_RATIOS = (3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0)  # of the kernel's variance
_NOISE_ROWS = 2_000


def label_targets(labels: Tensor, n_classes: int, dtype: torch.dtype) -> Tensor:
    """Labels 0 ... C - 1 as columns of -1 and +1: one column for two classes, else one a class."""
    if n_classes == 2:
        return 2 * labels[:, None].to(dtype) - 1
    return 2 * torch.nn.functional.one_hot(labels, n_classes).to(dtype) - 1


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
        model = _with_noise(model, variance, generator)[0]
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


def label_loss(kernel, X: Tensor, labels: Tensor, **options) -> float:
    """How well a kernel kriges labels that are left out, in nats a label; less is better.

    Parameters
    ----------
    kernel, X, labels, **options
        As of `krige_labels`, with noise that is chosen.

    Returns
    -------
    float
        Of some 2000 labels.
    """
    generator = options.pop("generator")
    model = _labelled(kernel, None, X, labels, **options)
    variance = float(gram_diag(kernel, model.X).mean())
    return _with_noise(model, variance, generator)[1]


def _with_noise(
    model: KrigingModel, variance: float, generator: torch.Generator
) -> tuple[KrigingModel, float]:
    """The model with the noise, of a grid, under which labels left out are most likely."""
    seed = generator.initial_seed()  # the same labels for all
    linked = [
        _linked(
            replace(model, noise=variance * ratio), torch.Generator().manual_seed(seed), _NOISE_ROWS
        )
        for ratio in _NOISE_RATIOS
    ]
    return min(linked, key=lambda each: each[1])


def fit_link(
    model: KrigingModel, *, generator: torch.Generator, n_rows: int = _LINK_ROWS
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
    return _linked(model, generator, n_rows)[0]


def _linked(
    model: KrigingModel, generator: torch.Generator, n_rows: int
) -> tuple[KrigingModel, float]:
    """The model with its link, and the mean negative log-probability of the labels left out."""
    row, label, weight = _each_label(model)
    frequency = weight.new_zeros(max(model.targets.shape[1], 2)).index_add_(0, label, weight)
    frequency = (frequency + 1) / (frequency + 1).sum()
    start = _start(model, frequency)
    lapse = 1 / (float(weight.sum()) + 2)
    if len(model.X) < 2:
        return replace(model, link=LabelLink(**start, frequency=frequency, lapse=lapse)), 0.0
    if len(row) > n_rows:
        some = torch.randperm(len(row), generator=generator)[:n_rows].to(row.device)
        row, label, weight = row[some], label[some], weight[some]
    value = label_targets(label, len(frequency), model.X.dtype)
    mean, var = model.leave_out(row, weight.clamp_max(1.0), value)
    mean = mean - model.offset

    def loss(parts: dict[str, Tensor]) -> Tensor:
        link = LabelLink(**parts, frequency=frequency, lapse=lapse)
        log_p = link.log_probabilities(mean, var).gather(1, label[:, None])[:, 0]
        prior = sum(((parts[name] - start[name]) / _PRIOR_STD).square().sum() for name in start)
        return (0.5 * prior - (weight * log_p).sum()) / weight.sum()

    found = minimize_lbfgs(loss, start, max_iter=200, tol=1e-10)
    link = LabelLink(**found.parameters, frequency=frequency, lapse=lapse)
    return replace(model, link=link), found.loss


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
