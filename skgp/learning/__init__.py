"""What moves hyper-parameters or chooses options: below the models, above inference."""
