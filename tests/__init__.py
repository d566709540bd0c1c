"""The tests mirror skgp/; reference/ holds dense NumPy oracles, contracts/ inherited suites."""
