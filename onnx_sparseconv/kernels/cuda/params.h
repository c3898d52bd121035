// What the host passes to the CUDA kernels: shared by the native library, which fills these in, and by device code.
// Plain data only, of the same layout for g++ and NVRTC.
#pragma once

namespace sparseconv::cuda {

// Division by a number that a launch does not change: n / d = (2 n * multiplier >> 32) >> shift for 0 <= n < 2^31, with
// 2^(shift - 1) < d <= 2^shift and multiplier = ceil(2^(31 + shift) / d) (Granlund and Montgomery, 1994).
struct Divisor {
  unsigned multiplier;
  int shift;
};

// Codes of the op's `activation` attribute; alpha and beta as in docs/op-spec.md.
enum ActivationCode : int {
  kNoActivation = 0,
  kRelu = 1,
  kClip = 2,
  kLeakyRelu = 3,
  kHardSwish = 4,
  kHardSigmoid = 5,
  kSigmoid = 6,
  kSilu = 7,
};

// What stored values are not below, and not above: the bits of two halves or of a float, as many as a word holds. What
// no activation, Relu and Clip do; nothing where there is another one. NaN stays NaN.
struct Bounds {
  unsigned low, high;
};

// What is done to a sum before it is stored: y = activation(sum + bias[k] + residual).
struct Epilogue {
  const void* bias;      // [K] of the element type, or null
  const void* residual;  // of Y's shape, or null
  int activation;        // ActivationCode
  float alpha;
  float beta;
  Bounds bounds;  // instead of the activation, for kernels that apply these
};

// The unified-CSR kernel: `sparseconv_csr_<f32|f16>_b<sub_batch>`, sub_batch 1, 2, 4 or 8.
//
// Grid: x = blocks of positions, y = block_rows output channels each, z = blocks of sub_batch images. Each thread
// computes one output position for sub_batch images. Every convolution is a 3-D one; leading axes have size 1.
//
// `sparseconv_pixel_<f32|f16>` takes the same: 1x1 of one image whose map is a pixel, of one group; see pixel_conv.cuh
// for its grid.
struct CsrParams {
  const void* x;  // [N, C, D, H, W]
  void* y;        // [N, K, OD, OH, OW]
  Epilogue epilogue;
  // Rows in their own order, without the marked zeros' need: row k holds entries row_begin[k] .. row_begin[k + 1] - 1.
  const float* values;        // [nnz]; float for both element types (products are summed in float)
  const unsigned* columns;    // [nnz], c * taps + tap, c within the group
  const unsigned* row_begin;  // [K + 1]
  int block_rows;
  int batch;
  int in_channels;
  int out_channels;
  int group_in_channels;
  int group_out_channels;
  int in_dims[3];
  int out_dims[3];
  int kernel_shape[3];
  int strides[3];
  int dilations[3];
  int pads_begin[3];
};

// What X is concatenated of, along channels, where a node reads the inputs of a Concat; else `count` is 0.
constexpr int kMaxSources = 8;
struct Sources {
  const void* x[kMaxSources];   // [N, channels of the source, ..]
  int begins[kMaxSources + 1];  // the first channel of each in X, and the number of all
  int count;
};

// How blocks that multiplied halves compute their outputs once more, in float, where halves could not hold what these
// read of X (recompute.cuh). Kernels for float16 have no use of it.
struct RecomputeParams {
  CsrParams csr;         // block_rows is 1; `x` is null where there are sources
  Sources sources;       // of a pointwise convolution
  const unsigned* seen;  // of X, by the blocks or warps of an earlier launch that rounded it; bits, see magnitude.cuh
  int num_seen;          // 0 where there is no such launch
  unsigned* happened;    // in the host's memory: becomes 1 where something was computed once more
};
constexpr unsigned kRecomputeBytes = 3072;  // of shared memory, that it takes

// Outputs of one image, to be computed once more.
struct OutputBox {
  long long first;              // index in Y of that of its first channel, row and column
  int channels, rows, columns;  // neighbours; where a box has whole planes, their outputs may count as columns of a row
  int share, shares;            // of the channels, the block has those at share, share + shares, ..
};

// Adds up the sums that several blocks computed of the same outputs: `sparseconv_reduce_<f32|f16>`, a thread for each
// output, and for what blocks of kernels on tensor cores share, `sparseconv_reduce_vectors`, float16, a thread for
// kReduceBytes of them.
//
// y[i] = activation(partial[0][i] + partial[1][i] + .. + bias[k] + residual[i]), in this order.
constexpr int kReduceBytes = 16;
struct ReduceParams {
  void* y;  // [N, K, plane]
  Epilogue epilogue;
  const void* partial;    // [num_splits][part_values], of them [N, K, plane] of the element type
  long long part_values;  // num_values at least; for vectors, whole ones, and `partial` begins at one of 16 bytes
  int num_splits;
  int out_channels;
  int plane;             // outputs of one channel of one image
  long long num_values;  // N * K * plane
};

// The same where X was floats that were rounded to halves: `sparseconv_reduce_rounded`, likewise.
struct ReduceRoundedParams {
  ReduceParams reduce;
  RecomputeParams recompute;
};

// Depthwise convolution in 2-D, or in 1-D as maps of one row: `sparseconv_depthwise_<window>_<f32|f16>`, with windows
// 3x3, 5x5, 3x3s2, 5x5s2 (a stride of 2), 7x7, without dilation, and any. depthwise_conv.cuh says how it works. One tap
// without strides and padding is 1x1: scale_channels.cuh, for which a plane is one row, an item an element of it, and
// there are fewer than 2^31 of them. Its grid is of any size in x, and it needs no shared memory. Of all others:
//
// Grid: x = blocks of planes, of N * C of them, y = bands of output rows. Shared memory: a row of zeros, with slack on
// either side; what the block reads, and slack; its outputs. Each of both begins within 16 bytes as in global memory. A
// thread computes an item: kDepthwiseRows outputs of a column or of two neighbouring ones; for any window, one output.
constexpr int kDepthwiseRows = 7;
// Two halves fill a bank of shared memory. Where there is a stride, and of floats, neighbours would share banks; large
// windows leave no registers for more.
template <bool kIsHalf, int kSize, int kStride>
constexpr int kDepthwiseColumns = kIsHalf && kSize >= 3 && kSize <= 5 && kStride == 1 ? 2 : 1;
constexpr int kMaxDepthwiseThreads = 256;
constexpr unsigned kDepthwiseSlackBytes = 64;
struct DepthwiseParams {
  const void* x;  // [N * C, in_h, in_w]
  void* y;        // [N * C, out_h, out_w]
  Epilogue epilogue;
  const float* weight;  // [C, kernel_h * kernel_w], zeros among them
  int num_planes;
  int channels;
  int in_h, in_w;
  int out_h, out_w;
  int kernel_h, kernel_w;
  int stride_h, stride_w;
  int dilation_h, dilation_w;
  int pad_top, pad_left;
  int block_planes;  // of a block; 1 where there are several bands
  int band_rows;     // output rows of a band
  int strips;        // of a band: rows of items
  int strip_items;
  int in_offset, out_offset;  // bytes, multiples of 16
  Divisor by_strip_items, by_strips, by_channels;
};

// Takes the maximum of windows of the maps that a convolution made: `sparseconv_max_pool_<f32|f16>`, and for such
// windows at every second position `sparseconv_max_pool_<2x2|3x3>_<f32|f16>`, and where a thread reads a vector of so
// many bytes of each row, `.._v<bytes>`. Windows are clipped to the map. Whether a NaN among others comes through
// depends on where it stands.
struct PoolParams {
  const void* x;  // [maps, D, H, W]
  void* y;        // [maps, OD, OH, OW]
  int in_dims[3];
  int out_dims[3];
  int kernel_shape[3];
  int strides[3];
  int pads_begin[3];
  long long num_threads;  // that have something to do: outputs, or vectors
};

// How a generated kernel gets its input into shared memory.
enum Staging : int {
  kBulkStaging = 0,     // cp.async.bulk of whole row ranges, sm_90 and later
  kVectorStaging = 1,   // 16 bytes a thread; the same alignment
  kElementStaging = 2,  // one element a thread: any size, any alignment
};

// Zeros before each staged channel: a word for each bank of shared memory, and as many bytes as a channel can be skewed
// by (see GeneratedPlan).
constexpr int kZeroBankBytes = 128;
constexpr int kGeneratedZeroBytes = kZeroBankBytes + 16;

// What a generated image was made for. Part of its header in `cuda_images` (see image_format.h), and constants of its
// code.
//
// The kernel `sparseconv_generated` computes tiles of `tile_channels` output channels. A thread owns one *slot*: one
// output column (float) or two neighbouring ones (float16). Output rows hold ceil(out_w / columns_per_slot) slots;
// slots are counted row after row and image after image. A block computes the slots of one *group* (consecutive ones,
// of one image or of several) for one tile, input channels in chunks of `chunk_channels`, each chunk staged in shared
// memory:
//
//   stage = [chunk_channels][channel_pitch bytes]     channel = zeros, then what the group reads of each image
//   element (row h, column w) of chunk channel c of an image whose part begins at byte `offset` lies at
//     c * channel_pitch + skew(c) + Z + offset + misalignment + ((h - first_row) * row_pitch + w - first_column) * size
//   skew(c) = (c * plane_residue mod U) * size, with U = 16 / size elements: where channel c of an input of that plane
//   size begins within 16 bytes, if channel 0 begins at a multiple. Z = kGeneratedZeroBytes. misalignment is that of
//   the part's first element in channel 0; offsets are multiples of 16: 0 for the first image, then those of whole
//   images.
//
// Packed plans, those with an image_pitch, are for small maps of one size only. A stage then holds whole planes as they
// lie in memory, so that all channels of a chunk arrive in one copy for each image that the group has slots of:
//
//   stage = zeros, then [stage_images][image_pitch bytes]
//   element (h, w) of chunk channel c of the group's image i lies at
//     P + i * image_pitch + c * channel_pitch + (h * in_w + w) * size, with channel_pitch = in_h * in_w * size
//   P, the bytes of zeros: as many as a chunk of an image takes, rounded up to 16, and kZeroBankBytes; none where the
//   convolution is pointwise, which has no taps outside of the input
struct GeneratedPlan {
  int element_type;  // onnx.TensorProto.DataType: 1 float, 10 float16
  int in_channels;   // C
  int out_channels;  // K
  int group;
  int tile_in_channels;  // input channels that a tile reads: those of its group, or of the groups that it spans
  int kernel_shape[2];   // of the last two axes; 1-D kernels have 1 first
  int strides[2];
  int dilations[2];
  int pads_begin[2];
  int activation;    // ActivationCode of the node
  int is_pointwise;  // 1x1, stride 1, no padding: the host passes planes as single rows, in_h = out_h = 1
  int tile_channels;
  int num_tiles;
  int chunk_channels;
  int num_chunks;
  int columns_per_slot;  // 1 (float) or 2 (float16)
  int threads;           // of a block that compute; a group has at most as many slots
  int staging_threads;   // of a block besides those, which only make bulk copies: 0 or 32
  int num_stages;
  int channel_pitch;  // bytes; a multiple of 16, unless packed
  int plane_residue;  // in_h * in_w modulo U of the input that the image was made for
  int image_pitch;    // bytes, a multiple of 16; 0 if not packed
  int stage_images;   // that a packed stage has room for, else 0
  int min_passes;     // passes or splits that keep float16 sums accurate
  int code_bytes;     // of the longest tile, about: what should stay in the instruction cache
  // Of the inputs that X is concatenated of, where the code reads these, and zeros; only zeros where it reads X. They
  // are of a pointwise convolution, and planes begin at multiples of 16 bytes, or are staged by elements.
  int source_channels[kMaxSources];
};

// One launch of `sparseconv_generated`. Grid x = num_tiles * num_splits * num_lanes, in clusters of `cluster_blocks`:
// cluster c = b / cluster_blocks of block b computes tile c % num_tiles of split c / num_tiles % num_splits; the block,
// the groups lane, lane + num_lanes, .. with
//   lane = c / (num_tiles * num_splits) * cluster_blocks + b % cluster_blocks
struct GeneratedParams {
  const void* x;       // or the first of the inputs that the plan has `source_channels` of
  void* out;           // Y; or sums that are not final, [num_splits] of Y's shape, or Y itself for one split
  const void* bias;    // [K], or null: what the sums begin with
  const void* addend;  // of Y's shape, or null: what is added to them at the end, the residual, or sums of an earlier
                       // launch. It may be `out`.
  long long split_stride;  // elements from one split to the next
  float alpha;             // of the activation
  float beta;
  int is_final;     // apply the activation
  int is_paired;    // float16: `out` and `addend` are multiples of 4 and rows have an even number of columns
  int chunk_begin;  // input channels: chunks chunk_begin .. chunk_end - 1, divided evenly among the splits:
  int chunk_end;    // split s begins at chunk_begin + (chunk_end - chunk_begin) * s / num_splits
  int num_splits;
  int num_lanes;       // a multiple of cluster_blocks
  int cluster_blocks;  // neighbours that share what they fetch of the code: 1 or 2
  int staging;         // Staging
  int in_h;
  int in_w;
  int out_h;
  int out_w;
  int num_groups;   // of the whole batch
  int group_slots;  // the last group may have fewer
  int num_slots;    // of the whole batch
  int row_pitch;    // elements, in_w; rounded up to even for float16
  int image_pitch;  // bytes, a multiple of 16: of what a group reads of an image that is not its first; or the plan's
  Divisor by_row_slots;
  Divisor by_plane_slots;
  const void* more_x[kMaxSources - 1];  // the other inputs
};

// Images that the sparse tensor cores compute together: the columns of one product.
constexpr int kTensorImages = 8;
constexpr int kMaxTensorThreads = 384;
// Units of one or two columns, and of four, that a thread of the staging warps loads at a time.
constexpr int kTensorUnits = 4, kWideTensorUnits = 2;
// What a stage has less of, of input: where a pixel lies there, a unit has so many bits for.
constexpr int kTensorStageBytes = 1 << 17;

// What the tensor-core kernels compute; see tensor_tile.cuh.
//
// Tiles, fastest first: row_blocks_per_group of warps_m row tiles, groups, tiles_x, tiles_y, and 8 images. 1-D
// convolutions have in_h = out_h = 1.
struct TileParams {
  const void* x;  // [N, C, H, W]
  void* y;        // [N, K, OH, OW]
  Epilogue epilogue;
  int batch;
  int in_channels;
  int out_channels;
  int groups;
  int group_in_channels;
  int group_out_channels;
  int in_h, in_w, out_h, out_w;
  int strides[2];
  int pads_begin[2];
  int row_tiles_per_group;
  int row_blocks_per_group;
  int tiles_x, tiles_y;
  int tile_h, tile_w;  // outputs of a tile, of each channel and image
  int warps_m;         // row tiles of a tile of outputs
  int num_stages;
  int stage_bytes;          // a multiple of 16
  int in_rows, in_columns;  // that a tile reads
  int line_pitch;           // pixels. Where each lies, TensorTile::PixelAt and WgmmaConv::PixelOf say
};

// The tensor-core kernel: `sparseconv_tensor_r<row tiles>_p<positions>`, float16, and
// `sparseconv_tensor_f32_r<row tiles>_p<positions>`, floats that it rounds. tensor_conv.cuh says how it works.
//
// A stage holds [chunk_channels][channel_pitch] pixels, and the chunk's steps of all row tiles. tile_w is a multiple of
// a warp's positions, line_pitch 1 more than a multiple of 8, and there are two stages.
//
// A pixel holds 8 images, or strips of one, as many neighbouring rows of outputs each: then the tile's batch and out_h
// are as if each strip were an image.
//
// Grid: x = tiles, y = parts of the chunks. Where there are several, the tile's y is memory for their sums, which are
// not final.
struct TensorParams {
  TileParams tile;
  const void* steps;            // of all row tiles; see tensor_weight.h
  const unsigned* step_begins;  // [groups * row_tiles_per_group][num_chunks + 1]
  int product_warps;            // of a block; the others stage
  int warps_k;                  // of them, those that share the steps of the same outputs
  Divisor by_row_blocks, by_groups, by_tiles_x, by_tiles_y;
  int num_chunks;
  int chunk_channels;
  int column_steps[3];  // pixels, from a unit's first column to the others
  int unit_columns;  // that are loaded together: 4 halves or 2 elements, where in_w is a multiple of it and X begins at
                     // a multiple of as many, else 1
  int channel_pitch;  // pixels, 1 more than a multiple of 8
  int input_bytes;    // of a stage, a multiple of 16; behind them, steps
  int max_steps;      // of a row tile in a chunk
  int is_y_paired;    // tile_w and out_w are even, and Y and the residual begin at multiples of two elements
  int sum_pitch;      // words from one row of outputs to the next, in shared memory
  // The outputs of a tile's channel, in words: pairs where they are stored as such. A block's threads store those of so
  // many channels at a time, and of `1 << store_pairs` pairs of images.
  int store_words, store_channels, store_pairs;
  Divisor by_store_words, by_tile_w;
  const float* scales;  // [K], of floats: the weight's rows are scaled by them
  int images;           // of a pixel at most: 8, or as many as an image has strips
  int last_rows;        // of outputs that the last of them has, the others have out_h
  int row_step;         // rows of X from one strip to the next, else 0
  // From one image or strip of a pixel to the next, and from one eight to the next: in X, and in Y or in sums of it
  // that are not final; there from one channel to the next, and from one part of the chunks to the next.
  int x_image, y_image, y_plane;
  long long x_eight, y_eight, y_part;
  RecomputeParams recompute;
  unsigned* seen;  // where X was floats, and parts of the chunks are summed: [gridDim.y][gridDim.x], as of the former
};

// Interleaves images: `sparseconv_interleave`, and `sparseconv_interleave_f32`, which rounds floats to halves. X as the
// warpgroup kernel reads it, with the padding:
//
//   out [eights of images][C][rows][windows][window_columns][8 images]
//
// A window is the columns that one tile reads of a row; neighbouring ones overlap. Images that the batch does not have
// are zeros. With few images, each is an eight by itself: its `strips`, as many neighbouring rows of outputs each, take
// the place of the eight images, and `rows` are those of a strip.
//
// Grid: x = pixels, a thread each, y = block_channels channels each, z = eights.
struct InterleaveParams {
  const void* x;  // [N, C, H, W]
  void* out;
  unsigned* seen;  // of floats, [blocks], x fastest, z slowest; as of RecomputeParams
  int batch;
  int in_channels;
  int block_channels;
  int in_h, in_w;
  int strips;      // of an image; 0 where eights are of images
  int strip_step;  // rows of X from one strip to the next, else 0
  int rows, windows, window_columns;
  int window_step;    // columns of X from one window to the next
  int pads_begin[2];  // the first row, and the first window's first column, lie so far before those of X
};

// Threads of a block that multiply, two warpgroups of them, and all.
constexpr int kWgmmaProductThreads = 256;
constexpr int kWgmmaThreads = 384;
constexpr int kWgmmaStagingWarps = (kWgmmaThreads - kWgmmaProductThreads) / 32;
// Channels of a chunk, and pixels of a stage: 8 halves of each, and 16 bytes that keep neighbours apart.
constexpr int kWgmmaChannels = 32;
constexpr int kWgmmaPixelBytes = 16 * kWgmmaChannels + 16;

// What the kernels of warpgroups have in common; see warpgroups.cuh. Row tiles are 64 rows. A stage holds pixels of 32
// channels, and the chunk's part of the weight.
//
// Blocks compute the tiles blockIdx.x, blockIdx.x + gridDim.x, .., of each the part blockIdx.y of the chunks, of
// gridDim.y parts.
struct WarpgroupParams {
  TileParams tile;
  int num_tiles;
  const void* chunks;            // of all row blocks; see wgmma_weight.h
  const unsigned* chunk_begins;  // [chunks + 1], in units of 16 bytes
  const unsigned* block_begins;  // [groups * row_blocks_per_group + 1], first chunks
  const int* channels;           // [chunks][kWgmmaChannels], of the group
  const float* scales;           // [K], by which sums are multiplied before all else; of floats alone
  int header_bytes;              // of a chunk
  int input_bytes;               // of a stage, a multiple of 128; behind them, the weight's part
  int table_bytes;               // behind the stages, a multiple of 16; behind them, barriers
  RecomputeParams recompute;
  unsigned* seen;  // where X was floats, and parts of the chunks are summed: [gridDim.y][gridDim.x], as of the former
};

// On their way to Y, outputs of a warp lie in rows of 64 bytes, 32 of them at a time, and 16 more that keep them apart.
constexpr int kWgmmaRowPitch = 64 + 16;
constexpr int kWgmmaRowBytes = kWgmmaProductThreads * kWgmmaRowPitch;

// The warpgroup kernel on sm_90a: `sparseconv_wgmma_p<positions>`, float16, and `sparseconv_wgmma_f32_p<positions>`.
// wgmma_conv.cuh says how it works. The tile's X is what the interleaving kernel wrote; a pixel holds 8 images, or
// strips of one: then the tile's batch and out_h are as if each strip were an image.
//
// A warpgroup computes one row tile, at one run of positions: run_lines neighbouring rows of outputs, run_w columns of
// each. The table has an entry for each of a tile's pixels.
constexpr int kMaxWgmmaPositions = 32;
constexpr int kMaxWgmmaTaps = 49;
struct WgmmaParams {
  WarpgroupParams common;
  int taps;
  unsigned tap_bytes[kMaxWgmmaTaps];  // from the pixel that a position reads with the first tap to that of each one
  int run_w, run_lines;
  int run_outputs[kMaxWgmmaPositions];  // in Y's plane, the first one's is 0; -1 for a position that has none
  int out_columns;  // that are stored together, 8, 4, 2 or 1: rows and runs are multiples of it, and what `run_outputs`
                    // leaves out; Y and the residual begin at such
  int x_rows, x_row_pixels, x_window_columns;  // of X; a row's are those of all windows
  int more_columns;  // of the tile's last row than `in_columns`: where lines lie closer than the columns that a row of
                     // outputs reads, the zeros behind a row are the first columns of the next one

  int images;     // of a pixel at most: 8, or as many as an image has strips
  int last_rows;  // of outputs that the last of them has, the others have out_h
  // In Y, or in sums of it that are not final, from the first output to that of the next channel, of the next image or
  // strip of a pixel, of the next eight, and of the next part of the chunks.
  int y_plane, y_image;
  long long y_eight, y_part;
};

// The cluster kernel on sm_90a: `sparseconv_cluster_n<blocks>`, float16, and `sparseconv_cluster_f32_n<blocks>`, for
// few images. A warpgroup computes up to `blocks` times eight positions. cluster_conv.cuh says how it works.
//
// The blocks of a cluster, along x, compute one tile, each a part of its chunks; blockIdx.y is the row block, of those
// of all groups, and blockIdx.z counts tiles_x, tiles_y and so many images as a tile has; there are no eights of
// images. The tile's rows and columns are those of outputs, and of each row, a line of each of its images follows the
// other. A warpgroup computes one row tile at one run: run_lines lines of outputs, run_w columns of each. Where a tile
// has two runs, the second one lies `run_step_y` lines or `run_step_x` columns further.
//
// X lies in shared memory as pixels of eight neighbouring channels, an octet. Pixels go on along a line: those that
// neighbouring outputs read with the same tap, one stride apart in X. A plane has the rows that those of outputs read
// so, a line of each image of each, and there is one for each place between strides that a tap reads, `planes[0]` along
// rows times `planes[1]` along columns.
constexpr int kClusterThreads = kWgmmaThreads, kClusterWarps = kClusterThreads / 32;
// Parts of a tile's chunks: what a cluster may have on every GPU. Chunks of a part, and parts of all row blocks.
constexpr int kMaxClusterParts = 8, kMaxClusterChunks = 31, kMaxAllClusterParts = 512;
// The barrier of a block's weight, and what is done to its sums.
constexpr int kClusterHeadBytes = 128 + 8 * 128;
// Where X has sources, an image of one takes fewer than 1 << kClusterSourceShift bytes.
constexpr int kClusterSourceShift = 29;
static_assert(kMaxSources <= 1 << (32 - kClusterSourceShift));
struct ClusterParams {
  WarpgroupParams common;
  Sources sources;            // of a pointwise convolution; all places of a chunk are of the same one
  const unsigned char* taps;  // [chunks][kMaxWgmmaTaps], of each chunk's steps
  int parts;                  // gridDim.x, a cluster
  // [gridDim.y][parts], first chunks, and behind the last one, their number
  unsigned short part_begins[kMaxAllClusterParts + 1];
  unsigned
      tap_bytes[kMaxWgmmaTaps];  // from a position's pixel in the first plane to the one that it reads with each tap
  int planes[2];
  int images;  // of a tile
  int plane_rows, line_pixels;
  int octet_bytes;   // from an octet's pixels to the next one's
  int x_columns;     // that are loaded together, 4, 2 or 1: rows of X are multiples of it, and X begins at such
  int line_vectors;  // of those, that a line may have pixels of
  int run_lines, run_w, run_step_y, run_step_x;
  int max_steps;    // of a part, that there is room for, a multiple of 4
  int sums_pitch;   // floats, from a row of sums in shared memory to the next
  int out_columns;  // that are stored together, 2 or 1: rows and runs are multiples of it, as is line_pixels; Y and the
                    // residual begin at such
  Divisor by_tiles_x, by_tiles_y, by_images;
  Divisor by_line_vectors;
  Divisor by_segments;                       // of 32 / x_columns vectors, of all lines
  Divisor by_out_row[2], by_out_vectors[2];  // of a run: outputs of a row of sums and of a line, for each `out_columns`
};

// The ring kernel, float16 on sm_90a: `sparseconv_ring_p<positions>`, for windows of few channels. ring_conv.cuh says
// how it works.
//
// Threads of a block: warpgroups that multiply, and one that stages.
constexpr int kRingWarpgroups = 2;
constexpr int kRingProductThreads = 128 * kRingWarpgroups;
constexpr int kRingThreads = kRingProductThreads + 128;
// Columns of X that are loaded together, and outputs that are stored together: rows of both are multiples of it.
constexpr int kRingColumns = 8;

// A tile is `tile_rows` rows of outputs, `positions` columns of each, of 64 output channels and an eight: of eight
// images or of the strips of one image, the parts of a pixel. Its rows of X go by a ring of `ring_rows` of them in
// shared memory; behind that, the weight of the block's row tile, a table of what staging warps load of a row, and
// where its channels lie.
//
// Blocks compute the tiles blockIdx.x, blockIdx.x + gridDim.x, ..; gridDim.x is a multiple of row_tiles, so that a
// block stays with one of them.
struct RingParams {
  const void* x;  // [N, C, H, W]
  void* y;        // [N, K, OH, OW]
  Epilogue epilogue;
  const void* weight;   // of all row tiles; see window_weight.h
  const int* channels;  // [row_tiles][places]; -1 at a place without one
  int weight_bytes;     // of a row tile, a multiple of 16
  int header_bytes;     // of that
  int dense_bytes;      // likewise, of dense steps
  int places;           // a multiple of 32
  int out_channels;
  int in_h, in_w;
  int out_h, out_w;  // out_h: of a part; the last part of an eight may have `last_rows` alone
  int last_rows;
  int strides[2];
  int pads_begin[2];
  int window_rows;  // of X, that a row of outputs reads
  int ring_rows;    // window_rows at least
  int row_pixels;   // of the ring
  int pixel_bytes;  // 16 for each place, and 16 that keep neighbours apart
  int row_blocks;   // of four eights of columns of X each, that a row of the ring may come from
  int row_units;    // of two places and a block each, that a row of the ring is staged in: a multiple of 4
  int row_tiles, tiles_x, tiles_y, tile_rows;
  int num_tiles;
  int parts;       // of a pixel at most
  int last_parts;  // of the last eight
  int num_eights;
  int part_rows;  // rows of X from a part to the next: 0 where parts are images
  int x_plane;    // halves, and so on
  int y_plane;
  long long x_part, x_eight;
  long long y_part, y_eight;
};

// Positions of a plane that lie together in a pixel of the pointwise kernel, a segment; the last one may have fewer.
constexpr int kSegmentPositions = 8;

// The pointwise kernel on sm_90a, for 1x1: `sparseconv_pointwise_s<segments>`, float16, and
// `sparseconv_pointwise_f32_s<segments>`. pointwise_conv.cuh says how it works.
//
// The tile's rows (tiles_y, tile_h) are images, its columns segments; there are no eights of images. A warpgroup
// computes one row tile at one run: run_segments segments of each of run_images images. Where a tile has two runs, the
// second one lies so many images or segments further.
//
// gridDim.x is a multiple of groups * row_blocks_per_group: a block computes tiles of one row block. The table has room
// for a word for each place of its chunks, and for each of its rows.
struct PointwiseParams {
  WarpgroupParams common;
  Sources sources;                // each place of a chunk is of the same one
  int rounds_x;                   // whether X is floats, which the kernel rounds itself
  int chunk_bytes;                // of the weight; all are the same
  unsigned x_plane_bytes;         // from a channel of X, or of the residual, to the next one. Where it is a multiple of
  unsigned residual_plane_bytes;  // 16, X or the residual begins at such, else both are multiples of 8
  int plane;                      // positions
  int run_images, run_segments;
  int run_step_images, run_step_segments;
  int out_columns;     // that are stored together, 8, 4, 2 or 1: planes are multiples of it, and Y begins at such
  long long y_part;    // in sums of Y that are not final, from the first output to that of the next part of the chunks
  Bounds kept_bounds;  // of sums that go to shared memory: none where a residual of floats is still to be added to them
};

// The kernels for windows of few channels, by octets.
enum class OctetForm {
  kPlain,
  kWords,    // rows may have more channels than registers hold, and planes of Y may begin anywhere
  kStrides,  // windows move by two rows, or columns, or both
};

// How the copy engine finds a box of a tensor: a CUtensorMap, which the driver encodes.
struct alignas(64) TensorMap {
  unsigned long long words[16];
};

// The octet kernel on sm_90a: `sparseconv_octets_n<blocks>`, float16, and `sparseconv_octets_f32_n<blocks>`, for
// windows of few channels that move by one row and column; `sparseconv_words_n<blocks>` and
// `sparseconv_words_f32_n<blocks>` for those of one row, of any number of channels and any plane of Y. A warpgroup
// computes up to `blocks` times eight positions at a time. octet_conv.cuh says how it works.
//
// A tile is `tile_rows` rows of outputs, `tile_columns` columns of each, of 64 output channels and an image. A
// warpgroup computes `group_rows` rows of it at a time. Rows of X go by a ring of `ring_rows` of them in shared memory,
// for each eight places a plane of it: pixels of 16 bytes, those of a row, then those of the next; copies of the first
// rows lie behind the last, so that those that are computed together always lie together. A row is `lead_pixels` zeros,
// `staged_columns` columns of X, of which the first is `halo_columns` in front of the tile's, and more zeros. Behind
// the ring follow what is not needed of transposed columns, outputs on their way to Y, the weight of the block's row
// tile, where its channels lie, and a table of where its steps read.
//
// Blocks compute the tiles blockIdx.x, blockIdx.x + gridDim.x, ..; gridDim.x is a multiple of row_tiles, so that a
// block stays with one of them.
constexpr int kWarpgroupThreads = 128, kOctetWarpgroups = 2;  // that multiply
// Others stage; where a warpgroup's sums leave registers for it, two sets of them.
constexpr int kOctetStagingWarps = 4, kMaxBlocksOfTwoSets = 15;
template <int kBlocks>
constexpr int kOctetStagingSets = kBlocks <= kMaxBlocksOfTwoSets ? 2 : 1;
template <int kBlocks>
constexpr int kOctetThreads =
    kWarpgroupThreads * kOctetWarpgroups + 32 * kOctetStagingWarps * kOctetStagingSets<kBlocks>;
constexpr unsigned kOctetDumpBytes = 16;
constexpr unsigned kBoxAlignment = 128;  // of a box in shared memory
struct OctetParams {
  // Of Y, where warps' outputs lie together in it, `run` of each channel, and the copy engine takes those of 16
  // channels as a box; `run` is 0 where they do not. Between channels, shared memory has more; that is behind the
  // tensor's axis.
  TensorMap y_map;
  int run;
  Divisor by_run;
  const void* x;  // [N, C, H, W]
  void* y;        // [N, K, OH, OW]
  Epilogue epilogue;
  const float* scales;  // [K], as of WarpgroupParams
  RecomputeParams recompute;
  const void* weight;   // of all row tiles; see window_weight.h
  const int* channels;  // [row_tiles][places]; -1 at a place without one
  int weight_bytes;     // of a row tile, a multiple of 16
  int header_bytes;     // of that
  int dense_bytes;      // likewise, of dense steps
  int places;           // a multiple of 32
  int inputs_pitch;     // bytes of the table for each slot of the ring, a multiple of 16
  int in_channels, out_channels;
  int in_h, in_w;
  int out_h, out_w;
  int pad_top;
  int stride_shifts[2];  // of rows and columns, the binary logarithms; 0 or 1
  int window_rows;  // of the ring, that a row of outputs reads; as many rows of X at a stride of 1, else twice as many
  int ring_rows;
  int phase_bytes;                                // of an octet, all rows at one place between strides
  int first_pixel;                                // of a row, all columns counted, that its first output reads first
  int row_pixels;                                 // of a phase, an even number
  int lead_pixels, staged_columns, halo_columns;  // all columns counted
  int group_rows;
  int staging_sets;  // up to kOctetStagingSets
  int rows_ahead;    // of X, that the second-level cache gets at a time; a power of two, or 0 for none
  int out_buffers;   // for outputs on their way to Y: one for each warpgroup, or one for both
  int row_tiles, tiles_x, tiles_y, tile_rows, tile_columns;
  Divisor by_row_tiles, by_tiles_x, by_tiles_y;
  int num_tiles;
};

// On their way to Y, outputs of a warp lie in 8 segments of 16 rows, and 16 bytes that keep segments apart; floats, in
// half as many segments.
constexpr int kPointwisePartSegments = 8;
constexpr int kPointwisePitch = 16 * 16 + 16;
constexpr int kPointwisePartBytes = kWgmmaProductThreads / 32 * kPointwisePartSegments * kPointwisePitch;

// Copies the positions of planes that a pointwise convolution reads, such that each plane begins at a multiple of 16
// bytes. out [planes][segments][kSegmentPositions]; positions outside of X are zeros, those behind a plane's last one
// anything. With `_f32`, floats are rounded to halves:
//
//   sparseconv_gather[_f32]          any positions, a segment a thread
//   sparseconv_gather_whole[_f32]    whole planes of one X, in their order
//   sparseconv_gather_columns[_f32]  without padding, every second column of rows that have twice as many as the output
//
// Grid: x = blocks of kGatherThreads, which go through all planes.
constexpr int kGatherThreads = 256;
// Of whole planes, halves of the segments of a block, from a vector's begin on, and those that are read behind.
constexpr int kGatherSlabBytes = 2 * (kGatherThreads * kSegmentPositions + 32);
struct GatherParams {
  const void* x;  // [planes, in_h, in_w]
  void* out;
  unsigned* seen;    // of floats, [gridDim.x], as of InterleaveParams
  int num_segments;  // of all planes
  int plane_segments;
  int in_h, in_w;  // of whole planes, of one row
  int out_h, out_w;
  int strides[2];
  int pads_begin[2];
  int is_whole;           // whether these are all positions, in their order
  int channels;           // of X, where it has sources
  Sources sources;        // of whole planes; `x` is null where there are any
  Divisor plane_divisor;  // of whole planes, by segments; of columns, by rows
  // Of columns alone:
  Divisor row_divisor;  // by loads
  int num_lines;        // rows of outputs of all planes, with less than 2^31 loads
  int load_bytes;       // 16, 8, or 4 of halves: of a load, that all rows of X and of the output are multiples of
};

// Copies sources together, for kernels that read X from one place: `sparseconv_concatenate_v<bytes>`, in units of so
// many bytes, 16, 4 or 2. out [N, C, ..]. A unit's source is found once for all images.
//
// Grid: x = blocks of threads, which go through the units of an image, y = images; both may be smaller.
struct ConcatenateParams {
  Sources sources;  // of units instead of channels
  void* out;
  int units;  // of an image
  int batch;
};

// Copies X such that a convolution with strides is one without, of more channels: `sparseconv_space_to_depth`, and
// `sparseconv_space_to_depth_f32`. out [N][C][strides][out_h][out_w], where row y and column x of place (r, s) are row
// y * strides[0] + r - pads_begin[0] of X, and the column likewise; zeros outside of X.
//
// Grid: x = blocks of threads, each for kSpaceToDepthColumns neighbouring columns of all places.
constexpr int kSpaceToDepthColumns = 4;
struct SpaceToDepthParams {
  const void* x;  // [N, C, in_h, in_w]
  void* out;
  unsigned num_threads;  // that have something to do
  int in_h, in_w;
  int out_h, out_w;  // out_w is a multiple of kSpaceToDepthColumns
  int strides[2];
  int pads_begin[2];
};

}  // namespace sparseconv::cuda
