"""Direct loss minimisation: sparse Gaussian processes trained on the loss they are judged by."""
