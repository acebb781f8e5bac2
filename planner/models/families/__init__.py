"""Model families, one a file: each turns dimensions into a `TrainingTask` of abstract parameters."""
