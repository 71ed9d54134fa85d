"""Frozen data that crosses between the parts; owns no behaviour beyond checking itself. Knows no torch."""
