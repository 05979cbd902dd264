// The recurrence of an SRU or a QRNN whose gates are in memory: as they come, or in the rows of tables that ids name (GATHER), of
// which a window sums one for each of its steps (TAPS).
//
// A block has two streams of whole rows, or two places in a ring, and UNITS hidden units. 64 threads for each stream copy gates into
// shared memory, BUFFERS tiles of 64 steps ahead of the team that takes them from there. What is not needed in every step is not
// copied, but read where it is needed, unless all steps are watched (ALL_BLOCKS).
constexpr int BUFFERS = STAGES;
#include "scan.cuh"

constexpr int FETCHERS = 64;                                    // of each stream
constexpr int PIECE = PIECE_BYTES / (int)sizeof(Gate);          // gates that are copied at once
constexpr int PIECES = UNITS / PIECE;                           // of a block of a step
constexpr int FETCHES = SLOTS * PIECES;                         // of each thread; a warp has every step's pieces of 32 steps
static_assert(THREADS >= 2 * FETCHERS + 2 * TEAM && UNITS % PIECE == 0 && (TAPS == 1 || ALL_BLOCKS), "launch shape");

struct Memory {
    alignas(16) Kept gates[2][BUFFERS][TILE * STRIDE];
    long long lines[2][2][TAPS][TILE];                          // of a tile's gates, by turns: in memory or in the tables
    Share teams[2];
    unsigned long long full[2][BUFFERS], empty[2][BUFFERS];
    int found[3];
};
static_assert(sizeof(Memory) <= SHARED, "as in launch.py");

// The gates of a line, one block after the other.
__device__ __forceinline__ const Gate* line_at(const Call& call, int direction, long long line) {
    return (const Gate*)call.source[direction] + line * BLOCKS * call.hidden;
}
// Where the gates of a step are that has no row before it: an id's line is that after the zeros.
__device__ __forceinline__ long long line_of(const Call& call, long long token) { return GATHER ? call.id(token) + FIRST_LINE : token; }
// Where those are that a step `tap` steps before it adds, in the tables one after the other.
__device__ __forceinline__ long long line_of(const Call& call, const Stream& stream, int row, int before, int place, int tap) {
    if (before >= tap) return tap * call.height + line_of(call, stream.token(place - tap));
    const long long* left = (const long long*)call.left[stream.direction];
    return tap * call.height + (left ? left[(long long)row * (TAPS - 1) + TAPS - 1 - tap + before] : 0);
}
// What stands before each row's next chunk.
__device__ __forceinline__ void keep_left(const Call& call, const Stream& stream, int thread) {
    constexpr int STEPS = TAPS > 1 ? TAPS - 1 : 1;
    const long long* left = (const long long*)call.left[stream.direction];
    long long* after = (long long*)call.left_after[stream.direction];
    if (!after || stream.start > 0) return;
    for (long long index = (long long)stream.first * STEPS + thread; index < (long long)stream.until * STEPS; index += FETCHERS) {
        const long long row = index / STEPS, begin = call.offset(row), end = call.offset(row + 1), step = end - begin - STEPS + index % STEPS;
        if (step >= 0) after[index] = line_of(call, stream.direction ? end - 1 - step : begin + step);
        else after[index] = left ? left[row * STEPS + STEPS + step] : 0;
    }
}

__device__ Gate gate_elsewhere(const Call& call, int direction, long long token, int block, int unit) {
    return line_at(call, direction, line_of(call, token))[block * call.hidden + unit];
}

__device__ __forceinline__ void copy(unsigned to, const Gate* from) {
#if PIECE_BYTES == 16
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
#elif PIECE_BYTES >= 4
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(PIECE_BYTES) : "memory");
#else
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(to), "h"(*(const Half*)from) : "memory");
#endif
}

struct alignas(PIECE_BYTES) Piece {
    Gate gates[PIECE];
};

// Copies the tiles of one stream. tiles: so far.
__device__ __forceinline__ void fetch(const Call& call, Memory& own, const Stream& stream, int s, int slice, int tiles) {
    const int thread = threadIdx.x % FETCHERS, mine = stream.tiles();
    const long long first_unit = (long long)slice * UNITS;
    // Ids are asked for two tiles ahead, as their gates cannot be before they are there.
    long long next[TAPS] = {}, later[TAPS] = {};
    const auto look_up = [&](int n, long long (&lines)[TAPS]) {
        const int at = stream.tile(n) * TILE + thread;
        if (at >= stream.places) return;
        lines[0] = line_of(call, stream.token(at));
        if (TAPS == 1) return;
        const int ordinal = stream.ordinal_of(call, at), before = at - stream.start_of(call, ordinal);
#pragma unroll
        for (int tap = 1; tap < TAPS; ++tap) lines[tap] = line_of(call, stream, stream.row(ordinal), before, at, tap);
    };
    look_up(0, next);
    look_up(1, later);
#pragma unroll 1
    for (int n = 0; n < mine; ++n) {
        long long (&lines)[TAPS][TILE] = own.lines[s][n % 2];
#pragma unroll
        for (int tap = 0; tap < TAPS; ++tap) lines[tap][thread] = next[tap], next[tap] = later[tap];
        __syncwarp();
        look_up(n + 2, later);
        const int turn = tiles + n, buffer = turn % BUFFERS, there = stream.places_of(stream.tile(n));
        await(shared_address(&own.empty[s][buffer]), (turn / BUFFERS & 1) ^ 1);
#pragma unroll 8
        for (int copied = 0; copied < FETCHES; ++copied) {
            const int index = copied * 32 + thread % 32, piece = index % PIECES, slot = index / PIECES % SLOTS;
            const int step = thread / 32 * 32 + index / (PIECES * SLOTS);
            const long long unit = first_unit + piece * PIECE;
            if (step >= there || unit >= call.hidden) continue;
            Kept* to = own.gates[s][buffer] + step * STRIDE + slot * UNITS + piece * PIECE;
            const auto from = [&](int tap) { return line_at(call, stream.direction, lines[tap][step]) + block_of(slot) * call.hidden + unit; };
            if constexpr (TAPS == 1) copy(shared_address(to), from(0));
            else {
                float sums[PIECE] = {};
#pragma unroll
                for (int tap = 0; tap < TAPS; ++tap) {
                    const Piece found = *(const Piece*)from(tap);
#pragma unroll
                    for (int gate = 0; gate < PIECE; ++gate) sums[gate] += value_of(found.gates[gate]);
                }
#pragma unroll
                for (int gate = 0; gate < PIECE; ++gate) to[gate] = sums[gate];
            }
        }
        const unsigned full = shared_address(&own.full[s][buffer]);
        if (TAPS == 1 && PIECE_BYTES >= 4) asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(full) : "memory");
        else arrive(full);
    }
}

extern "C" __global__ void __cluster_dims__(CTAS, 1, 1) __launch_bounds__(THREADS, 1) scan(const __grid_constant__ Call call) {
    extern __shared__ __align__(128) unsigned char dynamic[];
    Memory& own = *(Memory*)dynamic;
    const Place place = place_of();
    const long long tokens = call.offset(call.rows);
    if (threadIdx.x < 2 * BUFFERS) {
        make_barrier(shared_address(&own.full[0][threadIdx.x]), FETCHERS);
        make_barrier(shared_address(&own.empty[0][threadIdx.x]), RUNS * UNITS);
    }
    if (threadIdx.x < 2) make_ready(own.teams[threadIdx.x]);
    count_rows(call, place, tokens, own.found);
    if (RING) meet_cluster();

    const int thread = threadIdx.x, encode_first = 2 * FETCHERS;
    const int s = thread < encode_first ? thread / FETCHERS : (thread - encode_first) / TEAM;
    const Stream stream = stream_of(call, place, tokens, own.found, s);
    if (thread < encode_first) {
        int round = 0;
        do fetch(call, own, stream, s, place.slice, round * stream.tiles());
        while (again(own.teams[0], round));
        if (TAPS > 1 && place.slice == 0) keep_left(call, stream, thread % FETCHERS);
    } else {
        const Tiles tiles{own.gates[s][0], shared_address(own.full[s]), shared_address(own.empty[s])};
        encode(call, place, stream, own.teams[s], tiles, s, (thread - encode_first) % TEAM);
    }
}
