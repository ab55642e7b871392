"""What the other rooms stand on: cores, devices, progress, files, the cache."""
