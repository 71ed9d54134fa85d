"""Measures real machines: the speed of devices, links and collectives."""
