// One layer of an SRU or a QRNN from its inputs: the product with the weights and the recurrence in one launch, so that the product
// never leaves the multiprocessor.
//
// A block has two streams of whole rows, or two places in a ring, and UNITS hidden units. A tile of 64 steps of each stream is
// multiplied by a warp group of its own (wgmma, m64nNk16), with weights that both share; sums go to shared memory as gates, rounded as
// they are stored, and a team takes them from there while the next tiles are multiplied. One warp group fetches: the inputs of 64
// columns at a time, in rows of 128 bytes whose 16-byte pieces lie where the tensor cores want them (piece ^ row % 8), and the weights,
// which are packed so already (`pack` in launch.py), as one piece. Steps before a row's first are its left context, or zeros.
#define ALL_BLOCKS 1
#define GATES_FLOAT32 0
#define EXACT 0
#define TAPS 1
#include "scan.cuh"

struct alignas(16) Piece {
    unsigned x, y, z, w;
};
constexpr int DEPTH = 64, STEP_BYTES = DEPTH * 2;               // columns of the inputs at a time
constexpr int FETCHERS = 128, MULTIPLIERS = 128;
constexpr int DEPTHS = PIECES / WINDOW;                         // pieces of the inputs of a step
constexpr int X_BYTES = TILE * STEP_BYTES, WEIGHT_BYTES = COLUMNS * STEP_BYTES;
static_assert(THREADS == FETCHERS + 2 * MULTIPLIERS + 2 * TEAM && TEAM % 32 == 0 && COLUMNS % 16 == 0, "launch shape");
// A fetching warp must not be two turns ahead of what is multiplied, since a barrier tells only odd turns from even ones.
static_assert(STAGES >= FETCHERS / 32, "launch shape");
constexpr int EARLY = PIECES < STAGES ? PIECES : STAGES;        // pieces of the weights that are fetched before all else

struct Memory {
    alignas(1024) unsigned char x[STAGES][2][X_BYTES];
    alignas(1024) unsigned char weights[RESIDENT ? PIECES : STAGES][WEIGHT_BYTES];
    alignas(16) Kept gates[2][BUFFERS][TILE * STRIDE];
    Share teams[2];
    unsigned long long full[STAGES], empty[STAGES], loaded, gates_full[2][BUFFERS], gates_empty[2][BUFFERS];
    int found[3];
};
static_assert(sizeof(Memory) <= SHARED, "as in launch.py");

// Operands of the instruction for each number of columns: its sums, then the matrices and whether to add to the sums.
#define TEN(t) "%" #t "0,%" #t "1,%" #t "2,%" #t "3,%" #t "4,%" #t "5,%" #t "6,%" #t "7,%" #t "8,%" #t "9,"
#define FIRST_TEN "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,"
#define EIGHT(i) \
    "+f"(sums[i]), "+f"(sums[i + 1]), "+f"(sums[i + 2]), "+f"(sums[i + 3]), "+f"(sums[i + 4]), "+f"(sums[i + 5]), "+f"(sums[i + 6]), "+f"(sums[i + 7])
#define SIXTEEN(i) EIGHT(i), EIGHT(i + 8)
#define FORTY_EIGHT(i) SIXTEEN(i), SIXTEEN(i + 16), SIXTEEN(i + 32)
#if BLOCKS * UNITS == 64
#define SHAPE "m64n64k16"
#define SUMS FIRST_TEN TEN(1) TEN(2) "%30,%31"
#define OPERANDS "%32, %33, p, 1, 1, 0, 0;"
#define ADDS "%34"
#define OUTPUTS SIXTEEN(0), SIXTEEN(16)
#elif BLOCKS * UNITS == 96
#define SHAPE "m64n96k16"
#define SUMS FIRST_TEN TEN(1) TEN(2) TEN(3) "%40,%41,%42,%43,%44,%45,%46,%47"
#define OPERANDS "%48, %49, p, 1, 1, 0, 0;"
#define ADDS "%50"
#define OUTPUTS FORTY_EIGHT(0)
#elif BLOCKS * UNITS == 128
#define SHAPE "m64n128k16"
#define SUMS FIRST_TEN TEN(1) TEN(2) TEN(3) TEN(4) TEN(5) "%60,%61,%62,%63"
#define OPERANDS "%64, %65, p, 1, 1, 0, 0;"
#define ADDS "%66"
#define OUTPUTS FORTY_EIGHT(0), SIXTEEN(48)
#elif BLOCKS * UNITS == 192
#define SHAPE "m64n192k16"
#define SUMS FIRST_TEN TEN(1) TEN(2) TEN(3) TEN(4) TEN(5) TEN(6) TEN(7) TEN(8) "%90,%91,%92,%93,%94,%95"
#define OPERANDS "%96, %97, p, 1, 1, 0, 0;"
#define ADDS "%98"
#define OUTPUTS FORTY_EIGHT(0), FORTY_EIGHT(48)
#endif
#if BFLOAT16
#define TYPES ".f32.bf16.bf16 "
#else
#define TYPES ".f32.f16.f16 "
#endif

// sums = x @ weights, or are added to; rows of 64 steps and of COLUMNS gates, 16 columns of the inputs deep, as their descriptors say.
__device__ __forceinline__ void multiply(float (&sums)[COLUMNS / 2], unsigned long long x, unsigned long long weights, int add) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, " ADDS ", 0; wgmma.mma_async.sync.aligned." SHAPE TYPES "{" SUMS "}, " OPERANDS "}"
                 : OUTPUTS : "l"(x), "l"(weights), "r"(add));
}
// Of rows of 128 bytes in shared memory, eight of them 1 KiB, pieces swizzled.
__device__ __forceinline__ unsigned long long descriptor(unsigned address) {
    return (unsigned long long)(address >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

// What stands before each row's next chunk, eight columns at a time.
__device__ __forceinline__ void keep_left(const Call& call, const Place& place, const Stream& stream) {
    constexpr int STEPS = WINDOW - 1;
    const Piece *x = (const Piece*)call.data[stream.direction], *left = (const Piece*)call.left[stream.direction];
    Piece* after = (Piece*)call.left_after[stream.direction];
    const long long pieces = call.inputs / 8;
    if (!after || stream.start > 0) return;
    for (long long row = stream.first + place.slice; row < stream.until; row += call.slices) {
        const long long begin = call.offset(row), end = call.offset(row + 1), first = end - begin - STEPS;
        for (long long index = threadIdx.x; index < STEPS * pieces; index += FETCHERS) {
            const long long step = first + index / pieces, piece = index % pieces, earlier = (row * STEPS + STEPS + step) * pieces + piece;
            Piece found{0, 0, 0, 0};
            if (step >= 0) found = x[(stream.direction ? end - 1 - step : begin + step) * pieces + piece];
            else if (left) found = left[earlier];
            after[row * STEPS * pieces + index] = found;
        }
    }
}

// Pieces of the weights from one on into their places, by one thread.
__device__ __forceinline__ void fetch_weights(const Call& call, Memory& own, const Place& place, int piece, int at, int count, unsigned barrier) {
    const unsigned char* from = (const unsigned char*)call.source[place.direction];
    expect(barrier, count * WEIGHT_BYTES);
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(shared_address(own.weights[at])), "l"(from + ((long long)place.slice * PIECES + piece) * WEIGHT_BYTES),
                   "r"(count * WEIGHT_BYTES), "r"(barrier) : "memory");
}

// What a fetching warp knows of a tile: of two of its steps in each lane, how many stand before them in their rows, and which rows those
// are; least: of all steps.
struct Seen {
    int tile = -1, least, before[2], rows[2];

    __device__ void look_up(const Call& call, const Stream& stream, int next) {
        tile = next, least = 0x7fffffff;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int place = min(tile * TILE + half * 32 + (int)threadIdx.x % 32, stream.places - 1), ordinal = stream.ordinal_of(call, place);
            before[half] = place - stream.start_of(call, ordinal), rows[half] = stream.row(ordinal);
            least = min(least, (int)__reduce_min_sync(~0u, (unsigned)before[half]));
        }
    }
};

// Fetches the 64 steps of one tile for one piece of the depth, by one warp: eight lanes a step.
__device__ __forceinline__ void fetch_inputs(const Call& call, const Stream& stream, int tile, int tap, int k, unsigned to, Seen& seen) {
    const int lane = threadIdx.x % 32, piece = lane % 8, back = stream.direction ? -1 : 1, there = stream.places - tile * TILE;
    const long long column = k * DEPTH + piece * 8;
    const Half *x = (const Half*)call.data[stream.direction], *left = (const Half*)call.left[stream.direction];
    const Half* from = x + (stream.token(tile * TILE + lane / 8) - back * tap) * call.inputs + column;
    const int inside = column < call.inputs ? 16 : 0;
    if (WINDOW > 1 && tile != seen.tile) seen.look_up(call, stream, tile);
#pragma unroll
    for (int n = 0; n < TILE / 4; ++n, from += back * 4 * call.inputs) {
        const int step = n * 4 + lane / 8;
        const Half* source = from;
        int bytes = inside;
        if (WINDOW > 1 && seen.least < tap) {
            const int before = __shfl_sync(~0u, seen.before[n / 8], step % 32), row = __shfl_sync(~0u, seen.rows[n / 8], step % 32);
            if (before < tap) {
                source = left + ((long long)row * (WINDOW - 1) + WINDOW - 1 - tap + before) * call.inputs + column;
                bytes = left ? inside : 0;
            }
        }
        if (step < there)
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                         ::"r"(to + step * STEP_BYTES + ((piece ^ step % 8) << 4)), "l"(bytes ? source : x), "r"(bytes) : "memory");
    }
}

// Fetches the tiles of both streams, `most` of them; the first weights are on their way. Each warp has every fourth piece of the depth,
// and hands it to the tensor cores when it is there. turn: pieces so far.
__device__ __forceinline__ void fetch(const Call& call, Memory& own, const Place& place, const Stream& one, const Stream& other, int most, int turn) {
    const int warps = FETCHERS / 32;
    Seen seen, seen_other;
#pragma unroll 1
    for (int at = threadIdx.x / 32; at < most * PIECES; at += warps) {
        const int n = at / PIECES, piece = at % PIECES, stage = (turn + at) % STAGES;
        const unsigned full = shared_address(&own.full[stage]), x = shared_address(own.x[stage][0]);
        await(shared_address(&own.empty[stage]), ((turn + at) / STAGES & 1) ^ 1);
        if (!RESIDENT && threadIdx.x % 32 == 0 && turn + at >= EARLY) fetch_weights(call, own, place, piece, stage, 1, full);
        if (n < one.tiles()) fetch_inputs(call, one, one.tile(n), piece / DEPTHS, piece % DEPTHS, x, seen);
        if (n < other.tiles()) fetch_inputs(call, other, other.tile(n), piece / DEPTHS, piece % DEPTHS, x + X_BYTES, seen_other);
        asm volatile("cp.async.wait_all; fence.proxy.async.shared::cta;" ::: "memory");
        __syncwarp();
        if (threadIdx.x % 32 == 0) arrive(full);
    }
}
// Nothing may be on its way when a block without steps ends; by one thread.
__device__ __forceinline__ void await_weights(Memory& own) {
    if (RESIDENT) await(shared_address(&own.loaded), 0);
    for (int stage = 0; !RESIDENT && stage < EARLY; ++stage) {
        arrive(shared_address(&own.full[stage]));
        await(shared_address(&own.full[stage]), 0);
    }
}

// Multiplies the tiles of one stream, `mine` of the `most` that either has. tiles, turn: tiles and pieces of
// the depth so far.
__device__ __forceinline__ void multiply_tiles(const Call& call, Memory& own, int s, int mine, int most, int tiles, int turn) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, g = lane / 4, q = lane % 4;
    const unsigned x = shared_address(own.x[0][s]), weights = shared_address(own.weights[0]);
    const unsigned full = shared_address(own.full), empty = shared_address(own.empty);
    if (RESIDENT) await(shared_address(&own.loaded), 0);
#pragma unroll 1
    for (int n = 0; n < most; ++n) {
        const bool live = n < mine;

        float sums[COLUMNS / 2];
#pragma unroll 1
        for (int k = 0; k < PIECES; ++k, ++turn) {
            const int stage = turn % STAGES;
            await(full + stage * 8, turn / STAGES & 1);
            if (live) {
                asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
                const unsigned long long left = descriptor(x + stage * 2 * X_BYTES), right = descriptor(weights + (RESIDENT ? k : stage) * WEIGHT_BYTES);
#pragma unroll
                for (int part = 0; part < DEPTH / 16; ++part) multiply(sums, left + part * 2, right + part * 2, k + part);
                asm volatile("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 1;" ::: "memory");
            }
            // What was read before this piece is read by now.
            if (k > 0 && lane == 0) arrive(empty + (turn - 1) % STAGES * 8);
        }
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
        if (lane == 0) arrive(empty + (turn - 1) % STAGES * 8);
        if (!live) continue;

        const int buffer = (tiles + n) % BUFFERS;
        await(shared_address(&own.gates_empty[s][buffer]), ((tiles + n) / BUFFERS & 1) ^ 1);
        Gate* to = own.gates[s][buffer] + (warp * 16 + g) * STRIDE + 2 * q;
#pragma unroll
        for (int j = 0; j < COLUMNS / 8; ++j) {
            *(unsigned*)(to + 8 * j) = narrow(sums[4 * j], sums[4 * j + 1]);
            *(unsigned*)(to + 8 * j + 8 * STRIDE) = narrow(sums[4 * j + 2], sums[4 * j + 3]);
        }
        arrive(shared_address(&own.gates_full[s][buffer]));
    }
}

extern "C" __global__ void __cluster_dims__(CTAS, 1, 1) __launch_bounds__(THREADS, 1) scan(const __grid_constant__ Call call) {
    extern __shared__ __align__(1024) unsigned char dynamic[];
    Memory& own = *(Memory*)dynamic;
    const Place place = place_of();
    const long long tokens = call.offset(call.rows);
    // One thread each, since a barrier's address is the same for a whole warp.
    if (threadIdx.x == 0) {
        make_barrier(shared_address(&own.loaded), 1);
        for (int stage = 0; stage < STAGES; ++stage) make_barrier(shared_address(&own.full[stage]), 1 + !RESIDENT);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        // Whatever the rows are, the weights are the same.
        if (RESIDENT) fetch_weights(call, own, place, 0, 0, PIECES, shared_address(&own.loaded));
        else
            for (int stage = 0; stage < EARLY; ++stage) fetch_weights(call, own, place, stage, stage, 1, shared_address(&own.full[stage]));
    } else if (threadIdx.x == 32) {
        for (int stage = 0; stage < STAGES; ++stage) make_barrier(shared_address(&own.empty[stage]), 2 * MULTIPLIERS / 32);
    } else if (threadIdx.x == 64) {
        for (int s = 0; s < 2; ++s) {
            for (int buffer = 0; buffer < BUFFERS; ++buffer) {
                make_barrier(shared_address(&own.gates_full[s][buffer]), MULTIPLIERS);
                make_barrier(shared_address(&own.gates_empty[s][buffer]), RUNS * UNITS);
            }
            make_ready(own.teams[s]);
        }
    }
    count_rows(call, place, tokens, own.found);
    if (RING) meet_cluster();
    const int thread = threadIdx.x, multiply_first = FETCHERS, encode_first = FETCHERS + 2 * MULTIPLIERS;
    if (thread < encode_first) {
        const Stream one = stream_of(call, place, tokens, own.found, 0), other = stream_of(call, place, tokens, own.found, 1);
        const int most = max(one.tiles(), other.tiles()), s = (thread - multiply_first) / MULTIPLIERS;
        const int mine = s ? other.tiles() : one.tiles();
        int round = 0;
        do {
            if (thread < multiply_first) fetch(call, own, place, one, other, most, round * most * PIECES);
            else multiply_tiles(call, own, s, mine, most, round * mine, round * most * PIECES);
        } while (again(own.teams[0], round));
        if (most == 0 && thread == 0) await_weights(own);
        if (WINDOW > 1 && thread < multiply_first) {
            keep_left(call, place, one);
            if (!RING) keep_left(call, place, other);
        }
    } else {
        const int s = min((thread - encode_first) / TEAM, 1);
        const Tiles tiles{own.gates[s][0], shared_address(own.gates_full[s]), shared_address(own.gates_empty[s])};
        encode(call, place, stream_of(call, place, tokens, own.found, s), own.teams[s], tiles, s, (thread - encode_first) % TEAM);
    }
}
