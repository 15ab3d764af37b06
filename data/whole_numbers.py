"""Whole numbers as the program's options are written (llmc/run/options.c): 20k, 1.5M, 1e9."""

import re
from decimal import Decimal

EXPONENTS = {None: 0, "k": 3, "K": 3, "M": 6, "G": 9, "B": 9, "T": 12}  # of ten, by suffix


def whole_number_of(text):
    """Returns the number; None where the text is none, or not whole."""
    found = re.fullmatch(r"([+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+))(?:[eE]([+-]?[0-9]{1,2})|([kKMGBT]))?", text)
    if not found:
        return None
    number = Decimal(found[1]).scaleb(int(found[2]) if found[2] else EXPONENTS[found[3]])
    return int(number) if number == int(number) else None
