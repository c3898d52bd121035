#include "library_kernels.h"

#include <mutex>
#include <string>

#include "tensor_plan.h"
#include "wgmma_plan.h"

// Texts of the PTX files beside this one, which CMake turns into arrays; they end with a NUL.
extern const unsigned char sparseconv_library_kernels_ptx[];
extern const unsigned char sparseconv_tensor_kernels_ptx[];
extern const unsigned char sparseconv_wgmma_kernels_ptx[];

namespace sparseconv::cuda {
namespace {

// The compiled PTX that all nodes of the process share, as long as there is one.
class SharedLibrary {
 public:
  explicit SharedLibrary(const unsigned char* ptx) : ptx_(ptx) {}

  std::shared_ptr<const Library> Get() {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto library = library_.lock();
    if (library == nullptr) {
      library = std::make_shared<const Library>(ptx_);
      library_ = library;
    }
    return library;
  }

 private:
  const unsigned char* const ptx_;
  std::mutex mutex_;
  std::weak_ptr<const Library> library_;
};

// Never destroyed: a session may end after main.
std::shared_ptr<const Library> LibraryOfCsr() {
  static auto* const shared = new SharedLibrary(sparseconv_library_kernels_ptx);
  return shared->Get();
}

std::shared_ptr<const Library> LibraryOfTensor() {
  static auto* const shared = new SharedLibrary(sparseconv_tensor_kernels_ptx);
  return shared->Get();
}

std::shared_ptr<const Library> LibraryOfWgmma() {
  static auto* const shared = new SharedLibrary(sparseconv_wgmma_kernels_ptx);
  return shared->Get();
}

FunctionHandle LoadProduct(const Library& library, const std::string& name, int max_shared_bytes) {
  const FunctionHandle product = library.Function(name.c_str());
  GetDriver().set_function_attribute(product, kMaxDynamicSharedBytes, max_shared_bytes);
  return product;
}

}  // namespace

LibraryKernels::LibraryKernels(bool is_half) : library_(LibraryOfCsr()) {
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

TensorKernels::TensorKernels(int tile_rows, int max_shared_bytes) : library_(LibraryOfTensor()) {
  const std::string subtiles = std::to_string(tile_rows / kSubtileRows);
  for (const int positions : TensorPositions(tile_rows)) {
    const std::string name = "sparseconv_tensor_r" + subtiles + "_p" + std::to_string(positions);
    products_[positions] = LoadProduct(*library_, name, max_shared_bytes);
  }
}

WgmmaKernels::WgmmaKernels(int max_shared_bytes) : library_(LibraryOfWgmma()) {
  for (const int positions : kWgmmaPositions) {
    const std::string name = "sparseconv_wgmma_p" + std::to_string(positions);
    products_[positions] = LoadProduct(*library_, name, max_shared_bytes);
  }
}

}  // namespace sparseconv::cuda
