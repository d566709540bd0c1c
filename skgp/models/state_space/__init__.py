"""State-space Gaussian processes: Markov in time, so that n points cost O(n)."""
