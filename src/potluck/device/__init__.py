"""What computes on this machine: the one place that knows CPUs, CUDA, MPS and the paced device apart.

It must not know the network, the codecs or the training loop; they see a `Device` and never ask which.
"""

from potluck.device.base import Device, Mark, Memory
from potluck.device.pick import Factory, pick, pick_for_rank, register

__all__ = ["Device", "Factory", "Mark", "Memory", "pick", "pick_for_rank", "register"]
