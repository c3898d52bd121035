// The same kernels, as PTX, for GPUs of compute capability 9.0 and later, on which launches may begin early.
// kernels/library_code.py makes the PTX.
#include "library_kernels.cuh"
