"""The network layer: frames, trees of tensors, keys, tokens and the sockets that carry them."""
