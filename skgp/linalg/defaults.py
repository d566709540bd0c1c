"""Tuned constants of the solvers."""

import torch

#: Relative residual at which a row of ULISSE has converged: what products in this precision attain.
CONVERGED = {torch.float32: 1e-5, torch.float64: 1e-10}

#: Numbers of a right-hand side beyond which a sparse triangular system is solved level by level. Of
#: 20 entries a row, one column: 3000 rows .8 ms, row by row .07; 10,000 rows and 20 columns 4 and
#: 5 ms; 60,000 rows and 20 columns 23 and 74.
LEVELLED_NUMBERS = 200_000

# ---- factors (cholesky.py)
#: Rows of a matrix on the CPU, and columns of a triangular system, from which SciPy's LAPACK and
#: BLAS take less time than torch's: float64 on one core of an EPYC, factors .94 of 300 rows and .75
#: of 1000, inverses .93 and .82, systems of 1000 columns .5 of 100 rows and .8 of 1000.
LAPACK_ROWS, BLAS_COLUMNS = 256, 64
# Of a matrix that cannot be factored: rows whose eigenvalues are computed, and the ratio of
# variances that leaves no digits.
EIGENVALUE_ROWS, LARGE_RATIO = 200, 1e10

# ---- memory (runtime.py)
# Of what is free, for a fit: the rest is for what it does not count.
MEMORY_SHARE = 0.7
# Of the budget, for a tile: some are nested, and each has temporaries.
TILE_SHARE = 0.125
MEMORY_TICK = 0.1  # seconds for which what is free stays as it was read, in 0.05 to 0.2 ms
MEMORY_UNKNOWN = 8e9  # bytes, where the system tells nothing
# Bytes of a tile whose making costs more than its way to memory and back.
LARGE_TILE = 2.5e8

# Columns of a pivoted Cholesky block: of K, of what is explained, the difference and what is new.
BLOCK_COPIES = 4

# Small arrays that stay on a device: a kernel of a few parts has one a hyper-parameter.
KEPT_CONSTANTS = 256

# ---- threads (runtime.py)
# Flops, some 40 ms in one thread: ten time slices.
LARGE_FLOPS = 1e9
# Flops that an entry of a Gram matrix is worth: an exponential and a few passes over memory.
ENTRY = 100

# ---- small matrices (small_matrices.py)
# Inner dimensions up to here are unrolled, at equal results.
UNROLLED = 6
# Of a balance; one serves states of different units.
SWEEPS = 3
# Digits that LU may lose to rows of different units, in bits.
LARGE_ENTRY = 2.0**20
