"""Posteriors of processes that are Markov in time, so that n points cost O(n)."""
