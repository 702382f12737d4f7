"""Tables and learning curves of `learning.py`, from its results. Called by `learning.py`; not a script."""

from __future__ import annotations

from itertools import combinations

import numpy as np

from reward_kit.runs.statistics import t_quantile

DRAWS, PROBLEMS = 10_000, 256
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 760, 400, 56, 24, 120, 48
COLORS = {"gigpo": "#0072b2", "grpo": "#e69f00", "ppo": "#009e73"}
"""The Okabe–Ito palette, which is safe for color-blind readers."""

DASHES = {"gigpo": "", "grpo": "7 3", "ppo": "2 3"}
NAMES = {"gigpo": "GiGPO", "grpo": "GRPO", "ppo": "PPO"}


def area(run, steps):
    """Return the mean success over the first `steps` commands, each batch weighted by its commands."""
    starts = np.array([start for start, _ in run["batches"]] + [run["steps"]], dtype=float).clip(max=steps)
    scores = np.array([score for _, score in run["batches"]])
    return float((np.diff(starts) * scores).sum() / (starts[-1] - starts[0]))


def after(run, temperature="1.0"):
    """Return the held-out success after training, averaged over draws."""
    return float(np.mean(run["held_out"][temperature]))


def paired(differences, error=0.0):
    """Return the mean, the 95% paired t interval, and the 95% percentile bootstrap interval over seeds.

    Args:
        differences: one per seed.
        error: standard error of a common term, such as the success of the warm start.
    """
    values = np.array(differences)
    count, mean = len(values), float(values.mean())
    if count < 2:
        return mean, (float("nan"),) * 2, (float("nan"),) * 2
    half = np.hypot(t_quantile(0.975, count - 1) * values.std(ddof=1) / count**0.5, t_quantile(0.975, 1e6) * error)
    draws = np.random.default_rng(0)
    means = draws.choice(values, (DRAWS, count)).mean(axis=1) + draws.normal(0.0, error, DRAWS)
    low, high = np.percentile(means, [2.5, 97.5])
    return mean, (mean - half, mean + half), (float(low), float(high))


def standard_error(run, temperature):
    """Return the standard error of a success rate."""
    share, count = after(run, temperature), PROBLEMS * len(run["held_out"][temperature])
    return (share * (1 - share) / count) ** 0.5


def report(results, picture):
    """Print the tables and write the picture."""
    start = next(one for one in results if one["arm"] == "warm start")
    runs = {}
    for one in results:
        if "seed" in one:
            runs.setdefault(one["arm"], {})[one["seed"]] = one
    if not runs:
        print("No results yet.")
        return
    steps = min(one["asked_steps"] for of_arm in runs.values() for one in of_arm.values())
    print(f"Held-out success after {steps:,} commands: mean over seeds, and each seed in parentheses\n")
    print("| arm | T=1, two draws | T=0.5 | greedy | area under the curve | CPU s per run |")
    print("|---|---|---|---|---|---|")
    by_temperature = ", ".join(f"{after(start, at):.3f} at {at}" for at in start["held_out"])
    print(f"| warm start | {after(start):.3f} | {after(start, '0.5'):.3f} | {after(start, '0.0'):.3f} | | |")
    for arm, of_arm in runs.items():
        print(table_row(arm, [of_arm[seed] for seed in sorted(of_arm)], steps))
    print(f"\nWarm start by temperature: {by_temperature}")
    print("\n| difference | what | mean | 95%, paired t | 95%, bootstrap | seeds |")
    print("|---|---|---|---|---|---|")
    best = max(start["held_out"], key=lambda at: after(start, at))
    gains = {
        "after − before, T=1": ("1.0", "1.0"),
        "after − before, greedy": ("0.0", "0.0"),
        f"after at T=1 − before at its best, T={best}": ("1.0", best),
        f"after at T=0.5 − before at its best, T={best}": ("0.5", best),
    }
    for arm, of_arm in runs.items():
        for what, (at, before) in gains.items():
            values = [after(one, at) - after(start, before) for one in of_arm.values()]
            print_difference(NAMES[arm], what, values, standard_error(start, before))
    for one, other in combinations(runs, 2):
        both = sorted(runs[one].keys() & runs[other].keys())
        pairs = [(runs[one][seed], runs[other][seed]) for seed in both]
        if pairs:
            name = f"{NAMES[one]} − {NAMES[other]}"
            print_difference(name, "after, T=1", [after(a) - after(b) for a, b in pairs])
            print_difference(name, "area", [area(a, steps) - area(b, steps) for a, b in pairs])
    picture.write_text(svg(runs, after(start), steps), encoding="utf-8")
    print(f"\nLearning curves: {picture}")


def table_row(arm, of_arm, steps):
    """Return the table row of one arm."""
    values = [after(one) for one in of_arm]
    each = " ".join(f"{value:.3f}" for value in values)
    at_half, greedy = (np.mean([after(one, at) for one in of_arm]) for at in ("0.5", "0.0"))
    cpu = [one["cpu_s"] for one in of_arm if one["cpu_s"] is not None]
    areas = np.mean([area(one, steps) for one in of_arm])
    cpu_s = f"{np.mean(cpu):.0f}" if cpu else ""
    return f"| {NAMES[arm]} | {np.mean(values):.3f} ({each}) | {at_half:.3f} | {greedy:.3f} | {areas:.3f} | {cpu_s} |"


def print_difference(name, what, values, error=0.0):
    """Print a table row; a star marks a t interval that excludes 0."""
    mean, (low, high), (under, over) = paired(values, error)
    star = " *" if low > 0 or high < 0 else ""
    print(f"| {name} | {what} | {mean:+.3f}{star} | {low:+.3f} to {high:+.3f} | {under:+.3f} to {over:+.3f} |", end="")
    print(f" {len(values)} |")


def svg(runs, start, steps):
    """Return the learning curves: success of training batches by commands, runs thin and means of arms thick."""
    across, up = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    grid = np.linspace(0, steps, 61)

    def point(x, y):
        return f"{LEFT + across * x / steps:.1f},{TOP + up * (1 - y):.1f}"

    def line(ys, style):
        points = " ".join(point(x, y) for x, y in zip(grid, ys, strict=True))
        return f'<polyline fill="none" points="{points}" {style}/>'

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="13" role="img" aria-label="Success of training batches by environment steps">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for y in (0, 0.2, 0.4, 0.6, 0.8, 1.0):
        x0, x1 = point(0, y), point(steps, y)
        parts.append(f'<polyline points="{x0} {x1}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{TOP + up * (1 - y) + 4:.1f}" text-anchor="end">{y:.1f}</text>')
    for x in np.linspace(0, steps, 5):
        at = LEFT + across * x / steps
        parts.append(f'<text x="{at:.1f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">{x / 1000:.0f}k</text>')
    middle = LEFT + across / 2
    parts.append(f'<text x="{middle:.0f}" y="{HEIGHT - 8}" text-anchor="middle">commands given in training</text>')
    parts.append(f'<text x="{LEFT}" y="14">success on new training problems, up to five batches averaged</text>')
    ends = []
    for arm, of_arm in runs.items():
        color, dash = COLORS[arm], DASHES[arm]
        curves = [smooth(run, grid) for run in of_arm.values()]
        parts += [line(one, f'stroke="{color}" stroke-width="0.8" opacity="0.35"') for one in curves]
        mean = np.mean(curves, axis=0)
        parts.append(line(mean, f'stroke="{color}" stroke-width="2.6" stroke-dasharray="{dash}"'))
        ends.append([TOP + up * (1 - mean[-1]), arm])
    ends.sort()
    for number in range(1, len(ends)):
        ends[number][0] = max(ends[number][0], ends[number - 1][0] + 17)
    for y, arm in ends:
        at = WIDTH - RIGHT + 8
        style = f'stroke="{COLORS[arm]}" stroke-width="2.6" stroke-dasharray="{DASHES[arm]}"'
        parts.append(f'<polyline points="{at},{y:.1f} {at + 26},{y:.1f}" {style}/>')
        parts.append(f'<text x="{at + 32}" y="{y + 4:.1f}">{NAMES[arm]}</text>')
    parts.append(f'<polyline points="{point(0, start)} {point(steps, start)}" stroke="#555" stroke-dasharray="1 4"/>')
    parts.append(f'<text x="{WIDTH - RIGHT + 8}" y="{TOP + up * (1 - start) + 4:.1f}">warm start</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def smooth(run, grid):
    """Return the centered moving average over up to five batches, interpolated on the grid."""
    steps, scores = np.array(run["batches"]).T
    radii = [min(2, index, len(scores) - 1 - index) for index in range(len(scores))]
    means = [scores[index - r : index + r + 1].mean() for index, r in enumerate(radii)]
    return np.interp(grid, steps, means)
