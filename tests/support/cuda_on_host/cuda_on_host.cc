// Runs emulated kernels. See cuda_on_host.h.
#include "cuda_on_host.h"

#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdarg>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <iterator>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "tensor_core.h"
#include "tensor_map.h"

#if !defined(__x86_64__) || !defined(__linux__)
#error "the fibers are written for x86-64 Linux"
#endif

uint3 threadIdx, blockIdx, blockDim, gridDim;

// Saves the registers that a called function must keep on the stack, stores the stack pointer in *save, and goes on
// where `load` was stored.
extern "C" __attribute__((visibility("hidden"))) void cuda_on_host_switch(void** save, void* load);
asm(R"(
.text
.p2align 4
.hidden cuda_on_host_switch
.globl cuda_on_host_switch
.type cuda_on_host_switch, @function
cuda_on_host_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size cuda_on_host_switch, . - cuda_on_host_switch
)");

namespace cuda_on_host {

constexpr unsigned kMaxThreads = 1024;
constexpr unsigned kMaxCluster = 8;      // blocks, on every GPU that has clusters
constexpr unsigned kSharedBegin = 1024;  // address of the first byte of shared memory, so that 0 is an error
constexpr unsigned kMaxPendingBytes = (1u << 20) - 1;  // that an mbarrier can count
constexpr size_t kStack = 128 * 1024;
constexpr uint64_t kStackMark = 0x57AC4E4D57AC4E4Dull;  // at its end: a thread that overwrites it needs more stack
constexpr unsigned char kUnset = 0xFF;                  // NaN in both types, and a bad index
constexpr unsigned char kGuardByte = 0xFD;              // the same, but another one
constexpr uint64_t kBarrierMark = 0xBA441E4BA441E4BAull;
constexpr int kNumberedBarriers = 16;  // of a block; number 0 is that of __syncthreads

enum class Wait { kNothing, kBlock, kWarp, kBarrier, kNumberedBarrier, kCount, kArrival, kCluster, kDone };

struct Copy {
  unsigned char* to;
  const void* from;
  unsigned bytes;
};

struct Fiber {
  void* stack_pointer = nullptr;
  unsigned char* stack = nullptr;
  uint3 index = {};
  unsigned number = 0;
  Wait wait = Wait::kDone;
  const char* site = nullptr;  // of the __syncthreads
  unsigned barrier = 0;        // of WaitForBarrier or WaitAtBarrier
  unsigned parity = 0;
  const unsigned* counted = nullptr;  // of WaitForCount
  unsigned count = 0;
  bool may_begin_early = false, has_waited = false;
  bool has_arrived = false;  // at the cluster barrier of a phase, and not waited there
  unsigned arrival_phase = 0;
  unsigned num_copies = 0;
  std::vector<Copy> copies;              // not committed
  std::deque<std::vector<Copy>> groups;  // committed, not arrived
  std::vector<Copy> stores;              // bulk copies to global memory, which belong to no group yet
  std::deque<std::vector<Copy>> store_groups;
  // Where the metadata of products stands that are not complete: of those not committed, and of each group.
  std::vector<const unsigned*> metadata;
  std::deque<std::vector<const unsigned*>> products;
};

struct Warp {
  unsigned size = 0;
  unsigned arrived = 0;
  const char* instruction = nullptr;  // that they have come to, and a number that they have to agree on
  unsigned operand = 0;
  unsigned round = 0;
  uint64_t values[2][warpSize] = {};
  const unsigned char* rows[warpSize] = {};  // of LoadMatrices
  unsigned char* columns[warpSize] = {};     // of StoreMatrices
  uint16_t matrices[warpSize][8] = {};
  SparseOperands operands[warpSize] = {};  // of MultiplySparse
  float products[16][8] = {};
  unsigned phase = 0;  // of the numbered barrier that they have come to
};

struct NumberedBarrier {
  unsigned threads = 0;  // that this phase waits for
  uint32_t warps = 0;    // that have come, a bit each
  unsigned phase = 0;

  unsigned arrived() const { return static_cast<unsigned>(__builtin_popcount(warps)) * warpSize; }
};

struct Barrier {
  unsigned arrivals = 0;  // of a phase
  unsigned pending = 0;   // arrivals that this phase still waits for
  int64_t bytes = 0;      // that it still waits for
  unsigned phase = 0;
  unsigned owner = 0;  // the thread that initialised it
  unsigned epoch = 0;  // the block's barriers by then
  bool is_fenced = false;
  std::vector<Copy> copies;
  std::vector<std::vector<unsigned char>> boxes;  // that some of these are of
};

// What a block has of its own, besides shared memory.
struct Block {
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  std::map<unsigned, Barrier> barriers;
  NumberedBarrier numbered[kNumberedBarriers];
  unsigned epoch = 0;
  unsigned num_arrived = 0;  // threads, at the cluster barrier of this phase
  unsigned num_block_barriers = 0;
  bool votes[2] = {};  // of IsAnyInBlock, by turns
};

// A block of the cluster that runs.
struct Member {
  Block block;  // and what is in its shared memory, while others run
  std::vector<unsigned char> shared;
  // What was there when its threads had arrived at the cluster barrier before, and have arrived at the next one.
  std::vector<unsigned char> visible, arrived;
  bool has_ended = false;
};

// A load from another block's shared memory, since the last cluster barrier.
struct ClusterLoad {
  unsigned owner, reader;  // ranks
  unsigned thread;         // of the reader
  unsigned offset, bytes;
};

// The block in it is the one that runs.
struct State : Block {
  std::mutex mutex;
  unsigned char* stacks = nullptr;  // kStack bytes for each fiber of a cluster
  unsigned num_threads = 0;         // of a block
  Fiber* current = nullptr;
  void* scheduler = nullptr;
  std::vector<Member> cluster;
  unsigned rank = 0;
  unsigned phase = 0;  // cluster barriers that are complete
  std::vector<ClusterLoad> loads;
  pthread_t thread = {};  // that launched
  void (*kernel)(void**) = nullptr;
  const char* kernel_name = "";
  void** params = nullptr;
  unsigned char* shared = nullptr;  // all of it: static, then or before the dynamic part
  unsigned shared_size = 0;
  unsigned char* dynamic = nullptr;
  unsigned dynamic_size = 0;
  bool has_failed = false;
  std::string error;
};

// Never destroyed: threads may launch while the process ends.
static State& state = *new State;

static void SetErrorText(const char* format, va_list arguments) {
  char text[512], where[256];
  std::vsnprintf(text, sizeof(text), format, arguments);
  std::snprintf(where, sizeof(where), "%s, block (%u, %u, %u)", state.kernel_name, blockIdx.x, blockIdx.y, blockIdx.z);
  state.has_failed = true;
  state.error =
      std::string(where) + (state.current ? ", thread " + std::to_string(state.current->number) : "") + ": " + text;
  std::fprintf(stderr, "cuda_on_host: %s\n", state.error.c_str());
}

__attribute__((format(printf, 1, 2))) static void SetError(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  SetErrorText(format, arguments);
  va_end(arguments);
}

static void SwitchToScheduler() { cuda_on_host_switch(&state.current->stack_pointer, state.scheduler); }

void Fail(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  SetErrorText(format, arguments);
  va_end(arguments);
  SwitchToScheduler();
  __builtin_trap();
}

// --- what a thread does --------------------------------------------------------------------------------------------

void SyncThreads(const char* site) {
  state.current->wait = Wait::kBlock;
  state.current->site = site;
  SwitchToScheduler();
}

bool IsAnyInBlock(const char* site, bool vote) {
  bool& any = state.votes[state.num_block_barriers % 2];
  any = any || vote;
  SyncThreads(site);
  return any;
}

Warp& CurrentWarp() { return state.warps[state.current->number / warpSize]; }

// Waits for the other threads of the warp, which have to come to the same instruction. The last one calls `run` before
// any of them goes on, so that an instruction reads what there was when all had come.
template <class Function>
void MeetInWarp(const char* instruction, unsigned operand, Function run) {
  Warp& warp = CurrentWarp();
  if (warp.arrived != 0 && std::strcmp(warp.instruction, instruction) != 0) {
    Fail("%s, but others of the warp are at %s", instruction, warp.instruction);
  }
  if (warp.arrived != 0 && warp.operand != operand) Fail("threads of a warp are at %s of different kinds", instruction);
  warp.instruction = instruction;
  warp.operand = operand;
  if (++warp.arrived < warp.size) {
    state.current->wait = Wait::kWarp;
    SwitchToScheduler();
    return;
  }
  run(warp);
  warp.arrived = 0;
  const unsigned first = state.current->number / warpSize * warpSize;
  for (unsigned i = first; i < first + warp.size; ++i) {
    if (state.fibers[i].wait == Wait::kWarp) state.fibers[i].wait = Wait::kNothing;
  }
}

// Hands `value` to the other threads of the warp; returns the values of all.
const uint64_t* ExchangeInWarp(unsigned mask, uint64_t value) {
  if (mask != 0xFFFFFFFFu) Fail("only full warps are supported, got the mask %08x", mask);
  Warp& warp = CurrentWarp();
  // Two places: some may hand in their next value before others have read this one.
  uint64_t* values = warp.values[warp.round % 2];
  values[state.current->number % warpSize] = value;
  MeetInWarp("an exchange", 0, [](Warp& all) { ++all.round; });
  return values;
}

unsigned BallotInWarp(unsigned mask, bool vote) {
  const uint64_t* votes = ExchangeInWarp(mask, vote);
  unsigned result = 0;
  const unsigned size = state.warps[state.current->number / warpSize].size;
  for (unsigned i = 0; i < size; ++i) result |= static_cast<unsigned>(votes[i]) << i;
  return result;
}

// The address of shared memory as a number, and back.
unsigned SharedNumber(const void* pointer) {
  const auto offset = static_cast<const unsigned char*>(pointer) - state.shared;
  if (offset < 0 || offset >= static_cast<ptrdiff_t>(state.shared_size)) {
    Fail("%p is not an address of shared memory", pointer);
  }
  return static_cast<unsigned>(offset) + kSharedBegin;
}

unsigned char* SharedPointer(unsigned number, unsigned bytes, unsigned alignment) {
  if (number % alignment != 0) Fail("shared address %u is not a multiple of %u", number, alignment);
  if (number < kSharedBegin || bytes > state.shared_size || number - kSharedBegin > state.shared_size - bytes) {
    Fail("%u bytes at shared address %u are outside of shared memory", bytes, number);
  }
  unsigned char* pointer = state.shared + (number - kSharedBegin);
  if (pointer + bytes > state.dynamic + state.dynamic_size && pointer < state.dynamic + kMaxShared + kGuard) {
    Fail("byte %td of %u bytes of dynamic shared memory", pointer + bytes - 1 - state.dynamic, state.dynamic_size);
  }
  return pointer;
}

void Deliver(std::vector<Copy>& copies) {
  for (const Copy& copy : copies) std::memcpy(copy.to, copy.from, copy.bytes);
  copies.clear();
}

void LetNextLaunchBegin() { state.current->may_begin_early = true; }
void WaitForLaunchBefore() { state.current->has_waited = true; }

void CheckTouch() {
  if (state.current->may_begin_early && !state.current->has_waited) {
    Fail("touches memory before it has waited for the launch before");
  }
}

void CheckReadOnly() {
  if (state.current->may_begin_early) Fail("loads by way of the read-only cache what may still be written");
}

void CopyAsync(unsigned to, const void* from, unsigned bytes) {
  CheckGlobal(from, bytes);
  CheckTouch();
  const Copy copy = {SharedPointer(to, bytes, bytes), from, bytes};
  // Every second one, also among the threads, arrives at once.
  if ((state.current->number + state.current->num_copies++) % 2 != 0) {
    std::memcpy(copy.to, copy.from, copy.bytes);
  } else {
    state.current->copies.push_back(copy);
  }
}

void CommitCopies() {
  state.current->groups.emplace_back(std::move(state.current->copies));
  state.current->copies.clear();
}

void WaitForCopies(unsigned pending) {
  auto& groups = state.current->groups;
  for (; groups.size() > pending; groups.pop_front()) Deliver(groups.front());
}

void InitBarrier(unsigned number, unsigned arrivals) {
  std::memcpy(SharedPointer(number, 8, 8), &kBarrierMark, 8);
  if (state.barriers.count(number) != 0) Fail("the mbarrier at %u is initialised twice", number);
  if (arrivals == 0 || arrivals > kMaxPendingBytes) Fail("an mbarrier of %u arrivals", arrivals);
  Barrier& barrier = state.barriers[number];
  barrier.arrivals = barrier.pending = arrivals;
  barrier.owner = state.current->number;
  barrier.epoch = state.epoch;
}

void FenceBarrierInit() {
  for (auto& [number, barrier] : state.barriers) {
    if (barrier.owner == state.current->number) barrier.is_fenced = true;
  }
}

Barrier& FindBarrier(unsigned number) {
  const auto found = state.barriers.find(number);
  if (found == state.barriers.end()) Fail("there is no mbarrier at %u", number);
  if (LoadShared<uint64_t>(number) != kBarrierMark) Fail("the mbarrier at %u was overwritten", number);
  if (found->second.owner != state.current->number && found->second.epoch == state.epoch) {
    Fail("no __syncthreads between the initialisation of the mbarrier at %u and its use", number);
  }
  return found->second;
}

void EndPhaseIfComplete(Barrier& barrier) {
  if (barrier.pending != 0 || barrier.bytes != 0) return;
  barrier.pending = barrier.arrivals;
  ++barrier.phase;
}

void ExpectBytes(unsigned number, unsigned bytes) {
  Barrier& barrier = FindBarrier(number);
  barrier.bytes += bytes;
  if (barrier.bytes > kMaxPendingBytes) Fail("the mbarrier at %u waits for too many bytes", number);
}

void Arrive(unsigned number) {
  Barrier& barrier = FindBarrier(number);
  if (barrier.pending == 0) Fail("more than %u arrivals at the mbarrier at %u", barrier.arrivals, number);
  --barrier.pending;
  EndPhaseIfComplete(barrier);
}

// The barrier waits for the copies as for bulk ones, and the first half of each arrives early as well.
void ArriveAfterCopies(unsigned number) {
  Barrier& barrier = FindBarrier(number);
  for (const Copy& copy : state.current->copies) {
    barrier.bytes += copy.bytes;
    std::memcpy(copy.to, copy.from, copy.bytes / 2);
    barrier.copies.push_back(copy);
  }
  state.current->copies.clear();
  Arrive(number);
}

Barrier& FindBarrierOfCopy(unsigned number) {
  Barrier& barrier = FindBarrier(number);
  if (!barrier.is_fenced) Fail("no fence between the initialisation of the mbarrier at %u and a copy", number);
  return barrier;
}

void CopyBulk(unsigned to, const void* from, unsigned bytes, unsigned number) {
  Barrier& barrier = FindBarrierOfCopy(number);
  CheckBulk(from, bytes);
  unsigned char* pointer = SharedPointer(to, bytes, 16);
  std::memcpy(pointer, from, bytes / 2);  // the rest arrives when it is waited for
  barrier.copies.push_back({pointer, from, bytes});
}

void WaitForCount(const unsigned* from, unsigned count) {
  state.current->wait = Wait::kCount;
  state.current->counted = from;
  state.current->count = count;
  SwitchToScheduler();
}

bool IsComplete(unsigned number, unsigned parity) { return FindBarrier(number).phase % 2 != parity; }

void WaitForBarrier(unsigned number, unsigned parity) {
  // The copies arrive only when no other thread can go on.
  if (FindBarrier(number).phase % 2 != parity) return;
  state.current->wait = Wait::kBarrier;
  state.current->barrier = number;
  state.current->parity = parity;
  SwitchToScheduler();
}

void StoreBulk(void* to, unsigned from, unsigned bytes) {
  CheckBulk(to, bytes);
  CheckTouch();
  const unsigned char* pointer = SharedPointer(from, bytes, 16);
  std::memcpy(to, pointer, bytes / 2);  // the rest is read when that is waited for
  state.current->stores.push_back({static_cast<unsigned char*>(to), pointer, bytes});
}

const TensorMap& FindMap(const void* map) {
  CheckGlobal(map, 64);
  const auto& tensor = *static_cast<const TensorMap*>(map);
  if (tensor.mark != kTensorMapMark) Fail("%p is not the map of a tensor", map);
  return tensor;
}

// Calls function(byte in the box, address, or null outside of the tensor) for all elements of a box. The copy engine
// swizzles: of eight rows of 128 bytes, the 16 bytes at i of row r lie at i ^ r.
template <class Function>
void ForBox(const TensorMap& map, const BoxPlace& place, const Function& function) {
  const auto element_bytes = static_cast<int64_t>(map.element_bytes);
  if (place.at[0] * element_bytes % 16 != 0) {
    Fail("a box begins at column %d, which is not a multiple of 16 bytes", place.at[0]);
  }
  unsigned element = 0;
  for (uint32_t z = 0; z < map.box[2]; ++z) {
    for (uint32_t y = 0; y < map.box[1]; ++y) {
      for (uint32_t x = 0; x < map.box[0]; ++x, ++element) {
        const int64_t at[] = {int64_t{place.at[0]} + x, int64_t{place.at[1]} + y, int64_t{place.at[2]} + z};
        bool is_inside = true;
        for (int axis = 0; axis < kTensorAxes; ++axis) {
          is_inside = is_inside && at[axis] >= 0 && at[axis] < static_cast<int64_t>(map.sizes[axis]);
        }
        const unsigned byte = map.element_bytes * element, row = byte / 128;
        function(map.is_swizzled ? (byte / 128 * 128) | ((byte % 128) ^ (row % 8 * 16)) : byte,
                 is_inside ? map.first + element_bytes * at[0] + at[1] * static_cast<int64_t>(map.strides[0]) +
                                 at[2] * static_cast<int64_t>(map.strides[1])
                           : nullptr);
      }
    }
  }
}

unsigned char* FindBox(const TensorMap& map, unsigned number, unsigned* bytes) {
  constexpr unsigned kSwizzledRows = 1024, kRow = 128;
  *bytes = map.element_bytes * map.box[0] * map.box[1] * map.box[2];
  return SharedPointer(number, *bytes, map.is_swizzled ? kSwizzledRows : kRow);
}

// What arrives is made at once, and delivered as of CopyBulk.
void CopyBox(unsigned to, const void* map, const BoxPlace& place, unsigned number) {
  const TensorMap& tensor = FindMap(map);
  CheckTouch();
  Barrier& barrier = FindBarrierOfCopy(number);
  unsigned bytes;
  unsigned char* pointer = FindBox(tensor, to, &bytes);
  auto& box = barrier.boxes.emplace_back(bytes);
  ForBox(tensor, place, [&](unsigned byte, const unsigned char* from) {
    if (from != nullptr) std::memcpy(box.data() + byte, from, tensor.element_bytes);
  });
  std::memcpy(pointer, box.data(), bytes / 2);
  barrier.copies.push_back({pointer, box.data(), bytes});
}

// Each element is a copy of its own, of which the first ones are read at once.
void StoreBox(const void* map, unsigned from, const BoxPlace& place) {
  const TensorMap& tensor = FindMap(map);
  CheckTouch();
  unsigned bytes;
  const unsigned char* pointer = FindBox(tensor, from, &bytes);
  ForBox(tensor, place, [&](unsigned byte, unsigned char* to) {
    if (to == nullptr) return;
    if (byte < bytes / 2) {
      std::memcpy(to, pointer + byte, tensor.element_bytes);
    } else {
      state.current->stores.push_back({to, pointer + byte, tensor.element_bytes});
    }
  });
}

void CommitBulkStores() {
  state.current->store_groups.push_back(std::move(state.current->stores));
  state.current->stores.clear();
}

void WaitForBulkReads(unsigned pending) {
  auto& groups = state.current->store_groups;
  for (; groups.size() > pending; groups.pop_front()) Deliver(groups.front());
}

Warp& CurrentFullWarp(const char* instruction) {
  Warp& warp = CurrentWarp();
  if (warp.size != warpSize) Fail("%s in a warp of %u threads", instruction, warp.size);
  return warp;
}

void LoadMatrices(unsigned row, unsigned (&parts)[4]) {
  constexpr auto kName = "ldmatrix";
  Warp& warp = CurrentFullWarp(kName);
  const unsigned lane = state.current->number % warpSize;
  warp.rows[lane] = SharedPointer(row, sizeof(warp.matrices[0]), sizeof(warp.matrices[0]));
  MeetInWarp(kName, 0, [](Warp& all) {
    for (int i = 0; i < warpSize; ++i) std::memcpy(all.matrices[i], all.rows[i], sizeof(all.matrices[i]));
  });
  for (unsigned i = 0; i < 4; ++i) {
    const auto* rows = &warp.matrices[8 * i + lane % 4 * 2];
    parts[i] = rows[0][lane / 4] | static_cast<unsigned>(rows[1][lane / 4]) << 16;
  }
}

void StoreMatrices(unsigned column, const unsigned (&parts)[4]) {
  constexpr auto kName = "stmatrix";
  Warp& warp = CurrentFullWarp(kName);
  const unsigned lane = state.current->number % warpSize;
  warp.columns[lane] = SharedPointer(column, sizeof(warp.matrices[0]), sizeof(warp.matrices[0]));
  for (unsigned i = 0; i < 4; ++i) {
    for (unsigned j = 0; j < 2; ++j) {
      warp.matrices[8 * i + lane % 4 * 2 + j][lane / 4] = static_cast<uint16_t>(parts[i] >> (16 * j));
    }
  }
  MeetInWarp(kName, 0, [](Warp& all) {
    for (int i = 0; i < warpSize; ++i) std::memcpy(all.columns[i], all.matrices[i], sizeof(all.matrices[i]));
  });
}

void MultiplySparse(unsigned selector, float (&sums)[4], const unsigned (&a)[4], const unsigned (&b)[4],
                    unsigned metadata) {
  constexpr auto kName = "mma.sp";
  Warp& warp = CurrentFullWarp(kName);
  const unsigned lane = state.current->number % warpSize;
  for (unsigned i = 0; i < 8 && lane % 4 / 2 == selector; ++i) {
    const unsigned places = PlacesOf(metadata, i);
    if ((places & 3u) >= places >> 2) Fail("mma.sp: metadata %08x, digit %u of which is not in order", metadata, i);
  }
  SparseOperands& operands = warp.operands[lane];
  std::memcpy(operands.a, a, sizeof(a));
  std::memcpy(operands.b, b, sizeof(b));
  std::memcpy(operands.sums, sums, sizeof(sums));
  operands.metadata = metadata;
  MeetInWarp(kName, selector, [=](Warp& all) { MultiplySparse(all.operands, selector, all.products); });
  for (unsigned i = 0; i < 4; ++i) sums[i] = warp.products[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2];
}

// All halves as floats: every lane of a warpgroup converts the same ones, which is most of what its products take.
const float* Floats() {
  static const std::vector<float> floats = [] {
    std::vector<float> all(1u << 16);
    for (unsigned half = 0; half < all.size(); ++half) {
      all[half] = sparseconv::HalfToFloat(static_cast<uint16_t>(half));
    }
    return all;
  }();
  return floats.data();
}

// The operand that a matrix descriptor describes, of so many rows of 16 bytes in a matrix's 8.
class MatrixOperand {
 public:
  MatrixOperand(uint64_t descriptor, unsigned num_summed, unsigned num_other)
      : summed_step_(Field(descriptor, 16)), other_step_(Field(descriptor, 32)) {
    if (descriptor >> 46 != 0)
      Fail("matrix descriptor %016llx is swizzled", static_cast<unsigned long long>(descriptor));
    const unsigned bytes = (num_summed - 1) * summed_step_ + (num_other - 1) * other_step_ + 128;
    first_ = SharedPointer(Field(descriptor, 0), bytes, 16);
  }

  float At(unsigned summed, unsigned other, unsigned row, unsigned column) const {
    uint16_t half;
    std::memcpy(&half, first_ + summed * summed_step_ + other * other_step_ + row * 16 + column * 2, sizeof(half));
    return floats_[half];
  }

 private:
  static unsigned Field(uint64_t descriptor, unsigned shift) {
    return static_cast<unsigned>(descriptor >> shift & 0x3FFFu) << 4;
  }

  const float* const floats_ = Floats();
  const unsigned char* first_;
  const unsigned summed_step_, other_step_;
};

// The operand that a descriptor of swizzled bytes describes: 64 columns of a row of the summed axis are 128 bytes.
class SwizzledOperand {
 public:
  SwizzledOperand(uint64_t descriptor, unsigned num_summed, unsigned num_other) {
    const auto field = [descriptor](unsigned shift) {
      return static_cast<unsigned>(descriptor >> shift & 0x3FFFu) << 4;
    };
    if (descriptor >> 62 != 1) Fail("matrix descriptor %016llx", static_cast<unsigned long long>(descriptor));
    number_ = field(0), other_step_ = field(16), summed_step_ = field(32);
    const unsigned bytes = (num_summed - 1) / 8 * summed_step_ + (num_other - 1) / 64 * other_step_ + 1024;
    pointer_ = SharedPointer(number_, bytes, 1024);
  }

  float At(unsigned summed, unsigned other) const {
    const unsigned byte = other % 64 * 2, row = summed % 8;
    const unsigned char* at =
        pointer_ + summed / 8 * summed_step_ + other / 64 * other_step_ + row * 128 + (byte ^ (row * 16));
    uint16_t half;
    std::memcpy(&half, at, sizeof(half));
    return floats_[half];
  }

 private:
  const float* const floats_ = Floats();
  unsigned number_, summed_step_, other_step_;
  const unsigned char* pointer_;
};

void MultiplyDenseMatrices(float* sums, unsigned positions, uint64_t a, uint64_t b, bool has_octets) {
  constexpr unsigned kSummed = 16;
  CurrentFullWarp("wgmma");
  const unsigned lane = state.current->number % warpSize, warp = state.current->number / warpSize % 4;
  const MatrixOperand values(a, kSummed / 8, 8);
  const auto multiply = [&](const auto& input_at) {
    for (unsigned i = 0; i < 2; ++i) {
      const unsigned row = 16 * warp + lane / 4 + 8 * i;
      for (unsigned k = 0; k < kSummed; ++k) {
        const float value = values.At(k / 8, row / 8, row % 8, k % 8);
        for (unsigned j = 0; j < 2 * positions; ++j) {
          const unsigned column = j / 2 * 8 + lane % 4 * 2 + j % 2;
          sums[j / 2 * 4 + 2 * i + j % 2] += value * input_at(k, column);
        }
      }
    }
  };
  if (b >> 62 != 0) {
    const SwizzledOperand inputs(b, kSummed, 8 * positions);
    multiply([&](unsigned k, unsigned column) { return inputs.At(k, column); });
  } else {
    const MatrixOperand inputs(b, kSummed / 8, positions);
    multiply([&](unsigned k, unsigned column) {
      const unsigned row = has_octets ? column % 8 : k % 8;
      return inputs.At(k / 8, column / 8, row, has_octets ? k % 8 : column % 8);
    });
  }
}

// Each warp of a warpgroup computes its 16 of 64 rows, at once: what a kernel reads of sums before it waits for them is
// not found out.
void MultiplySparseMatrices(float* sums, unsigned positions, uint64_t a, uint64_t b, unsigned metadata,
                            bool has_octets) {
  constexpr auto kName = "wgmma.sp";
  CurrentFullWarp(kName);
  const unsigned lane = state.current->number % warpSize, warp = state.current->number / warpSize % 4;
  const uint64_t* all = ExchangeInWarp(0xFFFFFFFFu, metadata);
  const unsigned words[2] = {static_cast<unsigned>(all[lane / 4 * 4]), static_cast<unsigned>(all[lane / 4 * 4 + 1])};
  const MatrixOperand values(a, 2, 8), inputs(b, 4, positions);
  const auto multiply = [&](const auto& input_at) {
    for (unsigned i = 0; i < 2; ++i) {
      const unsigned row = 16 * warp + lane / 4 + 8 * i;
      for (unsigned stored = 0; stored < 16; ++stored) {
        const unsigned quad = stored / 2, places = PlacesOf(words[quad / 4], 4 * i + quad % 4);
        if ((places & 3u) >= places >> 2) Fail("wgmma.sp: metadata %08x is not in order", words[quad / 4]);
        const float value = values.At(stored / 8, row / 8, row % 8, stored % 8);
        const unsigned k = 4 * quad + (stored % 2 == 0 ? places & 3u : places >> 2);
        for (unsigned j = 0; j < positions; ++j) {
          for (unsigned n = 0; n < 2; ++n) sums[4 * j + 2 * i + n] += value * input_at(k, j, lane % 4 * 2 + n);
        }
      }
    }
  };
  if (has_octets) {
    multiply([&](unsigned k, unsigned j, unsigned column) { return inputs.At(k / 8, j, column, k % 8); });
  } else {
    multiply([&](unsigned k, unsigned j, unsigned column) { return inputs.At(k / 8, j, k % 8, column); });
  }
}

void NoteMetadata(const unsigned* metadata) { state.current->metadata.push_back(metadata); }

void CheckMetadata(const unsigned* metadata) {
  const auto is_used = [&](const std::vector<const unsigned*>& used) {
    return std::find(used.begin(), used.end(), metadata) != used.end();
  };
  const auto& products = state.current->products;
  if (is_used(state.current->metadata) || std::any_of(products.begin(), products.end(), is_used)) {
    Fail("the metadata of a product is overwritten before that is complete");
  }
}

void CommitProducts() {
  state.current->products.emplace_back(std::move(state.current->metadata));
  state.current->metadata.clear();
}

void WaitForProducts(unsigned pending) {
  auto& products = state.current->products;
  while (products.size() > pending) products.pop_front();
}

// Counts the warp at a numbered barrier. Returns the phase that it belongs to.
unsigned ComeToBarrier(const char* instruction, int number, unsigned threads) {
  if (number == 0) Fail("barrier 0 is that of __syncthreads");
  if (number < 0 || number >= kNumberedBarriers) Fail("there is no barrier %d", number);
  if (threads == 0 || threads % warpSize != 0 || threads > state.num_threads) {
    Fail("barrier %d of %u threads, in a block of %u", number, threads, state.num_threads);
  }
  const Warp& warp = CurrentFullWarp(instruction);
  MeetInWarp(instruction, threads * kNumberedBarriers + static_cast<unsigned>(number), [=](Warp& all) {
    NumberedBarrier& barrier = state.numbered[number];
    const uint32_t bit = uint32_t{1} << state.current->number / warpSize;
    if ((barrier.warps & bit) != 0) Fail("the warp comes to barrier %d twice in one phase", number);
    if (barrier.warps != 0 && barrier.threads != threads) {
      Fail("barrier %d of %u threads, of %u where others have come to it", number, threads, barrier.threads);
    }
    all.phase = barrier.phase;
    barrier.threads = threads;
    barrier.warps |= bit;
    if (barrier.arrived() < threads) return;
    barrier.warps = 0;
    ++barrier.phase;
    for (unsigned i = 0; i < state.num_threads; ++i) {
      Fiber& fiber = state.fibers[i];
      if (fiber.wait != Wait::kNumberedBarrier || fiber.barrier != static_cast<unsigned>(number)) continue;
      fiber.wait = Wait::kNothing;
    }
  });
  return warp.phase;
}

void WaitAtBarrier(int number, unsigned threads) {
  const unsigned phase = ComeToBarrier("barrier.sync", number, threads);
  if (state.numbered[number].phase != phase) return;
  state.current->wait = Wait::kNumberedBarrier;
  state.current->barrier = static_cast<unsigned>(number);
  SwitchToScheduler();
}

void ArriveAtBarrier(int number, unsigned threads) { ComeToBarrier("barrier.arrive", number, threads); }

unsigned ClusterRank() { return state.rank; }
unsigned ClusterSize() { return static_cast<unsigned>(state.cluster.size()); }

// Calls `run` with the offset and the bytes of each part of shared memory that the launch uses.
template <class Function>
void ForUsedShared(Function run) {
  const auto dynamic = static_cast<size_t>(state.dynamic - state.shared), behind = dynamic + kMaxShared + kGuard;
  run(0, dynamic + state.dynamic_size + kGuard);
  run(behind, state.shared_size - behind);
}

void SaveShared(std::vector<unsigned char>& copy) {
  copy.resize(state.shared_size);
  ForUsedShared([&](size_t offset, size_t bytes) { std::memcpy(copy.data() + offset, state.shared + offset, bytes); });
}

void RestoreShared(const std::vector<unsigned char>& copy) {
  ForUsedShared([&](size_t offset, size_t bytes) { std::memcpy(state.shared + offset, copy.data() + offset, bytes); });
}

// Returns whether any thread goes on that has arrived at the cluster barrier.
bool EndArrivals() {
  bool any = false;
  for (unsigned i = 0; i < state.num_threads; ++i) {
    if (state.fibers[i].wait != Wait::kArrival) continue;
    state.fibers[i].wait = Wait::kNothing;
    any = true;
  }
  return any;
}

// A thread goes on when all of the block have arrived or no other one can go on: so what it writes from here on is not
// among what the barrier makes visible.
void ArriveAtCluster() {
  Fiber& fiber = *state.current;
  if (fiber.has_arrived) Fail("arrives at the cluster barrier twice without waiting");
  MeetInWarp("barrier.cluster.arrive", 0, [](Warp&) {});
  fiber.has_arrived = true;
  fiber.arrival_phase = state.phase;
  if (++state.num_arrived < state.num_threads) {
    fiber.wait = Wait::kArrival;
    SwitchToScheduler();
    return;
  }
  SaveShared(state.cluster[state.rank].arrived);
  EndArrivals();
}

void WaitForCluster() {
  Fiber& fiber = *state.current;
  if (!fiber.has_arrived) Fail("waits at the cluster barrier without having arrived");
  MeetInWarp("barrier.cluster.wait", 0, [](Warp&) {});
  if (fiber.arrival_phase == state.phase) {
    fiber.wait = Wait::kCluster;
    SwitchToScheduler();
  }
  fiber.has_arrived = false;
}

void LoadFromCluster(void* to, unsigned number, unsigned rank, unsigned bytes) {
  if (rank >= ClusterSize()) Fail("there is no rank %u in a cluster of %u blocks", rank, ClusterSize());
  const unsigned char* from = SharedPointer(number, bytes, bytes);
  if (rank != state.rank) {
    const Member& owner = state.cluster[rank];
    if (state.phase == 0) Fail("loads from the block of rank %u before the first cluster barrier", rank);
    if (owner.has_ended) Fail("loads from the block of rank %u, which has ended", rank);
    if (state.current->has_arrived) Fail("loads from the block of rank %u after arriving, before it waits", rank);
    const auto offset = static_cast<unsigned>(from - state.shared);
    state.loads.push_back({rank, state.rank, state.current->number, offset, bytes});
    from = owner.visible.data() + offset;
  }
  std::memcpy(to, from, bytes);
}

// --- running a block -----------------------------------------------------------------------------------------------

void RunFiber() {
  state.kernel(state.params);
  const auto& stores = state.current->store_groups;
  const bool still_reads = std::any_of(stores.begin(), stores.end(), [](const auto& group) { return !group.empty(); });
  if (!state.current->stores.empty() || still_reads) Fail("a thread ends whose bulk copies still read shared memory");
  if (state.current->has_arrived) Fail("a thread ends that has arrived at the cluster barrier but not waited there");
  state.current->wait = Wait::kDone;
  SwitchToScheduler();
  __builtin_trap();
}

void StartFiber(Fiber& fiber, unsigned number) {
  fiber.stack = state.stacks + (state.rank * state.num_threads + number) * kStack;
  std::memcpy(fiber.stack, &kStackMark, sizeof(kStackMark));
  // What cuda_on_host_switch takes from the stack: six registers, then where to go. A function expects the stack
  // pointer 8 bytes off a multiple of 16.
  auto** top = reinterpret_cast<void**>(fiber.stack + kStack - 64);
  top[-1] = nullptr;
  top[-2] = reinterpret_cast<void*>(&RunFiber);
  for (int i = 3; i <= 8; ++i) top[-i] = nullptr;
  fiber.stack_pointer = top - 8;
  fiber.number = number;
  fiber.index = {number % blockDim.x, number / blockDim.x % blockDim.y, number / blockDim.x / blockDim.y};
  fiber.wait = Wait::kNothing;
  fiber.may_begin_early = fiber.has_waited = fiber.has_arrived = false;
  fiber.num_copies = 0;
  fiber.copies.clear();
  fiber.groups.clear();
  fiber.stores.clear();
  fiber.store_groups.clear();
}

void Resume(Fiber& fiber) {
  state.current = &fiber;
  threadIdx = fiber.index;
  cuda_on_host_switch(&state.scheduler, fiber.stack_pointer);
  state.current = nullptr;
}

// Lets threads go on whose copies may arrive now. Returns whether there are any.
bool CompleteBarriers() {
  bool any = false;
  for (unsigned i = 0; i < state.num_threads; ++i) {
    Fiber& fiber = state.fibers[i];
    if (fiber.wait != Wait::kBarrier) continue;
    Barrier& barrier = state.barriers[fiber.barrier];
    for (const Copy& copy : barrier.copies) {
      const unsigned early = copy.bytes / 2;
      std::memcpy(copy.to + early, static_cast<const unsigned char*>(copy.from) + early, copy.bytes - early);
      barrier.bytes -= copy.bytes;
      EndPhaseIfComplete(barrier);
    }
    barrier.copies.clear();
    barrier.boxes.clear();
    if (barrier.phase % 2 == fiber.parity) continue;
    fiber.wait = Wait::kNothing;
    any = true;
  }
  return any;
}

// Who has come to numbered barriers that wait for more: ", 32 of 64 at barrier 1".
std::string PendingBarriers() {
  std::string text;
  for (int i = 0; i < kNumberedBarriers; ++i) {
    const NumberedBarrier& barrier = state.numbered[i];
    if (barrier.warps == 0) continue;
    text += ", " + std::to_string(barrier.arrived()) + " of " + std::to_string(barrier.threads) + " at barrier " +
            std::to_string(i);
  }
  return text;
}

// Lets all threads pass __syncthreads once all have reached the same one.
void CompleteBlockBarrier() {
  unsigned waiting = 0, waiting_for_cluster = 0, done = 0;
  const char* site = nullptr;
  for (unsigned i = 0; i < state.num_threads; ++i) {
    const Fiber& fiber = state.fibers[i];
    if (fiber.wait == Wait::kDone) ++done;
    if (fiber.wait == Wait::kCluster) ++waiting_for_cluster;
    if (fiber.wait != Wait::kBlock) continue;
    ++waiting;
    if (site != nullptr && std::strcmp(site, fiber.site) != 0) {
      return SetError("threads wait at different barriers, %s and %s", site, fiber.site);
    }
    site = fiber.site;
  }
  if (waiting_for_cluster != 0) {
    return SetError("%u of %u threads wait at the cluster barrier; %u have ended, the others wait elsewhere%s",
                    waiting_for_cluster, state.num_threads, done, PendingBarriers().c_str());
  }
  if (waiting == 0) {
    return SetError("deadlock: %u threads wait for copies, for their warp, for a count or at numbered barriers%s",
                    state.num_threads - done, PendingBarriers().c_str());
  }
  if (waiting < state.num_threads) {
    return SetError("%u of %u threads wait at the barrier %s; %u have ended, the others wait elsewhere", waiting,
                    state.num_threads, site, done);
  }
  ++state.epoch;
  state.votes[++state.num_block_barriers % 2] = false;  // all have read those of the barrier before
  for (unsigned i = 0; i < state.num_threads; ++i) state.fibers[i].wait = Wait::kNothing;
}

void CheckStacks() {
  for (unsigned i = 0; i < state.num_threads; ++i) {
    if (std::memcmp(state.fibers[i].stack, &kStackMark, sizeof(kStackMark)) != 0) {
      return SetError("a thread has used more than %zu bytes of stack", kStack);
    }
  }
}

void CheckGuard() {
  const unsigned char* guard = state.dynamic + state.dynamic_size;
  for (unsigned i = 0; i < kGuard; ++i) {
    if (guard[i] != kGuardByte) return SetError("byte %u behind the end of dynamic shared memory was written", i);
  }
}

bool HasThread(Wait wait) {
  const auto end = state.fibers.begin() + state.num_threads;
  return std::any_of(state.fibers.begin(), end, [=](const Fiber& fiber) { return fiber.wait == wait; });
}

// Returns whether all threads have ended: otherwise the block waits at the cluster barrier, or has failed.
bool RunThreads(bool is_falling) {
  while (!state.has_failed) {
    bool any = false, all_done = true;
    for (unsigned i = 0; i < state.num_threads && !state.has_failed; ++i) {
      Fiber& fiber = state.fibers[is_falling ? state.num_threads - 1 - i : i];
      if (fiber.wait == Wait::kCount && *fiber.counted >= fiber.count) fiber.wait = Wait::kNothing;
      if (fiber.wait == Wait::kNothing) {
        Resume(fiber);
        any = true;
      }
      all_done = all_done && fiber.wait == Wait::kDone;
    }
    if (state.has_failed) break;
    if (all_done) return true;
    if (any || CompleteBarriers() || EndArrivals()) continue;
    if (state.num_arrived == state.num_threads && HasThread(Wait::kCluster)) break;
    CompleteBlockBarrier();
  }
  return false;
}

void StartBlock() {
  std::memset(state.shared, kUnset, static_cast<size_t>(state.dynamic - state.shared));
  std::memset(state.dynamic, kUnset, state.dynamic_size);
  std::memset(state.dynamic + state.dynamic_size, kGuardByte, kGuard);
  unsigned char* behind = state.dynamic + kMaxShared + kGuard;
  std::memset(behind, kUnset, static_cast<size_t>(state.shared + state.shared_size - behind));
  state.barriers.clear();
  std::fill(std::begin(state.numbered), std::end(state.numbered), NumberedBarrier());
  state.epoch = state.num_arrived = state.num_block_barriers = 0;
  state.votes[0] = state.votes[1] = false;
  state.warps.assign((state.num_threads + warpSize - 1) / warpSize, Warp());
  if (state.fibers.size() < state.num_threads) state.fibers.resize(state.num_threads);
  for (unsigned i = 0; i < state.num_threads; ++i) {
    StartFiber(state.fibers[i], i);
    ++state.warps[i / warpSize].size;
  }
}

void EndBlock() {
  for (const auto& [number, barrier] : state.barriers) {
    if (!barrier.copies.empty()) return SetError("bulk copies are under way when the block ends");
  }
  const std::string pending = PendingBarriers();
  if (!pending.empty()) return SetError("threads have arrived for nothing when the block ends%s", pending.c_str());
  for (const ClusterLoad& load : state.loads) {
    if (load.owner == state.rank) return SetError("ends while rank %u may still load from it", load.reader);
  }
  CheckStacks();
  CheckGuard();
}

// Lets the blocks of the cluster go on once all of them wait.
void CompleteClusterBarrier(unsigned first) {
  const auto has_ended = [](const Member& member) { return member.has_ended; };
  auto& cluster = state.cluster;
  const auto ended = std::count_if(cluster.begin(), cluster.end(), has_ended);
  if (ended != 0) {
    const auto waiting = std::find_if_not(cluster.begin(), cluster.end(), has_ended);
    blockIdx.x = first + static_cast<unsigned>(waiting - cluster.begin());
    return SetError("waits at the cluster barrier, but %td of %u blocks of the cluster have ended", ended,
                    ClusterSize());
  }
  for (const ClusterLoad& load : state.loads) {
    const Member& owner = cluster[load.owner];
    if (std::memcmp(owner.visible.data() + load.offset, owner.shared.data() + load.offset, load.bytes) == 0) continue;
    blockIdx.x = first + load.owner;
    return SetError(
        "writes to shared address %u without a cluster barrier between that and thread %u of rank %u, "
        "which loads from there",
        load.offset + kSharedBegin, load.thread, load.reader);
  }
  state.loads.clear();
  ++state.phase;
  for (Member& member : cluster) {
    member.visible.swap(member.arrived);
    member.block.num_arrived = 0;
    ++member.block.epoch;
    for (unsigned i = 0; i < state.num_threads; ++i) {
      Fiber& fiber = member.block.fibers[i];
      if (fiber.wait == Wait::kCluster) fiber.wait = Wait::kNothing;
    }
  }
}

// Runs a block of the cluster until it ends or waits for the others.
void RunMember(Member& member, bool is_falling) {
  if (state.phase == 0) {
    StartBlock();
  } else {
    std::swap(static_cast<Block&>(state), member.block);
    RestoreShared(member.shared);
  }
  member.has_ended = RunThreads(is_falling);
  if (state.has_failed) return;
  if (member.has_ended) return EndBlock();
  SaveShared(member.shared);
  std::swap(static_cast<Block&>(state), member.block);
}

// Runs the cluster of `blockIdx`, its first block, in front of which there are `number` blocks.
void RunCluster(unsigned number) {
  const unsigned first = blockIdx.x, count = ClusterSize();
  state.phase = 0;
  state.loads.clear();
  for (Member& member : state.cluster) member.has_ended = false;
  for (;; CompleteClusterBarrier(first)) {
    const bool is_falling = (number / count + state.phase) % 2 != 0;
    bool all_ended = true;
    for (unsigned i = 0; i < count && !state.has_failed; ++i) {
      state.rank = is_falling ? count - 1 - i : i;
      blockIdx.x = first + state.rank;
      RunMember(state.cluster[state.rank], (number + state.rank) % 2 != 0);
      all_ended = all_ended && state.cluster[state.rank].has_ended;
    }
    if (all_ended || state.has_failed) return;
  }
}

// Shared variables are thread-local ones, so the thread's storage of this shared object is the block's shared memory.
int FindShared(dl_phdr_info* info, size_t, void* address) {
  const ElfW(Phdr)* storage = nullptr;
  bool is_ours = false;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const ElfW(Phdr) & header = info->dlpi_phdr[i];
    const auto begin = info->dlpi_addr + header.p_vaddr;
    const auto wanted = reinterpret_cast<uintptr_t>(address);
    if (header.p_type == PT_LOAD && wanted >= begin && wanted < begin + header.p_memsz) is_ours = true;
    if (header.p_type == PT_TLS) storage = &header;
  }
  if (!is_ours) return 0;
  state.shared = static_cast<unsigned char*>(info->dlpi_tls_data);
  state.shared_size = static_cast<unsigned>(storage->p_memsz);
  if (reinterpret_cast<uintptr_t>(state.shared) % kSharedBegin != 0) __builtin_trap();
  return 1;
}

bool IsLaunchable(const unsigned grid[3], const unsigned block[3], unsigned cluster, unsigned shared_bytes) {
  const uint64_t threads = uint64_t{block[0]} * block[1] * block[2];
  return threads >= 1 && threads <= kMaxThreads && block[2] <= 64 && grid[0] >= 1 && grid[0] <= 0x7FFFFFFFu &&
         grid[1] >= 1 && grid[1] <= 65535 && grid[2] >= 1 && grid[2] <= 65535 && shared_bytes <= kMaxShared &&
         cluster >= 1 && cluster <= kMaxCluster && grid[0] % cluster == 0;
}

// The stacks of a launch. They are given back: a process may load hundreds of images, each with a State of its own.
class Stacks {
 public:
  explicit Stacks(size_t count) : size_(count * kStack) {
    void* memory = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) __builtin_trap();
    state.stacks = static_cast<unsigned char*>(memory);
  }
  ~Stacks() { munmap(state.stacks, size_); }

 private:
  const size_t size_;
};

// A fault of a thread ends the launch, not the process. The handler runs on a stack of its own and does not return.
void HandleFault(int signal, siginfo_t* info, void* context) {
  if (state.current == nullptr || !pthread_equal(state.thread, pthread_self())) {
    ::signal(signal, SIG_DFL);  // not a kernel's: it happens again
    return;
  }
  const bool is_write = (static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_ERR] & 2) != 0;
  if (signal == SIGFPE) {
    SetError("divides by zero");
  } else {
    SetError("%s %p, which it may not", is_write ? "writes to" : "reads from", info->si_addr);
  }
  SwitchToScheduler();
}

class FaultHandler {
 public:
  FaultHandler() {
    stack_t stack = {};
    stack.ss_sp = memory_.data();
    stack.ss_size = memory_.size();
    sigaltstack(&stack, &stack_before_);
    struct sigaction action = {};
    action.sa_sigaction = &HandleFault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    for (size_t i = 0; i < kSignals.size(); ++i) sigaction(kSignals[i], &action, &before_[i]);
  }
  ~FaultHandler() {
    for (size_t i = 0; i < kSignals.size(); ++i) sigaction(kSignals[i], &before_[i], nullptr);
    sigaltstack(&stack_before_, nullptr);
  }

 private:
  static constexpr std::array<int, 3> kSignals = {SIGSEGV, SIGBUS, SIGFPE};
  std::vector<unsigned char> memory_ = std::vector<unsigned char>(64 * 1024);
  stack_t stack_before_ = {};
  struct sigaction before_[kSignals.size()] = {};
};

int LaunchLocked(const unsigned grid[3], const unsigned block[3], unsigned cluster, unsigned shared_bytes) {
  state.has_failed = false;
  state.current = nullptr;
  state.thread = pthread_self();
  if (!IsLaunchable(grid, block, cluster, shared_bytes)) {
    SetError("grid (%u, %u, %u), block (%u, %u, %u), clusters of %u, %u bytes of shared memory", grid[0], grid[1],
             grid[2], block[0], block[1], block[2], cluster, shared_bytes);
    return 2;
  }
  gridDim = {grid[0], grid[1], grid[2]};
  blockDim = {block[0], block[1], block[2]};
  state.num_threads = block[0] * block[1] * block[2];
  state.dynamic = DynamicShared();
  state.dynamic_size = shared_bytes;
  dl_iterate_phdr(&FindShared, reinterpret_cast<void*>(&RunFiber));
  const FaultHandler handler;
  const Stacks stacks(size_t{cluster} * state.num_threads);
  state.cluster.resize(cluster);
  unsigned number = 0;
  for (blockIdx.z = 0; blockIdx.z < grid[2] && !state.has_failed; ++blockIdx.z) {
    for (blockIdx.y = 0; blockIdx.y < grid[1] && !state.has_failed; ++blockIdx.y) {
      for (unsigned x = 0; x < grid[0] && !state.has_failed; x += cluster, number += cluster) {
        blockIdx.x = x;
        RunCluster(number);
      }
    }
  }
  state.cluster.clear();
  return state.has_failed ? 2 : 0;
}

}  // namespace cuda_on_host

namespace {

const cuda_on_host::Kernel* FindKernel(const char* name) {
  for (const auto* kernel = cuda_on_host::kernels; kernel->name != nullptr; ++kernel) {
    if (std::strcmp(kernel->name, name) == 0) return kernel;
  }
  return nullptr;
}

}  // namespace

#define CUDA_ON_HOST_EXPORT extern "C" __attribute__((visibility("default")))

CUDA_ON_HOST_EXPORT int cuda_on_host_has_kernel(const char* name) { return FindKernel(name) != nullptr; }

CUDA_ON_HOST_EXPORT const char* cuda_on_host_error() { return cuda_on_host::state.error.c_str(); }

CUDA_ON_HOST_EXPORT int cuda_on_host_launch_clusters(const char* name, const unsigned grid[3], const unsigned block[3],
                                                     unsigned cluster, unsigned shared_bytes, void** params) {
  const auto* kernel = FindKernel(name);
  if (kernel == nullptr) return 1;
  const std::lock_guard<std::mutex> lock(cuda_on_host::state.mutex);
  cuda_on_host::state.kernel = kernel->run;
  cuda_on_host::state.kernel_name = kernel->name;
  cuda_on_host::state.params = params;
  return cuda_on_host::LaunchLocked(grid, block, cluster, shared_bytes);
}

CUDA_ON_HOST_EXPORT int cuda_on_host_launch(const char* name, const unsigned grid[3], const unsigned block[3],
                                            unsigned shared_bytes, void** params) {
  return cuda_on_host_launch_clusters(name, grid, block, 1, shared_bytes, params);
}
