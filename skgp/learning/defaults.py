"""Constants of the searches for hyper-parameters and of choices, each with what chose it."""

# ---- Choices by held-out data (selection.py)

#: Nats an observation below which a gain is none: .3% of the loss of a fair coin, .69.
LEAST_EFFECT = 2e-3
#: Share of the loss of labels below which a gain is none.
LABEL_SHARE = 0.02

# ---- Evidence of few observations (kernel_choice.py, kernel_family.py)

#: Columns of the group of relevant ones, at most.
MOST_GROUPED = 32
#: Log length scales to begin with of k relevant columns, relative to those of all: the root of k
#: and a bit more; and of the others, at which the kernel is nearly flat.
SHORT, LONG = 0.3, 2.0
#: Of the differences of theta that make the Hessian of the objective.
DIFFERENCE = 1e-3
#: Least curvature of the objective, in nats: that of its priors, about.
LEAST_CURVATURE = 0.1
#: Move of an element of theta that its linearisation is trusted with.
FARTHEST = 1.0

# ---- Searches by neighbours (search.py, classification_hyperparameters.py)

#: Variances of the noise to begin with, relative to that of standardised targets.
NOISE_GRID = (1e-3, 1e-2, 1e-1, 0.5)
#: Noise variance of labels taken for numbers, relative to that of the signal: start and bounds.
LABEL_NOISE, LABEL_NOISE_BOUNDS = 0.2, (1e-4, 1e1)

# ---- Newton's method for the mode (laplace_evidence.py)

MAX_NEWTON, MAX_HALVINGS = 100, 30
#: A step of squared length 1e-10 (in the metric of the Hessian) leaves about 1e-10 of error.
LAST_STEP = 1e-10
