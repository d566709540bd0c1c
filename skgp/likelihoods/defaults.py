"""Tuned constants of the likelihoods, each with what chose it."""

# ---- product sampling and its envelopes: the acceptance of 77 to 95% was measured with these
PROPOSALS_HELD = 2**22  # at once; with the dozen temporaries of a round: 400 MB
MAX_CHORDS = 256  # a side
MAX_SEARCH = 100  # steps of a search; validity does not hang on its success
FALL = (0.8, 1.25)  # of log-density from the mode to the outer tangent points
REACH, RISE = 1.5, 0.03  # of the middle tangent over this distance
FLAT = 1e-8  # change of log-density over a piece below which it counts as uniform

# ---- log-expectations
SMOOTHING = 1e-4  # nu of smooth-bMC, added to the mean of the densities: the paper's
