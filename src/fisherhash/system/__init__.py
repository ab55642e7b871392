"""What every other package builds on: the cache folder, cores, devices, progress bars and files.

Nothing here knows about images, codes or models. ``storage`` writes files that are complete or
absent; ``devices`` and the tensor functions of ``storage`` import torch only when they are called.
"""
