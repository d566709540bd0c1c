"""Tuned constants of the samplers.

Where no experiment is named, a constant is the convention of the reference named in its module, or
a guard that well-behaved targets do not meet.
"""

# ---- chains
SEGMENT = 25  # iterations between two looks at what the chains have in common
LEAST_DRAWS = 4  # of a chain, below which R-hat and ESS are NaN
LEAST_TAIL = 5  # weights: fewer do not determine the two parameters of a Pareto distribution

# ---- importance sampling: rounds on the posteriors of concrete (n = 1030) and airfoil (n = 1353)
CHUNK = 16  # points of one job: the same for any number of workers
FIRST_SCALE, SCALE = 1.1, 1.05  # of the factors of the first proposals, and of refitted ones
LEAST_SHARE = 0.05  # of a round's other points, below which a component is dropped
POINTS_A_DIRECTION = 5  # effective ones that keep the noise of a refitted covariance harmless
TINY = 1e-300  # variance of points of one place
EDGE = 1e-10  # quasi-random numbers keep this distance from 0 and 1

# ---- Hamiltonian Monte Carlo
JUMPS = 6  # proposed to a chain in an iteration of jumps
MAX_STEPS = 64  # of a path
DIVERGENCE = 50.0  # nats of energy lost on a path: the integrator has left the level set
LEAST_PATHS = 0.2  # share of the iterations that are paths, at least
JUMPS_THAT_MIX = 4.0  # times the share of jumps accepted: what paths need not do
LEAST_WARMUP = 20  # iterations below which the metric stays the first one
SHRINKAGE = 5.0  # draws a dimension that the first approximation counts for in the metric
# Dual averaging: names and values of Hoffman and Gelman (2014), section 3.2.
GAMMA, T0, KAPPA = 0.05, 10.0, 0.75
ACCEPTANCE = 0.8  # that steps are tuned to: of Stan

# ---- Langevin dynamics
ASTRAY = 0.1  # share of a chain's iterations clipped or undone: such a chain is left out
CLIP = 6.0  # times sqrt(p): the longest whitened gradient; that of N(0, I) has length sqrt(p)
PAIR_WARMUP, PAIR = 2, 10  # every so many iterations a second estimate shows the noise
# SGLD, values of Filippone and Engler (2015), section 5.1:
KEPT = 20  # iterations with one realisation of the noise
BATCH = 100  # gradients of which the covariance is taken
FREEZE = 0.002  # noise ratio (7) at which the step is held

# ---- Stein's identity
STEIN_STEPS, STEIN_TOL = 50, 1e-9  # of Newton's method
DRAWS_PER_FUNCTION = 4  # effective draws: a function costs a part in as many of the variance
LEAST_DRAWS_SHARE = 0.5  # that carry the weight; where fewer would, the identities do not fit
