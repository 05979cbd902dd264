// Convolutions over time of token ids. Folded tables replace the product: they hold the embedding times the filters, computed once at load.
//
//   out[window] = activation(sum over taps of table[tap, 1 + id[window + tap * dilation]] + bias)
//
// A lane reads a piece of 16 bytes of a table row. A warp adds up four such pieces for eight windows of a row at a time. SPLIT warps share
// the windows of a row. Maxima stay in registers until all windows of the row are done. A linear classifier may follow, in the same block or in the
// first block of the row's cluster.
#define EXACT 0
#define GATE 0
#include "../device.cuh"
#include "conv.cuh"

constexpr int AT_ONCE = 8;                      // maps of a 16-byte piece
constexpr int PIECES_AT_ONCE = 4, WINDOWS_AT_ONCE = 8, TAPS_AT_ONCE = 5;
constexpr int WARPS = THREADS / 32, GROUPS = WARPS / SPLIT;     // groups of four pieces that a block adds up at a time
// Blocks per multiprocessor: many loads in flight hide their latency.
constexpr int BLOCKS_AT_ONCE = THREADS > 960 ? 1 : 960 / THREADS;
static_assert(WARPS % SPLIT == 0 && (SPLIT == 1 || GROUPS < 16) && (CTAS == 1 || CLASSIFIES), "launch shape");

// The kernel's argument. Every member has eight bytes, so that the launcher passes a list of integers.
struct Call {
    const void* ids;                    // (tokens,) int32, or int64 if `wide_ids`
    const void* steps_at;               // (rows + 1,) where the output steps of each row begin, in the type of the offsets
    float* steps;                       // (tokens, columns)
    float* maxima;                      // (rows, columns)
    const Half* classifier;             // (columns, labels), or null
    const Half* classifier_bias;        // (labels,)
    float* scores;                      // (rows, labels)
    const Half* tables[BANKS];          // (width, height, stride), row 1 + n is the row of id n
    const float* bias[BANKS];           // (outputs,)
    Rows batch;
    long long wide_ids, dilation, columns, labels, pieces, banks;       // pieces: the total of all banks
    long long height, stride[BANKS], width[BANKS], outputs[BANKS], first_column[BANKS], first_piece[BANKS];     // height: rows of a table

    __device__ int id(int token) const { return ((const int*)ids)[wide_ids ? 2 * token : token]; }
};

// With a classifier, the blocks of a row form a cluster, and each stores its maxima in the first block.
__device__ __forceinline__ void store_in_first_block(float* at, float value) {
    if (CTAS == 1) *at = value;
    else asm volatile("{.reg .u32 remote; mapa.shared::cluster.u32 remote, %0, 0; st.shared::cluster.f32 [remote], %1;}" ::"r"(shared_address(at)), "f"(value) : "memory");
}
// No block may write to the first block before that block has started.
__device__ __forceinline__ void cluster_arrive() {
    if (CTAS > 1) asm volatile("barrier.cluster.arrive.relaxed.aligned;");
}
__device__ __forceinline__ void cluster_wait() {
    if (CTAS > 1) asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_sync() {
    if (CTAS > 1) asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
    else __syncthreads();
}

// The piece that a lane adds up: eight maps of one bank.
struct Maps {
    int width, reach;
    bool exists;                        // false for a lane beyond the last piece
    long long stride, height;
    const Half* table;

    __device__ Maps(const Call& call, int piece) {
        const int bank = bank_of(call, piece);
        width = (int)call.width[bank], reach = (width - 1) * (int)call.dilation + 1, exists = piece < call.pieces;
        stride = call.stride[bank], height = call.height;
        table = call.tables[bank] + (piece - (int)call.first_piece[bank]) * AT_ONCE;
    }
    __device__ static int bank_of(const Call& call, int piece) {
        int bank = 0;
        while (bank + 1 < call.banks && piece >= call.first_piece[bank + 1]) ++bank;
        return bank;
    }
};

// The map that a lane writes.
struct Map {
    int column, reach;                  // column: -1 if the lane has no map
    float bias;

    __device__ Map(const Call& call, int piece, int n) {
        const int bank = Maps::bank_of(call, piece), map = (piece - (int)call.first_piece[bank]) * AT_ONCE + n;
        const bool exists = piece < call.pieces && map < call.outputs[bank];
        column = exists ? (int)call.first_column[bank] + map : -1, bias = exists ? call.bias[bank][map] : 0.0f;
        reach = ((int)call.width[bank] - 1) * (int)call.dilation + 1;
    }
};

__device__ __forceinline__ void add_pair(float& low, float& high, unsigned pair) { low += low_of(pair), high += high_of(pair); }

// sums += the table rows of one window. All ids are read before the first row is fetched, so that the fetches overlap. Steps outside the row
// have zero rows, which are not fetched.
__device__ __forceinline__ void add_window(const Call& call, const Maps& maps, const Row& row, int window, float (&sums)[AT_ONCE]) {
    const int first = row.origin + window * (int)call.batch.stride;
#pragma unroll 1
    for (int from = 0; from < maps.width; from += TAPS_AT_ONCE) {
        int ids[TAPS_AT_ONCE];
#pragma unroll
        for (int n = 0; n < TAPS_AT_ONCE; ++n) {
            const int step = first + (from + n) * (int)call.dilation;
            ids[n] = -1;
            if (from + n < maps.width && step >= 0 && step < row.steps) ids[n] = call.id(row.begin + step);
        }
        uint4 pieces[TAPS_AT_ONCE];
#pragma unroll
        for (int n = 0; n < TAPS_AT_ONCE; ++n) {
            pieces[n] = uint4{0, 0, 0, 0};
            if (ids[n] >= 0) pieces[n] = *(const uint4*)(maps.table + ((from + n) * maps.height + 1 + ids[n]) * maps.stride);
        }
#pragma unroll
        for (int n = 0; n < TAPS_AT_ONCE; ++n) {
            add_pair(sums[0], sums[1], pieces[n].x), add_pair(sums[2], sums[3], pieces[n].y);
            add_pair(sums[4], sums[5], pieces[n].z), add_pair(sums[6], sums[7], pieces[n].w);
        }
    }
}

__device__ __forceinline__ void classify(const Call& call, int row, const float* maxima) {
    const int lane = threadIdx.x % 32, labels = (int)call.labels;
    for (int label = threadIdx.x / 32; label < labels; label += WARPS) {
        float sum = 0.0f;
#pragma unroll 4
        for (int column = lane; column < call.columns; column += 32) sum = fmaf(maxima[column], widen(call.classifier[column * labels + label]), sum);
#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
        if (lane == 0) call.scores[(long long)row * labels + label] = sum + widen(call.classifier_bias[label]);
    }
}

// Writes the outputs of every window of a row. Several blocks may share the windows of a row.
__device__ __forceinline__ void write_steps(const Call& call, const Maps& maps, const Row& row, int number, int first, int share) {
    const int lane = threadIdx.x % 32, piece = first + lane % PIECES_AT_ONCE, stride = WINDOWS_AT_ONCE * SPLIT * gridDim.z;
    const int begin = (blockIdx.z * SPLIT + share) * WINDOWS_AT_ONCE + lane / PIECES_AT_ONCE, count_out = THINNED ? (int)call.batch.count_out : 0;
    const int windows = row.windows(call.batch, maps.reach);
    const int at = THINNED ? number * count_out : Rows::at(call.steps_at, call.batch.wide, number);
#pragma unroll 1
    for (int window = begin; window < max(windows, count_out); window += stride) {
        float sums[AT_ONCE] = {};
        if (maps.exists && window < windows) add_window(call, maps, row, window, sums);
        float* steps = call.steps + (long long)(at + window) * call.columns;
#pragma unroll
        for (int n = 0; n < AT_ONCE; ++n) {
            const Map map(call, piece, n);
            // The last step of a row without steps is zero.
            if (map.column >= 0) steps[map.column] = window < windows ? activated<ACTIVATION>(sums[n] + map.bias) : 0.0f;
        }
    }
}

extern "C" __global__ void CLUSTER_OF(1, CTAS) __launch_bounds__(THREADS, BLOCKS_AT_ONCE) conv(const __grid_constant__ Call call) {
    extern __shared__ float shared[];   // 32 maxima of each warp, then the maxima of the row
    let_next_begin();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = warp / SPLIT, share = warp % SPLIT, number = blockIdx.x;
    float* const maxima = shared + WARPS * 32;
    cluster_arrive();
    wait_for_last();
    cluster_wait();
    const Row row(call.batch, number);
#pragma unroll 1
    for (int first = (blockIdx.y * GROUPS + group) * PIECES_AT_ONCE; first < call.pieces; first += gridDim.y * GROUPS * PIECES_AT_ONCE) {
        const Maps maps(call, first + lane % PIECES_AT_ONCE);
        if (!POOLED) {
            write_steps(call, maps, row, number, first, share);
            continue;
        }
        const Map map(call, first + lane / AT_ONCE, lane % AT_ONCE);
        const int windows = row.windows(call.batch, maps.reach);
        float best[AT_ONCE];
#pragma unroll
        for (int n = 0; n < AT_ONCE; ++n) best[n] = LEAST;
#pragma unroll 1
        for (int window = share * WINDOWS_AT_ONCE + lane / PIECES_AT_ONCE; window < windows; window += WINDOWS_AT_ONCE * SPLIT) {
            float sums[AT_ONCE] = {};
            if (maps.exists) add_window(call, maps, row, window, sums);
#pragma unroll
            for (int n = 0; n < AT_ONCE; ++n) best[n] = larger(best[n], sums[n]);
        }
        // Reduce over the windows of the warp, then over the warps of the group. Each lane then holds one map.
#pragma unroll
        for (int n = 0; n < AT_ONCE; ++n) {
#pragma unroll
            for (int distance = PIECES_AT_ONCE; distance < 32; distance *= 2) best[n] = larger(best[n], __shfl_xor_sync(~0u, best[n], distance));
            if (lane < PIECES_AT_ONCE) shared[warp * 32 + lane * AT_ONCE + n] = best[n];
        }
        if (SPLIT > 1) meet(1 + group, 32 * SPLIT);
        else __syncwarp();
        float maximum = LEAST;
#pragma unroll
        for (int member = 0; member < SPLIT; ++member) maximum = larger(maximum, shared[(group * SPLIT + member) * 32 + lane]);
        if (share == 0 && map.column >= 0) {
            const float value = row.windows(call.batch, map.reach) > 0 ? activated<RELU>(maximum + map.bias) : 0.0f;
            call.maxima[(long long)number * call.columns + map.column] = value;
            if (CLASSIFIES) store_in_first_block(maxima + map.column, value);
        }
        if (SPLIT > 1) meet(1 + group, 32 * SPLIT);
        else __syncwarp();
    }
    if (!CLASSIFIES) return;
    cluster_sync();
    if (blockIdx.y == 0) classify(call, number, maxima);
}
