"""Collect the wheels that the GPU campaign needs on a machine without network that has torch.

    python benchmarks/gpu_campaign/wheels.py [--python 3.12] [--out gpu-wheels] [--have numpy …] [--trl]

The folder contains reward-kit, its dependencies for training, and pytest, at the versions that are installed here.
torch, CUDA's libraries, and what comes with them are left out, because they take gigabytes, and so is TensorBoard,
which no stage uses. The exit status is 1 if the folder exceeds 64 MiB.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.gpu_campaign.campaign import commit  # noqa: E402

EXTRAS = "lora,games,constrained"
TOOLS = ("pytest", "pytest-asyncio", "pytest-xdist", "hypothesis")
OMITTED = ("torch", "sympy", "mpmath", "networkx", "triton", "setuptools", "tensorboard")
"""Distributions that come with torch, and TensorBoard, which is not needed."""
TRL = ("trl==1.16.0", "datasets==5.2.0", "dill==0.4.1", "multiprocess==0.70.19", "xxhash==4.1.0")
"""TRL and its dependencies, without pandas and pyarrow, which the machine must have for it."""
PLATFORMS = [*(f"manylinux_2_{minor}_x86_64" for minor in (39, 35, 34, 31, 28, 27, 26, 24, 17, 12, 5)), "linux_x86_64"]
PLATFORMS += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"]
LIMIT_MIB = 64


def of_training() -> list[str]:
    """Return the requirements of reward-kit's extra for training, without those that are omitted."""
    own = [Requirement(text) for text in importlib.metadata.requires("reward-kit") or ()]
    chosen = [one for one in own if one.marker is not None and one.marker.evaluate({"extra": "train"})]
    return [f"{one.name}{one.specifier}" for one in chosen if one.name not in OMITTED]


def closure(requirements: list[str], python: str, omitted: Collection[str]) -> dict[str, str]:
    """Return the installed versions of the given distributions and of everything that they require, by name.

    Raises:
        SystemExit: If one of them is not installed.
    """
    versions: dict[str, str] = {}
    environment = {"python_version": python, "python_full_version": f"{python}.0", "sys_platform": "linux"}
    pending, seen = [Requirement(text) for text in requirements], set[str]()
    while pending:
        requirement = pending.pop()
        name = canonicalize_name(requirement.name)
        if name in omitted or name.startswith(("nvidia-", "cuda-")) or str(requirement) in seen:
            continue
        seen.add(str(requirement))
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            raise SystemExit(f"{requirement} is not installed here; run `make .venv/.dev`") from None
        versions[name] = distribution.version
        pending += _needed(distribution, {"", *requirement.extras}, environment)
    return versions


def _needed(
    distribution: importlib.metadata.Distribution, extras: set[str], environment: dict[str, str]
) -> Iterator[Requirement]:
    for text in distribution.requires or ():
        requirement = Requirement(text)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({**environment, "extra": extra}) for extra in extras):
            yield requirement


def download(folder: Path, requirements: list[str], python: str) -> None:
    """Download a wheel for each requirement, without its dependencies."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--dest", str(folder), "--python-version", python, "--implementation", "cp"]
    command += [part for platform in PLATFORMS for part in ("--platform", platform)]
    subprocess.run([*command, *requirements], check=True)


def main() -> int:
    """Fill the folder, and print how to use it."""
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=here, help=f"the version of the machine's Python (default {here})")
    parser.add_argument("--out", type=Path, default=ROOT / "gpu-wheels", help="the folder, which is replaced")
    parser.add_argument("--have", nargs="+", default=[], metavar="NAME", help="packages that the machine has")
    parser.add_argument("--trl", action="store_true", help="add TRL; the machine must have pandas and pyarrow for it")
    options = parser.parse_args()
    folder: Path = options.out
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    needed = [*of_training(), *TOOLS]
    versions = closure([f"reward-kit[{EXTRAS}]", *needed], options.python, {*OMITTED, *options.have})
    own = versions.pop("reward-kit")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run(build, check=True)
    pinned = [f"{name}=={version}" for name, version in sorted(versions.items())]
    download(folder, [*pinned, *(TRL if options.trl else ())], options.python)
    # Without versions, so that what the machine has is kept if it fits.
    lines = [f"reward-kit[{EXTRAS}]=={own}", *needed, *(("trl", "xxhash") if options.trl else ())]
    (folder / "requirements.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / "COMMIT").write_text(f"{commit()}\n", encoding="utf-8")
    sizes = {path.name: path.stat().st_size for path in folder.glob("*.whl")}
    for name, size in sorted(sizes.items(), key=lambda one: -one[1])[:8]:
        print(f"{size / 2**20:8.1f} MiB  {name}")
    total = sum(sizes.values()) / 2**20
    print(f"{total:8.1f} MiB  {len(sizes)} wheels for Python {options.python} in {folder}")
    present = ["torch >= 2.6 with CUDA", *options.have, *(["pandas", "pyarrow"] if options.trl else [])]
    print(
        f"\nThe machine must have: Linux on x86-64, Python {options.python} with pip, {', '.join(present)}.\n"
        "Install there, without network:\n"
        f"  python3 -m pip install --no-index --find-links {folder.name} -r {folder.name}/requirements.txt\n"
        "  python3 benchmarks/gpu_campaign/campaign.py --device cuda --size full --out runs/gpu"
    )
    if total > LIMIT_MIB:
        print(f"the folder exceeds {LIMIT_MIB} MiB", file=sys.stderr)
    return int(total > LIMIT_MIB)


if __name__ == "__main__":
    raise SystemExit(main())
