// The kernels that the library carries, as PTX, for every GPU. kernels/library_code.py makes the PTX.
#include "library_kernels.cuh"
