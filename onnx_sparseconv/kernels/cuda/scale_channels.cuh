// Depthwise convolution of one tap: each channel is scaled, and shifted by its bias. What normalises X before an
// activation and a convolution is that.
//
// Nothing but memory bounds it. Outputs lie where their inputs do, so all of X is one run of elements, whatever the
// size of its planes, and a thread takes some vectors of 16 bytes of it. In a vector are elements of one plane, or of
// two that follow each other; where planes are smaller than a vector, each element looks for its own. X may be what
// several sources would be together, which a vector never crosses.
#pragma once

#include "divide.cuh"
#include "epilogue.cuh"
#include "intrinsics.cuh"
#include "params.h"
#include "scale_params.h"
#include "sources.cuh"

namespace sparseconv::cuda {

template <class T>
class ScaleChannels {
 public:
  __device__ __forceinline__ explicit ScaleChannels(const ScaleParams& params)
      : p_(params.map), sources_(params.sources), count_(params.map.num_planes * params.map.in_w) {}

  __device__ __forceinline__ void Run() const {
    LetNextLaunchBegin();
    const int threads = static_cast<int>(gridDim.x * blockDim.x);
    const int thread = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    const int vectors = p_.in_w >= kElements && AreVectors() ? count_ / kElements : 0;
    WaitForLaunchBefore();
    for (int first = thread; first < vectors; first += kScaleVectors * threads) {
      Vector x[kScaleVectors];
#pragma unroll
      for (int i = 0; i < kScaleVectors; ++i) {
        const bool exists = first + i * threads < vectors;
        x[i].words = LoadVectorIf(exists, exists ? PlaceOf(first + i * threads) : nullptr);
      }
#pragma unroll
      for (int i = 0; i < kScaleVectors; ++i) {
        if (first + i * threads < vectors) ScaleVector(first + i * threads, x[i]);
      }
    }
    for (auto i = static_cast<unsigned>(vectors * kElements) + static_cast<unsigned>(thread);
         i < static_cast<unsigned>(count_); i += threads) {
      ScaleElement(static_cast<int>(i));
    }
  }

 private:
  static constexpr int kElements = 16 / static_cast<int>(sizeof(T));
  union Vector {
    uint4 words;
    T elements[kElements];
  };
  using Sums = Floats<kElements>;

  // Of a plane: y = scale * x + shift.
  struct Scale {
    float scale, shift;
  };

  static __device__ __forceinline__ const uint4* VectorsOf(const void* tensor) {
    return static_cast<const uint4*>(tensor);
  }

  __device__ __forceinline__ bool AreVectors() const {
    const auto addresses = reinterpret_cast<unsigned long long>(p_.x) | reinterpret_cast<unsigned long long>(p_.y) |
                           reinterpret_cast<unsigned long long>(p_.epilogue.residual);
    return addresses % sizeof(Vector) == 0;
  }

  // Where a vector of X lies.
  __device__ __forceinline__ const uint4* PlaceOf(int vector) const {
    if (sources_.count == 0) return VectorsOf(p_.x) + vector;
    const int first = vector * kElements, plane = Divide(first, p_.by_strip_items);
    const int image = Divide(plane, p_.by_channels), channel = plane - image * p_.channels;
    const Source source = FindSource(sources_, channel);
    // Planes of the source that lie before that of X, less those of X.
    const int apart = image * source.channels + channel - source.begin - plane;
    return VectorsOf(source.x) + (first + apart * p_.in_w) / kElements;
  }

  __device__ __forceinline__ Scale ScaleOf(int plane) const {
    const int channel = plane - Divide(plane, p_.by_channels) * p_.channels;
    const T* bias = static_cast<const T*>(p_.epilogue.bias);
    return {LoadWritten(p_.weight + channel), bias != nullptr ? LoadElement(bias + channel) : 0.0f};
  }

  __device__ __forceinline__ void ScaleVector(int vector, const Vector& x) const {
    const int first = vector * kElements, plane = Divide(first, p_.by_strip_items);
    const int left = (plane + 1) * p_.in_w - first;  // elements of that plane
    const Scale here = ScaleOf(plane);
    Scale next = here;
    if (left < kElements) next = ScaleOf(plane + 1);
    Sums sums;
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      const float scale = i < left ? here.scale : next.scale, shift = i < left ? here.shift : next.shift;
      sums.at[i] = scale * ToFloat(x.elements[i]) + shift;
    }
    if (p_.epilogue.residual != nullptr) {
      Vector residual;
      residual.words = LoadWritten(VectorsOf(p_.epilogue.residual) + vector);
#pragma unroll
      for (int i = 0; i < kElements; ++i) sums.at[i] += ToFloat(residual.elements[i]);
    }
    sums = ActivateSums<T>(p_.epilogue, sums);
    Vector y;
#pragma unroll
    for (int i = 0; i < kElements; ++i) StoreRounded(y.elements + i, sums.at[i]);
    static_cast<uint4*>(p_.y)[vector] = y.words;
  }

  __device__ __forceinline__ void ScaleElement(int element) const {
    const int plane = Divide(element, p_.by_strip_items);
    const Scale scale = ScaleOf(plane);
    const float sum = scale.scale * LoadElement(static_cast<const T*>(p_.x) + element) + scale.shift;
    Epilogue rest = p_.epilogue;
    rest.bias = nullptr;
    StoreOutput<T>(rest, p_.y, element, 0, sum);
  }

  const DepthwiseParams& p_;
  const Sources& sources_;
  const int count_;  // of elements
};

}  // namespace sparseconv::cuda
