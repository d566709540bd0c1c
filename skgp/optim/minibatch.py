"""Indices of minibatches, at a cost that does not depend on the size of the data."""

import torch
from torch import Tensor


def sample_without_replacement(n: int, size: int, *, generator: torch.Generator) -> Tensor:
    r"""Draw a uniform subset of ``range(n)``.

    Draws with replacement and draws again, as often as needed, as many indices as were
    duplicates. The result is the set of the first ``size`` distinct values of one i.i.d. uniform
    sequence, so all subsets are equally likely. Each round repeats at most one third of its draws
    in expectation: O(size) time and memory, whatever n. From ``size > n / 3`` on, a permutation
    of ``range(n)`` is of that order too and is taken instead.

    Parameters
    ----------
    n : int
        Size of the population.
    size : int
        Number of distinct indices, from 0 to n.
    generator : torch.Generator

    Returns
    -------
    Tensor of shape (size,)
        Distinct int64 indices in increasing order (which reads a memory map forwards), on the
        device of the generator.

    Raises
    ------
    ValueError
        If ``size`` is negative or greater than n.

    Examples
    --------
    >>> import torch
    >>> sample_without_replacement(10, 10, generator=torch.Generator().manual_seed(0))
    tensor([0, 1, 2, 3, 4, 5, 6, 7, 8, 9])
    """
    if not 0 <= size <= n:
        raise ValueError(f"size must lie between 0 and n={n}, got {size}: lower the batch size.")
    if size > n // 3:
        order = torch.randperm(n, generator=generator, device=generator.device)
        return order[:size].sort().values
    chosen = torch.empty(0, dtype=torch.int64, device=generator.device)
    while (missing := size - len(chosen)) > 0:
        drawn = torch.randint(n, (missing,), generator=generator, device=generator.device)
        chosen = torch.cat([chosen, drawn]).unique()
    return chosen
