"""Other starts of a search for the hyper-parameters of one kernel of a series.

From a length scale far above that of the data a search ends where the function is noise. The grid
of :mod:`skgp.learning.starts` is looked at on few rows, once spread evenly and once in a stretch of
consecutive ones; all rows say which of these starts is worth a search.
"""

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from skgp.data import Data
from skgp.inference.markov.series import Series
from skgp.learning.defaults import LEAST_EFFECT, SERIES_START_ROWS
from skgp.learning.markov.search import Search
from skgp.learning.sparse.start import white_kernel
from skgp.learning.starts import likeliest_start
from skgp.likelihoods import Likelihood

__all__ = ["from_likeliest_start", "likeliest_starts"]


def from_likeliest_start(
    found: Search,
    starts: Iterator[tuple[Any, Tensor]],
    series: Series,
    value: Callable[[Any, Tensor], float],
    climb: Callable[[Any, Tensor], Search],
) -> Search:
    """The search found, or one by `climb` from a start that is likelier than where that ended.

    `value` is the evidence of all rows at a start, in nats.
    """
    for start in starts:
        if value(*start) > found.value + LEAST_EFFECT * series.total:
            found = climb(*start)
    return found


def likeliest_starts(
    kernel: Any, series: Series, likelihood: Likelihood
) -> Iterator[tuple[Any, Tensor]]:
    """Kernels with parameters (1,) of the Gaussian likelihood; none where no length scale moves."""
    (log_noise,) = likelihood.initial(series.y).cpu()  # as places of a search
    white, size = white_kernel(likelihood, log_noise), SERIES_START_ROWS
    few = len(series.y) <= 2 * size
    for some in [series] if few else [series.thinned(size), series.stretches(size, size)]:
        x = some.times if some.index is None else some.times[some.index]
        found = likeliest_start(kernel + white, Data(x[:, None], some.y, some.weight).to("cpu"))
        if found is not None:
            whole = found[0]
            yield whole.k1, log_noise.new_tensor([whole.k2.noise_level]).log()
