"""The torch.distributed backend: its public names. It must not import torch before one of them is used."""
