"""Constants of kernels, each with what chose it."""

# ---- state-space forms
#: Greatest error of a truncated Fourier series, relative to its variance.
TOLERANCE = 1e-8
#: Terms of a Fourier series at most.
MAX_HARMONICS = 32
#: c of a Gamma mixture's variable, of the least errors for alpha between 0.5 and 5; points of its
#: grid at most; and the least log u, whose square root is then still a normal float.
CENTRE, MAX_GRID, LEAST_LOG = 0.2, 4096, -600.0
#: Entries of a block's matrices for the gaps that are worked on together: they stay in a core's
#: cache through all passes.
TILE_ENTRIES = 2**16
