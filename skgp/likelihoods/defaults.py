"""Constants of the likelihoods: orders and widths of quadrature rules, and sizes of chunks.

The tests of each likelihood pin the errors of its rules, against adaptive integration.
"""

# ---- quadrature
NARROW = 0.3  # standard deviations up to this multiple of the scale are left to Gauss-Hermite
N_WIDE = 80
WIDE_REACH = 6.5  # of the wide rule, in standard deviations
QUADRATURE_CHUNK = 512  # rows held with all their nodes: temporaries of 0.3 MB stay in the cache

# ---- adaptive
N_POINTS = 56
ADAPTIVE_DROP = 20.0  # nats below the peak where the rule ends: 1e-10 of the integral is left out
TAIL_DROP = 30.0  # the same for rules that serve probabilities
N_REACH_STEPS = 4
MAX_SKEW = 0.9  # tanh of the shift of the sinh map, where its ends allow it
MIN_BEND = 0.1  # of the sinh map: below, sinh(b u) / b would cancel in single precision
STRAIGHT = 0.3  # bend up to which the integrand is nearly normal, and half of the nodes will do
MODE_MAX_NEWTON = 30
MODE_TOLERANCE = 0.05  # of a Newton step, in standard deviations: the mode only places nodes
ROWS_PLACED = 8192  # rows placed at once
ADAPTIVE_CHUNK = 256  # rows held with all nodes: temporaries of 0.1 MB, kept in the cache

# ---- bernoulli
SIGMOID_SCALE = 3.0  # of the sigmoids' bends, in f
N_SIGMOID = 64
# Probits that a logistic sigmoid is a mixture of, at halves of their scales: errors of 1e-11 in its
# expected logarithm, and of .1% in derivatives of 1e-13.
N_PROBITS, PROBITS_REACH = 20, (0.18, 3.5)
SIGMOID_CHUNK = 2048

# ---- laplace (closed_form.py)
MIN_STD = 1e-12  # of the latent value, relative to the scale: below, its square would overflow
QUANTILE_MAX_NEWTON = 60

# ---- poisson
SOFTPLUS_SCALE = 3.0  # of the bend of softplus, in f
NARROW_COUNT = 0.35  # variance of f, in log-rates and relative to that of log Gamma(y + 1)
N_TIMES = 64  # nodes for Gamma(y + 1)
COUNT_CHUNK = 256
MAX_BISECTIONS = 200  # of doubles: 53 for the digits and some for the magnitude
MAX_EXACT_RATE = 1e15  # beyond, Poisson draws overflow integers, and a normal draw is as good

# ---- student_t
# Of degrees of freedom a priori. Against rates of 0, .1 (Juarez and Steel, 2010) and .5: nats of
# new observations (30 to 400 rows, one and three columns, noise of 2.5, 4, 8 and many degrees).
DF_SHAPE, DF_RATE = 2.0, 0.25
STUDENT_T_SCALE = 1.2  # of log(1 + X^2), in X
STUDENT_T_DROP = 20.0  # nats below the peak where the window ends
N_ROOT_STEPS = 6
FEW_NODES, MANY_NODES = 40, 96  # nodes
HARD = 24.0  # ratio of window to narrowest peak above which a row takes many nodes
N_MIXTURE = 96
STUDENT_T_CHUNK = 256
STUDENT_T_MAX_NEWTON = 60

# ---- product sampling and its envelopes: the acceptance of 77 to 95% was measured with these
PROPOSALS_HELD = 2**22  # at once; with the dozen temporaries of a round: 400 MB
MAX_CHORDS = 256  # a side
MAX_SEARCH = 100  # steps of a search; validity does not hang on its success
FALL = (0.8, 1.25)  # of log-density from the mode to the outer tangent points
REACH, RISE = 1.5, 0.03  # of the middle tangent over this distance
FLAT = 1e-8  # change of log-density over a piece below which it counts as uniform

# ---- log-expectations
SMOOTHING = 1e-4  # nu of smooth-bMC, added to the mean of the densities: the paper's
