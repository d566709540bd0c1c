"""Tuned constants of inference, each with what chose it."""

import numpy as np
import torch

# ---- sparse posteriors
# Jitter of Kuu relative to its mean diagonal. It bounds ||L^-1||, by which the rounding of kernel
# values is magnified: with 1e-8 searches for q(u) and inducing points stop where they begin.
JITTER = {torch.float64: 1e-6, torch.float32: 1e-4}
SITE_STEP = 0.8  # of natural gradients; prototypes converged in 6 to 14 steps with .7 to .8
LEAST_SITE_BETA = 1e-3  # stands for a smaller beta, with which the sites would be all that counts
ROUNDING_OF_ELBO = 1e-9  # share of the ELBO that rounding may cost a step
LEAST_CALIBRATED_NOISE = 1e-8  # after a square loss: the residuals of a constant are 0
RIDGE_RATIOS = np.logspace(-6, 3, 46)  # noise over prior variance, where the search of it begins
