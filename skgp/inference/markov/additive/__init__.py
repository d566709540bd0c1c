"""Sums of state-space processes, one a column: mean field, joint, in bins or in rows."""
