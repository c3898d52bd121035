#include "library_kernels.h"

#include <iterator>
#include <mutex>
#include <utility>

#include "../checked.h"
#include "cluster_plan.h"
#include "concatenate_plan.h"
#include "flat_plan.h"
#include "gemm_plan.h"
#include "octet_plan.h"
#include "pointwise_plan.h"
#include "ring_plan.h"
#include "tensor_launch.h"
#include "tensor_plan.h"
#include "wgmma_plan.h"

// The files of code beside this one, which CMake turns into arrays; they end with a NUL.
extern const unsigned char sparseconv_early_kernels_ptx[];
extern const unsigned char sparseconv_gemm_float_kernels_cubin[];
extern const unsigned char sparseconv_gemm_kernels_cubin[];
extern const unsigned char sparseconv_library_kernels_ptx[];
extern const unsigned char sparseconv_segment_float_kernels_ptx[];
extern const unsigned char sparseconv_segment_kernels_ptx[];
extern const unsigned char sparseconv_tensor_float_kernels_ptx[];
extern const unsigned char sparseconv_tensor_kernels_ptx[];
extern const unsigned char sparseconv_wgmma_float_kernels_cubin[];
extern const unsigned char sparseconv_wgmma_kernels_cubin[];

namespace sparseconv::cuda {
namespace {

// From which on sparse products take metadata in order alone: there, each of the others calls a function first.
constexpr int kOrderedArchitecture = 100;

void Replace(std::string& text, const std::string& old, const std::string& with) {
  for (size_t at = text.find(old); at != std::string::npos; at = text.find(old, at + with.size())) {
    text.replace(at, old.size(), with);
  }
}

// PTX whose sparse products say that their metadata is in order, as SparsePair's is. Drivers know that since CUDA 12.5;
// those that know such GPUs are newer.
std::string WithOrderedMetadata(const unsigned char* ptx) {
  std::string text = reinterpret_cast<const char*>(ptx);
  Replace(text, "\n.version 8.1\n", "\n.version 8.5\n");
  Replace(text, "mma.sp.sync", "mma.sp::ordered_metadata.sync");
  return text;
}

// The loaded code that all nodes of the process share, as long as there is one.
class SharedLibrary {
 public:
  explicit SharedLibrary(const unsigned char* code, bool orders_metadata = false)
      : code_(code), orders_metadata_(orders_metadata) {}

  std::shared_ptr<const Library> Get() {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto library = library_.lock();
    if (library == nullptr) {
      library = orders_metadata_ ? std::make_shared<const Library>(WithOrderedMetadata(code_).c_str())
                                 : std::make_shared<const Library>(code_);
      library_ = library;
    }
    return library;
  }

 private:
  const unsigned char* const code_;
  const bool orders_metadata_;
  std::mutex mutex_;
  std::weak_ptr<const Library> library_;
};

// Never destroyed: a session may end after main.
std::shared_ptr<const Library> LibraryOfCsr(bool begin_early) {
  static auto* const shared = new SharedLibrary(sparseconv_library_kernels_ptx);
  static auto* const early = new SharedLibrary(sparseconv_early_kernels_ptx);
  return (begin_early ? early : shared)->Get();
}

// PTX with sparse products, for both ways in which GPUs take their metadata.
class SharedProducts {
 public:
  explicit SharedProducts(const unsigned char* code) : any_(code), ordered_(code, true) {}

  std::shared_ptr<const Library> Get(int architecture) {
    return (architecture >= kOrderedArchitecture ? ordered_ : any_).Get();
  }

 private:
  SharedLibrary any_, ordered_;
};

std::shared_ptr<const Library> LibraryOfTensor(bool is_half, int architecture) {
  static auto* const of_halves = new SharedProducts(sparseconv_tensor_kernels_ptx);
  static auto* const of_floats = new SharedProducts(sparseconv_tensor_float_kernels_ptx);
  return (is_half ? of_halves : of_floats)->Get(architecture);
}

std::shared_ptr<const Library> LibraryOfSegments(bool is_half, int architecture) {
  static auto* const of_halves = new SharedProducts(sparseconv_segment_kernels_ptx);
  static auto* const of_floats = new SharedProducts(sparseconv_segment_float_kernels_ptx);
  return (is_half ? of_halves : of_floats)->Get(architecture);
}

std::shared_ptr<const Library> LibraryOfWgmma(bool is_half) {
  static auto* const of_halves = new SharedLibrary(sparseconv_wgmma_kernels_cubin);
  static auto* const of_floats = new SharedLibrary(sparseconv_wgmma_float_kernels_cubin);
  return (is_half ? of_halves : of_floats)->Get();
}

std::shared_ptr<const Library> LibraryOfGemm(bool is_half) {
  static auto* const of_halves = new SharedLibrary(sparseconv_gemm_kernels_cubin);
  static auto* const of_floats = new SharedLibrary(sparseconv_gemm_float_kernels_cubin);
  return (is_half ? of_halves : of_floats)->Get();
}

template <size_t kCount>
std::vector<int> AllOf(const int (&counts)[kCount]) {
  return {std::begin(counts), std::end(counts)};
}

const char* NameOf(OctetForm form) {
  switch (form) {
    case OctetForm::kPlain:
      return "octets";
    case OctetForm::kWords:
      return "words";
    case OctetForm::kStrides:
      return "strided";
  }
  return "";
}

std::vector<int> BlocksOf(OctetForm form) {
  switch (form) {
    case OctetForm::kPlain:
      return AllOf(kOctetBlocks);
    case OctetForm::kWords:
      return AllOf(kWordBlocks);
    case OctetForm::kStrides:
      return AllOf(kStridedBlocks);
  }
  return {};
}

std::vector<int> GemmSegments(bool is_half, bool has_boxes, bool is_ready) {
  if (is_half && is_ready) return has_boxes ? std::vector<int>() : AllOf(kReadyPlanesSegments);
  if (is_ready) return has_boxes ? AllOf(kReadyFloatBoxesSegments) : AllOf(kReadyFloatPlanesSegments);
  if (!is_half) return AllOf(kGemmFloatSegments);
  return has_boxes ? AllOf(kGemmBoxesSegments) : AllOf(kGemmPlanesSegments);
}

}  // namespace

LibraryKernels::LibraryKernels(bool is_half, const DeviceFacts& device)
    : begin_early_(device.architecture >= kEarlyArchitecture), library_(LibraryOfCsr(begin_early_)) {
  const std::string type = is_half ? "f16" : "f32";
  for (int i = 0; i < 4; ++i) {
    csr_[i] = library_->Function(("sparseconv_csr_" + type + "_b" + std::to_string(1 << i)).c_str());
  }
  for (size_t i = 0; i < std::size(kDepthwiseWindows); ++i) {
    depthwise_[i] =
        library_->Function(("sparseconv_depthwise_" + std::string(kDepthwiseWindows[i].name) + "_" + type).c_str());
    GetDriver().set_function_attribute(depthwise_[i], kMaxDynamicSharedBytes,
                                       device.max_shared_bytes - kReservedSharedBytes);
  }
  reduce_ = library_->Function(("sparseconv_reduce_" + type).c_str());
  pixel_ = library_->Function(("sparseconv_pixel_" + type).c_str());
  for (const int bytes : kConcatenateUnits) {
    concatenate_[bytes] = library_->Function(("sparseconv_concatenate_v" + std::to_string(bytes)).c_str());
  }
  pools_[{0, 0}] = library_->Function(("sparseconv_max_pool_" + type).c_str());
  for (const int size : {2, 3}) {
    const std::string window = std::to_string(size) + "x" + std::to_string(size);
    pools_[{size, 0}] = library_->Function(("sparseconv_max_pool_" + window + "_" + type).c_str());
    for (const int bytes : {4, 8, 16}) {
      if (bytes == 4 && !is_half) continue;
      const std::string name = "sparseconv_max_pool_" + window + "_" + type + "_v" + std::to_string(bytes);
      pools_[{size, bytes}] = library_->Function(name.c_str());
    }
  }
}

FunctionHandle LibraryKernels::Csr(int sub_batch) const {
  int i = 0;
  while (sub_batch > 1 << i) ++i;
  return csr_[i];
}

ProductKernels::ProductKernels(std::shared_ptr<const Library> library, const std::string& prefix,
                               const std::vector<int>& positions, int max_shared_bytes)
    : library_(std::move(library)) {
  for (const int count : positions) {
    const FunctionHandle product = library_->Function((prefix + std::to_string(count)).c_str());
    GetDriver().set_function_attribute(product, kMaxDynamicSharedBytes, max_shared_bytes);
    products_[count] = product;
  }
}

TensorKernels::TensorKernels(bool is_half, int tile_rows, int architecture, int max_shared_bytes)
    : ProductKernels(LibraryOfTensor(is_half, architecture),
                     std::string("sparseconv_tensor_") + (is_half ? "r" : "f32_r") +
                         std::to_string(tile_rows / kSubtileRows) + "_p",
                     TensorPositions(tile_rows), max_shared_bytes),
      reduce_(library().Function(is_half ? "sparseconv_reduce_vectors" : "sparseconv_reduce_rounded")) {}

SegmentKernels::SegmentKernels(bool is_half, int tile_rows, int architecture, int max_shared_bytes)
    : ProductKernels(LibraryOfSegments(is_half, architecture),
                     is_half ? "sparseconv_segments_r" : "sparseconv_segments_f32_r", {tile_rows / kSubtileRows},
                     max_shared_bytes) {}

WgmmaKernels::WgmmaKernels(bool is_half, int max_shared_bytes)
    : ProductKernels(LibraryOfWgmma(is_half), is_half ? "sparseconv_wgmma_p" : "sparseconv_wgmma_f32_p",
                     AllOf(kWgmmaPositions), max_shared_bytes),
      interleave_(library().Function(is_half ? "sparseconv_interleave" : "sparseconv_interleave_f32")),
      reduce_(library().Function(is_half ? "sparseconv_reduce_vectors" : "sparseconv_reduce_rounded")) {}

RingKernels::RingKernels(int max_shared_bytes)
    : ProductKernels(LibraryOfWgmma(true), "sparseconv_ring_p", AllOf(kRingPositions), max_shared_bytes) {}

OctetKernels::OctetKernels(bool is_half, OctetForm form, int max_shared_bytes)
    : ProductKernels(LibraryOfWgmma(is_half), std::string("sparseconv_") + NameOf(form) + (is_half ? "_n" : "_f32_n"),
                     BlocksOf(form), max_shared_bytes) {}

FlatKernels::FlatKernels(bool is_half, FlatProducts products, int max_shared_bytes)
    : ProductKernels(
          LibraryOfWgmma(is_half),
          Concat("sparseconv_flat_", products == FlatProducts::kDense ? "dense_" : "", is_half ? "n" : "f32_n"),
          AllOf(kFlatBlocks), max_shared_bytes),
      flatten_(library().Function(is_half ? "sparseconv_flatten" : "sparseconv_flatten_f32")),
      flatten_rows_(library().Function(is_half ? "sparseconv_flatten_rows" : "sparseconv_flatten_rows_f32")) {}

GemmKernels::GemmKernels(bool is_half, bool has_boxes, bool is_ready, int max_shared_bytes)
    : ProductKernels(LibraryOfGemm(is_half),
                     Concat("sparseconv_gemm_", is_ready ? "ready_" : "", has_boxes ? "boxes_" : "planes_",
                            is_half ? "s" : "f32_s"),
                     GemmSegments(is_half, has_boxes, is_ready), max_shared_bytes) {}

CopyKernel::CopyKernel(std::shared_ptr<const Library> library, const char* name)
    : library_(std::move(library)), function_(library_->Function(name)) {}

PackKernel::PackKernel(bool is_half)
    : CopyKernel(LibraryOfGemm(is_half), is_half ? "sparseconv_pack" : "sparseconv_pack_f32") {}

SpaceToDepthKernel::SpaceToDepthKernel(bool is_half)
    : CopyKernel(LibraryOfWgmma(is_half), is_half ? "sparseconv_space_to_depth" : "sparseconv_space_to_depth_f32") {}

ClusterKernels::ClusterKernels(bool is_half, int max_shared_bytes)
    : ProductKernels(LibraryOfWgmma(is_half), is_half ? "sparseconv_cluster_n" : "sparseconv_cluster_f32_n",
                     AllOf(kClusterBlocks), max_shared_bytes) {
  LaunchShape shape;
  shape.threads = kClusterThreads;
  shape.dynamic_shared_bytes = static_cast<unsigned>(max_shared_bytes);
  for (int parts = 1; parts <= kMaxClusterParts; ++parts) {
    shape.grid[0] = shape.cluster = static_cast<unsigned>(parts);
    try {
      max_clusters_.push_back(ActiveClusters(Product(kClusterBlocks[0]), shape));
    } catch (const DriverError&) {
      max_clusters_.push_back(0);  // a part of a GPU may have no room for them
    }
  }
}

PointwiseKernels::PointwiseKernels(bool is_half, int max_shared_bytes)
    : ProductKernels(LibraryOfWgmma(is_half), is_half ? "sparseconv_pointwise_s" : "sparseconv_pointwise_f32_s",
                     AllOf(kPointwiseSegments), max_shared_bytes) {
  for (const char* name : {"sparseconv_gather", "sparseconv_gather_whole", "sparseconv_gather_columns"}) {
    gathers_.push_back(library().Function((std::string(name) + (is_half ? "" : "_f32")).c_str()));
  }
}

}  // namespace sparseconv::cuda
