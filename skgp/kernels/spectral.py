r"""Random Fourier features of a kernel expression.

.. math:: k(x, z) = \sum_t a_t\, E_{w \sim p_t}[\cos(w^\top (x - z))]
          \approx \phi(x)^\top \phi(z), \qquad
          \phi(x) = \left(\sqrt{a_t / N_t}\,[\cos(w_k^\top x), \sin(w_k^\top x)]\right)_k

with t the terms of the expanded expression, a_t their variances and N_t the number of frequencies
given to each. Frequencies come in blocks that are regenerated from (seed, block) whenever they are
needed, so that their number is not limited by memory.
"""

import copy
from collections import OrderedDict
from typing import Any

import numpy as np
import torch
from sklearn.gaussian_process.kernels import Kernel
from torch import Tensor

from skgp.linalg.runtime import constant, free_memory

from .defaults import CACHE_BYTES, DEVICE_SHARE, LARGEST_PHASE
from .expression import Binder, check_kernel
from .leaves import LEAVES, Draws
from .spectra import GAUSSIAN_ROWS, Pairs, Term, expand, fill_pairs


class FourierFeatures:
    """Random Fourier features of a stationary kernel expression, in blocks from seeds.

    Parameters
    ----------
    kernel : Kernel
        Expression without WhiteKernel. Its own hyper-parameters decide how the frequencies are
        shared among its terms, in proportion to their variances, and are the default theta.
    n_features : int
        m, even: two features a frequency. Features 2k and 2k + 1 are the cosine and the sine of
        the same frequency.
    n_inputs : int
        Columns d of X.
    kind : {"orthogonal", "iid", "hadamard"}
        How the directions of the frequencies are drawn (:mod:`skgp.kernels.spectra`). "orthogonal"
        has the smallest error; "hadamard" is close to it and cheaper to draw from d of about 100.
    seed : int
        Key of the counter-based generator, 0 <= seed < 2**64.
    block_size : int, default=1000
        Frequencies a block; at least one for each term of the expression.
    origin : array-like of shape (d,), optional
        From which X is measured; 0 by default. Near the data, no digits are lost.

    Attributes
    ----------
    n_features, n_inputs, kind, seed, block_size
        As given.
    n_blocks : int
    block_features : int
        Features of a block; the last may have fewer.
    n_frequencies : tuple of int
        N_t, the frequencies of each term over all blocks.

    Raises
    ------
    ValueError
        If a part of the kernel has no spectral density or a parameter is out of range.
    TypeError
        If a part of the kernel is not supported.

    Notes
    -----
    Nothing of size m d is stored: a block is a function of (seed, block) alone, at a cost of
    O(block_size d) for "iid", times d for "orthogonal" and times log d for "hadamard". The blocks
    used last are kept, up to 16 MiB; on another device than the CPU up to a quarter of the memory
    free at first, where a block is moved there once.

    Values and gradients hold for every theta. Frequencies follow theta smoothly (length scales,
    periods, alpha); the harmonics of ExpSineSquared instead keep the choice made under the kernel's
    own length scale and change weight, so rebuild the features when that length scale has moved
    far.

    A phase w'x loses eps ``abs(w'x)``: give an origin near the data. Rows whose phases exceed 1e8
    have no digits left that two computations would share, and count as if they lay there.

    Examples
    --------
    >>> import torch
    >>> from sklearn.gaussian_process.kernels import RBF
    >>> phi = FourierFeatures(2.0 * RBF(), 1000, 1, seed=0)
    >>> X = torch.zeros(1, 1, dtype=torch.float64)
    >>> (phi.all_features(X) @ phi.all_features(X).T).item()  # the variance is exact
    2.0...
    """

    def __init__(
        self,
        kernel: Kernel,
        n_features: int,
        n_inputs: int,
        *,
        kind: str = "orthogonal",
        seed: int,
        block_size: int = 1000,
        origin=None,
    ):
        check_kernel(kernel)
        _check_integers(n_features, n_inputs, seed, block_size)
        if kind not in GAUSSIAN_ROWS:
            raise ValueError(f"kind must be one of {sorted(GAUSSIAN_ROWS)}, got {kind!r}.")
        self.kernel = copy.deepcopy(kernel)  # later changes by the caller must not reach it
        self.n_features = int(n_features)
        self.n_inputs = int(n_inputs)
        self.kind = kind
        self.origin = None if origin is None else torch.as_tensor(origin).cpu().double().numpy()
        self.seed = int(seed)
        self.block_size = min(int(block_size), self.n_features // 2)
        self.n_blocks = -(-(self.n_features // 2) // self.block_size)
        self.block_features = 2 * self.block_size
        self._clear()
        self._shares = self._term_shares()
        last = self._block_counts(self.n_blocks - 1)
        full = self._block_counts(0)
        self.n_frequencies = tuple(
            (self.n_blocks - 1) * a + b for a, b in zip(full, last, strict=True)
        )

    # Layout ---------------------------------------------------------------------------------

    def block_slice(self, block: int) -> slice:
        """Columns of a block among all m features."""
        self._check_block(block)
        start = block * self.block_features
        return slice(start, min(start + self.block_features, self.n_features))

    def _check_block(self, block: int) -> None:
        if not 0 <= block < self.n_blocks:
            raise ValueError(f"block must be in 0..{self.n_blocks - 1}, got {block}.")

    def _clear(self) -> None:
        """Forget what only saves time."""
        self._cache: OrderedDict[tuple, list[list[Draws]]] = OrderedDict()
        self._budgets: dict[torch.device, float] = {torch.device("cpu"): CACHE_BYTES}
        self._bind = Binder(self.kernel)
        self._own_terms: dict[torch.device | None, list[Term]] = {}
        self._counts: dict[bool, list[int]] = {}

    def _terms(self, theta: Tensor | None, device: torch.device | None) -> list[Term]:
        if theta is None and device in self._own_terms:
            return self._own_terms[device]
        node = self._bind(theta, dtype=torch.float64, device=device)
        terms = expand(node, tuple(range(self.n_inputs)))
        if theta is None:  # each block asks for them
            self._own_terms[device] = terms
        return terms

    def _term_shares(self) -> np.ndarray:
        """Fraction of the frequencies for each term; 0 where one a block is all it needs.

        The error of term t is about a_t / sqrt(N_t); the sum of squares is least for N_t
        proportional to a_t.
        """
        terms = self._terms(None, None)
        if self.block_size < len(terms):
            raise ValueError(
                f"the kernel expands to {len(terms)} terms and needs as many frequencies a block, "
                f"got {self.block_size}; raise n_features to {2 * len(terms)} or more and "
                f"block_size to {len(terms)} or more."
            )
        shares = np.array([0.0 if t.is_exact() else float(t.variance) for t in terms])
        if not shares.any():
            shares[0] = 1.0  # exact terms alone: repeat the first
        return shares / shares.sum()

    def _block_counts(self, block: int) -> list[int]:
        """Frequencies of each term in a block."""
        is_last = block == self.n_blocks - 1
        if is_last not in self._counts:
            self._counts[is_last] = self._counted(block)
        return self._counts[is_last]

    def _counted(self, block: int) -> list[int]:
        """Frequencies of each term in a block: one each, the rest by shares."""
        columns = self.block_slice(block)
        size = (columns.stop - columns.start) // 2
        if size < len(self._shares):  # a short last block serves the largest terms
            counts = np.zeros(len(self._shares), dtype=int)
            counts[np.argsort(-self._shares, kind="stable")[:size]] = 1
            return counts.tolist()
        ideal = self._shares * size
        counts = np.maximum(np.floor(ideal).astype(int), 1)
        while counts.sum() > size:  # the ones given to small terms came on top
            counts[np.argmax(np.where(counts > 1, counts - ideal, -np.inf))] -= 1
        while counts.sum() < size:
            counts[np.argmax(ideal - counts)] += 1
        return counts.tolist()

    # Frequencies ----------------------------------------------------------------------------

    def frequencies(
        self, block: int, theta: Tensor | None = None, device: torch.device | None = None
    ) -> tuple[Tensor, Tensor]:
        """Frequencies of a block and the amplitudes of their features.

        Parameters
        ----------
        block : int
        theta : Tensor of shape (kernel.n_dims,), optional
            Gradients flow to it.
        device : torch.device, optional

        Returns
        -------
        W : Tensor of shape (b, d), float64
            Radians per unit of X.
        amplitude : Tensor of shape (b,), float64
            sqrt(a_t / N_t) of each frequency.
        """
        draws, counts = self._draws(block, device), self._block_counts(block)
        terms = self._terms(theta, device)
        parts = [
            self._term_frequencies(term, raws, count, total, device)
            for term, raws, count, total in zip(
                terms, draws, counts, self.n_frequencies, strict=True
            )
        ]
        W = parts[0][0] if len(parts) == 1 else torch.cat([part[0] for part in parts])
        return W, torch.cat([part[1] for part in parts]).sqrt()

    def _term_frequencies(
        self, term: Term, raws: list[Draws], count: int, total: int, device: torch.device | None
    ) -> tuple[Tensor, Tensor]:
        """Return W (count, d) of a term and the variance (count,) that each frequency carries."""
        W: Tensor | None = None
        variance = torch.full((count,), 1 / total, dtype=torch.float64, device=device)
        variance = variance * term.variance
        for factor, raw in zip(term.factors, raws, strict=True):
            kernel, params, _ = factor.node
            added, weight = LEAVES[type(kernel)].frequencies(kernel, params, raw)
            added = _spread(added, factor.dims, self.n_inputs)
            W = added if W is None else W + added  # frequencies of a product add
            variance = variance if weight is None else variance * weight
        return (variance.new_zeros(count, self.n_inputs) if W is None else W), variance

    def _draws(self, block: int, device: torch.device | None = None) -> list[list[Draws]]:
        """Return the randomness of a block, one tuple of tensors a factor of each term."""
        self._check_block(block)
        device = torch.device("cpu") if device is None else device
        if (block, device) in self._cache:
            self._cache.move_to_end((block, device))
            return self._cache[block, device]
        draws = self._drawn(block)
        if device.type != "cpu":
            draws = [[tuple(r.to(device) for r in raw) for raw in term] for term in draws]
            self._budgets.setdefault(device, DEVICE_SHARE * free_memory(device))
        size = sum(r.numel() * r.element_size() for term in draws for raw in term for r in raw)
        if size <= self._budgets[device]:
            self._cache[block, device] = draws
        while len(self._cache) * size > self._budgets[device]:
            self._cache.popitem(last=False)
        return draws

    def _drawn(self, block: int) -> list[list[Draws]]:
        """The draws of a block, by term and factor: a function of (seed, block) alone."""
        # Philox is a counter-based generator: the key alone decides the stream.
        key = np.array([self.seed, block], dtype=np.uint64)
        rng = np.random.Generator(np.random.Philox(key=key))
        rows = GAUSSIAN_ROWS[self.kind]
        terms, counts = self._terms(None, None), self._block_counts(block)
        return [
            [
                LEAVES[type(f.node.kernel)].draw(*f.node[:2], count, len(f.dims), rows, rng)
                for f in term.factors
            ]
            for term, count in zip(terms, counts, strict=True)
        ]

    def __getstate__(self) -> dict[str, Any]:
        left = ("_cache", "_budgets", "_bind", "_own_terms", "_counts")
        return {name: value for name, value in self.__dict__.items() if name not in left}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._clear()

    # Features -------------------------------------------------------------------------------

    def features(self, X: Tensor, block: int, theta: Tensor | None = None) -> Tensor:
        """Features of one block.

        Parameters
        ----------
        X : Tensor of shape (n, d)
            float32 or float64.
        block : int
        theta : Tensor of shape (kernel.n_dims,), optional
            Logarithms of the free hyper-parameters; gradients flow to it. None takes the
            kernel's own values.

        Returns
        -------
        Tensor of shape (n, b)
            In the dtype of X. Over all blocks, the sum of Phi Phi' approximates K, so that
            weights have the prior N(0, I).

        Raises
        ------
        ValueError
            If X has another number of columns.

        Notes
        -----
        Cost O(n b d) in a matrix product, and a cosine or sine for each element.
        """
        if X.ndim != 2 or X.shape[1] != self.n_inputs or not X.is_floating_point():
            raise ValueError(
                f"X must be a floating tensor of shape (n, {self.n_inputs}), "
                f"got shape {tuple(X.shape)} and dtype {X.dtype}."
            )
        W, amplitude = self.frequencies(block, theta, X.device)
        if self.origin is not None:
            X = X - constant(self.origin, dtype=torch.float64, device=X.device).to(X.dtype)
        X = within_reach(X, W)
        W, amplitude = W.to(X.dtype), amplitude.to(X.dtype)
        if torch.is_grad_enabled() and any(t.requires_grad for t in (X, W, amplitude)):
            return Pairs.apply(X, W, amplitude)
        with torch.no_grad():
            return fill_pairs(X, W, amplitude, X.new_empty(len(X), 2 * len(W)))

    def all_features(self, X: Tensor, theta: Tensor | None = None) -> Tensor:
        """All features, shape (n, m), for m that fits in memory."""
        return torch.cat([self.features(X, b, theta) for b in range(self.n_blocks)], 1)


def _check_integers(n_features: int, n_inputs: int, seed: int, block_size: int) -> None:
    if n_features < 2 or n_features % 2:
        raise ValueError(
            f"n_features must be even and >= 2, a cosine and a sine a frequency, got {n_features}."
        )
    for name, value in (("n_inputs", n_inputs), ("block_size", block_size)):
        if value < 1:
            raise ValueError(f"{name} must be >= 1, got {value}.")
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed must be in 0..2**64 - 1, got {seed}.")


def _spread(W: Tensor, dims: tuple[int, ...], d: int) -> Tensor:
    """Move the columns of W (b, len(dims)) to ``dims`` among d columns, zeros elsewhere."""
    if dims == tuple(range(d)):
        return W
    spread = W.new_zeros(W.shape[0], d)
    return spread.index_copy(1, torch.tensor(dims, device=W.device), W)


# Phases -------------------------------------------------------------------------------------------


def within_reach(X: Tensor, W: Tensor) -> Tensor:
    """Rows of X (n, d), where phases under W (b, d) are too large moved nearer."""
    # The mean of the roots stands for heavy tails and for columns that few frequencies see.
    typical = W.detach().abs().sqrt().mean(0).square().to(X)
    phase = X.detach().abs() @ typical
    return X * (LARGEST_PHASE / phase).clamp_max_(1.0)[:, None]
