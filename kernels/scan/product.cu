// One layer of an SRU or a QRNN from its inputs: the product with the weights and the recurrence in one launch, so that the product
// never leaves the multiprocessor.
//
// A block has two streams of whole rows and UNITS hidden units. Each stream has a warp group that multiplies
// its tiles of 64 steps (wgmma, m64nNk16) with weights that both share. The sums go to shared memory as gates, rounded to 16 bits, and a
// team consumes them while the next tiles are multiplied.
//
// If SPLIT, the streams have parts of a single row instead. They store the maps of the parts, and fold.cu computes the outputs.
//
// One thread fetches 64 columns at a time. The inputs come through a tensor map, in rows of 128 bytes with the tensor cores' swizzle of
// 16-byte pieces (piece ^ row % 8). The weights are packed that way already (`pack` in product.py). A tile of the backward direction is in
// memory's order as well; only its gates are stored in the order of its steps. The steps before a row's first step are its left context,
// or zeros. The tensor map delivers steps of another row there, and the patching warps overwrite them.
#define ALL_BLOCKS 1
#define GATES_FLOAT32 0
#define EXACT 0
#define TAPS 1
#include "scan.cuh"
#include "../wgmma.cuh"

struct alignas(16) Piece {
    unsigned x, y, z, w;
};
struct alignas(64) Maps {
    unsigned char of[2][128];           // tensor map of (tokens, inputs), in boxes of 64 steps and 64 columns, for each direction
};
constexpr int DEPTH = 64, STEP_BYTES = DEPTH * 2;               // columns of the inputs in a piece
constexpr int FETCHERS = 128, MULTIPLIERS = 128;
constexpr int DEPTHS = PIECES / WINDOW;                         // pieces of a step's inputs
constexpr int X_BYTES = TILE * STEP_BYTES, WEIGHT_BYTES = COLUMNS * STEP_BYTES;
static_assert(THREADS == FETCHERS + 2 * MULTIPLIERS + 2 * TEAM && TEAM % 32 == 0 && COLUMNS % 16 == 0, "launch shape");
constexpr int PATCHERS = FETCHERS / 32 - 1;                     // patching warps
// No patching warp may be two rounds of the stages ahead of the product, because a barrier only distinguishes odd from even rounds.
static_assert(STAGES >= PATCHERS, "launch shape");
constexpr int EARLY = PIECES < STAGES ? PIECES : STAGES;        // pieces of the weights that are fetched first

struct Memory {
    alignas(1024) unsigned char x[STAGES][2][X_BYTES];
    alignas(1024) unsigned char weights[RESIDENT ? PIECES : STAGES][WEIGHT_BYTES];
    alignas(16) Kept gates[2][BUFFERS][TILE * STRIDE];
    Share teams[2];
    unsigned long long full[STAGES], patched[STAGES], empty[STAGES], loaded, gates_full[2][BUFFERS], gates_empty[2][BUFFERS];
};
static_assert(sizeof(Memory) <= SHARED, "SHARED is less than sizeof(Memory): see product.py");

// Writes the context of each row's next chunk, eight columns at a time.
__device__ __forceinline__ void keep_left(const Call& call, const BlockPart& part, const Stream& stream) {
    constexpr int STEPS = WINDOW - 1;
    const Piece *x = (const Piece*)call.data[stream.direction], *left = (const Piece*)call.left[stream.direction];
    Piece* after = (Piece*)call.left_after[stream.direction];
    const int pieces = (int)call.inputs / 8;
    if (!after) return;
#pragma unroll 1
    for (long long row = stream.first + part.slice; row < stream.until; row += call.slices) {
        const long long begin = call.offset(row), end = call.offset(row + 1), first = end - begin - STEPS;
#pragma unroll 1
        for (int index = threadIdx.x; index < STEPS * pieces; index += FETCHERS) {
            const int piece = index % pieces;
            const long long step = first + index / pieces, earlier = (row * STEPS + STEPS + step) * pieces + piece;
            Piece context{0, 0, 0, 0};
            if (step >= 0) context = x[(stream.direction ? end - 1 - step : begin + step) * pieces + piece];
            else if (left) context = left[earlier];
            after[row * STEPS * pieces + index] = context;
        }
    }
}

// Fetches `count` pieces of the weights, beginning with `piece`, to positions from `at` on. One thread calls it.
__device__ __forceinline__ void fetch_weights(const Call& call, Memory& shared, const BlockPart& part, int piece, int at, int count, unsigned barrier) {
    const unsigned char* from = (const unsigned char*)call.source[part.direction];
    expect(barrier, count * WEIGHT_BYTES);
    copy_in_bulk(shared_address(shared.weights[at]), from + ((long long)part.slice * PIECES + piece) * WEIGHT_BYTES, count * WEIGHT_BYTES, barrier);
}

// The rows of a tile, as one warp sees them. For two steps, each lane knows the row and the number of steps before the step in its row.
// These are filled only if some step has too few predecessors. One load covers 31 rows.
struct TileRows {
    int tile = -1, before[2], rows[2];
    int base = -1, starts;              // a row that begins before the tile; in each lane, the start of this row or of a later row
    bool short_of;

    __device__ void look_up(const Call& call, const Stream& stream, int next) {
        if (tile == next) return;
        const int lane = threadIdx.x % 32, first = next * TILE, last = min(first + TILE, stream.places) - 1;
        tile = next;
        if (base < 0) base = 0, starts = stream.start_of(call, lane);
        while (__shfl_sync(~0u, starts, 31) <= first) base += 31, starts = stream.start_of(call, base + lane);
        short_of = __any_sync(~0u, starts > first - (WINDOW - 1) && starts <= last);
        if (!short_of) return;
        const bool known = __shfl_sync(~0u, starts, 31) > last;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int place = min(first + half * 32 + lane, last);
            int ordinal = 0;
            if (known) {
#pragma unroll
                for (int step = 16; step > 0; step /= 2)
                    if (__shfl_sync(~0u, starts, ordinal + step) <= place) ordinal += step;
                before[half] = place - __shfl_sync(~0u, starts, ordinal), ordinal += base;
            } else ordinal = stream.ordinal_of(call, place), before[half] = place - stream.start_of(call, ordinal);
            rows[half] = stream.row(ordinal);
        }
    }
    // Returns a bit mask of the 32 steps of a half that have fewer than `count` predecessors.
    __device__ unsigned have_fewer(int half, int count) const { return __ballot_sync(~0u, before[half] < count); }
};

// Overwrites steps of other rows with the left context, or with zeros. A step of another row is `tap` steps before a step that has fewer
// predecessors. One warp patches 64 columns. Returns whether it wrote anything.
__device__ __forceinline__ bool patch(const Call& call, const Stream& stream, const TileRows& tile_rows, int tap, int k, unsigned to) {
    const int lane = threadIdx.x % 32, piece = lane % 8;
    const long long column = k * DEPTH + piece * 8;
    if (!tile_rows.short_of) return false;
    const Half* left = (const Half*)call.left[stream.direction];
    // Each group of eight lanes takes every fourth step.
    unsigned long long steps = ((unsigned long long)tile_rows.have_fewer(1, tap) << 32 | tile_rows.have_fewer(0, tap)) & 0x1111111111111111ull << lane / 8;
#pragma unroll 1
    for (; __any_sync(~0u, steps != 0); steps &= steps - 1) {
        const int step = steps ? __ffsll(steps) - 1 : 0, half = step / 32, line = stream.direction ? TILE - 1 - step : step;
        const int before[2] = {__shfl_sync(~0u, tile_rows.before[0], step % 32), __shfl_sync(~0u, tile_rows.before[1], step % 32)};
        const int row[2] = {__shfl_sync(~0u, tile_rows.rows[0], step % 32), __shfl_sync(~0u, tile_rows.rows[1], step % 32)};
        const long long from = (long long)(half ? row[1] : row[0]) * (WINDOW - 1) + WINDOW - 1 - tap + (half ? before[1] : before[0]);
        Piece context{0, 0, 0, 0};
        if (steps && left && column < call.inputs) context = *(const Piece*)(left + from * call.inputs + column);
        if (steps)
            asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};"
                         ::"r"(to + line * STEP_BYTES + ((piece ^ line % 8) << 4)), "r"(context.x), "r"(context.y), "r"(context.z), "r"(context.w) : "memory");
    }
    return true;
}
// Patches up to `most` tiles of both streams as soon as they arrive.
__device__ __forceinline__ void patch_tiles(const Call& call, Memory& shared, const Stream& first, const Stream& second, int most) {
    const unsigned full = settled(shared_address(shared.full)), patched = settled(shared_address(shared.patched));
    const unsigned empty = settled(shared_address(shared.empty)), x = settled(shared_address(shared.x[0][0]));
    TileRows first_rows, second_rows;
#pragma unroll 1
    for (int at = threadIdx.x / 32 - 1; at < most * PIECES; at += PATCHERS) {
        const int n = at / PIECES, piece = at % PIECES, tap = piece / DEPTHS, k = piece % DEPTHS, stage = at % STAGES;
        const bool has_first = n < first.tiles(), has_second = n < second.tiles();
        if (has_first) first_rows.look_up(call, first, n);
        if (has_second) second_rows.look_up(call, second, n);
        // Wait until the previous piece of the stage has been read: then the barrier can only mean this piece.
        await(empty + stage * 8, at / STAGES & 1 ^ 1);
        await(full + stage * 8, at / STAGES & 1);
        bool patched_any = false;
        if (tap > 0 && has_first) patched_any = patch(call, first, first_rows, tap, k, x + stage * 2 * X_BYTES);
        if (tap > 0 && has_second) patched_any |= patch(call, second, second_rows, tap, k, x + stage * 2 * X_BYTES + X_BYTES);
        if (patched_any) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncwarp();
        if (threadIdx.x % 32 == 0) arrive(patched + stage * 8);
    }
}

// Fetches one box of the inputs that begins at a token and a column.
__device__ __forceinline__ void fetch_box(const void* map, unsigned to, int column, int token, unsigned barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
                 ::"r"(to), "l"(map), "r"(column), "r"(token), "r"(barrier) : "memory");
}
// Fetches up to `most` tiles of both streams. One thread calls it, after the first weights were requested.
__device__ __forceinline__ void fetch(
    const Call& call, const Maps& maps, Memory& shared, const BlockPart& part, const Stream& first, const Stream& second, int most
) {
    const unsigned full_first = shared_address(shared.full), empty_first = shared_address(shared.empty), x_first = shared_address(shared.x[0][0]);
    const void* map = maps.of[part.direction];
    int stage = 0, phase = 0, turn = 0;
#pragma unroll 1
    for (int n = 0; n < most; ++n) {
        const bool has_first = n < first.tiles(), has_second = n < second.tiles();
        // The tile's first step in the order of memory.
        const int first_step = part.direction ? TILE - 1 : 0;
        const int first_token = (int)first.token(n * TILE + first_step), second_token = (int)second.token(n * TILE + first_step);
#pragma unroll 1
        for (int piece = 0; piece < PIECES; ++piece, ++turn) {
            const int tap = piece / DEPTHS, column = piece % DEPTHS * DEPTH, shift = part.direction ? tap : -tap;
            const unsigned full = full_first + stage * 8, x = x_first + stage * 2 * X_BYTES;
            await(empty_first + stage * 8, phase ^ 1);
            if (!RESIDENT && turn >= EARLY) fetch_weights(call, shared, part, piece, stage, 1, full);
            expect(full, (has_first + has_second) * X_BYTES);
            if (has_first) fetch_box(map, x, column, first_token + shift, full);
            if (has_second) fetch_box(map, x + X_BYTES, column, second_token + shift, full);
            if (++stage == STAGES) stage = 0, phase ^= 1;
        }
    }
}
// Waits for the weights of a block without steps: no copy may be in flight when a block ends. One thread calls it.
__device__ __forceinline__ void await_weights(Memory& shared) {
    if (RESIDENT) await(shared_address(&shared.loaded), 0);
    for (int stage = 0; !RESIDENT && stage < EARLY; ++stage) {
        arrive(shared_address(&shared.full[stage]));
        await(shared_address(&shared.full[stage]), 0);
    }
}

// Multiplies the `count` tiles of one stream; the longer stream has `most`.
// All work on a piece besides its products delays everything else, so nothing is computed twice.
__device__ __forceinline__ void multiply_tiles(Memory& shared, int direction, int s, int count, int most) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, g = lane / 4, q = lane % 4;
    const unsigned x = settled(piece_at(shared_address(shared.x[0][s]))), weights = settled(piece_at(shared_address(shared.weights[0])));
    const unsigned full = settled(shared_address(shared.full)), patched = settled(shared_address(shared.patched)), empty = settled(shared_address(shared.empty));
    int stage = 0, phase = 0;
    if (RESIDENT) await(shared_address(&shared.loaded), 0);
#pragma unroll 1
    for (int n = 0; n < most; ++n) {
        const bool live = n < count;
        unsigned before = empty;        // the barrier of the previous piece

        float sums[COLUMNS / 2];
#pragma unroll 1
        for (int k = 0; k < PIECES; ++k) {
            await(full + stage * 8, phase);
            if (WINDOW > 1) await(patched + stage * 8, phase);
            if (live) {
                asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
                const unsigned left = x + stage * (2 * X_BYTES / 16), right = weights + (RESIDENT ? k : stage) * (WEIGHT_BYTES / 16);
                multiply(sums, left, right, k);
#pragma unroll
                for (int part = 1; part < DEPTH / 16; ++part) multiply(sums, left + part * 2, right + part * 2, 1);
                asm volatile("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 1;" ::: "memory");
            }
            // The previous piece has been read by now.
            if (k > 0 && lane == 0) arrive(before);
            before = empty + stage * 8;
            if (++stage == STAGES) stage = 0, phase ^= 1;
        }
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
        if (lane == 0) arrive(before);
        if (!live) continue;

        const int buffer = n % BUFFERS, row = warp * 16 + g;
        await(shared_address(&shared.gates_empty[s][buffer]), (n / BUFFERS & 1) ^ 1);
        Gate* const to = shared.gates[s][buffer] + (direction ? TILE - 1 - row : row) * STRIDE + 2 * q;
        const int further = direction ? -8 * STRIDE : 8 * STRIDE;
#pragma unroll
        for (int j = 0; j < COLUMNS / 8; ++j) {
            *(unsigned*)(to + 8 * j) = narrow(sums[4 * j], sums[4 * j + 1]);
            *(unsigned*)(to + 8 * j + further) = narrow(sums[4 * j + 2], sums[4 * j + 3]);
        }
        arrive(shared_address(&shared.gates_full[s][buffer]));
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    scan(const __grid_constant__ Call call, const __grid_constant__ Maps maps) {
    extern __shared__ __align__(1024) unsigned char dynamic[];
    Memory& shared = *(Memory*)dynamic;
    const BlockPart part = block_part();
    let_next_begin();
    // One thread of a warp each, because a barrier's address is uniform in a warp.
    if (threadIdx.x == 0) {
        make_barrier(shared_address(&shared.loaded), 1);
        for (int stage = 0; stage < STAGES; ++stage) make_barrier(shared_address(&shared.full[stage]), 1 + !RESIDENT);
        asm volatile("prefetch.tensormap [%0];" ::"l"(maps.of[part.direction]) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        // The weights do not depend on the rows.
        if (RESIDENT) fetch_weights(call, shared, part, 0, 0, PIECES, shared_address(&shared.loaded));
        else
            for (int stage = 0; stage < EARLY; ++stage) fetch_weights(call, shared, part, stage, stage, 1, shared_address(&shared.full[stage]));
    } else if (threadIdx.x == 32) {
        for (int stage = 0; stage < STAGES; ++stage) {
            make_barrier(shared_address(&shared.empty[stage]), 2 * MULTIPLIERS / 32);
            make_barrier(shared_address(&shared.patched[stage]), 1);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    } else if (threadIdx.x == 64) {
        for (int s = 0; s < 2; ++s) {
            for (int buffer = 0; buffer < BUFFERS; ++buffer) {
                make_barrier(shared_address(&shared.gates_full[s][buffer]), MULTIPLIERS);
                make_barrier(shared_address(&shared.gates_empty[s][buffer]), RUNS * UNITS);
            }
            init_team(shared.teams[s]);
        }
    }
    __syncthreads();
    wait_for_last();
    const Streams streams(call, part);
    const int thread = threadIdx.x, multiply_first = FETCHERS, encode_first = FETCHERS + 2 * MULTIPLIERS;
    if (thread < encode_first) {
        const Stream first = streams.stream(part, 0), second = streams.stream(part, 1);
        const int most = settled(max(first.tiles(), second.tiles())), s = settled((thread - multiply_first) / MULTIPLIERS);
        const int count = settled(s ? second.tiles() : first.tiles());
        if (thread == 0) fetch(call, maps, shared, part, first, second, most);
        else if (thread >= multiply_first) multiply_tiles(shared, part.direction, s, count, most);
        else if (WINDOW > 1 && thread >= 32) patch_tiles(call, shared, first, second, most);
        if (most == 0 && thread == 0) await_weights(shared);
        if (WINDOW > 1 && thread < multiply_first) {
            if (!SPLIT || part.group == 0) keep_left(call, part, first);
            if (!SPLIT) keep_left(call, part, second);
        }
    } else {
        const int s = min((thread - encode_first) / TEAM, 1);
        const Tiles tiles{shared.gates[s][0], settled(shared_address(shared.gates_full[s])), settled(shared_address(shared.gates_empty[s]))};
        encode(call, part, streams.stream(part, s), shared.teams[s], tiles, s, (thread - encode_first) % TEAM);
    }
}
