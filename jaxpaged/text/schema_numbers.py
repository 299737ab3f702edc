"""Numbers of JSON schemas as llguidance computes with them: doubles, and 64 bits for integers."""

import math
from decimal import Decimal

# Beyond these the compiler's arithmetic is not exact, or ends the process.
MAX_BOUND = 10**18
MAX_DOUBLE_BELOW_2_63 = 2**63 - 1024
MIN_FRACTION = 1e-20
MAX_MULTIPLE = 2**32
_NEIGHBORS = 8


def exact_number(value: int | float) -> int | float | None:
    """A constant as the compiler has to read it in order to write exactly it; None where there is no such number."""
    if isinstance(value, float):
        whole = math.isfinite(value) and value.is_integer()
        good = math.isfinite(value) and (not whole or Decimal(repr(value)) == Decimal(value))
        return _literal(value) if good else None
    if abs(value) >= 2**1023 or int(float(value)) != value:
        return None
    if abs(value) < MAX_BOUND:
        return value
    # The compiler writes the shortest digits.
    return _literal(float(value)) if Decimal(repr(float(value))) == value else None


def bound(value: int | float, *, lower: bool) -> int | float | None:
    """A bound as a double that the compiler can use, rounded to the side where fewer values are.

    Returns:
        None where it is so far from 0 that the compiler cannot use it.
    """
    if (isinstance(value, float) and not math.isfinite(value)) or (value >= MAX_BOUND if lower
                                                                   else value <= -MAX_BOUND):
        return None
    value = max(value, -MAX_DOUBLE_BELOW_2_63) if lower else min(value, MAX_DOUBLE_BELOW_2_63)
    inward = math.inf if lower else -math.inf
    if isinstance(value, int):
        double = float(value)
        if (int(double) < value) if lower else (int(double) > value):
            double = math.nextafter(double, inward)
        return int(double)
    if 0 < abs(value) < MIN_FRACTION:
        return MIN_FRACTION * math.copysign(1, value) if (value > 0) == lower else 0
    while (literal := _literal(value)) is None:
        value = math.nextafter(value, inward)
    return literal


def next_inside(value: int | float, *, lower: bool) -> int | float | None:
    """The bound that includes the double next to an exclusive one; None where the exclusive one can stay.

    Beside another bound less than 1 away the compiler takes an exclusive integer for an inclusive one.
    """
    if value != int(value) or abs(value) >= 2**52:
        return None
    return bound(math.nextafter(float(value), math.inf if lower else -math.inf), lower=lower)


def divisor(value: int | float) -> int | float | None:
    """A number that the compiler reads as exactly this divisor, None where there is none.

    It multiplies a double with 10 until that is an integer, which for some goes wrong and for a neighbor does not.
    """
    if isinstance(value, int):
        return value if value < MAX_MULTIPLE else None
    if not math.isfinite(value):
        return None
    exact = Decimal(repr(value))
    for double in _neighbors(value):
        read, exponent = double, 0
        while not read.is_integer():
            read, exponent = read * 10, exponent + 1
        if read < MAX_MULTIPLE and Decimal(int(read)).scaleb(-exponent) == exact:
            literal = _literal(double)
            if literal is not None:
                return literal
    return None


def _literal(value: float) -> float | None:
    """A number that the compiler reads as this double."""
    return next((near for near in _neighbors(value) if _read(near) == value), None)


def _neighbors(value: float) -> list[float]:
    found = [value]
    for direction in (math.inf, -math.inf):
        near = value
        for _ in range(_NEIGHBORS):
            near = math.nextafter(near, direction)
            found.append(near)
    return [near for near in found if math.isfinite(near)]


def _read(value: float) -> float:
    """What the compiler's parser makes of a double's shortest digits: it rounds them, and then their power of 10."""
    sign, digits, exponent = Decimal(repr(value)).as_tuple()
    assert isinstance(exponent, int)
    double = float(int("".join(map(str, digits))))
    while exponent < -308:
        double, exponent = double / 1e308, exponent + 308
    double = double * float(f"1e{exponent}") if exponent >= 0 else double / float(f"1e{-exponent}")
    return -double if sign else double


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
