"""Experiments: grids of runs that resume, and the tables made from them.

The doors are :func:`fisherhash.experiments.reproduce.reproduce` and ``compare`` beside it.
``specs`` has the tables as data; ``planning`` makes cells of them, which ``runner`` runs;
``tuning`` searches hyper-parameters first; ``significance`` and ``comparison`` say who is ahead;
``report`` prints it.
"""
