"""Plain-Python arithmetic of the second derivation: fractions, fifty-digit decimals, differences.

Imports the standard library only. Shares no code and no formula with the NumPy generator where
there is a choice: sums are loops over `fractions.Fraction`, gradients are differences of the
function itself instead of `softmax - onehot`.
"""

import decimal
from fractions import Fraction

CONTEXT = decimal.Context(prec=50, Emin=-(10**6), Emax=10**6)
STEP = decimal.Decimal("1e-18")  # central difference: error of the order 1e-36


def exact(number):
    """A Decimal with the exact value of the float (or of its protocol string)."""
    return CONTEXT.create_decimal(number if isinstance(number, str) else repr(number))


def logsumexp(row):
    top = max(row)
    total = sum((CONTEXT.exp(CONTEXT.subtract(x, top)) for x in row), decimal.Decimal(0))
    return CONTEXT.add(top, CONTEXT.ln(total))


def xent_of_row(row, target):
    return CONTEXT.subtract(logsumexp(row), row[target])


def derivative(function, row, index):
    """d function / d row[index]."""
    up, down = list(row), list(row)
    up[index] = CONTEXT.add(row[index], STEP)
    down[index] = CONTEXT.subtract(row[index], STEP)
    return CONTEXT.divide(CONTEXT.subtract(function(up), function(down)), 2 * STEP)


def mean(values):
    values = list(values)
    return sum(values, Fraction(0)) / len(values) if values else Fraction(0)


def fraction(number):
    return Fraction(number)


def grid(rows):
    """(row, column) of every element of a nested list."""
    return [(b, s) for b, row in enumerate(rows) for s, _ in enumerate(row)]


def cells(schedule):
    return [rows for step in schedule for rows in step]


def group_means_weights(mask, groups):
    """Weight of each position; `groups` are lists of (row, column)."""
    weights = {at: Fraction(0) for at in grid(mask)}
    for group in groups:
        scored = [at for at in group if mask[at[0]][at[1]]]
        for at in scored:
            weights[at] += Fraction(1, len(scored)) / len(groups)
    return weights


def rows_group(mask, rows):
    return [(b, s) for b, s in grid(mask) if b in rows]


def masked_sum(losses, mask, group):
    return sum((fraction(losses[b][s]) for b, s in group if mask[b][s]), Fraction(0))


def masked_count(mask, group):
    return sum(1 for b, s in group if mask[b][s])


def group_mean(losses, mask, group):
    return masked_sum(losses, mask, group) / max(masked_count(mask, group), 1)
