"""From labelled images to a model: settings, the one loop, checkpoints, measuring."""
