"""Numbers of JSON schemas as llguidance computes with them: doubles, and 64 bits for integers."""

import math
from decimal import Decimal

# Beyond these the compiler's arithmetic is not exact, or ends the process.
MAX_BOUND = 10**18
MAX_DOUBLE_BELOW_2_63 = 2**63 - 1024
MAX_MULTIPLE = 2**32


def exact_number(value: int | float) -> int | float | None:
    """A constant as the compiler has to read it in order to write exactly it; None where there is no such number."""
    if isinstance(value, float):
        whole = math.isfinite(value) and value.is_integer()
        return value if math.isfinite(value) and (not whole or Decimal(repr(value)) == Decimal(value)) else None
    if abs(value) >= 2**1023 or int(float(value)) != value:
        return None
    if abs(value) < MAX_BOUND:
        return value
    return float(value) if Decimal(repr(float(value))) == value else None  # the compiler writes the shortest digits


def bound(value: int | float, *, lower: bool) -> int | float | None:
    """A bound as a double that the compiler can use, rounded to the side where fewer values are.

    Returns:
        None where it is so far from 0 that the compiler cannot use it.
    """
    if (isinstance(value, float) and not math.isfinite(value)) or (value >= MAX_BOUND if lower
                                                                   else value <= -MAX_BOUND):
        return None
    value = max(value, -MAX_DOUBLE_BELOW_2_63) if lower else min(value, MAX_DOUBLE_BELOW_2_63)
    if isinstance(value, float):
        return value
    double = float(value)
    if (int(double) < value) if lower else (int(double) > value):
        double = math.nextafter(double, math.inf if lower else -math.inf)
    return int(double)


def divisor(value: int | float) -> int | float | None:
    """A number that the compiler reads as exactly this divisor, None where there is none.

    It multiplies a double with 10 until that is an integer, which for some goes wrong and for a neighbor does not.
    """
    if isinstance(value, int):
        return value if value < MAX_MULTIPLE else None
    if not math.isfinite(value):
        return None
    exact = Decimal(repr(value))
    for steps in range(-8, 9):
        double = value
        for _ in range(abs(steps)):
            double = math.nextafter(double, math.inf if steps > 0 else 0.0)
        read, exponent = double, 0
        while not read.is_integer():
            read, exponent = read * 10, exponent + 1
        if read < MAX_MULTIPLE and Decimal(int(read)).scaleb(-exponent) == exact:
            return double
    return None


def scale_of(number: int | float) -> int:
    """Digits after the point; negative for a multiple of 10."""
    return -int(Decimal(repr(number)).normalize().as_tuple().exponent)


def num_remainders(value: int | float) -> int:
    """Number of remainders of a divisor, for decimal numbers with as many digits after the point."""
    exact = Decimal(repr(value))
    return int(exact.scaleb(max(0, scale_of(value))))


def have_common_multiple(divisors: list[int | float]) -> bool:
    """Whether the compiler computes the least common multiple of divisors right, for which it has 32 bits."""
    scale = max(0, *map(scale_of, divisors)) if divisors else 0
    common = 1
    for value in divisors:
        scaled = int(Decimal(repr(value)).scaleb(scale))
        if common * scaled >= MAX_MULTIPLE:
            return False
        common = math.lcm(common, scaled)
    return True
