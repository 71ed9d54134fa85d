"""What torch imports and calls at its own import, by the entry point `torch.backends`; owns that it never fails.

torch refuses to be imported where an entry point cannot be loaded. So this is a module of its own, which lies among
the installed packages even where potluck itself lies in a checkout (build_backend.py). When the checkout has moved,
torch works, with a warning that the backend is not there.
"""


def watch() -> None:
    """Make the backend known to torch, or warn that it is not."""
    try:
        from potluck.dist.registration import watch as watch_for_torch

        watch_for_torch()
    except Exception as error:
        import warnings

        warnings.warn(
            f"torch has no backend 'potluck': {type(error).__name__}: {error}. If its folder has moved, install it "
            "again from there (pip install -e .), or remove it (pip uninstall potluck)",
            RuntimeWarning,
            stacklevel=2,
        )
