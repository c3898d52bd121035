"""Options that several commands share."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer


class ProviderChoice(enum.StrEnum):
    """Where to run."""

    CPU = "cpu"
    CUDA = "cuda"


class KernelChoice(enum.StrEnum):
    """Which kernels run SparseConv nodes on CUDA."""

    AUTO = "auto"
    CSR = "csr"
    TENSOR = "tensor"
    SEGMENTS = "segments"
    WGMMA = "wgmma"
    FLAT = "flat"
    GEMM = "gemm"
    CLUSTER = "cluster"
    DEPTHWISE = "depthwise"
    GENERATED = "generated"


class DenseChoice(enum.StrEnum):
    """Which options of ONNX Runtime's CUDA provider are tried."""

    BEST = "best"
    DEFAULT = "default"
    NHWC = "nhwc"


class PrecisionChoice(enum.StrEnum):
    """Type that the model computes in."""

    KEEP = "keep"
    FP16 = "fp16"


OriginalArgument = Annotated[
    Path, typer.Argument(metavar="ORIGINAL", help="The model before conversion.", show_default=False)
]
ConvertedArgument = Annotated[
    Path, typer.Argument(metavar="CONVERTED", help="The model that 'sparseconv convert' wrote.", show_default=False)
]
ProviderOption = Annotated[
    ProviderChoice,
    typer.Option(
        "--provider", help="Where to run. It is an error (exit code 5) when ONNX Runtime would run elsewhere."
    ),
]
ThreadsOption = Annotated[
    int | None,
    typer.Option(
        "--threads",
        min=1,
        help="Threads of one run, at most 4 for each processor, or 64. Default: ONNX Runtime's choice.",
        show_default=False,
    ),
]
BatchOption = Annotated[
    int | None,
    typer.Option(
        "--batch",
        min=1,
        help="Batch size of made-up inputs where the model leaves it open. Default: 1.",
        show_default=False,
    ),
]
ShapeOption = Annotated[
    list[str] | None,
    typer.Option(
        "--shape",
        metavar="NAME:1x3x224x224",
        help="Shape of a made-up input, where the model leaves it open. May be repeated.",
        show_default=False,
    ),
]
InputsOption = Annotated[
    Path | None,
    typer.Option(
        "--inputs",
        metavar="FILE.npz",
        help="Real inputs: numpy arrays under the names of the model's inputs. Default: random ones.",
        show_default=False,
    ),
]
SeedOption = Annotated[int, typer.Option("--seed", min=0, help="Seed of random inputs.")]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print JSON, and nothing else, on stdout.", show_default=False)
]
ReportFileOption = Annotated[
    Path | None,
    typer.Option("-o", "--output", metavar="FILE", help="Write the JSON report to this file too.", show_default=False),
]
NoLibraryOption = Annotated[
    bool,
    typer.Option(
        "--no-library",
        help="Run the converted model without the native library, as any other program would: as a dense model.",
        show_default=False,
    ),
]
KernelOption = Annotated[
    KernelChoice,
    typer.Option(
        "--kernel",
        help="Kernels of SparseConv on CUDA. auto: the one generated at conversion, from the batch size on that the "
        "node states, or else the fastest of the library's, by its own count. Another name insists on that kernel.",
    ),
]
