"""A stand-in for NVIDIA's CUDA toolkit, for programs that are compiled and never run.

XLA's compiler for GPUs ends in two pieces of that toolkit: a library of mathematical functions, which it links into
every kernel, and the assembler `ptxas`, which it starts for every kernel. By then the program is optimized and its
buffers are assigned, and that is all that is looked at where there is no GPU. The stand-ins are a library of no
functions and an assembler that writes an empty program, so that no toolkit is needed, and none is waited for.
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
    """Writes the stand-ins below a folder, and returns what XLA's option `xla_gpu_cuda_data_dir` is told."""
    toolkit = folder / "cuda"
    assembler, library = toolkit / "bin" / "ptxas", toolkit / "nvvm" / "libdevice" / "libdevice.10.bc"
    for file, text in ((assembler, ASSEMBLER), (library, LIBRARY)):
        file.parent.mkdir(parents=True)
        file.write_text(text)
    assembler.chmod(0o755)
    return toolkit
