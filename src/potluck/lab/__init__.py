"""A fleet on one Linux box: emulated machines and links. It starts commands there and knows no training."""
