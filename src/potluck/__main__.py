"""`python -m potluck` runs the command `potluck`."""

from potluck.cli import main

if __name__ == "__main__":
    main()
