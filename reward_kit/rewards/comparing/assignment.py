"""Which things of two lists belong together, where each pair is worth something: the best total, not the greedy one."""

from __future__ import annotations

from collections.abc import Sequence


def best_pairs(weights: Sequence[Sequence[float]]) -> list[int | None]:
    """For each row the column that it is paired with, so that the weights of all pairs add up to the most.

    No column is used twice; where there are fewer columns than rows, some rows get None. The Hungarian method with
    potentials (Kuhn 1955, Munkres 1957), in rows² · columns steps.

    Args:
        weights: a rectangle of numbers of at least 0.
    """
    if not weights or not weights[0]:
        return [None] * len(weights)
    if len(weights) <= len(weights[0]):
        return list(_columns_of_rows(weights))
    rows_of_columns = _columns_of_rows(list(zip(*weights, strict=True)))
    placed: list[int | None] = [None] * len(weights)
    for column, row in enumerate(rows_of_columns):
        placed[row] = column
    return placed


def best_in_order(weights: Sequence[Sequence[float]]) -> list[int | None]:
    """As `best_pairs`, where the columns of later rows stand behind those of earlier ones: an alignment."""
    width = len(weights[0]) if weights else 0
    best = [[0.0] * (width + 1)]
    for row in weights:
        above, line = best[-1], [0.0]
        for column, weight in enumerate(row):
            line.append(max(above[column] + weight, above[column + 1], line[column]))
        best.append(line)
    placed: list[int | None] = [None] * len(weights)
    row_index, column = len(weights), width
    while row_index and column:
        if best[row_index][column] == best[row_index - 1][column]:
            row_index -= 1
        elif best[row_index][column] == best[row_index][column - 1]:
            column -= 1
        else:
            row_index, column = row_index - 1, column - 1
            placed[row_index] = column
    return placed


def _columns_of_rows(weights: Sequence[Sequence[float]]) -> list[int]:
    """Each row's column; there are at least as many columns as rows. Row and column 0 stand for "none yet"."""
    height, width = len(weights), len(weights[0])
    row_price, column_price = [0.0] * (height + 1), [0.0] * (width + 1)
    row_of = [0] * (width + 1)
    for row in range(1, height + 1):
        row_of[0] = row
        for column, before in _shortest_path(weights, row_price, column_price, row_of):
            row_of[column] = row_of[before]
    columns = [0] * height
    for column in range(1, width + 1):
        if row_of[column]:
            columns[row_of[column] - 1] = column - 1
    return columns


def _shortest_path(
    weights: Sequence[Sequence[float]], row_price: list[float], column_price: list[float], row_of: list[int]
) -> list[tuple[int, int]]:
    """The cheapest way from the row at column 0 to a free column: pairs (column, the one before), the free one first.

    Dijkstra's search over columns; it updates the prices so that no reduced cost falls below 0.
    """
    width = len(weights[0])
    slack, before, is_used = [float("inf")] * (width + 1), [0] * (width + 1), [False] * (width + 1)
    column = 0
    while row_of[column]:
        is_used[column] = True
        row = row_of[column]
        for other in range(1, width + 1):
            if not is_used[other]:
                cost = -weights[row - 1][other - 1] - row_price[row] - column_price[other]
                if cost < slack[other]:
                    slack[other], before[other] = cost, column
        nearest = min((other for other in range(1, width + 1) if not is_used[other]), key=slack.__getitem__)
        step = slack[nearest]
        for other in range(width + 1):
            if is_used[other]:
                row_price[row_of[other]] += step
                column_price[other] -= step
            else:
                slack[other] -= step
        column = nearest
    path = []
    while column:
        path.append((column, before[column]))
        column = before[column]
    return path
