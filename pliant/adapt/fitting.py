"""Least squares with bounds, as small as the models of this package need it. No parameter is ever outside its bounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
_STEPS = 200
_DIFFERENCE = 1e-6


def nonnegative(features: NDArray[Any], values: NDArray[Any]) -> Vector:
    """The weights of the columns, none below 0, with the least squared error: Lawson and Hanson 1974, chapter 23.

    A column that tells nothing (all zeros, or a multiple of another one) gets what is left for it, at least 0.
    """
    matrix, target = np.asarray(features, np.float64), np.asarray(values, np.float64)
    sizes = np.linalg.norm(matrix, axis=0)
    matrix = matrix / np.where(sizes > 0, sizes, 1.0)  # seconds per byte and seconds per hop are ten powers apart
    weights = np.zeros(matrix.shape[1])
    free = np.zeros(matrix.shape[1], bool)
    for _ in range(3 * len(weights)):
        pull = matrix.T @ (target - matrix @ weights)
        pull[free | (sizes == 0)] = -np.inf
        if not np.any(pull > 1e-12 * max(1.0, float(np.abs(target).max(initial=0.0)))):
            break
        free[int(np.argmax(pull))] = True
        weights = _shrunk(matrix, target, weights, free)
    return weights / np.where(sizes > 0, sizes, 1.0)


def _shrunk(matrix: Vector, target: Vector, weights: Vector, free: NDArray[np.bool_]) -> Vector:
    """The best weights of the free columns; those that would go below 0 are freed no longer."""
    while True:
        wanted = np.zeros_like(weights)
        wanted[free] = np.linalg.lstsq(matrix[:, free], target, rcond=None)[0]
        below = free & (wanted <= 0)
        if not below.any():
            return wanted
        ways = weights[below] / np.maximum(weights[below] - wanted[below], 1e-300)
        weights = weights + float(ways.min()) * (wanted - weights)
        free &= weights > 1e-15
        weights = np.where(free, weights, 0.0)
        if not free.any():
            return weights


def damped(
    errors: Callable[[Vector], Vector], start: Sequence[float], lower: Sequence[float], upper: Sequence[float]
) -> tuple[Vector, float]:
    """Parameters within the bounds, near `start`, with a least sum of squared errors, and that sum.

    Damped Gauss-Newton (Levenberg and Marquardt) with numeric derivatives. A parameter at a bound that wants to go
    further stays there, and the others move on.
    """
    low, high = np.asarray(lower, np.float64), np.asarray(upper, np.float64)
    here = np.clip(np.asarray(start, np.float64), low, high)
    found = errors(here)
    cost, damping = float(found @ found), 1e-3
    for _ in range(_STEPS):
        slopes = _slopes(errors, here, found, low, high)
        pull = slopes.T @ found
        moves = ~(((here <= low) & (pull > 0)) | ((here >= high) & (pull < 0)) | (low == high))
        if not moves.any():
            break
        curve = slopes[:, moves].T @ slopes[:, moves]
        scale = np.diag(curve) + 1e-12
        step = np.zeros_like(here)
        step[moves] = -np.linalg.solve(curve + damping * np.diag(scale), pull[moves])
        tried = np.clip(here + step, low, high)
        new = errors(tried)
        new_cost = float(new @ new)
        if new_cost < cost:
            small = cost - new_cost < 1e-14 + 1e-10 * cost
            here, found, cost, damping = tried, new, new_cost, max(damping / 5, 1e-12)
            if small:
                break
        else:
            damping *= 4
            if damping > 1e10:
                break
    return here, cost


def _slopes(
    errors: Callable[[Vector], Vector], here: Vector, found: Vector, low: Vector, high: Vector
) -> NDArray[np.float64]:
    columns = []
    for number in range(len(here)):
        width = _DIFFERENCE * max(1e-3, abs(float(here[number])))
        if here[number] + width > high[number]:
            width = -width
        moved = here.copy()
        moved[number] += width
        # Where the bounds leave no room at all the parameter does not move, and its slope does not matter.
        columns.append((errors(moved) - found) / width if low[number] < high[number] else np.zeros_like(found))
    return np.stack(columns, axis=1)
