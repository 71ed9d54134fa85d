"""`python -m potluck` is `potluck`. It owns nothing."""

from potluck.cli import main

if __name__ == "__main__":
    main()
