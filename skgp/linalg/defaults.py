"""Tuned constants of the solvers."""

import torch

#: Relative residual at which a row of ULISSE has converged: what products in this precision attain.
CONVERGED = {torch.float32: 1e-5, torch.float64: 1e-10}
