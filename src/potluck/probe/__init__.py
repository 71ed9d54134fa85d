"""What is measured on real machines: facts about the host, the device's speed, links and collectives."""
