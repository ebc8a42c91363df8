"""A stand-in for NVIDIA's CUDA toolkit, for programs that are compiled and never run.

XLA's GPU compiler ends with two tools of that toolkit: a library of mathematical functions, which it links into every
kernel, and the assembler `ptxas`, which it starts for every kernel. By then the program is optimized and its buffers
are assigned, and without a GPU nothing more is needed. The stand-ins, an empty library and an assembler that writes an
empty program, save the toolkit and its time.
"""

from pathlib import Path

RELEASE = "13.0"  # of CUDA, as the descriptions of GPUs in `target.py` say
ASSEMBLER = f"""\
#!/bin/sh
case "$*" in *--version*)
  echo "ptxas: NVIDIA (R) Ptx optimizing assembler"
  echo "Cuda compilation tools, release {RELEASE}, V{RELEASE}.0"
  exit ;;
esac
while [ $# -gt 0 ]; do
  if [ "$1" = -o ]; then printf '\\177ELF' > "$2"; fi
  shift
done
"""
LIBRARY = "; no functions\n"


def make_toolkit(folder: Path) -> Path:
    """Writes the stand-ins below a folder; returns the value of XLA's option `xla_gpu_cuda_data_dir`."""
    toolkit = folder / "cuda"
    assembler, library = toolkit / "bin" / "ptxas", toolkit / "nvvm" / "libdevice" / "libdevice.10.bc"
    for file, text in ((assembler, ASSEMBLER), (library, LIBRARY)):
        file.parent.mkdir(parents=True)
        file.write_text(text)
    assembler.chmod(0o755)
    return toolkit
