// A layer of linear cells from its inputs, of which only the last hidden vector of each row is needed: see tiles.cuh.
//
// A warp group multiplies its tile with the weights (wgmma, m64nNk16). The sums go to shared memory as gates, rounded to 16 bits. One thread
// fetches the inputs (through a tensor map) and the weights (`pack` in product.py), 64 columns at a time. The steps before a row's first
// step are its left context, or zeros. The tensor map delivers steps of another row there, and the warp group overwrites them.
//
// Only steps that end a row need the output gate and the skip block. A block without such steps does not multiply them.
#define GATES_FLOAT32 0
#define EXACT 0
#include "tiles.cuh"
#include "../wgmma.cuh"

struct alignas(64) Maps {
    unsigned char of[2][128];           // tensor map of (tokens, inputs), in boxes of 64 steps and 64 columns, for each direction
};
constexpr int DEPTH = 64, STEP_BYTES = DEPTH * 2;               // columns of the inputs in a piece
constexpr int DEPTHS = PIECES / WINDOW;                         // pieces of a step's inputs
constexpr int CELL_COLUMNS = (IS_SRU || BLOCKS < 4 ? 2 : 4) * UNITS;      // the cell's columns come first
constexpr int X_BYTES = TILE * STEP_BYTES, WEIGHT_BYTES = COLUMNS * STEP_BYTES, CELL_BYTES = CELL_COLUMNS * STEP_BYTES;
constexpr int GATE_BYTES = TILE * (LINE * 4 + STRIDE * 2);      // the gates of a tile, and p and q
constexpr int TILE_BYTES = STAGES * X_BYTES > GATE_BYTES ? STAGES * X_BYTES : (GATE_BYTES + 1023) / 1024 * 1024;
constexpr int EARLY = PIECES < STAGES ? PIECES : STAGES;        // pieces that are fetched first
static_assert(THREADS == MULTIPLIERS + 32, "launch shape");

struct Memory {
    alignas(1024) unsigned char x[TILES][TILE_BYTES];           // after a product, its gates, and p and q
    alignas(1024) unsigned char weights[STAGES][WEIGHT_BYTES];
    Share share;
    unsigned long long full[STAGES], empty[STAGES], done;        // done: a round
};
static_assert(sizeof(Memory) <= SHARED, "SHARED is less than sizeof(Memory): see tile_product.py");

// Fetches columns of a piece of the weights. One thread calls it.
__device__ __forceinline__ void fetch_weights(const Call& call, Memory& shared, int direction, int slice, int piece, int stage, int from, int bytes) {
    const unsigned char* weights = (const unsigned char*)call.source[direction] + ((long long)slice * PIECES + piece) * WEIGHT_BYTES;
    const unsigned barrier = shared_address(&shared.full[stage]);
    expect(barrier, bytes);
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(shared_address(shared.weights[stage]) + from), "l"(weights + from), "r"(bytes), "r"(barrier) : "memory");
}

// Returns the bytes of a piece of the weights that are fetched before the rows are known.
__device__ __forceinline__ int early_bytes(const Call& call) { return call.maps[0] ? CELL_BYTES : WEIGHT_BYTES; }
// Fetches a piece of the inputs of all tiles from a place on. One thread calls it.
__device__ __forceinline__ void fetch_inputs(const Maps& maps, Memory& shared, const Stream& all, int place, int piece, int stage) {
    const int tap = piece / DEPTHS, column = piece % DEPTHS * DEPTH, direction = all.direction;
    const unsigned full = shared_address(&shared.full[stage]);
    expect(full, TILES * X_BYTES);
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
        // The first step of the tile in the order of memory. Steps outside of the data are zeros.
        const int token = (int)all.token(place + tile * TILE + (direction ? TILE - 1 : 0)) + (direction ? tap : -tap);
        asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
                     ::"r"(shared_address(shared.x[tile]) + stage * X_BYTES), "l"(maps.of[direction]), "r"(column), "r"(token), "r"(full) : "memory");
    }
}
// Fetches everything except the first weights. One thread calls it. begun: the first inputs were fetched.
__device__ __forceinline__ void fetch(const Call& call, const Maps& maps, Memory& shared, const Job& job, int slice, bool begun) {
    const int direction = job.all.direction, rounds = job.rounds(), early = early_bytes(call);
    int stage = 0, phase = 0, turn = 0;
#pragma unroll 1
    for (int round = 0; round < rounds; ++round) {
        if (round > 0) await(shared_address(&shared.done), round - 1 & 1);
#pragma unroll 1
        for (int piece = 0; piece < PIECES; ++piece, ++turn) {
            const unsigned full = shared_address(&shared.full[stage]);
            await(shared_address(&shared.empty[stage]), phase ^ 1);
            if (turn >= EARLY) fetch_weights(call, shared, direction, slice, piece, stage, 0, early);
            if (early == WEIGHT_BYTES || !job.whole_rows) arrive(full);
            else fetch_weights(call, shared, direction, slice, piece, stage, early, WEIGHT_BYTES - early);
            if (!begun || turn >= EARLY) fetch_inputs(maps, shared, job.all, job.from + round * SPAN, piece, stage);
            if (++stage == STAGES) stage = 0, phase ^= 1;
        }
    }
    // No copy may be in flight when a block ends.
    if (rounds == 0)
        for (int stage = 0; stage < EARLY; ++stage) {
            const unsigned full = shared_address(&shared.full[stage]);
            arrive(full);
            if (!begun) arrive(full);
            await(full, 0);
        }
}

// Writes the context of each row's next chunk, eight columns at a time. A warp calls it. part: its number among `parts` warps.
__device__ __forceinline__ void keep_left(const Call& call, int direction, int part, int parts) {
    constexpr int STEPS = WINDOW - 1;
    const Piece *x = (const Piece*)call.data[direction], *left = (const Piece*)call.left[direction];
    Piece* after = (Piece*)call.left_after[direction];
    const int pieces = (int)call.inputs / 8;
#pragma unroll 1
    for (long long row = part; row < call.rows; row += parts) {
        const long long begin = call.offset(row), end = call.offset(row + 1), first = end - begin - STEPS;
#pragma unroll 4
        for (int index = threadIdx.x % 32; index < STEPS * pieces; index += 32) {
            const int piece = index % pieces;
            const long long step = first + index / pieces;
            Piece context{0, 0, 0, 0};
            if (step >= 0) context = x[(direction ? end - 1 - step : begin + step) * pieces + piece];
            else if (left) context = left[(row * STEPS + STEPS + step) * pieces + piece];
            after[row * STEPS * pieces + index] = context;
        }
    }
}

struct Multiplier : Group {
    Memory& shared;

    // Overwrites steps of other rows in a piece of the inputs with the left context, or with zeros. They are `tap` steps before a step that has
    // fewer predecessors.
    __device__ __forceinline__ void patch(int round, int tap, int k, int stage) const {
        const Half* left = (const Half*)call.left[direction()];
        const int step = thread / 2, line = direction() ? TILE - 1 - step : step;
        int row, before = steps_before(round, step, tap, row);
        if (before >= 0) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int piece = thread % 2 * 4 + i, column = k * DEPTH + piece * 8;
                Piece context{0, 0, 0, 0};
                if (left && column < call.inputs) context = *(const Piece*)(left + ((long long)row * (WINDOW - 1) + WINDOW - 1 - tap + before) * call.inputs + column);
                *(Piece*)(shared.x[tile] + stage * X_BYTES + line * STEP_BYTES + ((piece ^ line % 8) << 4)) = context;
            }
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        meet_group();
    }

    // Multiplies a tile with the first N columns of the weights. turn: the number of pieces in earlier rounds.
    template <int N>
    __device__ __forceinline__ void multiply_tile(float (&all_sums)[COLUMNS / 2], int turn) const {
        float (&sums)[N / 2] = reinterpret_cast<float (&)[N / 2]>(all_sums);
        const unsigned x = settled(piece_at(shared_address(shared.x[tile]))), weights = settled(piece_at(shared_address(shared.weights[0])));
        const unsigned full = settled(shared_address(shared.full)), empty = settled(shared_address(shared.empty));
        int stage = turn % STAGES, phase = turn / STAGES & 1, row;
        const bool patches = WINDOW > 1 && (__any_sync(~0u, steps_before(turn / PIECES, thread % 32, WINDOW - 1, row) >= 0 || steps_before(turn / PIECES, 32 + thread % 32, WINDOW - 1, row) >= 0));
        unsigned before = empty;
#pragma unroll 1
        for (int k = 0; k < PIECES; ++k) {
            await(full + stage * 8, phase);
            if (WINDOW > 1 && patches && k >= DEPTHS) patch(turn / PIECES, k / DEPTHS, k % DEPTHS, stage);
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
            const unsigned left = x + stage * (X_BYTES / 16), right = weights + stage * (WEIGHT_BYTES / 16);
            multiply(sums, left, right, k);
#pragma unroll
            for (int part = 1; part < DEPTH / 16; ++part) multiply(sums, left + part * 2, right + part * 2, 1);
            asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
            // The last pieces are released only after the tile: see `release`.
            if (k > 0 && k - 1 + STAGES < PIECES) {
                asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
                if (thread % 32 == 0) arrive(before);
            }
            before = empty + stage * 8;
            if (++stage == STAGES) stage = 0, phase ^= 1;
        }
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    }
    // Releases the pieces that are left in shared memory at the end of a round.
    __device__ void release(int turn) const {
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncwarp();
        if (thread % 32) return;
        for (int k = PIECES - EARLY; k < PIECES; ++k) arrive(shared_address(&shared.empty[(turn + k) % STAGES]));
        arrive(shared_address(&shared.done));
    }
    // Releases the pieces of a round without a tile.
    __device__ void skip_tile(int turn) const {
        for (int k = 0; k < PIECES - STAGES; ++k) {
            const int stage = (turn + k) % STAGES;
            await(shared_address(&shared.full[stage]), (turn + k) / STAGES & 1);
            if (thread % 32 == 0) arrive(shared_address(&shared.empty[stage]));
        }
    }

    // Stores the sums as gates. A thread has two lines, eight apart, and two columns of every eight.
    __device__ __forceinline__ void store(const float (&sums)[COLUMNS / 2]) const {
        const int line = warp() * 16 + thread % 32 / 4, further = direction() ? -8 * STRIDE : 8 * STRIDE;
        Half* const to = gates + (direction() ? TILE - 1 - line : line) * STRIDE + thread % 4 * 2;
#pragma unroll
        for (int j = 0; j < COLUMNS / 8; ++j) {
            *(unsigned*)(to + 8 * j) = narrow(sums[4 * j], sums[4 * j + 1]);
            *(unsigned*)(to + 8 * j + further) = narrow(sums[4 * j + 2], sums[4 * j + 3]);
        }
    }

    __device__ __forceinline__ void run() const {
        const int rounds = job.rounds();
#pragma unroll 1
        for (int round = 0; round < rounds; ++round) {
            const int steps = job.steps(round, tile), turn = round * PIECES;
            mark(round);
            if (steps > 0) {
                const Marks own = marks(round, steps);
                const float begun_at = warp() == 0 ? begun(own) : 0.0f;
                const Skip skip = warp() == 0 ? last_skip(own) : Skip{};
                float sums[COLUMNS / 2];
                if (CELL_COLUMNS == COLUMNS || job.whole_rows) multiply_tile<COLUMNS>(sums, turn);
                else multiply_tile<CELL_COLUMNS>(sums, turn);
                meet_group();               // all warps have read the inputs
                store(sums);
                meet_group();
                prepare_pairs(steps);
                meet_group();
                if (warp() == 0) chain(own, steps, round, begun_at, skip);
                __syncwarp();
            } else skip_tile(turn);
            if (round + 1 == rounds) break;
            meet_groups();
            release(turn);
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, TILES > 2 ? 1 : 2) scan(const __grid_constant__ Call call, const __grid_constant__ Maps maps) {
    extern __shared__ __align__(1024) unsigned char dynamic[];
    Memory& shared = *(Memory*)dynamic;
    const int direction = blockIdx.z, slice = blockIdx.y;
    let_next_begin();
    if (threadIdx.x == MULTIPLIERS) {
        for (int stage = 0; stage < STAGES; ++stage) {
            // Weights of the cell, other weights, and inputs.
            make_barrier(shared_address(&shared.full[stage]), 3);
            make_barrier(shared_address(&shared.empty[stage]), MULTIPLIERS / 32);
        }
        make_barrier(shared_address(&shared.done), MULTIPLIERS / 32);
        for (int tile = 0; tile < TILES; ++tile) make_barrier(shared_address(&shared.share.handed[tile]), 32);
        asm volatile("prefetch.tensormap [%0];" ::"l"(maps.of[direction]) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        // The weights do not depend on the rows.
        for (int stage = 0; stage < EARLY; ++stage) fetch_weights(call, shared, direction, slice, stage, stage, 0, early_bytes(call));
    } else if (threadIdx.x < MULTIPLIERS) {
        shared.share.load_bias(call, direction, slice);
    }
    __syncthreads();
    wait_for_last();
    // A single row begins at a known place.
    const bool begun = call.rows == 1 && direction == 0;
    if (begun && threadIdx.x == MULTIPLIERS)
        for (int stage = 0; stage < EARLY; ++stage) fetch_inputs(maps, shared, Stream{0, 0, 0, 1, 0}, blockIdx.x * SPAN, stage, stage);
    const Job job(call, direction, blockIdx.x);
    if (threadIdx.x < MULTIPLIERS) {
        const int tile = settled(threadIdx.x / GROUP);
        Multiplier{{call, shared.share, job, (Half*)(shared.x[tile] + TILE * LINE * 4), (float*)shared.x[tile], tile, slice, (int)threadIdx.x % GROUP}, shared}.run();
        return;
    }
    if (threadIdx.x == MULTIPLIERS) fetch(call, maps, shared, job, slice, begun);
    __syncwarp();
    if (WINDOW > 1 && call.left_after[direction]) keep_left(call, direction, blockIdx.x * gridDim.y + slice, gridDim.x * gridDim.y);
    if (!call.maps[0]) end_empty_rows(call, direction, slice);
}
