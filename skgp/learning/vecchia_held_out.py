"""What a kernel predicts of held-out observations from their nearest, in data and across gaps."""

import math

import torch
from torch import Tensor

from skgp.data import Data
from skgp.inference.neighbors.search import NeighborSearch
from skgp.inference.vecchia.conditionals import Conditionals
from skgp.kernels.expression import RBF, split_noise, theta_places
from skgp.kernels.scales import robust_std
from skgp.learning.defaults import (
    VECCHIA_BLOCK_SHARE,
    VECCHIA_BLOCKS,
    VECCHIA_HELD_NEIGHBORS,
    VECCHIA_START_ROWS,
)


def noises_of(kernel, data: Data) -> Tensor:
    """Variances (n,) of the noise of the observations under an expression with a WhiteKernel."""
    return data.row_noise(data.X.new_tensor(theta_places(kernel)[2]))


def rows_in_blocks(X: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    """Rows to predict, in blocks (b,), and those outside of all blocks (o,); of X (n, d).

    A block is what is nearest, in standard units, to a row; `order` (n,) is a random one.
    """
    n = len(X)
    spread = X.new_tensor(robust_std(X.cpu().numpy()))
    inverse = 1 / torch.where(spread > 0, spread, 1.0)
    centres = X[order[:VECCHIA_BLOCKS]]
    blocks = NeighborSearch(RBF(inverse.reciprocal().cpu().numpy()), X).query(
        centres, max(1, int(VECCHIA_BLOCK_SHARE * n))
    )
    inside = torch.zeros(n, dtype=torch.bool, device=X.device)
    inside[blocks.reshape(-1)] = True
    rows = order[inside[order]][:VECCHIA_START_ROWS]
    return rows, (~inside).nonzero()[:, 0]


@torch.no_grad()
def held_out_densities(
    kernel, data: Data, rows: Tensor, outside: Tensor, n_neighbors: int = VECCHIA_HELD_NEIGHBORS
) -> Tensor:
    """Log-densities (2 b,), in nats, of rows (b,) given others near them; means over the targets.

    The first half given the nearest of all other observations, the second given the nearest of
    the observations `outside` (o,) of all blocks that the rows lie in.
    """
    signal, X = split_noise(kernel)[0], data.X
    noise = noises_of(kernel, data)
    of_all = NeighborSearch(signal, X).query(X[rows], min(n_neighbors, len(X) - 1), rows)
    beyond = NeighborSearch(signal, X[outside]).query(X[rows], min(n_neighbors, len(outside)))
    found = []
    for near in (of_all, outside[beyond]):
        group = torch.cat([near, rows[:, None]], 1)
        for tile in Conditionals(signal, X, group, noise):
            e, D = tile.contrast(data.y.reshape(len(data), -1)), tile.variance[:, None]
            found.append(-0.5 * ((2 * math.pi * D).log() + e.square() / D).mean(1))
    return torch.cat(found)
