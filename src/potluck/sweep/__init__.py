"""Sweeps: many trials of one script on unequal machines, scheduled by Ray Tune or Dask."""
