"""Tuned constants of mixtures; none moves a prediction by more than the tolerances stated."""

import torch

TILE_BYTES = 2**22  # of one of the few (n, t) matrices that a tile of t rows needs: in the cache
FEW_ROWS = 200  # training rows up to which all samples are evaluated at once
TOGETHER = 2**19  # covariances of all samples with new rows, up to which they are made at once
MOST_JOINT = 4000  # rows up to which a joint draw factors their covariance
FEATURES, BLOCK = 8000, 250  # of the draws from the prior beyond, and frequencies at once
SEED = 0  # of the pivots, which touch the speed alone

#: Relative residual that products in this precision attain.
SOLVED = {torch.float32: 1e-5, torch.float64: 1e-8}
VARIANCE_TOL = 0.01  # of the noise variance: the most that a variance may exceed the exact one
JITTER = {torch.float32: 1e-5, torch.float64: 1e-8}  # of K_mm, relative to its mean diagonal

# ---- quantiles of mixtures in one dimension
MAX_STEPS = 100  # of Newton's method, which takes five to ten
ELEMENTS = 2**20  # component values held at once
