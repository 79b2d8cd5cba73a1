"""Run the numeric tests as other machines would: `make test-machines`.

Libraries choose their kernels by the CPU and the number of threads, and kernels round differently.
Each setting below is one that MKL, oneDNN, OpenBLAS or torch obeys; one that a machine does not
know (an Arm CPU, say) changes nothing there.

`make test` runs each of these tests once: a quarter of them on each of these machines, and a
quarter here. With `--every-machine` all of them run everywhere, as in `make test-all`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

TESTS = Path(__file__).parent.parent / "tests"
sys.path.insert(0, str(TESTS))

from conftest import NUMERIC  # noqa: E402

MACHINES = {
    "SSE4": {
        "ATEN_CPU_CAPABILITY": "default",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
        "OPENBLAS_CORETYPE": "Nehalem",
        "OMP_NUM_THREADS": "1",
    },
    "AVX2, two threads": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "MKL_CBWR": "AVX2",  # which CPUs that are not Intel's obey
        "OPENBLAS_CORETYPE": "Haswell",
        "OMP_NUM_THREADS": "2",
        "OMP_WAIT_POLICY": "passive",  # there are two workers
    },
    "MKL for any CPU": {"MKL_CBWR": "COMPATIBLE", "OMP_NUM_THREADS": "1"},
}


def main(options: list[str]) -> int:
    """All of them, whatever fails; 0 if nothing did."""
    every = "--every-machine" in options
    options = [option for option in options if option != "--every-machine"]
    # The files, too: to collect all tests takes longer than some of these.
    command = [sys.executable, "-m", "pytest", "-m", "numeric and not slow", *options]
    command += [str(path) for path in sorted(TESTS.rglob("test_*.py")) if path.stem in NUMERIC]
    lines, failed = [], 0
    for number, (name, setting) in enumerate(MACHINES.items(), start=1):
        said = " ".join(f"{variable}={value}" for variable, value in setting.items())
        print(f"\n{name}: {said}", flush=True)
        start = time.monotonic()
        part = [] if every else ["--part", f"{number}/{len(MACHINES) + 1}"]
        environment = {**os.environ, **setting}
        code = subprocess.run([*command, *part], env=environment, check=False).returncode
        failed += code != 0
        verdict = "FAILED" if code else "passed"
        lines.append(f"{verdict} in {time.monotonic() - start:3.0f} s  {name}: {said}")
    print("\nNumeric tests on other machines:", *lines, sep="\n")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
