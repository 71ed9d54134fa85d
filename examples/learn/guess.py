"""Compares a guess with a measured figure. The lessons in docs/learn/ use it.

python examples/learn/guess.py GUESS FILE PATH          a figure out of a JSON file (`-`: standard input)
python examples/learn/guess.py GUESS FILE PATH / PATH   one figure divided by another

PATH names the way to the figure: `rows strategy=ddp step_s` is the entry `rows`, in that list the item whose
`strategy` is `ddp`, and of that item `step_s`.
"""

import json
import sys
from typing import Any


def verdict(guess: float, measured: float, unit: str = "") -> str:
    """How far off a guess is: in percent, or as a factor where it is off by more than 2."""
    said = f"you said {short(guess)}{unit}, it is {short(measured)}{unit}"
    if guess <= 0 or measured <= 0:
        return f"{said}: off by {short(abs(guess - measured))}{unit}"
    ratio, direction = guess / measured, "high" if guess > measured else "low"
    if max(ratio, 1 / ratio) > 2:
        return f"{said}: {max(ratio, 1 / ratio):.1f} times too {direction}"
    percent = abs(ratio - 1) * 100
    return f"{said}: right" if percent < 1 else f"{said}: {percent:.0f} % too {direction}"


def short(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def pick(found: Any, path: list[str]) -> Any:
    for part in path:
        key, is_item, value = part.partition("=")
        if is_item:
            found = next(item for item in found if str(item[key]) == value)
        else:
            found = found[int(part) if isinstance(found, list) else part]
    return found


if __name__ == "__main__":
    guess, name, *path = sys.argv[1:]
    with sys.stdin if name == "-" else open(name, encoding="utf-8") as file:
        text = file.read()
    if not text.strip():
        sys.exit(f"{name} is empty: the command that should write it failed, or was stopped")
    found = json.loads(text)
    cut = path.index("/") if "/" in path else len(path)
    measured = float(pick(found, path[:cut]))
    if cut < len(path):
        measured /= float(pick(found, path[cut + 1 :]))
    print(verdict(float(guess), measured))
