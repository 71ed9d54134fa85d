"""Trainers of other libraries on Potluck's steps: one file each, which alone imports its library."""
