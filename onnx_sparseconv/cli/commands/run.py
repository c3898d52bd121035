"""``sparseconv run``: run a model once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from onnx_sparseconv.cli import failures
from onnx_sparseconv.cli.console import format_shape, format_time, say
from onnx_sparseconv.cli.exit_codes import ExitCode
from onnx_sparseconv.cli.options import NoLibraryOption, ProviderChoice, ProviderOption, ThreadsOption
from onnx_sparseconv.cli.paths import require_inputs_spared

NAME = "run"


@failures.command
def command(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="An ONNX model, converted or not.", show_default=False)
    ],
    *,
    inputs: Annotated[
        Path,
        typer.Option(
            "--inputs",
            metavar="FILE.npz",
            help="Numpy arrays under the names of the model's inputs: numpy.savez(FILE, name=array).",
            show_default=False,
        ),
    ],
    output: Annotated[
        Path,
        typer.Option("-o", "--output", metavar="OUT.npz", help="The outputs, under their names.", show_default=False),
    ],
    provider: ProviderOption = ProviderChoice.CPU,
    threads: ThreadsOption = None,
    no_library: NoLibraryOption = False,
) -> ExitCode:
    """Run a model once on the inputs of a file and write the outputs to another."""
    from onnx_sparseconv.files import atomic_write  # noqa: PLC0415
    from onnx_sparseconv.runtime.inputs import write_npz  # noqa: PLC0415
    from onnx_sparseconv.runtime.run import run_model  # noqa: PLC0415

    require_inputs_spared(output, [model, inputs])
    with failures.stdout_kept_clean():
        result = run_model(model, inputs, provider=provider.value, threads=threads, use_library=not no_library)
        with atomic_write(output) as temporary:
            write_npz(temporary, result.outputs)
    for name, array in result.outputs.items():
        say(f"{name}: {array.dtype} {format_shape(array.shape)}")
    say(f"Wrote {output}. The run took {format_time(result.time_us)} (a first run is slow: sparseconv bench measures).")
    return ExitCode.DONE
