"""Other starts of a search for the hyper-parameters of one kernel of a series.

From a length scale far above that of the data a search ends where the function is noise. The grid
of :mod:`skgp.learning.starts` is looked at on few rows, once spread evenly and once in a stretch of
consecutive ones; all rows say which of these starts is worth a search.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from skgp.data import Data
from skgp.inference.markov.series import Series
from skgp.kernels.sde_expression import check_one_input
from skgp.learning.defaults import SERIES_START_ROWS
from skgp.learning.latent_starts import latent_start
from skgp.learning.sparse.evidence import white_kernel
from skgp.learning.starts import likeliest_start
from skgp.likelihoods import Likelihood


def likeliest_starts(
    kernel: Any, series: Series, likelihood: Likelihood
) -> Iterator[tuple[Any, Tensor]]:
    """Kernels with parameters (p,) of the likelihood; none where no length scale moves."""
    start, size = likelihood.initial(series.y).cpu(), SERIES_START_ROWS  # a place of a search
    few = len(series.y) <= 2 * size
    for some in [series] if few else [series.thinned(size), series.stretches(size, size)]:
        x = some.at_rows(some.times)
        offset = None if some.log_exposure is None else some.log_exposure[:, None]
        data = Data(x[:, None], some.y, some.weight, offset=offset).to("cpu")
        if not likelihood.is_gaussian:
            signal = latent_start(kernel, data, likelihood)
            if signal is not None:
                yield signal, start
            continue
        found = likeliest_start(kernel + white_kernel(likelihood, start), data)
        if found is not None:
            whole = found[0]
            yield whole.k1, start.new_tensor([whole.k2.noise_level]).log()


def column_starts(kernels: Sequence[Any], data: Data, likelihood: Likelihood) -> list:
    """Kernels, one a column of X (n, c), each the likeliest where its column alone is seen."""
    found = []
    for kernel, x in zip(kernels, data.X.mT, strict=True):
        width = 1 + (check_one_input(kernel) or 0)  # what ActiveDims selects is there, too
        column = replace(data, X=x[:, None].expand(-1, width))
        found.append(latent_start(kernel, column, likelihood) or kernel)
    return found
