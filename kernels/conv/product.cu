// Convolutions over time on the tensor cores:
//
//   sums[map, window] = sum over taps and inputs of filters[tap, input, map] * x[step, input]
//
// Each tap is one product of (maps, 64 inputs) and (64 inputs, windows). No lowered matrix is stored: the steps of a window are lines of
// shared memory. If windows are one step apart, the next tap reads the same lines, shifted by one dilation.
//
// The windows of all rows are packed end to end into places. A tile covers PLACES places, and 64 maps for each of GROUPS warp groups. A block runs
// several tiles. Three warps fetch the inputs, 64 columns at a time, through a table of addresses that is filled once per tile: steps of the
// batch, embeddings of token ids, steps of a row's previous chunk, or null for zeros. One thread fetches the filters (layout: packing.py).
// A thread holds the sums of two maps over a quarter of the places. So it computes most of the maximum over time on its own, and pooled
// feature maps are never written.
#define EXACT 0
#include "../device.cuh"
#include "conv.cuh"
#include "../wgmma.cuh"

constexpr int DEPTH = 64, LINE_BYTES = DEPTH * 2;               // input columns at a time
constexpr int MAPS = 64 * GROUPS, FILTER_BYTES = 64 * LINE_BYTES;
constexpr int FETCHERS = 96, MULTIPLIERS = 128;                 // threads; the fourth warp fetches filters
constexpr int FIRST_MULTIPLIER = 128;
static_assert(THREADS == FIRST_MULTIPLIER + GROUPS * MULTIPLIERS && X_STAGES >= 2 && LINES % 8 == 0, "launch shape");
constexpr int LINES_AT_ONCE = 4;              // lines of 128 bytes that a warp fetches at a time
constexpr int OF_MAPS = GATE ? 2 : 1;                           // sums per output: a value, or a value and its gate
constexpr int PART = PLACES < 64 ? PLACES : 64;                 // places that are pooled at a time
constexpr int NOWHERE = -1;

struct Memory {
    alignas(1024) unsigned char x[X_STAGES][LINES * LINE_BYTES];
    alignas(1024) unsigned char filters[FILTER_STAGES][GROUPS][FILTER_BYTES];
    alignas(16) const Half* table[TABLE];       // the address of each line of a tile; null for zeros
    // For this tile and the next: the row of each place if maxima are wanted, otherwise the line of its output step; the line of its residual.
    alignas(16) int places[2][PLACES], residuals[2][RESIDUAL ? PLACES : 1];
    unsigned long long x_full[X_STAGES], x_empty[X_STAGES], filters_full[FILTER_STAGES], filters_empty[FILTER_STAGES];
    unsigned long long places_full[2], places_empty[2];
};
static_assert(sizeof(Memory) <= SHARED, "as in plan.py");

// The kernel's argument. Every member has eight bytes, so that the launcher passes a list of integers.
struct Call {
    const Half* x;                      // (tokens, inputs), or an embedding
    const void* ids;                    // (tokens,) int32, or int64 if `wide_ids`; null: x contains the steps themselves
    const Half* before;                 // (rows, left, inputs) the steps before each row; null: zeros
    Half* after;                        // (lines, left, inputs) the steps before each row's next chunk; null: not wanted
    const int* lines_after;             // (rows,) the line of each row in `after`; null: the row number
    const void* steps_at;               // (rows + 1,) where the output steps of each row begin, in the type of the offsets
    const Half* residual;               // (tokens, residual_columns), added to the output; THINNED like the output
    void* steps;                        // (tokens, columns)
    int* maxima;                        // (rows, columns) the bits of floats >= 0, set to zero before the launch unless ALONE
    const Half* filters[BANKS];
    const float* bias[BANKS];           // (maps, padded)
    Rows batch;
    long long wide_ids, inputs, dilation, lines, columns;       // lines: per stage
    long long residual_columns, residual_count, residual_spacing, residual_apart;
    // known: no kernel that may still run writes the offsets and ids; frees_next: the next kernel may start at once, because it does not
    // rely on `known`.
    long long tiles, banks, known, frees_next;
    long long width[BANKS], outputs[BANKS], first_column[BANKS], first_tile[BANKS];

    __device__ int id(int token) const { return ((const int*)ids)[wide_ids ? 2 * token : token]; }
};

// The filters and places of a tile.
struct Tile {
    int bank, maps, position, width, reach;

    __device__ Tile(const Call& call, int tile) {
        int n = tile;
        bank = 0;
        for (int candidate = 0; candidate < call.banks; ++candidate) {
            const int ahead = tile - (int)call.first_tile[candidate];
            if (ahead >= 0 && ahead <= n) n = ahead, bank = candidate;
        }
        const int tiles = ((int)call.outputs[bank] * OF_MAPS + MAPS - 1) / MAPS;
        maps = n % tiles, position = n / tiles, width = (int)call.width[bank], reach = (width - 1) * (int)call.dilation + 1;
    }
};
__device__ __forceinline__ int chunks_of(const Call& call) { return ((int)call.inputs + DEPTH - 1) / DEPTH; }

// Returns the row of a place. Places after the last row belong to the last row. All lanes of a warp call it together, with places that
// ascend from lane to lane.
__device__ __forceinline__ int row_at(const Rows& rows, int place) {
    if (rows.rows == 1) return 0;
    if (THINNED) return min(place / (int)rows.count_out, (int)rows.rows - 1);
    const int lane = threadIdx.x % 32, first = settled(place);
    int low = 0, high = (int)rows.rows;
    while (high - low > 1) {
        const int distance = (high - low + 31) / 32, probe = low + lane * distance;
        const unsigned before = __ballot_sync(~0u, probe < high && rows.first_place(probe) <= first);
        low += max(__popc(before) - 1, 0) * distance, high = min(high, low + distance);
    }
    const int start = low + lane < rows.rows ? rows.first_place(low + lane) : 0x7fffffff;
    int ahead = 0;
#pragma unroll
    for (int step = 16; step > 0; step /= 2)
        if (__shfl_sync(~0u, start, ahead + step) <= place) ahead += step;
    int row = low + ahead;
    if (ahead == 31)                    // more rows may follow the 32 that were compared, because rows may be empty
        while (row + 1 < rows.rows && rows.first_place(row + 1) <= place) ++row;
    return row;
}

__device__ __forceinline__ const Half* line_of(const Call& call, const Row& row, int number, int step) {
    if (step >= 0 && step < row.steps) return call.x + (call.ids ? call.id(row.begin + step) : row.begin + step) * call.inputs;
    const int back = (int)call.batch.left + step;
    if (step >= 0 || back < 0 || !call.before) return nullptr;
    return call.before + (number * call.batch.left + back) * call.inputs;
}

// Returns the line of a window's residual in a THINNED batch. back: how many windows of the row follow this window.
__device__ __forceinline__ int residual_line(const Call& call, int number, int back) {
    const int begin = call.batch.offset(number), whole = call.batch.offset(number + 1) - begin, count = (int)call.residual_count;
    const int spacing = (int)call.residual_spacing, steps = count ? min(count, (whole + spacing - 1) / spacing) : whole;
    return (count ? number * count : begin) + steps - 1 - back * (int)call.residual_apart;
}

// Fills the table of addresses and the places of a tile. Called by the warps that fetch inputs.
__device__ __forceinline__ void fill_table(const Call& call, Memory& memory, const Tile& tile, int buffer) {
    int* const places = memory.places[buffer];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, stride = (int)call.batch.stride, dilation = (int)call.dilation;
    const int count = SHARED_LINES ? (int)call.lines : PLACES;
#pragma unroll 1
    for (int base = warp * 32; base < count; base += FETCHERS) {
        const int n = base + lane, place = tile.position * PLACES + n, number = row_at(call.batch, place);
        const Row row(call.batch, number);
        const int window = place - call.batch.first_place(number), step = row.origin + window * stride, windows = row.windows(call.batch, tile.reach);
        if (n >= count) continue;
        if (SHARED_LINES) memory.table[n] = line_of(call, row, number, step);
        else
            for (int tap = 0; tap < tile.width; ++tap) memory.table[tap * PLACES + n] = line_of(call, row, number, step + tap * dilation);
        if (n >= PLACES) continue;
        const bool whole = window < windows;
        if (POOLED) places[n] = whole ? number : NOWHERE;
        else if (THINNED) places[n] = whole ? place : window < call.batch.count_out ? NOWHERE - 1 - place : NOWHERE;
        else places[n] = whole ? Rows::at(call.steps_at, call.batch.wide, number) + window : NOWHERE;
        if (RESIDUAL) memory.residuals[buffer][n] = THINNED && whole ? residual_line(call, number, windows - 1 - window) : places[n];
    }
}

// Fetches eight columns of a line in pieces of PIECE_BYTES. Columns at and after `columns` become zero.
__device__ __forceinline__ void fetch_line(unsigned to, const Half* from, const Half* anywhere, int columns) {
#pragma unroll
    for (int n = 0; n < 16 / PIECE_BYTES; ++n) {
        const bool exists = columns > n * (PIECE_BYTES / 2);
        const Half* at = exists ? from + n * (PIECE_BYTES / 2) : anywhere;
#if PIECE_BYTES == 16
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(at), "r"(exists ? 16 : 0));
#else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %3, %2;" ::"r"(to + n * PIECE_BYTES), "l"(at), "r"(exists ? PIECE_BYTES : 0), "n"(PIECE_BYTES));
#endif
    }
}

// Each warp fetches every third piece, for all lines.
__device__ __forceinline__ void fetch_inputs(const Call& call, Memory& memory) {
    const int lane = threadIdx.x % 32, piece = lane % 8, first_line = lane / 8, warp = threadIdx.x / 32;
    const int chunks = chunks_of(call), inputs = (int)call.inputs, lines = SHARED_LINES ? (int)call.lines : PLACES;
    const unsigned full = settled(shared_address(memory.x_full)), empty = settled(shared_address(memory.x_empty));
    const unsigned x = shared_address(memory.x[0]) + first_line * LINE_BYTES, swizzled = (piece ^ first_line) << 4;
    int stage = warp, phase = 0, item = warp;
#pragma unroll 1
    for (int n = blockIdx.x, round = 0, end = 0; n < call.tiles; n += gridDim.x, ++round) {
        const Tile tile(call, n);
        const int groups = settled(SHARED_LINES ? 1 : tile.width), buffer = round % 2, begin = end;
        await(shared_address(&memory.places_empty[buffer]), round / 2 & 1 ^ 1);
        fill_table(call, memory, tile, buffer);
        if (round == 0 && call.known) wait_for_last();
        meet(1, FETCHERS);
        arrive(shared_address(&memory.places_full[buffer]));
        end += chunks * groups;
#pragma unroll 1
        for (; item < end; item += FETCHERS / 32) {
            while (stage >= X_STAGES) stage -= X_STAGES, phase ^= 1;
            const int k = (item - begin) / groups, group = (item - begin) % groups, column = k * DEPTH + piece * 8;
            const unsigned to = x + stage * (LINES * LINE_BYTES);
            const Half* const* from = memory.table + group * PLACES + first_line;
            await(empty + stage * 8, phase ^ 1);
#pragma unroll 8
            for (int line = 0; line < lines; line += LINES_AT_ONCE) {
                const Half* at = from[line];
                // Lines beyond the tile's lines are zero.
                fetch_line(to + line * LINE_BYTES + (swizzled ^ line % 8 << 4), at + column, call.x, line + first_line < lines && at ? inputs - column : 0);
            }
            // The barrier counts this warp when its copies have completed. This warp does not wait for them.
            asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(full + stage * 8) : "memory");
            stage += FETCHERS / 32;
        }
        meet(1, FETCHERS);              // all warps have read the table
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
}

// Run by one thread. The filters do not depend on earlier kernels, so this does not wait for them.
__device__ __forceinline__ void fetch_filters(const Call& call, Memory& memory) {
    const unsigned full = shared_address(memory.filters_full), empty = shared_address(memory.filters_empty), filters = shared_address(memory.filters[0][0]);
    const int chunks = chunks_of(call);
    int stage = 0, phase = 0;
#pragma unroll 1
    for (int n = blockIdx.x; n < call.tiles; n += gridDim.x) {
        const Tile tile(call, n);
        const int pieces = chunks * tile.width;
        const unsigned char* from = (const unsigned char*)call.filters[tile.bank] + (long long)tile.maps * pieces * (GROUPS * FILTER_BYTES);
#pragma unroll 1
        for (int piece = 0; piece < pieces; ++piece, from += GROUPS * FILTER_BYTES) {
            await(empty + stage * 8, phase ^ 1);
            expect(full + stage * 8, GROUPS * FILTER_BYTES);
            copy_in_bulk(filters + stage * (GROUPS * FILTER_BYTES), from, GROUPS * FILTER_BYTES, full + stage * 8);
            if (++stage == FILTER_STAGES) stage = 0, phase ^= 1;
        }
    }
}

// The destination of a thread's sums: two maps, eight apart, or one map and its gate.
struct Maps {
    int column, outputs;                // column: of the first map; outputs: how many the bank has, counted from this warp's first map
    float bias, bias_below;             // of the sums of rows g and g + 8
};

// Writes the maxima of a row within this tile. Sums are compared before bias and ReLU, which are monotone.
__device__ __forceinline__ void write_maxima(const Call& call, const Maps& maps, int row, float best, float best_below) {
    const int q = threadIdx.x % 4, g = threadIdx.x / 4 % 8;
#pragma unroll
    for (int distance = 1; distance < 4; distance *= 2) {
        best = larger(best, __shfl_xor_sync(~0u, best, distance));
        best_below = larger(best_below, __shfl_xor_sync(~0u, best_below, distance));
    }
    if (q > 1 || g + 8 * q >= maps.outputs) return;
    const int value = __float_as_int(activated<RELU>(q ? best_below + maps.bias_below : best + maps.bias));
    int* const to = call.maxima + (long long)row * call.columns + maps.column + 8 * q;
    if (ALONE) *to = value;
    else atomicMax(to, value);
}
// Writes the maxima of rows without windows, if one tile has all rows.
__device__ __forceinline__ void write_empty_rows(const Call& call, const Maps& maps, int row, int until) {
#pragma unroll 1
    for (; row < until; ++row) write_maxima(call, maps, row, LEAST, LEAST);
}

// The maxima of the current row so far, over the parts of a tile.
struct Best {
    int row = NOWHERE;
    float value = LEAST, below = LEAST;
};
template <int PART_AT>
__device__ __forceinline__ void pool_part(const Call& call, const float (&sums)[PLACES / 2], const int* places, const Maps& maps, Best& best) {
    const int lane = threadIdx.x % 32, q = lane % 4;
    int lowest = 0x7fffffff, highest = NOWHERE;
    bool whole = true;                  // all places are windows of the same row
#pragma unroll
    for (int n = 0; n < PART; n += 32) {
        const int row = places[PART_AT + n + lane];
        lowest = min(lowest, row < 0 ? 0x7fffffff : row), highest = max(highest, row), whole = whole && row >= 0;
    }
    lowest = __reduce_min_sync(~0u, lowest), highest = __reduce_max_sync(~0u, highest);
    whole = __all_sync(~0u, whole) && lowest == highest;
#pragma unroll 1
    for (int row = lowest; row <= highest; ++row) {
        if (row != best.row) {
            if (best.row != NOWHERE) write_maxima(call, maps, best.row, best.value, best.below);
            else if (ALONE) write_empty_rows(call, maps, 0, row);
            best = Best{row, LEAST, LEAST};
        }
        if (whole) {
#pragma unroll
            for (int j = PART_AT / 8; j < (PART_AT + PART) / 8; ++j) {
                best.value = larger(best.value, larger(sums[4 * j], sums[4 * j + 1]));
                best.below = larger(best.below, larger(sums[4 * j + 2], sums[4 * j + 3]));
            }
        } else {
#pragma unroll
            for (int j = PART_AT / 8; j < (PART_AT + PART) / 8; ++j) {
                const int2 pair = *(const int2*)(places + 8 * j + 2 * q);
                best.value = larger(best.value, larger(pair.x == row ? sums[4 * j] : LEAST, pair.y == row ? sums[4 * j + 1] : LEAST));
                best.below = larger(best.below, larger(pair.x == row ? sums[4 * j + 2] : LEAST, pair.y == row ? sums[4 * j + 3] : LEAST));
            }
        }
    }
}
__device__ __forceinline__ void pool(const Call& call, const float (&sums)[PLACES / 2], const int* places, const Maps& maps) {
    Best best;
    pool_part<0>(call, sums, places, maps, best);
#if PLACES > 64
    pool_part<64>(call, sums, places, maps, best);
#endif
#if PLACES > 128
    pool_part<128>(call, sums, places, maps, best);
    pool_part<192>(call, sums, places, maps, best);
#endif
    if (best.row != NOWHERE) write_maxima(call, maps, best.row, best.value, best.below);
    if (ALONE) write_empty_rows(call, maps, best.row + 1, (int)call.batch.rows);
}

// Transposes an (8, 8) matrix of 16-bit values. Each lane holds two values of a row.
__device__ __forceinline__ unsigned transposed(unsigned pair) {
    unsigned result;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pair));
    return result;
}

// The residual of a thread's sums: two maps of one place in each word, eight places and eight maps at a time.
constexpr int BLOCKS = GATE ? 1 : 2;        // blocks of eight maps that a warp writes
struct Residual {
    unsigned of[RESIDUAL ? PLACES / 8 : 1][BLOCKS];
};
__device__ __forceinline__ Residual load_residual(const Call& call, const int* at, const Maps& maps) {
    const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    Residual residual;
#pragma unroll
    for (int j = 0; j < PLACES / 8; ++j) {
        const int line = at[8 * j + g];
        const Half* from = call.residual + (long long)line * call.residual_columns + maps.column - g + 2 * q;
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block) {
            residual.of[j][block] = 0;
            if (line >= 0 && 8 * block + 2 * q < maps.outputs) residual.of[j][block] = *(const unsigned*)(from + 8 * block);
        }
    }
    return residual;
}

// Writes eight maps of eight places. This thread has map g at places 2q and 2q + 1. places: the lines of the output steps; column: the column
// of the first map; outputs: how many maps there are, counted from the first.
__device__ __forceinline__ void write_block(const Call& call, float first, float second, const int* places, unsigned residual, int column, int outputs) {
    const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    if (RESIDUAL) {
        const unsigned pair = transposed(residual);
        first = activated<AFTER>(first + low_of(pair)), second = activated<AFTER>(second + high_of(pair));
    }
    if (STEPS_FLOAT32) {
        const int2 at = *(const int2*)(places + 2 * q);
        float* steps = (float*)call.steps + column + g;
        if (g < outputs && at.x != NOWHERE) steps[(long long)(at.x < 0 ? NOWHERE - 1 - at.x : at.x) * call.columns] = at.x < 0 ? 0.0f : first;
        if (g < outputs && at.y != NOWHERE) steps[(long long)(at.y < 0 ? NOWHERE - 1 - at.y : at.y) * call.columns] = at.y < 0 ? 0.0f : second;
    } else {
        const unsigned pair = transposed(narrow(first, second));
        const int line = places[g];
        if (line >= 0 && 2 * q < outputs) *(unsigned*)((Half*)call.steps + (long long)line * call.columns + column + 2 * q) = pair;
    }
}
__device__ __forceinline__ void write(const Call& call, const float (&sums)[PLACES / 2], const int* places, const Residual& residual, const Maps& maps) {
    const int column = maps.column - (int)(threadIdx.x / 4 % 8);
#pragma unroll
    for (int j = 0; j < PLACES / 8; ++j) {
        const float values[4] = {sums[4 * j] + maps.bias, sums[4 * j + 1] + maps.bias, sums[4 * j + 2] + maps.bias_below, sums[4 * j + 3] + maps.bias_below};
        const int *at = places + 8 * j, k = RESIDUAL ? j : 0;
        if (GATE) {
            write_block(call, gated(values[0], values[2]), gated(values[1], values[3]), at, residual.of[k][0], column, maps.outputs);
        } else {
            write_block(call, activated<ACTIVATION>(values[0]), activated<ACTIVATION>(values[1]), at, residual.of[k][0], column, maps.outputs);
            write_block(call, activated<ACTIVATION>(values[2]), activated<ACTIVATION>(values[3]), at, residual.of[k][BLOCKS - 1], column + 8, maps.outputs - 8);
        }
    }
}

// Computes 64 maps of every tile of this block.
__device__ __forceinline__ void multiply_tiles(const Call& call, Memory& memory, int group) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, g = lane / 4, chunks = chunks_of(call);
    const unsigned x = settled(piece_at(shared_address(memory.x[0]))), filters = settled(piece_at(shared_address(memory.filters[0][group])));
    const unsigned x_full = settled(shared_address(memory.x_full)), x_empty = settled(shared_address(memory.x_empty));
    const unsigned full = settled(shared_address(memory.filters_full)), empty = settled(shared_address(memory.filters_empty));
    int stage = 0, phase = 0, x_stage = 0, x_phase = 0;
#pragma unroll 1
    for (int n = blockIdx.x, round = 0; n < call.tiles; n += gridDim.x, ++round) {
        const Tile tile(call, n);
        const int taps = settled(SHARED_LINES ? tile.width : 1), groups = settled(SHARED_LINES ? 1 : tile.width);
        const unsigned shift = settled((int)call.dilation * (LINE_BYTES / 16));
        const int sum = tile.maps * MAPS + group * 64 + warp * 16 + g, buffer = round % 2;      // the sum of row g; the sum of row g + 8 is eight further
        const int first_map = GATE ? sum / 16 * 8 + g : sum;
        const float* bias = call.bias[tile.bank];
        const Maps maps{(int)call.first_column[tile.bank] + first_map, (int)call.outputs[tile.bank] - (first_map - g), bias[sum], bias[sum + 8]};
        // Load the residual before the products start: the sums need it at the end.
        await(shared_address(&memory.places_full[buffer]), round / 2 & 1);
        if (round == 0) wait_for_last();
        Residual residual;
        if (RESIDUAL) residual = load_residual(call, memory.residuals[buffer], maps);
        unsigned before = 0, x_before = 0;      // barriers of the stages that the product in flight reads
        float sums[PLACES / 2];
        int adds = 0;
#pragma unroll 1
        for (int k = 0; k < chunks; ++k) {
#pragma unroll 1
            for (int item = 0; item < groups; ++item) {
                await(x_full + x_stage * 8, x_phase);
                asm volatile("fence.proxy.async.shared::cta;" ::: "memory");        // cp.async writes through the generic proxy, wgmma reads through the async proxy
                unsigned right = x + x_stage * (LINES * LINE_BYTES / 16);
#pragma unroll 1
                for (int tap = 0; tap < taps; ++tap, right += shift) {
                    const unsigned left = filters + stage * (GROUPS * FILTER_BYTES / 16);
                    await(full + stage * 8, phase);
                    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
                    multiply(sums, left, right, adds);
#pragma unroll
                    for (int part = 1; part < DEPTH / 16; ++part) multiply(sums, left + part * 2, right + part * 2, 1);
                    asm volatile("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 1;" ::: "memory");
                    adds = 1;
                    if (before && lane == 0) arrive(before);
                    if (x_before && lane == 0) arrive(x_before);
                    before = empty + stage * 8, x_before = 0;
                    if (++stage == FILTER_STAGES) stage = 0, phase ^= 1;
                }
                x_before = x_empty + x_stage * 8;
                if (++x_stage == X_STAGES) x_stage = 0, x_phase ^= 1;
            }
        }
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
        if (lane == 0) arrive(before), arrive(x_before);

        if (POOLED) pool(call, sums, memory.places[buffer], maps);
        else write(call, sums, memory.places[buffer], residual, maps);
        arrive(shared_address(&memory.places_empty[buffer]));
    }
}

// Writes the steps before each row's next chunk, two columns at a time.
__device__ __forceinline__ void write_left_context(const Call& call) {
    const Rows& batch = call.batch;
    const int pairs = (int)call.inputs / 2, left = (int)batch.left, threads = GROUPS * MULTIPLIERS;
#pragma unroll 1
    for (int number = blockIdx.x; number < batch.rows; number += gridDim.x) {
        const Row row(batch, number);
        unsigned* after = (unsigned*)call.after + (long long)(call.lines_after ? call.lines_after[number] : number) * left * pairs;
#pragma unroll 1
        for (int index = threadIdx.x - FIRST_MULTIPLIER; index < left * pairs; index += threads) {
            const Half* from = line_of(call, row, number, row.steps - left + index / pairs);
            after[index] = from ? ((const unsigned*)from)[index % pairs] : 0;
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) conv(const __grid_constant__ Call call) {
    extern __shared__ __align__(1024) unsigned char dynamic[];
    Memory& memory = *(Memory*)dynamic;
    if (call.frees_next) let_next_begin();
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < X_STAGES; ++stage) {
            make_barrier(shared_address(&memory.x_full[stage]), 32);
            make_barrier(shared_address(&memory.x_empty[stage]), GROUPS * MULTIPLIERS / 32);
        }
        for (int buffer = 0; buffer < 2; ++buffer) {
            make_barrier(shared_address(&memory.places_full[buffer]), FETCHERS);
            make_barrier(shared_address(&memory.places_empty[buffer]), GROUPS * MULTIPLIERS);
        }
    } else if (threadIdx.x == FETCHERS) {
        for (int stage = 0; stage < FILTER_STAGES; ++stage) {
            make_barrier(shared_address(&memory.filters_full[stage]), 1);
            make_barrier(shared_address(&memory.filters_empty[stage]), GROUPS * MULTIPLIERS / 32);
        }
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    __syncthreads();
    if (threadIdx.x >= FETCHERS && threadIdx.x < FIRST_MULTIPLIER) {
        if (threadIdx.x == FETCHERS) fetch_filters(call, memory);
        return;
    }
    if (!call.known) wait_for_last();
    if (!call.frees_next) let_next_begin();     // kernels that start now may read the offsets at once
    if (threadIdx.x < FETCHERS) return fetch_inputs(call, memory);
    multiply_tiles(call, memory, settled((threadIdx.x - FIRST_MULTIPLIER) / MULTIPLIERS));
    if (call.after) write_left_context(call);
}
