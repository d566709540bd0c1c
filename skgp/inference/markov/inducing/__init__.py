"""S2VGP: states at inducing times decide the whole process."""
