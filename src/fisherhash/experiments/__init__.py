"""Experiments: grids of runs that resume, and the tables made from them."""
