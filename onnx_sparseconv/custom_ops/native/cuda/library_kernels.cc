#include "library_kernels.h"

#include <mutex>
#include <string>

// Text of library_kernels.ptx, which CMake turns into an array; it ends with a NUL.
extern const unsigned char sparseconv_library_kernels_ptx[];

namespace sparseconv::cuda {
namespace {

std::shared_ptr<const Library> SharedLibrary() {
  static std::mutex mutex;
  static auto* const shared = new std::weak_ptr<const Library>;  // never destroyed: a session may end after main
  const std::lock_guard<std::mutex> lock(mutex);
  auto library = shared->lock();
  if (library == nullptr) {
    library = std::make_shared<const Library>(sparseconv_library_kernels_ptx);
    *shared = library;
  }
  return library;
}

}  // namespace

LibraryKernels::LibraryKernels(bool is_half) : library_(SharedLibrary()) {
  const std::string type = is_half ? "f16" : "f32";
  for (int i = 0; i < 4; ++i) {
    csr_[i] = library_->Function(("sparseconv_csr_" + type + "_b" + std::to_string(1 << i)).c_str());
  }
  reduce_ = library_->Function(("sparseconv_reduce_" + type).c_str());
}

FunctionHandle LibraryKernels::Csr(int sub_batch) const {
  int i = 0;
  while (sub_batch > 1 << i) ++i;
  return csr_[i];
}

}  // namespace sparseconv::cuda
