// The recurrence of an SRU or a QRNN with gate inputs in memory: a line for each step, or rows of tables that ids select (GATHER). With
// TAPS > 1 they are sums over a window, with a table for each of its steps.
//
// A block has two streams of whole rows and UNITS hidden units. 64 threads for each stream copy gate inputs into
// shared memory, up to BUFFERS tiles of 64 steps ahead of the team that consumes them. Gates that are not needed in every step are not
// copied; they are read when they are needed, unless every step has outputs (ALL_BLOCKS).
#define SPLIT 0
constexpr int BUFFERS = STAGES;
#include "scan.cuh"

constexpr int FETCHERS = 64;                                    // copying threads of each stream
constexpr int PIECE = PIECE_BYTES / (int)sizeof(Gate);          // gates of one copy
constexpr int PIECES = UNITS / PIECE;                           // pieces of a block of a step
constexpr int FETCHES = SLOTS * PIECES;                         // copies of a thread for a tile; a warp copies 32 steps
constexpr int TOGETHER = FETCHES % 8 == 0 ? 8 : FETCHES % 6 == 0 ? 6 : 4;   // copies whose addresses are computed together
constexpr int AHEAD = !GATHER ? 1 : TAPS == 1 ? 4 : 2;          // tiles whose ids are loaded early: gates are copied only once ids are there
static_assert(THREADS >= 2 * FETCHERS + 2 * TEAM && UNITS % PIECE == 0 && FETCHES % TOGETHER == 0 && (TAPS == 1 || ALL_BLOCKS), "launch shape");

struct Memory {
    alignas(16) Kept gates[2][BUFFERS][TILE * STRIDE];
    const Gate* lines[2][2][TAPS][TILE];                        // the gates of a tile in memory or in the tables, alternating
    Share teams[2];
    unsigned long long full[2][BUFFERS], empty[2][BUFFERS];
};
static_assert(sizeof(Memory) <= SHARED, "SHARED is less than sizeof(Memory): see gate_inputs.py");

// Returns the gates of a line, block by block.
__device__ __forceinline__ const Gate* line_at(const Call& call, int direction, long long line) {
    return (const Gate*)call.source[direction] + line * BLOCKS * call.hidden;
}
constexpr int FIRST = GATHER ? FIRST_LINE : 0;                  // the first id's line, after the line of zeros
// Returns the id of a step, or its position.
__device__ __forceinline__ int id_at(const Call& call, long long token) { return GATHER ? call.id(token) : (int)token; }
// Writes the context of each row's next chunk.
__device__ __forceinline__ void keep_left(const Call& call, const Stream& stream, int thread) {
    constexpr int STEPS = TAPS > 1 ? TAPS - 1 : 1;
    const long long* left = (const long long*)call.left[stream.direction];
    long long* after = (long long*)call.left_after[stream.direction];
    if (!after) return;
    for (long long index = (long long)stream.first * STEPS + thread; index < (long long)stream.until * STEPS; index += FETCHERS) {
        const long long row = index / STEPS, begin = call.offset(row), end = call.offset(row + 1), step = end - begin - STEPS + index % STEPS;
        if (step >= 0) after[index] = id_at(call, stream.direction ? end - 1 - step : begin + step) + FIRST;
        else after[index] = left ? left[row * STEPS + STEPS + step] : 0;
    }
}

__device__ Gate gate_elsewhere(const Call& call, int direction, long long token, int block, int unit) {
    return line_at(call, direction, id_at(call, token) + FIRST)[block * call.hidden + unit];
}

// There is no memory clobber: nothing reads the copy before a barrier.
__device__ __forceinline__ void copy(unsigned to, const Gate* from) {
#if PIECE_BYTES == 16
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from));
#elif PIECE_BYTES >= 4
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(PIECE_BYTES));
#else
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(to), "h"(*(const Half*)from));
#endif
}

struct alignas(PIECE_BYTES) Piece {
    Gate gates[PIECE];
};

// The ids in the window of a thread's step. Their loads may still be in flight.
struct WindowIds {
    int ids[TAPS];

    __device__ __forceinline__ void look_up(const Call& call, const Stream& stream, int place) {
        if (place >= stream.places) return;
        ids[0] = id_at(call, stream.token(place));
        if (TAPS == 1) return;
        const long long* left = (const long long*)call.left[stream.direction];
        const int ordinal = stream.ordinal_of(call, place), before = place - stream.start_of(call, ordinal), row = stream.row(ordinal);
#pragma unroll
        for (int tap = 1; tap < TAPS; ++tap) {
            if (before >= tap) ids[tap] = id_at(call, stream.token(place - tap));
            else ids[tap] = (left ? (int)left[(long long)row * (TAPS - 1) + TAPS - 1 - tap + before] : 0) - FIRST;
        }
    }
    // Returns the gates of one step of the window: in its table, or in memory.
    __device__ __forceinline__ const Gate* gates(const Call& call, int direction, int tap) const {
        return line_at(call, direction, tap * call.height + ids[tap] + FIRST);
    }
};

// Copies a thread's part of a tile of `steps` steps. lines: of all its steps.
__device__ __forceinline__ void copy_tile(const Call& call, const Gate* const (&lines)[TAPS][TILE], Kept* to, int steps, long long first_unit) {
    const int thread = threadIdx.x % FETCHERS;
#pragma unroll 1
    for (int copied = 0; copied < FETCHES; copied += TOGETHER) {
        const Gate* from[TOGETHER][TAPS];
        Kept* place[TOGETHER];
        bool copies[TOGETHER];
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i) {
            const int index = (copied + i) * 32 + thread % 32, piece = index % PIECES, slot = index / PIECES % SLOTS;
            const int step = thread / 32 * 32 + index / (PIECES * SLOTS), column = block_of(slot) * (int)call.hidden + piece * PIECE;
#pragma unroll
            for (int tap = 0; tap < TAPS; ++tap) from[i][tap] = lines[tap][step] + column;
            place[i] = to + step * STRIDE + slot * UNITS + piece * PIECE;
            copies[i] = step < steps && first_unit + piece * PIECE < call.hidden;
        }
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i) {
            if (!copies[i]) continue;
            if constexpr (TAPS == 1) copy(shared_address(place[i]), from[i][0]);
            else {
                float sums[PIECE] = {};
#pragma unroll
                for (int tap = 0; tap < TAPS; ++tap) {
                    const Piece line = *(const Piece*)from[i][tap];
#pragma unroll
                    for (int gate = 0; gate < PIECE; ++gate) sums[gate] += value_of(line.gates[gate]);
                }
#pragma unroll
                for (int gate = 0; gate < PIECE; ++gate) place[i][gate] = sums[gate];
            }
        }
    }
}

// Copies the tiles of one stream.
__device__ __forceinline__ void fetch(const Call& call, Memory& shared, const Stream& stream, int s, int slice) {
    const int thread = threadIdx.x % FETCHERS, count = stream.tiles();
    const long long first_unit = (long long)slice * UNITS;
    WindowIds ahead[AHEAD] = {};
#pragma unroll
    for (int n = 0; n < AHEAD; ++n) ahead[n].look_up(call, stream, n * TILE + thread);
#pragma unroll 1
    for (int begun = 0; begun < count; begun += AHEAD) {
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const int n = begun + i, buffer = n % BUFFERS;
            if (n >= count) return;
            const Gate* (&lines)[TAPS][TILE] = shared.lines[s][n % 2];
#pragma unroll
            for (int tap = 0; tap < TAPS; ++tap) lines[tap][thread] = ahead[i].gates(call, stream.direction, tap) + first_unit;
            __syncwarp();
            ahead[i].look_up(call, stream, (n + AHEAD) * TILE + thread);
            await(shared_address(&shared.empty[s][buffer]), (n / BUFFERS & 1) ^ 1);
            copy_tile(call, lines, shared.gates[s][buffer], stream.places_of(n), first_unit);
            const unsigned full = shared_address(&shared.full[s][buffer]);
            if (TAPS == 1 && PIECE_BYTES >= 4) asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(full) : "memory");
            else arrive(full);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) scan(const __grid_constant__ Call call) {
    extern __shared__ __align__(128) unsigned char dynamic[];
    Memory& shared = *(Memory*)dynamic;
    const BlockPart part = block_part();
    let_next_begin();
    if (threadIdx.x < 2 * BUFFERS) {
        make_barrier(shared_address(&shared.full[0][threadIdx.x]), FETCHERS);
        make_barrier(shared_address(&shared.empty[0][threadIdx.x]), RUNS * UNITS);
    }
    if (threadIdx.x < 2) init_team(shared.teams[threadIdx.x]);
    __syncthreads();
    wait_for_last();

    const int thread = threadIdx.x, encode_first = 2 * FETCHERS;
    const int s = thread < encode_first ? thread / FETCHERS : (thread - encode_first) / TEAM;
    const Stream stream = Streams(call, part).stream(part, s);
    if (thread < encode_first) {
        fetch(call, shared, stream, s, part.slice);
        if (TAPS > 1 && part.slice == 0) keep_left(call, stream, thread % FETCHERS);
    } else {
        const Tiles tiles{shared.gates[s][0], settled(shared_address(shared.full[s])), settled(shared_address(shared.empty[s]))};
        encode(call, part, stream, shared.teams[s], tiles, s, (thread - encode_first) % TEAM);
    }
}
