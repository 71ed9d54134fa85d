"""How processes are started and how they end; what they compute is not known here."""
