#!/usr/bin/env bash
# Builds the native library with AddressSanitizer and UndefinedBehaviorSanitizer, and runs the fuzz test and a sample of the
# other tests with it, then those of its CUDA side. PYTHON names the interpreter (default: python3).
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
build=build/sanitized

# The library is built for either side, from objects that are mostly the same: the second build, in cuda_emulation, takes
# them from here. Those that nothing has taken for days are of older sources.
export SPARSECONV_OBJECTS="${SPARSECONV_OBJECTS:-$PWD/build/objects}"
mkdir -p "$SPARSECONV_OBJECTS"
find "$SPARSECONV_OBJECTS" -type f -mtime +3 -delete

# What is checked takes longer to compile than to run. The options are those of cuda_emulation.
cmake -S . -B "$build" -DCMAKE_CXX_COMPILER=g++ -DCMAKE_CXX_COMPILER_LAUNCHER="$PWD/tests/support/compile_once.py" \
  -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS_DEBUG="-O0 -g1" -DSPARSECONV_WARNINGS_AS_ERRORS=ON \
  -DSPARSECONV_SANITIZE=ON >/dev/null
cmake --build "$build" --parallel 2

export ONNX_SPARSECONV_LIBRARY="$PWD/$build/libonnx_sparseconv.so" PYTHONPATH="$PWD"
# The sanitizers must be loaded before anything allocates, and need the C++ runtime to be there when they start. Python
# and ONNX Runtime keep memory until the process ends, which would be reported as leaks.
preload="$(g++ -print-file-name=libasan.so) $(g++ -print-file-name=libstdc++.so)"
export ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 UBSAN_OPTIONS=print_stacktrace=1

# With the sanitizers, as ASAN_OPTIONS is set; their runtime is only loaded for what is tested.
"$python" -c "
from tests.native.cuda import reference
from tests.support import cuda_emulation
cuda_emulation.build_emulated_library(), cuda_emulation.build_driver(), cuda_emulation.build_kernels()
reference.compiled()"

echo "fuzz"
LD_PRELOAD="$preload" "$python" tests/native/fuzz_attributes.py --count 1000 2>"$build/fuzz.log" ||
  { tail -60 "$build/fuzz.log"; exit 1; }
echo "tests"
LD_PRELOAD="$preload" "$python" -m pytest -q -p no:xdist -p no:cacheprovider \
  tests/native/test_correctness.py tests/native/test_refusals.py tests/native/test_concurrency.py \
  -k "not steady_runs and not portable_form"
echo "tests of the CUDA side"
# How a kernel is chosen is slow, and the same here; of layers, the other kernels' do, and of code any plan.
wanted="not runs_by_itself and not same_plan and not fewer_cycles and not (test_wgmma and test_layers)"
wanted+=" and not rows_that_begin_anywhere and not every_size_of_a_stage"
LD_PRELOAD="$preload" "$python" -m pytest -q -p no:xdist -p no:cacheprovider \
  tests/native/cuda/test_images.py tests/native/cuda/test_csr.py tests/native/cuda/test_generated.py \
  tests/native/cuda/test_driver_errors.py tests/native/cuda/test_tensor.py tests/native/cuda/test_segments.py \
  tests/native/cuda/test_wgmma.py -k "$wanted"
