"""What is measured: collectives and links. It must not know how results are shown."""
