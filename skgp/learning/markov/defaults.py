"""Constants of the search of hyper-parameters in state space, each with what chose it."""

import numpy as np

#: Nats an observation to which the ELBO of a series, or of an additive model, is found.
ELBO_TOL, ADDITIVE_TOL = 1e-8, 1e-6
#: Tolerance of an ELBO, of that of the search that asks for it.
INNER = 0.1
#: Between inducing locations that are learned, of their span.
LEAST_GAP = 1e-6

# ---- the choice of a kernel: series drawn from kernels of nu 1/2 to infinity, new rows predicted
#: Rows on which the length scale is found, and on which kernels compete.
SCALE_ROWS, CHOICE_ROWS = 2000, 20_000
#: Stretches of consecutive rows that these are in, if not spread evenly.
N_STRETCHES = 10
#: Iterations of a competitor, which ends with gains of so many nats in all, or of few rows with so
#: much an observation; and the tolerance where it starts.
CHOICE_ITER, CHOICE_NATS, CHOICE_TOL, START_TOL = 25, 0.01, 1e-5, 1e-3
#: That a kernel besides the first needs, of a curvature of at most 1: a choice by 60 numbers
#: predicts better than the first kernel, and one by 320 labels does not yet.
ROWS_A_PARAMETER = 25
#: Of a short gap: below, the rows look like white noise whatever the scale.
LEAST_SCALE = 0.1
#: Multiples of the length scale that a start tries.
SCALES = 10.0 ** np.array([0.75, 0.0, -0.75, -1.5, -2.25, -3.0])

# ---- additive models
#: Rows up to which exact inference in their own space is thought of: the time of an iteration in
#: bins, with columns of numbers.
FEW_ROWS = 3000
#: Beyond which log-odds and log-rates of standardised data do not lie.
FAR = 10.0
