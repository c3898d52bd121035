// Sparse convolution on the sparse tensor cores (sm_80 and later), of halves, and of floats that are rounded to halves
// as they are staged, where these hold them (magnitude.cuh).
//
// A tensor core multiplies a matrix with at most two non-zeros in every four of a row (2:4) by a dense one, at up to
// twice the rate of two dense matrices. Weights pruned without structure are not of this form, but the product does not
// care in which order the columns come: the host (tensor_weight.cc) sorts the columns (channel, tap) of a tile of
// output channels such that hardly a row has more than two non-zeros in four neighbours, leaves out columns that the
// whole tile has no weight in, and gives what is left over further columns. Columns can be read in any order since the
// input is not lowered: it is staged in shared memory as [channel][row][column][8 images], so what column (c, r, s) of
// the lowered matrix holds for one position and 8 images are 16 contiguous bytes, at the position's address plus an
// offset that belongs to the column. ldmatrix gathers 32 of those.
//
// A product warp computes kSubtiles * 16 output channels at kPositions neighbouring positions of 8 images; its sums
// stay in registers, as floats. The product warps of a block share the staged input and weights, which the other warps
// bring: input channels come in chunks, two stages.
//
// With few images, strips of an image take the places of the 8 images. There are few outputs then, and they are shared
// out: warps of a block each take some of the steps of the same outputs and add up their sums in shared memory, and
// blocks some of the chunks, whose sums another launch adds up (reduce.cuh).
#pragma once

#include "recompute.cuh"
#include "tensor_input.cuh"
#include "tensor_sums.cuh"

namespace sparseconv::cuda {

// Neighbouring columns of Y or of the residual, which are loaded and stored together: a `Word` of them.
template <class T, int kWidth>
struct Neighbours;

template <>
struct Neighbours<Half, 1> {
  using Word = Half;
  static __device__ __forceinline__ float At(Word word, int) { return ToFloat(word); }
  static __device__ __forceinline__ Word Of(const float (&values)[1]) { return ToHalf(values[0]); }
};

template <>
struct Neighbours<Half, 2> {
  using Word = Half2;
  static __device__ __forceinline__ float At(Word word, int i) { return ToFloat(i == 0 ? Lower(word) : Upper(word)); }
  static __device__ __forceinline__ Word Of(const float (&values)[2]) { return ToHalves(values[0], values[1]); }
};

template <>
struct Neighbours<float, 1> {
  using Word = float;
  static __device__ __forceinline__ float At(Word word, int) { return word; }
  static __device__ __forceinline__ Word Of(const float (&values)[1]) { return values[0]; }
};

template <>
struct Neighbours<float, 2> {
  using Word = uint2;
  static __device__ __forceinline__ float At(const Word& word, int i) { return BitsToFloat(i == 0 ? word.x : word.y); }
  static __device__ __forceinline__ Word Of(const float (&values)[2]) {
    return {FloatToBits(values[0]), FloatToBits(values[1])};
  }
};

// T is the type of X and Y.
template <class T, int kSubtiles, int kPositions>
class TensorConv : private TensorInput<T, TensorSums<kSubtiles, kPositions>::kStepBytes> {
  static constexpr bool kIsFloat = sizeof(T) == sizeof(float);
  using Sums = TensorSums<kSubtiles, kPositions>;
  using Input = TensorInput<T, Sums::kStepBytes>;

 public:
  __device__ __forceinline__ TensorConv(const TensorParams& params, const void* shared)
      : Input(params, shared), shared_(shared) {}

  // Returns whether outputs are what they should be; else RecomputeTiles has to follow.
  __device__ __forceinline__ bool Run() {
    const Tile tile = this->TileOfBlock();
    unsigned seen = 0;
    if (Warp() < p_.product_warps) {
      Multiply(tile);
    } else {
      seen = this->Stage(tile);
    }
    __syncthreads();
    Finish(tile);
    if constexpr (!kIsFloat) return true;
    const unsigned all = SeenByBlock(seen);
    if (gridDim.y == 1) return DidHalvesHold(all);
    // What adds up the parts will tell.
    if (threadIdx.x == 0) p_.seen[blockIdx.y * gridDim.x + blockIdx.x] = all;
    return true;
  }

  // Of the block's tile, what was computed. To be called by all threads.
  __device__ __forceinline__ void RecomputeTiles() const {
    const Tile tile = this->TileOfBlock();
    const int first_channel = tile.first_row_tile * kRows;
    OutputBox box;
    box.channels = min(t_.warps_m * kRows, t_.group_out_channels - first_channel);
    box.columns = min(t_.tile_w, t_.out_w - tile.x);
    box.share = 0;
    box.shares = 1;
    for (int i = 0; i < tile.images; ++i) {
      box.rows = min(t_.tile_h, RowsOf(i) - tile.y);
      box.first = FirstOutput(tile, i) + static_cast<long long>(first_channel) * p_.y_plane +
                  static_cast<long long>(tile.y) * t_.out_w + tile.x;
      if (box.rows > 0) Recompute(p_.recompute, box, const_cast<void*>(shared_));
    }
  }

 private:
  using Input::EightOf;
  using Input::EndChunk;
  using Input::FilledBarrier;
  using Input::FirstChunk;
  using Input::FreeBarrier;
  using Input::Lane;
  using Input::p_;
  using Input::Split;
  using Input::SplitFew;
  using Input::stages_;
  using Input::StepAddress;
  using Input::StepBegins;
  using Input::t_;
  using Input::Warp;
  using typename Input::Position;
  using typename Input::Tile;

  static constexpr int kRows = 16 * kSubtiles;
  static constexpr int kImagePairs = kTensorImages / 2;

  // Of outputs, that an image or strip of a pixel has.
  __device__ __forceinline__ int RowsOf(int image) const { return image + 1 == p_.images ? p_.last_rows : t_.out_h; }

  // Index in Y of the first output of an image or strip, of the tile's group.
  __device__ __forceinline__ long long FirstOutput(const Tile& tile, int image) const {
    return EightOf(tile) * p_.y_eight + static_cast<long long>(image) * p_.y_image +
           static_cast<long long>(tile.group * t_.group_out_channels) * p_.y_plane;
  }

  // Product warps that have outputs of their own; the others share in the steps of these.
  __device__ __forceinline__ int BaseWarps() const {
    int rest;
    return SplitFew(p_.product_warps, p_.warps_k, rest);
  }

  // What a product warp computes: a row tile of the block and a run of positions, and which share of the steps.
  struct WarpPlace {
    int row_tile, run, share;
  };

  __device__ __forceinline__ WarpPlace PlaceOfWarp() const {
    WarpPlace place;
    int warp;
    place.share = SplitFew(Warp(), BaseWarps(), warp);
    place.run = SplitFew(warp, t_.warps_m, place.row_tile);
    return place;
  }

  // --- products -----------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void Multiply(const Tile& tile) {
    const WarpPlace place = PlaceOfWarp();
    const int row_tile = tile.first_row_tile + place.row_tile, share = place.share;
    const bool is_active = row_tile < t_.row_tiles_per_group;
    int x;
    const int y = SplitFew(place.run, t_.tile_w / kPositions, x);
    const unsigned first =
        16u * static_cast<unsigned>(y * t_.strides[0] * t_.strides[1] * t_.line_pitch + x * kPositions);
    const Biases biases = LoadBiases(tile, row_tile, share == 0);
    this->StageFirst(tile);
    StartSums(biases);
    WaitForCopies<0>();
    Position at;
    const int end = EndChunk();
    for (at.chunk = FirstChunk(); at.chunk < end; this->Advance(at)) {
      const unsigned* begins = StepBegins(tile, is_active ? row_tile : 0) + at.chunk;
      const int steps = is_active ? static_cast<int>(begins[1] - begins[0]) : 0;
      WaitAtBarrier(FilledBarrier(at.stage), blockDim.x);
      sums_.Multiply(this->StageAddress(at.stage) + first, StepAddress(at.stage, place.row_tile) + Lane() * 16, share,
                     steps, p_.warps_k, [this](unsigned column) { return Offset(column); });
      if (at.chunk + 2 < end) ArriveAtBarrier(FreeBarrier(at.stage), blockDim.x);
    }
    if constexpr (kIsFloat) ScaleSums(tile, row_tile, share == 0);
  }

  // What the lane's sums begin with.
  struct Biases {
    float at[kSubtiles][2];
  };

  // The bias, if that is the warp's to add, but for sums of a scaled weight.
  __device__ __forceinline__ Biases LoadBiases(const Tile& tile, int row_tile, bool has_bias) const {
    Biases biases;
#pragma unroll
    for (int m = 0; m < kSubtiles; ++m) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        biases.at[m][i] = kIsFloat || !has_bias ? 0.0f : this->BiasOf(tile, ChannelOf(row_tile, m, i));
      }
    }
    return biases;
  }

  __device__ __forceinline__ void StartSums(const Biases& biases) {
#pragma unroll
    for (int m = 0; m < kSubtiles; ++m) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int j = 0; j < kPositions; ++j) sums_.at[m][j][2 * i] = sums_.at[m][j][2 * i + 1] = biases.at[m][i];
      }
    }
  }

  // To what they are of the weight as it was, with the bias, likewise.
  __device__ __forceinline__ void ScaleSums(const Tile& tile, int row_tile, bool has_bias) {
#pragma unroll
    for (int m = 0; m < kSubtiles; ++m) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int channel = ChannelOf(row_tile, m, i);
        if (channel >= t_.group_out_channels) continue;
        const float scale = p_.scales[tile.group * t_.group_out_channels + channel];
        const float bias = has_bias ? this->template BiasOf<float>(tile, channel) : 0.0f;
#pragma unroll
        for (int j = 0; j < kPositions; ++j) {
          sums_.at[m][j][2 * i] = sums_.at[m][j][2 * i] * scale + bias;
          sums_.at[m][j][2 * i + 1] = sums_.at[m][j][2 * i + 1] * scale + bias;
        }
      }
    }
  }

  // Of the tile's group, that the lane's sums 2i and 2i + 1 of a subtile belong to.
  static __device__ __forceinline__ int ChannelOf(int row_tile, int subtile, int i) {
    return row_tile * kRows + subtile * 16 + static_cast<int>(Lane()) / 4 + 8 * i;
  }

  // Where a column begins, in bytes from position (0, 0).
  __device__ __forceinline__ unsigned Offset(unsigned column) const {
    const unsigned channel = column & 0xFFFu, line = column >> 12 & 0x3FFu, place = column >> 22;
    return 16u *
           (channel * static_cast<unsigned>(p_.channel_pitch) + line * static_cast<unsigned>(t_.line_pitch) + place);
  }

  // --- outputs ------------------------------------------------------------------------------------------------------

  // To be called by all threads. Sums pass through shared memory, so that neighbouring threads store
  // neighbouring columns: those of two images in a word where they can be rounded at once, else first those of the even
  // images, then those of the odd ones.
  __device__ __forceinline__ void Finish(const Tile& tile) {
    const Epilogue& e = t_.epilogue;
    if (p_.warps_k > 1) AddShares();
    if (!kIsFloat && e.residual == nullptr && IsBound(e.activation)) {
      KeepSums([](float even, float odd) { return ToHalves(even, odd); });
      __syncthreads();
      if (p_.is_y_paired) {
        StoreHalves<2>(tile);
      } else {
        StoreHalves<1>(tile);
      }
      return;
    }
    for (int odd = 0; odd < 2; ++odd) {
      KeepSums([odd](float even_sum, float odd_sum) { return FloatToBits(odd == 0 ? even_sum : odd_sum); });
      __syncthreads();
      if (p_.is_y_paired) {
        StoreSums<2>(tile, odd);
      } else {
        StoreSums<1>(tile, odd);
      }
      __syncthreads();
    }
  }

  // Of warps that have the same outputs, the first one gets the sums of the others, in their order: through shared
  // memory behind where KeepSums stores. To be called by all threads.
  __device__ __forceinline__ void AddShares() {
    const int base_warps = BaseWarps();
    const Shared others = SumAddress(t_.warps_m * kRows, 0, 0) + 16u * Lane();
    if (Warp() >= base_warps && Warp() < p_.product_warps) {
      sums_.Keep(others + static_cast<unsigned>(Warp() - base_warps) * Sums::kKeptBytes);
    }
    __syncthreads();
    if (Warp() >= base_warps) return;
    for (int share = 1; share < p_.warps_k; ++share) {
      sums_.AddKept(others + static_cast<unsigned>((share - 1) * base_warps + Warp()) * Sums::kKeptBytes);
    }
  }

  // Of the block's row, a pair of images, and a slot; see `SlotOf`.
  __device__ __forceinline__ Shared SumAddress(int row, int pair, int slot) const {
    return stages_ + 4u * static_cast<unsigned>((row * kImagePairs + pair) * p_.sum_pitch + slot);
  }

  __device__ __forceinline__ int SlotOf(int y, int x) const { return y * t_.tile_w + x; }

  template <class Word>
  __device__ __forceinline__ void KeepSums(const Word& word) const {
    if (Warp() >= BaseWarps()) return;
    int row_tile;
    const int run = SplitFew(Warp(), t_.warps_m, row_tile);
    const int first_row = row_tile * kRows + static_cast<int>(Lane()) / 4, first_slot = run * kPositions;
#pragma unroll
    for (int m = 0; m < kSubtiles; ++m) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const Shared to = SumAddress(first_row + m * 16 + 8 * i, static_cast<int>(Lane()) % 4, first_slot);
#pragma unroll
        for (int j = 0; j < kPositions; ++j) {
          StoreShared(to + 4 * j, word(sums_.at[m][j][2 * i], sums_.at[m][j][2 * i + 1]));
        }
      }
    }
  }

  // Calls load(value, index of the even image's output in Y, address of the word, whether there is an odd image) and
  // then store(value, index, whether there is) for all outputs of the tile, for kWidth columns at a time. A thread
  // keeps its place in the tile and its images, and goes through the channels, several at a time: it waits for none of
  // its loads and stores alone.
  template <int kWidth, int kAtOnce, class Value, class Load, class Store>
  __device__ __forceinline__ void ForOutputs(const Tile& tile, const Load& load, const Store& store) const {
    int place, column;
    const int row = Split(static_cast<int>(threadIdx.x), p_.store_words, p_.by_store_words, place);
    const int line = Split(place * kWidth, t_.tile_w, p_.by_tile_w, column);
    const int y = tile.y + line, x = tile.x + column;
    const int pairs_at_once = 1 << p_.store_pairs, channels_at_once = p_.store_channels;
    const int first = row >> p_.store_pairs;  // channel
    if (first >= channels_at_once || x >= t_.out_w) return;
    const int first_channel = tile.first_row_tile * kRows;
    const int channels = min(t_.warps_m * kRows, t_.group_out_channels - first_channel);
    const long long index_step = static_cast<long long>(channels_at_once) * p_.y_plane;
    const unsigned from_step = 4u * static_cast<unsigned>(channels_at_once * kImagePairs * p_.sum_pitch);
    for (int pair = row & (pairs_at_once - 1); 2 * pair < tile.images && y < RowsOf(2 * pair); pair += pairs_at_once) {
      const bool has_odd = 2 * pair + 1 < tile.images && y < RowsOf(2 * pair + 1);
      long long index =
          FirstOutput(tile, 2 * pair) + static_cast<long long>(first_channel + first) * p_.y_plane + y * t_.out_w + x;
      Shared from = SumAddress(first, pair, SlotOf(line, column));
#pragma unroll 1
      for (int channel = first; channel < channels; channel += kAtOnce * channels_at_once) {
        Value values[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          if (channel + i * channels_at_once < channels)
            load(values[i], index + i * index_step, from + static_cast<unsigned>(i) * from_step, has_odd);
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          if (channel + i * channels_at_once < channels) store(values[i], index + i * index_step, has_odd);
        }
        index += kAtOnce * index_step;
        from += kAtOnce * from_step;
      }
    }
  }

  // Of neighbouring columns: of two images each.
  template <int kWidth>
  struct HalfPairs {
    Half2 columns[kWidth];
  };

  template <int kWidth>
  __device__ __forceinline__ void StoreHalves(const Tile& tile) const {
    Half* const outputs = Outputs<Half>();
    const int image = p_.y_image;
    const Bounds& bounds = t_.epilogue.bounds;
    const auto load = [&](HalfPairs<kWidth>& pairs, long long, Shared from, bool) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) pairs.columns[i] = LoadShared(from + 4u * static_cast<unsigned>(i));
    };
    const auto store = [&](HalfPairs<kWidth>& pairs, long long index, bool has_odd) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        pairs.columns[i] = AtMost(bounds.high, AtLeast(bounds.low, pairs.columns[i]));
      }
      if constexpr (kWidth == 1) {
        StoreOnce(outputs + index, Lower(pairs.columns[0]));
        if (has_odd) StoreOnce(outputs + index + image, Upper(pairs.columns[0]));
      } else {
        const Half2 left = pairs.columns[0], right = pairs.columns[1];
        StoreOnce(reinterpret_cast<Half2*>(outputs + index), SelectBytes(left, right, kLowerHalves));
        if (has_odd)
          StoreOnce(reinterpret_cast<Half2*>(outputs + index + image), SelectBytes(left, right, kUpperHalves));
      }
    };
    ForOutputs<kWidth, 1, HalfPairs<kWidth>>(tile, load, store);
  }

  // Of neighbouring columns of an image.
  template <int kWidth>
  struct ColumnSums {
    float columns[kWidth];
    typename Neighbours<T, kWidth>::Word residual;
  };

  template <int kWidth>
  __device__ __forceinline__ void StoreSums(const Tile& tile, int odd) const {
    using Together = Neighbours<T, kWidth>;
    using Word = typename Together::Word;
    const Epilogue& e = t_.epilogue;
    const T* const residual = static_cast<const T*>(e.residual);
    T* const outputs = Outputs<T>();
    const int image = odd * p_.y_image;
    const auto load = [&](ColumnSums<kWidth>& sums, long long index, Shared from, bool has_odd) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        sums.columns[i] = BitsToFloat(LoadShared(from + 4u * static_cast<unsigned>(i)));
      }
      sums.residual = {};
      if (residual == nullptr || (odd == 1 && !has_odd)) return;
      sums.residual = LoadOnce(reinterpret_cast<const Word*>(residual + index + image));
    };
    const auto store = [&](const ColumnSums<kWidth>& sums, long long index, bool has_odd) {
      if (odd == 1 && !has_odd) return;
      float finished[kWidth];
#pragma unroll
      for (int i = 0; i < kWidth; ++i) finished[i] = Finished(sums.columns[i], Together::At(sums.residual, i));
      StoreOnce(reinterpret_cast<Word*>(outputs + index + image), Together::Of(finished));
    };
    ForOutputs<kWidth, 2, ColumnSums<kWidth>>(tile, load, store);
  }

  // Y, or where the sums of this part of the chunks go.
  template <class Output>
  __device__ __forceinline__ Output* Outputs() const {
    return static_cast<Output*>(t_.y) + blockIdx.y * p_.y_part;
  }

  // Floats, too, need be no more accurate than what was rounded.
  __device__ __forceinline__ float Finished(float sum, float residual) const {
    const Epilogue& e = t_.epilogue;
    if (e.residual != nullptr) sum += residual;
    return Activate<Half>(e.activation, sum, e.alpha, e.beta);
  }

  const void* const shared_;
  Sums sums_;
};

}  // namespace sparseconv::cuda
