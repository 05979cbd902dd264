// One layer of an SRU or a QRNN from its inputs: the product with the weights and the recurrence in one launch, so that the product
// never leaves the multiprocessor.
//
// A block has two streams of whole rows, or two places in a ring, and UNITS hidden units. A tile of 64 steps of each stream is
// multiplied by a warp group of its own (wgmma, m64nNk16), with weights that both share; sums go to shared memory as gates, rounded as
// they are stored, and a team takes them from there while the next tiles are multiplied. One thread fetches, 64 columns at a time: the
// inputs through a map of their matrix, in rows of 128 bytes whose 16-byte pieces lie where the tensor cores want them (piece ^ row % 8),
// and the weights, which are packed so already (`pack` in launch.py). A tile of the backward direction lies in memory's order too, and
// only its gates in that of its steps. Steps before a row's first are its left context, or zeros: other warps put them where the map
// has shown steps of another row.
#define ALL_BLOCKS 1
#define GATES_FLOAT32 0
#define EXACT 0
#define TAPS 1
#include "scan.cuh"
#define PRODUCT_COLUMNS (BLOCKS * UNITS)
#include "../wgmma.cuh"

struct alignas(16) Piece {
    unsigned x, y, z, w;
};
struct alignas(64) Maps {
    unsigned char of[2][128];           // of (tokens, inputs), in boxes of 64 steps and 64 columns, for each direction
};
constexpr int DEPTH = 64, STEP_BYTES = DEPTH * 2;               // columns of the inputs at a time
constexpr int FETCHERS = 128, MULTIPLIERS = 128;
constexpr int DEPTHS = PIECES / WINDOW;                         // pieces of the inputs of a step
constexpr int X_BYTES = TILE * STEP_BYTES, WEIGHT_BYTES = COLUMNS * STEP_BYTES;
static_assert(THREADS == FETCHERS + 2 * MULTIPLIERS + 2 * TEAM && TEAM % 32 == 0 && COLUMNS % 16 == 0, "launch shape");
constexpr int PATCHERS = FETCHERS / 32 - 1;                     // warps
// None may be two turns ahead of what is multiplied, since a barrier tells only odd turns from even ones.
static_assert(STAGES >= PATCHERS, "launch shape");
constexpr int EARLY = PIECES < STAGES ? PIECES : STAGES;        // pieces of the weights that are fetched before all else

struct Memory {
    alignas(1024) unsigned char x[STAGES][2][X_BYTES];
    alignas(1024) unsigned char weights[RESIDENT ? PIECES : STAGES][WEIGHT_BYTES];
    alignas(16) Kept gates[2][BUFFERS][TILE * STRIDE];
    Share teams[2];
    unsigned long long full[STAGES], patched[STAGES], empty[STAGES], loaded, gates_full[2][BUFFERS], gates_empty[2][BUFFERS];
};
static_assert(sizeof(Memory) <= SHARED, "as in launch.py");

// What stands before each row's next chunk, eight columns at a time.
__device__ __forceinline__ void keep_left(const Call& call, const Place& place, const Stream& stream) {
    constexpr int STEPS = WINDOW - 1;
    const Piece *x = (const Piece*)call.data[stream.direction], *left = (const Piece*)call.left[stream.direction];
    Piece* after = (Piece*)call.left_after[stream.direction];
    const int pieces = (int)call.inputs / 8;
    if (!after || stream.start > 0) return;
#pragma unroll 1
    for (long long row = stream.first + place.slice; row < stream.until; row += call.slices) {
        const long long begin = call.offset(row), end = call.offset(row + 1), first = end - begin - STEPS;
#pragma unroll 1
        for (int index = threadIdx.x; index < STEPS * pieces; index += FETCHERS) {
            const int piece = index % pieces;
            const long long step = first + index / pieces, earlier = (row * STEPS + STEPS + step) * pieces + piece;
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

// What a warp knows of a tile: of two of its steps in each lane, how many stand before them in their rows, and which rows those are;
// only where some step has too few before it. Memory is asked once for 31 rows.
struct Seen {
    int tile = -1, before[2], rows[2];
    int base = -1, starts;              // a row that begins before the tile does; in each lane, where it or one of those after it begins
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
    // Of 32 steps, which have fewer than so many before them.
    __device__ unsigned have_fewer(int half, int than) const { return __ballot_sync(~0u, before[half] < than); }
};

// Puts what stands left of the rows where a tile shows the step `tap` steps before one that has fewer before it; 64 columns, by one warp.
// Whether there was something to put.
__device__ __forceinline__ bool patch(const Call& call, const Stream& stream, const Seen& seen, int tap, int k, unsigned to) {
    const int lane = threadIdx.x % 32, piece = lane % 8;
    const long long column = k * DEPTH + piece * 8;
    if (!seen.short_of) return false;
    const Half* left = (const Half*)call.left[stream.direction];
    // Of every fourth step, in turn for each eight lanes.
    unsigned long long mine = ((unsigned long long)seen.have_fewer(1, tap) << 32 | seen.have_fewer(0, tap)) & 0x1111111111111111ull << lane / 8;
#pragma unroll 1
    for (; __any_sync(~0u, mine != 0); mine &= mine - 1) {
        const int step = mine ? __ffsll(mine) - 1 : 0, half = step / 32, line = stream.direction ? TILE - 1 - step : step;
        const int before[2] = {__shfl_sync(~0u, seen.before[0], step % 32), __shfl_sync(~0u, seen.before[1], step % 32)};
        const int row[2] = {__shfl_sync(~0u, seen.rows[0], step % 32), __shfl_sync(~0u, seen.rows[1], step % 32)};
        const long long from = (long long)(half ? row[1] : row[0]) * (WINDOW - 1) + WINDOW - 1 - tap + (half ? before[1] : before[0]);
        Piece found{0, 0, 0, 0};
        if (mine && left && column < call.inputs) found = *(const Piece*)(left + from * call.inputs + column);
        if (mine)
            asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};"
                         ::"r"(to + line * STEP_BYTES + ((piece ^ line % 8) << 4)), "r"(found.x), "r"(found.y), "r"(found.z), "r"(found.w) : "memory");
    }
    return true;
}
// Patches the tiles of both streams, `most` of them, as soon as they are there. turn: pieces so far.
__device__ __forceinline__ void patch_tiles(const Call& call, Memory& own, const Stream& one, const Stream& other, int most, int turn) {
    const unsigned full = settled(shared_address(own.full)), patched = settled(shared_address(own.patched));
    const unsigned empty = settled(shared_address(own.empty)), x = settled(shared_address(own.x[0][0]));
    Seen seen, seen_other;
#pragma unroll 1
    for (int at = threadIdx.x / 32 - 1; at < most * PIECES; at += PATCHERS) {
        const int n = at / PIECES, piece = at % PIECES, tap = piece / DEPTHS, k = piece % DEPTHS, stage = (turn + at) % STAGES;
        const bool there = n < one.tiles(), other_there = n < other.tiles();
        if (there) seen.look_up(call, one, one.tile(n));
        if (other_there) seen_other.look_up(call, other, other.tile(n));
        // What was there before is read, so that the barrier tells of this piece and of none before it.
        await(empty + stage * 8, (turn + at) / STAGES & 1 ^ 1);
        await(full + stage * 8, (turn + at) / STAGES & 1);
        bool put = false;
        if (tap > 0 && there) put = patch(call, one, seen, tap, k, x + stage * 2 * X_BYTES);
        if (tap > 0 && other_there) put |= patch(call, other, seen_other, tap, k, x + stage * 2 * X_BYTES + X_BYTES);
        if (put) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncwarp();
        if (threadIdx.x % 32 == 0) arrive(patched + stage * 8);
    }
}

// One box, from a step and a column on.
__device__ __forceinline__ void fetch_box(const void* map, unsigned to, int column, int token, unsigned barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
                 ::"r"(to), "l"(map), "r"(column), "r"(token), "r"(barrier) : "memory");
}
// Fetches the tiles of both streams, `most` of them, by one thread; the first weights are on their way. turn: pieces so far.
__device__ __forceinline__ void fetch(
    const Call& call, const Maps& maps, Memory& own, const Place& place, const Stream& one, const Stream& other, int most, int turn
) {
    const unsigned full_first = shared_address(own.full), empty_first = shared_address(own.empty), x_first = shared_address(own.x[0][0]);
    const void* map = maps.of[place.direction];
    int stage = turn % STAGES, phase = turn / STAGES & 1;
#pragma unroll 1
    for (int n = 0; n < most; ++n) {
        const bool there = n < one.tiles(), other_there = n < other.tiles();
        // The first step in memory's order.
        const int first = place.direction ? TILE - 1 : 0;
        const int token = (int)one.token(one.tile(n) * TILE + first), other_token = (int)other.token(other.tile(n) * TILE + first);
#pragma unroll 1
        for (int piece = 0; piece < PIECES; ++piece, ++turn) {
            const int tap = piece / DEPTHS, column = piece % DEPTHS * DEPTH, shift = place.direction ? tap : -tap;
            const unsigned full = full_first + stage * 8, x = x_first + stage * 2 * X_BYTES;
            await(empty_first + stage * 8, phase ^ 1);
            if (!RESIDENT && turn >= EARLY) fetch_weights(call, own, place, piece, stage, 1, full);
            expect(full, (there + other_there) * X_BYTES);
            if (there) fetch_box(map, x, column, token + shift, full);
            if (other_there) fetch_box(map, x + X_BYTES, column, other_token + shift, full);
            if (++stage == STAGES) stage = 0, phase ^= 1;
        }
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

// Multiplies the tiles of one stream, `mine` of the `most` that either has. tiles, turn: tiles and pieces of the depth so far. What a
// piece costs beside its products, all wait for: nothing is computed twice.
__device__ __forceinline__ void multiply_tiles(Memory& own, int direction, int s, int mine, int most, int tiles, int turn) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, g = lane / 4, q = lane % 4;
    const unsigned x = settled(piece_at(shared_address(own.x[0][s]))), weights = settled(piece_at(shared_address(own.weights[0])));
    const unsigned full = settled(shared_address(own.full)), patched = settled(shared_address(own.patched)), empty = settled(shared_address(own.empty));
    int stage = turn % STAGES, phase = turn / STAGES & 1;
    if (RESIDENT) await(shared_address(&own.loaded), 0);
#pragma unroll 1
    for (int n = 0; n < most; ++n) {
        const bool live = n < mine;
        unsigned before = empty;        // the barrier of the piece before

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
            // What was read before this piece is read by now.
            if (k > 0 && lane == 0) arrive(before);
            before = empty + stage * 8;
            if (++stage == STAGES) stage = 0, phase ^= 1;
        }
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
        if (lane == 0) arrive(before);
        if (!live) continue;

        const int buffer = (tiles + n) % BUFFERS, row = warp * 16 + g;
        await(shared_address(&own.gates_empty[s][buffer]), ((tiles + n) / BUFFERS & 1) ^ 1);
        Gate* const to = own.gates[s][buffer] + (direction ? TILE - 1 - row : row) * STRIDE + 2 * q;
        const int further = direction ? -8 * STRIDE : 8 * STRIDE;
#pragma unroll
        for (int j = 0; j < COLUMNS / 8; ++j) {
            *(unsigned*)(to + 8 * j) = narrow(sums[4 * j], sums[4 * j + 1]);
            *(unsigned*)(to + 8 * j + further) = narrow(sums[4 * j + 2], sums[4 * j + 3]);
        }
        arrive(shared_address(&own.gates_full[s][buffer]));
    }
}

extern "C" __global__ void __cluster_dims__(CTAS, 1, 1) __launch_bounds__(THREADS, 1)
    scan(const __grid_constant__ Call call, const __grid_constant__ Maps maps) {
    extern __shared__ __align__(1024) unsigned char dynamic[];
    Memory& own = *(Memory*)dynamic;
    const Place place = place_of();
    let_next_begin();
    // One thread each, since a barrier's address is the same for a whole warp.
    if (threadIdx.x == 0) {
        make_barrier(shared_address(&own.loaded), 1);
        for (int stage = 0; stage < STAGES; ++stage) make_barrier(shared_address(&own.full[stage]), 1 + !RESIDENT);
        asm volatile("prefetch.tensormap [%0];" ::"l"(maps.of[place.direction]) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        // Whatever the rows are, the weights are the same.
        if (RESIDENT) fetch_weights(call, own, place, 0, 0, PIECES, shared_address(&own.loaded));
        else
            for (int stage = 0; stage < EARLY; ++stage) fetch_weights(call, own, place, stage, stage, 1, shared_address(&own.full[stage]));
    } else if (threadIdx.x == 32) {
        for (int stage = 0; stage < STAGES; ++stage) {
            make_barrier(shared_address(&own.empty[stage]), 2 * MULTIPLIERS / 32);
            make_barrier(shared_address(&own.patched[stage]), 1);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    } else if (threadIdx.x == 64) {
        for (int s = 0; s < 2; ++s) {
            for (int buffer = 0; buffer < BUFFERS; ++buffer) {
                make_barrier(shared_address(&own.gates_full[s][buffer]), MULTIPLIERS);
                make_barrier(shared_address(&own.gates_empty[s][buffer]), RUNS * UNITS);
            }
            make_ready(own.teams[s]);
        }
    }
    if (RING) meet_cluster();
    else __syncthreads();
    wait_for_last();
    const Streams streams(call, place);
    const int thread = threadIdx.x, multiply_first = FETCHERS, encode_first = FETCHERS + 2 * MULTIPLIERS;
    if (thread < encode_first) {
        const Stream one = streams.stream(place, 0), other = streams.stream(place, 1);
        const int most = settled(max(one.tiles(), other.tiles())), s = settled((thread - multiply_first) / MULTIPLIERS);
        const int mine = settled(s ? other.tiles() : one.tiles());
        int round = 0;
        do {
            const int turn = round * most * PIECES;
            if (thread == 0) fetch(call, maps, own, place, one, other, most, turn);
            else if (thread >= multiply_first) multiply_tiles(own, place.direction, s, mine, most, round * mine, turn);
            else if (WINDOW > 1 && thread >= 32) patch_tiles(call, own, one, other, most, turn);
        } while (again(own.teams[0], round));
        if (most == 0 && thread == 0) await_weights(own);
        if (WINDOW > 1 && thread < multiply_first) {
            keep_left(call, place, one);
            if (!RING) keep_left(call, place, other);
        }
    } else {
        const int s = min((thread - encode_first) / TEAM, 1);
        const Tiles tiles{own.gates[s][0], settled(shared_address(own.gates_full[s])), settled(shared_address(own.gates_empty[s]))};
        encode(call, place, streams.stream(place, s), own.teams[s], tiles, s, (thread - encode_first) % TEAM);
    }
}
