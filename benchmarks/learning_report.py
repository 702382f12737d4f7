"""The table and the picture of the household campaign, from its results."""

from __future__ import annotations

from itertools import combinations

import numpy as np

from reward_kit.runs.statistics import t_quantile

DRAWS, PROBLEMS = 10_000, 256
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 760, 400, 56, 24, 120, 48
COLOURS = {"gigpo": "#0072b2", "grpo": "#e69f00", "ppo": "#009e73"}
"""Okabe and Ito's, which are told apart by colour-blind eyes."""

DASHES = {"gigpo": "", "grpo": "7 3", "ppo": "2 3"}
NAMES = {"gigpo": "GiGPO", "grpo": "GRPO", "ppo": "PPO"}


def area(run, steps):
    """The mean success over the first so many commands, of batches each of which stands for the commands it took."""
    starts = np.array([start for start, _ in run["batches"]] + [run["steps"]], dtype=float).clip(max=steps)
    scores = np.array([score for _, score in run["batches"]])
    return float((np.diff(starts) * scores).sum() / (starts[-1] - starts[0]))


def after(run, temperature="1.0"):
    """Held-out success after training, the draws averaged."""
    return float(np.mean(run["held_out"][temperature]))


def paired(differences, error=0.0):
    """Mean, bounds of the paired t interval, and of the bootstrap over seeds (percentiles), at 95%.

    Args:
        differences: one of each seed.
        error: the standard error of what they all have in common, such as the figure of one warm start.
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


def error_of(run, temperature):
    """The standard error of a share of episodes."""
    share, count = after(run, temperature), PROBLEMS * len(run["held_out"][temperature])
    return (share * (1 - share) / count) ** 0.5


def report(results, picture):
    """Print everything and draw the picture."""
    start = next(one for one in results if one["arm"] == "warm start")
    runs = {}
    for one in results:
        if "seed" in one:
            runs.setdefault(one["arm"], {})[one["seed"]] = one
    if not runs:
        print("There are no results yet.")
        return
    steps = min(one["asked_steps"] for of_arm in runs.values() for one in of_arm.values())
    print(f"Held-out success after {steps:,} commands; mean over seeds, in brackets each seed\n")
    print("| arm | T=1, two draws | T=0.5 | greedy | area under the curve | CPU s a run |")
    print("|---|---|---|---|---|---|")
    colder = ", ".join(f"{after(start, at):.3f} at {at}" for at in start["held_out"])
    print(f"| warm start | {after(start):.3f} | {after(start, '0.5'):.3f} | {after(start, '0.0'):.3f} | | |")
    for arm, of_arm in runs.items():
        print(row(arm, [of_arm[seed] for seed in sorted(of_arm)], steps))
    print(f"\nThe warm start by temperature: {colder}")
    print("\n| difference | what | mean | 95%, paired t | 95%, bootstrap | seeds |")
    print("|---|---|---|---|---|---|")
    best = max(start["held_out"], key=lambda at: after(start, at))
    told = {
        "after − before, T=1": ("1.0", "1.0"),
        "after − before, greedy": ("0.0", "0.0"),
        f"after at T=1 − before at its best, T={best}": ("1.0", best),
        f"after at T=0.5 − before at its best, T={best}": ("0.5", best),
    }
    for arm, of_arm in runs.items():
        for what, (at, before) in told.items():
            gains = [after(one, at) - after(start, before) for one in of_arm.values()]
            difference(NAMES[arm], what, gains, error_of(start, before))
    for one, other in combinations(runs, 2):
        both = sorted(runs[one].keys() & runs[other].keys())
        pairs = [(runs[one][seed], runs[other][seed]) for seed in both]
        if pairs:
            name = f"{NAMES[one]} − {NAMES[other]}"
            difference(name, "after, T=1", [after(a) - after(b) for a, b in pairs])
            difference(name, "area", [area(a, steps) - area(b, steps) for a, b in pairs])
    picture.write_text(svg(runs, after(start), steps), encoding="utf-8")
    print(f"\nThe curves are in {picture}")


def row(arm, of_arm, steps):
    """The line of one arm."""
    values = [after(one) for one in of_arm]
    each = " ".join(f"{value:.3f}" for value in values)
    cold, greedy = (np.mean([after(one, at) for one in of_arm]) for at in ("0.5", "0.0"))
    cpu = [one["cpu_s"] for one in of_arm if one["cpu_s"] is not None]
    areas = np.mean([area(one, steps) for one in of_arm])
    took = f"{np.mean(cpu):.0f}" if cpu else ""
    return f"| {NAMES[arm]} | {np.mean(values):.3f} ({each}) | {cold:.3f} | {greedy:.3f} | {areas:.3f} | {took} |"


def difference(name, what, values, error=0.0):
    """Print a line; where the interval excludes 0 it says so."""
    mean, (low, high), (under, over) = paired(values, error)
    sure = " *" if low > 0 or high < 0 else ""
    print(f"| {name} | {what} | {mean:+.3f}{sure} | {low:+.3f} to {high:+.3f} | {under:+.3f} to {over:+.3f} |", end="")
    print(f" {len(values)} |")


def svg(runs, start, steps):
    """Success of the batches by commands: each run thin, the mean of an arm thick."""
    across, up = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    grid = np.linspace(0, steps, 61)

    def place(x, y):
        return f"{LEFT + across * x / steps:.1f},{TOP + up * (1 - y):.1f}"

    def line(ys, style):
        points = " ".join(place(x, y) for x, y in zip(grid, ys, strict=True))
        return f'<polyline fill="none" points="{points}" {style}/>'

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="13" role="img" aria-label="Success of training batches by environment steps">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for y in (0, 0.2, 0.4, 0.6, 0.8, 1.0):
        x0, x1 = place(0, y), place(steps, y)
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
        colour, dash = COLOURS[arm], DASHES[arm]
        curves = [smooth(run, grid) for run in of_arm.values()]
        parts += [line(one, f'stroke="{colour}" stroke-width="0.8" opacity="0.35"') for one in curves]
        mean = np.mean(curves, axis=0)
        parts.append(line(mean, f'stroke="{colour}" stroke-width="2.6" stroke-dasharray="{dash}"'))
        ends.append([TOP + up * (1 - mean[-1]), arm])
    ends.sort()
    for number in range(1, len(ends)):
        ends[number][0] = max(ends[number][0], ends[number - 1][0] + 17)
    for y, arm in ends:
        at = WIDTH - RIGHT + 8
        style = f'stroke="{COLOURS[arm]}" stroke-width="2.6" stroke-dasharray="{DASHES[arm]}"'
        parts.append(f'<polyline points="{at},{y:.1f} {at + 26},{y:.1f}" {style}/>')
        parts.append(f'<text x="{at + 32}" y="{y + 4:.1f}">{NAMES[arm]}</text>')
    parts.append(f'<polyline points="{place(0, start)} {place(steps, start)}" stroke="#555" stroke-dasharray="1 4"/>')
    parts.append(f'<text x="{WIDTH - RIGHT + 8}" y="{TOP + up * (1 - start) + 4:.1f}">warm start</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def smooth(run, grid):
    """The mean of up to five batches about each place, as many before it as behind it, on the grid."""
    steps, scores = np.array(run["batches"]).T
    reach = [min(2, place, len(scores) - 1 - place) for place in range(len(scores))]
    means = [scores[place - r : place + r + 1].mean() for place, r in enumerate(reach)]
    return np.interp(grid, steps, means)
