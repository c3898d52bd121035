// CUDA on a CPU, for tests on machines without a GPU: device code compiled by g++ (Linux, x86-64) as a shared object.
//
// cuda_host_build.py includes this file before a device source and, behind it, names the kernels:
//
//   #include "cuda_on_host.h"
//   CUDA_ON_HOST_DYNAMIC_SHARED(float, stages)  // for `extern __shared__ float stages[]`
//   ..the device source..
//   CUDA_ON_HOST_KERNELS(CUDA_ON_HOST_KERNEL(first_kernel), CUDA_ON_HOST_KERNEL(second_kernel))
//
// The shared object exports
//
//   int cuda_on_host_launch(name, grid, block, shared_bytes, params)
//       0: done, 1: no such kernel, 2: the kernel is wrong
//   int cuda_on_host_launch_clusters(name, grid, block, cluster, shared_bytes, params)
//       the same, of blocks in clusters of so many along x
//   int cuda_on_host_has_kernel(name)
//   const char* cuda_on_host_error()
//       of the last launch that returned 2
//
// The threads of a block are fibers: each runs until it waits for others. Blocks run one after the other, every second
// one with its threads in falling order; those of a cluster take turns whenever they wait for each other, the last one
// first at every second time. Launches of one shared object wait for each other.
//
// What is wrong on a GPU goes wrong here. Shared memory holds NaNs (all bits set) when a block begins. Half of every
// asynchronous copy arrives at once, the other half when it is waited for and no thread can go on otherwise: so neither
// a missing wait nor a copy over data that others still read goes unseen. Errors are: barriers that not all threads
// reach, numbered ones whose threads disagree on how many they are or that nobody waits at, instructions of a warp that
// not all its threads come to, metadata of sparse operands out of order, misaligned copies and vectors, shared memory
// behind its end, waits that never end, memory that is touched before the launch in front has been waited for, and
// global addresses that the process may not read or write. Races are only found where the order of the threads shows
// them.
//
// A block of a cluster reads in another's shared memory what that held when its threads came to the cluster barrier
// before. Errors are: other values there by the next barrier, a load that no barrier comes before, between coming to
// one and waiting at it, or of a block that ends before the next one, and barriers that not all threads of the cluster
// come to and wait at, in turn.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

struct uint3 {
  unsigned x, y, z;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
extern uint3 threadIdx, blockIdx, blockDim, gridDim;
constexpr int warpSize = 32;

namespace cuda_on_host {

constexpr unsigned kMaxShared = 227 * 1024;
constexpr unsigned kGuard = 1024;  // bytes behind the dynamic shared memory that must stay as they are

// Ends the launch as failed. Does not return.
[[noreturn]] void Fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

void SyncThreads(const char* site);
// The same, and whether any thread's vote is true.
bool IsAnyInBlock(const char* site, bool vote);
// Hands `value` to the other threads of the warp; returns the values of all.
const uint64_t* ExchangeInWarp(unsigned mask, uint64_t value);
unsigned BallotInWarp(unsigned mask, bool vote);

// The address of shared memory as a number, and back.
unsigned SharedNumber(const void* pointer);
unsigned char* SharedPointer(unsigned number, unsigned bytes, unsigned alignment);

inline void CheckGlobal(const void* address, unsigned alignment) {
  if (reinterpret_cast<uintptr_t>(address) % alignment == 0) return;
  Fail("global address %p is not a multiple of %u", address, alignment);
}

inline void CheckBulk(const void* address, unsigned bytes) {
  if (bytes % 16 != 0 || bytes == 0) Fail("a bulk copy of %u bytes", bytes);
  CheckGlobal(address, 16);
}

// In a kernel that lets the next launch begin, which may have begun early itself, a thread must wait before it touches
// what other launches do.
void LetNextLaunchBegin();
void WaitForLaunchBefore();
void CheckTouch();
// Loads by way of the read-only cache are not for such a kernel.
void CheckReadOnly();

void CopyAsync(unsigned to, const void* from, unsigned bytes);
void CommitCopies();
void WaitForCopies(unsigned pending);
void InitBarrier(unsigned number, unsigned arrivals);
void FenceBarrierInit();
void Arrive(unsigned number);
void ArriveAfterCopies(unsigned number);
void ExpectBytes(unsigned number, unsigned bytes);
void CopyBulk(unsigned to, const void* from, unsigned bytes, unsigned number);
void WaitForBarrier(unsigned number, unsigned parity);
bool IsComplete(unsigned number, unsigned parity);
// In global memory.
void WaitForCount(const unsigned* from, unsigned count);
void StoreBulk(void* to, unsigned from, unsigned bytes);
// Boxes of tensors of three axes; where one begins, the innermost axis first.
struct BoxPlace {
  int at[3];
};
void CopyBox(unsigned to, const void* map, const BoxPlace& place, unsigned number);
void StoreBox(const void* map, unsigned from, const BoxPlace& place);
void CommitBulkStores();
void WaitForBulkReads(unsigned pending);

// What the threads of a warp do together; see the kernels' intrinsics.cuh.
void LoadMatrices(unsigned row, unsigned (&parts)[4]);
void StoreMatrices(unsigned column, const unsigned (&parts)[4]);
void MultiplySparse(unsigned selector, float (&sums)[4], const unsigned (&a)[4], const unsigned (&b)[4],
                    unsigned metadata);
// `has_octets`: 16 bytes of b are eight of the summed axis.
void MultiplySparseMatrices(float* sums, unsigned positions, uint64_t a, uint64_t b, unsigned metadata,
                            bool has_octets);

void MultiplyDenseMatrices(float* sums, unsigned positions, uint64_t a, uint64_t b, bool has_octets);

// Products are computed at once, but their metadata must stay where it is until they have been waited for.
void NoteMetadata(const unsigned* metadata);
void CheckMetadata(const unsigned* metadata);
void CommitProducts();
void WaitForProducts(unsigned pending);
void WaitAtBarrier(int number, unsigned threads);
void ArriveAtBarrier(int number, unsigned threads);

unsigned ClusterRank();
unsigned ClusterSize();
void ArriveAtCluster();
void WaitForCluster();
// From the shared memory of a block of the cluster.
void LoadFromCluster(void* to, unsigned number, unsigned rank, unsigned bytes);

template <class T>
T ShuffleInWarp(unsigned mask, T value, unsigned lane) {
  static_assert(sizeof(T) <= 8);
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  bits = ExchangeInWarp(mask, bits)[lane % warpSize];
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

template <class T>
T LoadShared(unsigned number) {
  T value;
  std::memcpy(&value, SharedPointer(number, sizeof(T), sizeof(T)), sizeof(T));
  return value;
}

template <class T>
T LoadCluster(unsigned number, unsigned rank) {
  T value;
  LoadFromCluster(&value, number, rank, sizeof(T));
  return value;
}

template <class T>
void StoreShared(unsigned number, T value) {
  std::memcpy(SharedPointer(number, sizeof(T), sizeof(T)), &value, sizeof(T));
}

// What an image defines: its dynamic shared memory, and its kernels, behind the last of which stands one without a
// name.
struct Kernel {
  const char* name;
  void (*run)(void** params);
};
extern const Kernel kernels[];
unsigned char* DynamicShared();

template <size_t... kIndices>
struct Indices {};
template <size_t kCount, size_t... kIndices>
struct IndicesTo : IndicesTo<kCount - 1, kCount - 1, kIndices...> {};
template <size_t... kIndices>
struct IndicesTo<0, kIndices...> {
  using Type = Indices<kIndices...>;
};

template <class... Parameters, size_t... kIndices>
void Call(void (*kernel)(Parameters...), void** params, Indices<kIndices...>) {
  kernel(*static_cast<Parameters*>(params[kIndices])...);
}

template <class... Parameters>
void Call(void (*kernel)(Parameters...), void** params) {
  Call(kernel, params, typename IndicesTo<sizeof...(Parameters)>::Type());
}

}  // namespace cuda_on_host

#define CUDA_ON_HOST_DYNAMIC_SHARED(type, name)                                                           \
  alignas(1024) thread_local type name[(cuda_on_host::kMaxShared + cuda_on_host::kGuard) / sizeof(type)]; \
  unsigned char* cuda_on_host::DynamicShared() { return reinterpret_cast<unsigned char*>(name); }

#define CUDA_ON_HOST_KERNEL(name) {#name, [](void** params) { cuda_on_host::Call(&name, params); }}

#define CUDA_ON_HOST_KERNELS(...) \
  const cuda_on_host::Kernel cuda_on_host::kernels[] = {__VA_ARGS__, {nullptr, nullptr}};

// --- the language --------------------------------------------------------------------------------------------------

#define __CUDA_ARCH__ 900
#define __global__
#define __device__
#define __constant__ static
#define __shared__ thread_local
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))
#define CUDA_ON_HOST_TEXT(x) #x
#define CUDA_ON_HOST_LINE(x) CUDA_ON_HOST_TEXT(x)
#define CUDA_ON_HOST_SITE __FILE__ ":" CUDA_ON_HOST_LINE(__LINE__)
#define __syncthreads() ::cuda_on_host::SyncThreads(CUDA_ON_HOST_SITE)

inline void __syncwarp(unsigned mask = 0xFFFFFFFFu) { cuda_on_host::ExchangeInWarp(mask, 0); }
inline unsigned __ballot_sync(unsigned mask, bool vote) { return cuda_on_host::BallotInWarp(mask, vote); }
inline int __any_sync(unsigned mask, bool vote) { return __ballot_sync(mask, vote) != 0; }
inline int __all_sync(unsigned mask, bool vote) { return __ballot_sync(mask, !vote) == 0; }
template <class T>
T __shfl_sync(unsigned mask, T value, int lane) {
  return cuda_on_host::ShuffleInWarp(mask, value, static_cast<unsigned>(lane));
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lanes) {
  return cuda_on_host::ShuffleInWarp(mask, value, threadIdx.x % warpSize ^ static_cast<unsigned>(lanes));
}

template <class T>
T max(T a, T b) {
  return a < b ? b : a;
}
template <class T>
T min(T a, T b) {
  return b < a ? b : a;
}

extern "C" {
float exp2f(float) noexcept;
float expf(float) noexcept;
}
