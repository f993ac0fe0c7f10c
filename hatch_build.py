"""Compiles the CPU kernels when BlockPilot is installed, once for every set of instructions of this kind of machine.

The compiler is Zig's, which pip brings for the time of the build: no compiler has to be on the machine, and everyone
gets the same code. Where it fails, BlockPilot is installed without kernels and computes in float32.
"""

import os
import platform
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NATIVE = Path("src/blockpilot/native")
VARIANTS = {  # name -> processor, in the compiler's words
    "x86_64": {
        "avx512-vnni": "x86_64_v4+avx512vnni",
        "avx-vnni": "x86_64_v3+avxvnni",
        "avx2": "x86_64_v3",
        "portable": "x86_64",
    },
    "aarch64": {"arm-dot": "generic+dotprod", "portable": "generic"},
}
SYSTEMS = {"linux": ("linux-gnu.2.17", "so"), "darwin": ("macos", "dylib")}
# no contraction: a product and a sum become one instruction where the code says so, the same for every shape of a pass
FLAGS = ["-shared", "-O3", "-fPIC", "-std=c11", "-ffp-contract=off", "-fno-math-errno", "-fno-sanitize=undefined"]
FLAGS += ["-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-unused-function", "-s", "-lpthread"]


def find_platform() -> tuple[str, str]:
    """The processor and the system, in the words of the tables."""
    machine = platform.machine().lower()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(machine, machine), sys.platform


def compile_kernels(root: Path, machine: str, system: str, compiler: list[str]) -> list[Path]:
    target, suffix = SYSTEMS[system]
    folder = root / NATIVE / "lib"
    folder.mkdir(exist_ok=True)
    jobs = {folder / f"kernels-{name}.{suffix}": processor for name, processor in VARIANTS[machine].items()}

    def compile_one(job: tuple[Path, str]) -> None:
        path, processor = job
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            made = Path(temporary) / path.name
            kind = ["-target", f"{machine}-{target}", f"-mcpu={processor}"]
            source = root / NATIVE / "kernels" / "kernels.c"
            subprocess.run([*compiler, *FLAGS, *kind, "-o", made, source], check=True, capture_output=True, text=True)
            os.replace(made, path)

    with ThreadPoolExecutor(max_workers=max(1, min(4, os.cpu_count() or 1))) as pool:
        list(pool.map(compile_one, jobs.items()))
    return list(jobs)


class KernelsHook(BuildHookInterface):
    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """`version` is `standard` or `editable`; both leave the libraries beside their sources."""
        machine, system = find_platform()
        if self.target_name != "wheel":
            return
        if machine not in VARIANTS or system not in SYSTEMS:
            self.app.display_warning(f"no CPU kernels for {system} on {machine}: float32 serves there")
            return
        try:
            compile_kernels(Path(self.root), machine, system, [sys.executable, "-m", "ziglang", "cc"])
        except (OSError, subprocess.CalledProcessError) as error:
            said = getattr(error, "stderr", "") or str(error)
            self.app.display_warning(f"the CPU kernels could not be compiled, float32 serves instead: {said[-2000:]}")
            return
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{_platform_tag(machine, system)}"
        build_data["artifacts"].append(f"{NATIVE}/lib/kernels-*")


def _platform_tag(machine: str, system: str) -> str:
    if system == "linux":
        return f"manylinux_2_17_{machine}"
    return "macosx_11_0_arm64" if machine == "aarch64" else "macosx_11_0_x86_64"
