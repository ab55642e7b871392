"""Methods fitted on features, without a network to train."""
