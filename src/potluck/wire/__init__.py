"""The wire: frames, trees of tensors, keys, tokens and the sockets that carry them.

It moves bytes between machines and knows nothing of training, leases or codecs.
"""
