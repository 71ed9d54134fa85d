"""The devices that compute: CPU, CUDA, MPS and the paced device. Other code uses `Device` without asking which."""

from potluck.device.base import Device, Mark, Memory
from potluck.device.pick import Factory, pick, pick_for_rank

__all__ = ["Device", "Factory", "Mark", "Memory", "pick", "pick_for_rank"]
