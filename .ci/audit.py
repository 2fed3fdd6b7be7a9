"""Audit what muxkit's users install: the licence of every package, and its known vulnerabilities.

Run by `.ci/run audit` with the environment of the suite. The packages are those that muxkit and its extras require,
directly or indirectly. Vulnerabilities are looked up by pip-audit where it is installed, as the release workflow does;
an index that has no such data, such as a mirror, is reported and doesn't fail the step.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

# Permissive licences, and weak copyleft where muxkit only imports the package.
ALLOWED = re.compile(
    r"\b(MIT|BSD|0BSD|Apache|ISC|PSF|Python Software Foundation|MPL|Mozilla|LGPL|Lesser|Unlicense|Zlib|HPND)\b",
    re.IGNORECASE,
)


def required(name: str, extras: frozenset[str], seen: dict[str, set[str]]) -> None:
    """Collect into `seen` every installed package that `name[extras]` requires, directly or indirectly."""
    key = re.sub(r"[-_.]+", "-", name).lower()
    if key in seen and extras <= seen[key]:
        return
    seen.setdefault(key, set()).update(extras)
    for line in metadata.requires(name) or ():
        requirement = Requirement(line)
        wanted = requirement.marker is None or any(
            requirement.marker.evaluate({"extra": extra}) for extra in extras or {""}
        )
        if wanted:
            required(requirement.name, frozenset(requirement.extras), seen)


def licence_of(name: str) -> str:
    """Return what a package's metadata says about its licence."""
    about = metadata.metadata(name)
    classifiers = [
        each.rpartition(" :: ")[2] for each in about.get_all("Classifier", []) if each.startswith("License ::")
    ]
    return about.get("License-Expression") or "; ".join(classifiers) or (about.get("License") or "").split("\n")[0]


def check_licences(names: list[str]) -> list[str]:
    """Return a line for each package whose licence is missing or not allowed."""
    faults = []
    for name in names:
        licence = licence_of(name)
        if not ALLOWED.search(licence):
            faults.append(f"{name}: {licence or 'no licence in its metadata'}")
    return faults


def check_vulnerabilities(names: list[str]) -> list[str]:
    """Return a line for each known vulnerability, as far as the package index has such data."""
    if importlib.util.find_spec("pip_audit") is None:
        print("vulnerabilities: not looked up, because pip-audit isn't installed")
        return []
    with tempfile.TemporaryDirectory() as folder:
        pins = Path(folder, "pins.txt")
        pins.write_text("".join(f"{name}=={metadata.version(name)}\n" for name in names), encoding="utf-8")
        command = [
            sys.executable,
            "-m",
            "pip_audit",
            "--no-deps",
            "--disable-pip",
            "--progress-spinner=off",
            "-f",
            "json",
        ]
        done = subprocess.run([*command, "-r", str(pins)], capture_output=True, text=True, timeout=300, check=False)
    try:
        found = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        print(f"vulnerabilities: pip-audit could not run: {done.stderr.strip().splitlines()[-1:]}")
        return []
    audited = [each for each in found if "vulns" in each]
    print(f"vulnerabilities: audited {len(audited)} of {len(names)} packages; the index has no data on the others")
    return [f"{each['name']} {each['version']}: {one['id']}" for each in audited for one in each["vulns"]]


def main() -> int:
    seen: dict[str, set[str]] = {}
    required("muxkit", frozenset({"all", "spark"}), seen)
    names = sorted(seen.keys() - {"muxkit"})
    faults = check_licences(names)
    print(f"licences: {len(names)} packages checked")
    faults += check_vulnerabilities(names)
    print(*faults, sep="\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
