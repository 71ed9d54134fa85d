"""The facts of this machine, looked up for the doctor's checks."""
