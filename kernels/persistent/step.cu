// A recurrent layer for a few steps of many rows: one product of [x | h] with [W; R] for each step, whose epilogue is the cell.
//
// A turn is one step of a tile: ROWS rows by UNITS hidden units. Blocks are persistent and take turns in a fixed order. The first warp
// group of a block loads: it gathers rows of x by token and rows of h by state slot, converts them to 16 bits where they are float32, and
// writes them as the tensor cores read them. Weights arrive as they are packed. Each other warp group multiplies 64 rows, and then
// advances their cells while the chunks of the next turn arrive. The PAIR blocks of a cluster have neighbouring rows and the same units:
// each fetches a part of the weights for both.
//
// The hidden values of other units come from all blocks of a step. DIRECT blocks read the first ones from the states, so no row may start
// from a slot that another row ends in. Otherwise the blocks first write them in 16 bits, and meet: units of large layers are read by many
// blocks. Between steps the blocks meet too, and the tiles of a step hold only the rows that have it. All blocks must be resident, so the
// launch is cooperative. Meetings count in `meeting`: two words that are zero before the launch and after it.
//
// Order of sums: the gate inputs, then along x, then along h, in the order of the tensor cores, whatever the tile. FLOAT32 hidden values and
// weights have two terms: each chunk of h is multiplied three times.
//
// Compiled with THREADS, ROWS, UNITS, PAIR, STAGES, SHARED, DIRECT, X_FLOAT32, and the properties of a layer in cell.cuh.
#include "cell.cuh"
#include "../wgmma.cuh"

constexpr int DEPTH = 64, GROUP = 128;                                  // columns of a chunk; threads of a warp group
constexpr int GROUPS = ROWS / 64, MULTIPLY = GROUPS * GROUP;            // warp groups that multiply, and their threads
constexpr int PASSES_OF_H = FLOAT32 ? 3 : 1;                            // products of a chunk of h
constexpr int COLUMNS = BLOCKS * UNITS, PARTS = UNITS / 16;             // columns of a product; parts of 16 units
constexpr int LEFT_BYTES = ROWS * DEPTH * 2, RIGHT_BYTES = COLUMNS * DEPTH * 2;
static_assert(THREADS == GROUP + MULTIPLY && UNITS % 16 == 0 && SORTED % (PAIR * ROWS) == 0, "launch shape");

// Where a row of a tile reads and writes.
struct alignas(16) Place {
    long long token, before, after;     // of this step; the beginnings of its states
    int row, steps;                     // row of the batch, or -1 for none; its number of steps
};
enum Kind { TILE, STEP_ENDS, END };
// What the warp groups that multiply do next. kept: they advanced the same rows and units last, whose cells they still hold.
struct alignas(16) Turn {
    Kind kind;
    int step, unit, kept;               // unit: the first of the tile
};
struct Memory {
    alignas(1024) unsigned char left[STAGES][LEFT_BYTES];
    alignas(1024) unsigned char right[STAGES][RIGHT_BYTES];
    Place places[2][ROWS];
    Turn turns[2];
    int counts[2][GROUP / 32];
    unsigned long long full[STAGES], empty[STAGES], announced[2], taken[2];
};
static_assert(sizeof(Memory) <= SHARED, "SHARED is less than sizeof(Memory): see step.py");
extern __shared__ __align__(1024) unsigned char dynamic[];
__device__ __forceinline__ Memory& memory() { return *(Memory*)dynamic; }

#if X_FLOAT32
typedef float Value;
#else
typedef Half Value;
#endif

// The arguments of a launch.
struct Step {
    Calls calls;
    const Value* x;                     // (tokens, inputs), `x_apart` from token to token
    const void* ids;                    // (tokens,) the rows of the gates, int64 when `ids_wide`; or null: the tokens
    unsigned* meeting;
    long long ids_wide, x_apart, inputs;

    __device__ __forceinline__ const Call& call() const { return calls.sides[0]; }
    __device__ __forceinline__ int hidden() const { return (int)call().hidden; }
    __device__ __forceinline__ int rows() const { return (int)(call().until - call().first); }
    __device__ __forceinline__ int tiles_of_units() const { return (hidden() + UNITS - 1) / UNITS; }
    __device__ __forceinline__ int tiles() const { return (rows() + PAIR * ROWS - 1) / (PAIR * ROWS) * tiles_of_units(); }
    __device__ __forceinline__ int chunks_of_x() const { return ((int)inputs + DEPTH - 1) / DEPTH; }
    __device__ __forceinline__ int chunks_of_h(int t) const {
        return t == 0 && !call().hidden_before ? 0 : PASSES_OF_H * ((hidden() + DEPTH - 1) / DEPTH);
    }
    __device__ __forceinline__ long long gate_row(long long token) const {
        return !ids ? token : ids_wide ? ((const long long*)ids)[token] : (long long)((const int*)ids)[token];
    }
    // Between steps, states are by row of the launch: the hidden values that enter step `t`, (TERMS, rows, hidden), and the cells.
    __device__ __forceinline__ long long between(int row) const { return (row - call().first) * call().hidden; }
    __device__ __forceinline__ Half* hidden(int t, int term) const {
        return (Half*)call().exchange + (t % 2 * TERMS + term) * (long long)rows() * call().hidden;
    }
    __device__ __forceinline__ float* cells() const { return (float*)hidden(0, 0) + TERMS * (long long)rows() * call().hidden; }
};

__device__ __forceinline__ int rank() { return PAIR > 1 ? cluster_rank() : 0; }
__device__ __forceinline__ void arrive_at(unsigned barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Fetches to the same place in both blocks of the cluster.
__device__ __forceinline__ void fetch_for_both(unsigned to, const void* from, int bytes, unsigned barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], %4;"
                 ::"r"(to), "l"(from), "r"(bytes), "r"(barrier), "h"((unsigned short)3) : "memory");
}

// Announces at the meeting what this thread and those it has met in its block have written.
__device__ __forceinline__ void attend(const Step& step) {
    asm volatile("fence.acq_rel.gpu; red.relaxed.gpu.global.add.u32 [%0], 1;" ::"l"(step.meeting) : "memory");
}
// Waits until all blocks have met `times` times. The loading warp group calls it.
__device__ __forceinline__ void await_blocks(const Step& step, int times) {
    if (threadIdx.x == 0) {
        unsigned count;
        do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(count) : "l"(step.meeting) : "memory");
        while (count < times * gridDim.x);
    }
    meet(1, GROUP);
}

// Returns two values of a product's left operand. A GRU's hidden value in 16 bits is at most 32, as in the other kernels.
__device__ __forceinline__ unsigned of_x(float a, float b) { return narrow(a, b); }
__device__ __forceinline__ float bounded(float hidden) {
#if GRU && !FLOAT32
    asm("max.NaN.f32 %0, %0, %1;" : "+f"(hidden) : "f"(-16.0f * LARGEST));
    asm("min.NaN.f32 %0, %0, %1;" : "+f"(hidden) : "f"(16.0f * LARGEST));
#endif
    return hidden;
}
__device__ __forceinline__ unsigned of_hidden(float a, float b, int term) {
    const unsigned first = narrow(bounded(a), bounded(b));
    return term ? narrow(a - low_of(first), b - high_of(first)) : first;
}
template <typename Two> __device__ __forceinline__ Quad piece_of(const float4 (&values)[2], Two two) {
    const float4 a = values[0], b = values[1];
    return Quad{two(a.x, a.y), two(a.z, a.w), two(b.x, b.y), two(b.z, b.w)};
}

// Writes this block's part of the hidden values before the first step in 16 bits. The warp groups that multiply call it.
__device__ __forceinline__ void gather_hidden(const Step& step) {
    constexpr int AT_ONCE = 8, PIECE = 256;                             // loads under way; units that a warp converts at once
    const Call& call = step.call();
    const int each = (step.rows() + gridDim.x - 1) / gridDim.x, begin = blockIdx.x * each, pieces = (step.hidden() + PIECE - 1) / PIECE;
    const int end = call.hidden_before ? max(0, min(step.rows() - begin, each)) * pieces : 0;
    for (int first = threadIdx.x / 32 - GROUP / 32; first < end; first += MULTIPLY / 32 * AT_ONCE) {
        float4 values[AT_ONCE][2];
        long long to[AT_ONCE];
#pragma unroll
        for (int n = 0; n < AT_ONCE; ++n) {
            const int number = first + n * (MULTIPLY / 32), row = (int)call.first + begin + number / pieces;
            const int unit = number % pieces * PIECE + threadIdx.x % 32 * 8;
            to[n] = number < end && unit < step.hidden() ? step.between(row) + unit : -1;
            if (to[n] < 0) continue;
            const float4* const from = (const float4*)(call.hidden_before + call.start_before(row) + unit);
            values[n][0] = from[0], values[n][1] = from[1];
        }
#pragma unroll
        for (int n = 0; n < AT_ONCE; ++n)
            for (int term = 0; term < TERMS && to[n] >= 0; ++term)
                *(Quad*)(step.hidden(0, term) + to[n]) = piece_of(values[n], [&](float a, float b) { return of_hidden(a, b, term); });
    }
    meet(2, MULTIPLY);
    if (threadIdx.x == GROUP) attend(step);
}

// Writes the places of a tile in a step: those of all rows in their order, or of the rows that have the step. Returns whether this block or
// the other one of the cluster has any.
__device__ __forceinline__ bool find_places(const Step& step, Place* places, int tile, int t, bool all) {
    const Call& call = step.call();
    const Place none{0, 0, 0, -1, 0};
    auto steps_of = [&](long long row) { return (int)(call.offset(row + 1) - call.offset(row)); };
    auto place_of = [&](long long row) {
        const int steps = steps_of(row);
        const long long token = steps > t ? call.token(call.first_token(row), t) : 0;
        return Place{token, call.start_before((int)row), call.start_after((int)row), (int)row, steps};
    };
    if (all) {
        const long long row = call.first + (long long)tile * ROWS + threadIdx.x;
        if (threadIdx.x < ROWS) places[threadIdx.x] = row < call.until ? place_of(row) : none;
        meet(1, GROUP);
        return true;
    }
    constexpr int EACH = SORTED / GROUP, TILES = SORTED / ROWS;
    int(&counts)[GROUP / 32] = memory().counts[0];
    const long long begin = call.first + (long long)(tile / TILES) * SORTED + threadIdx.x * EACH;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = tile % TILES * ROWS;
    unsigned runs = 0;
#pragma unroll
    for (int n = 0; n < EACH; ++n) runs |= (begin + n < call.until && steps_of(begin + n) > t) << n;
    int up_to = __popc(runs);
#pragma unroll
    for (int apart = 1; apart < 32; apart *= 2) {
        const int other = __shfl_up_sync(~0u, up_to, apart);
        if (lane >= apart) up_to += other;
    }
    if (lane == 31) counts[warp] = up_to;
    if (threadIdx.x < ROWS) places[threadIdx.x] = none;
    meet(1, GROUP);
    int at = up_to - __popc(runs) - first, total = 0;
    for (int other = 0; other < GROUP / 32; ++other) {
        if (other < warp) at += counts[other];
        total += counts[other];
    }
#pragma unroll
    for (int n = 0; n < EACH; ++n) {
        if (!(runs >> n & 1)) continue;
        if (at >= 0 && at < ROWS) places[at] = place_of(begin + n);
        ++at;
    }
    meet(1, GROUP);
    return total > first - rank() * ROWS;
}

// The loading warp group. A thread loads the same piece of eight values in every STRIDE-th row.
struct Loader {
    static constexpr int PIECES = DEPTH / 8, STRIDE = GROUP / PIECES, LOADS = ROWS / STRIDE;
    const Step& step;
    Memory& shared = memory();
    int chunks = 0, turns = 0, meetings = DIRECT ? 0 : 1, met = 0;

    static __device__ __forceinline__ int piece() { return threadIdx.x % PIECES; }
    static __device__ __forceinline__ int row_of(int load) { return load * STRIDE + threadIdx.x / PIECES; }
    __device__ __forceinline__ int stage() const { return chunks % STAGES; }
    __device__ __forceinline__ unsigned full() const { return shared_address(&shared.full[stage()]); }
    __device__ __forceinline__ unsigned to(int load) const {
        // The rows of all loads have the same remainder of 8.
        return shared_address(shared.left[stage()]) + row_of(load) * 128 + (piece() ^ row_of(0) % 8) * 16;
    }

    // Opens the stage of the next chunk and fetches its weights. Warps take turns.
    __device__ __forceinline__ void open(int chunk, int unit) const {
        await(shared_address(&shared.empty[stage()]), (chunks / STAGES & 1) ^ 1);
        if (threadIdx.x != chunks % (GROUP / 32) * 32) return;
        constexpr int BYTES = RIGHT_BYTES / PAIR;
        const int begin = rank() * BYTES, padded = (step.hidden() + DEPTH - 1) / DEPTH * DEPTH;
        const unsigned char* const from = (const unsigned char*)step.call().packed + ((long long)chunk * padded + unit) * (BLOCKS * DEPTH * 2) + begin;
        const unsigned to = shared_address(shared.right[stage()]) + begin;
        expect(full(), RIGHT_BYTES);
        if (PAIR > 1) fetch_for_both(to, from, BYTES, full());
        else copy_in_bulk(to, from, BYTES, full());
    }
    // Loads a chunk of 16-bit values. `columns` are left from its beginning on, and zeros follow.
    __device__ __forceinline__ void load(const Half* const (&from)[LOADS], int begin, int columns) {
        const bool real = piece() * 8 < columns;
#pragma unroll
        for (int n = 0; n < LOADS; ++n)
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to(n)), "l"(from[n] + (real ? begin : 0)), "r"(real ? 16 : 0));
        // This thread arrives when its copies have.
        asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(full()) : "memory");
        ++chunks;
    }
    // Loads and converts a chunk of float32 values.
    template <typename Two> __device__ __forceinline__ void load(const float* const (&from)[LOADS], int begin, int columns, Two two) {
        const bool real = piece() * 8 < columns;
        float4 values[LOADS][2];
#pragma unroll
        for (int n = 0; n < LOADS; ++n) {
            values[n][0] = real ? __ldg((const float4*)(from[n] + begin)) : float4{};
            values[n][1] = real ? __ldg((const float4*)(from[n] + begin) + 1) : float4{};
        }
#pragma unroll
        for (int n = 0; n < LOADS; ++n) {
            const Quad piece = piece_of(values[n], two);
            asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to(n)), "r"(piece.x), "r"(piece.y), "r"(piece.z), "r"(piece.w));
        }
        arrive(full());
        ++chunks;
    }
    // Finds the addresses of this thread's pieces. A row that is not there reads any other: nobody reads its sums.
    template <typename T, typename At> static __device__ __forceinline__ void find(const T* (&from)[LOADS], At at) {
#pragma unroll
        for (int n = 0; n < LOADS; ++n) from[n] = at(row_of(n)) + piece() * 8;
    }

    __device__ __forceinline__ void load_x(const Place* places, int unit) {
        const Value* from[LOADS];
        find(from, [&](int row) { return step.x + places[row].token * step.x_apart; });
        for (int chunk = 0; chunk < step.chunks_of_x(); ++chunk) {
            open(chunk, unit);
#if X_FLOAT32
            load(from, chunk * DEPTH, (int)step.inputs - chunk * DEPTH, of_x);
#else
            load(from, chunk * DEPTH, (int)step.inputs - chunk * DEPTH);
#endif
        }
    }
    __device__ __forceinline__ void load_states(const Place* places, int unit) {
        const float* from[LOADS];
        find(from, [&](int row) { return step.call().hidden_before + places[row].before; });
        for (int chunk = 0; chunk < step.chunks_of_h(0); ++chunk) {
            const int begin = chunk / PASSES_OF_H * DEPTH, term = chunk % PASSES_OF_H / 2;
            open(step.chunks_of_x() + chunk, unit);
            load(from, begin, step.hidden() - begin, [&](float a, float b) { return of_hidden(a, b, term); });
        }
    }
    __device__ __forceinline__ void load_hidden(const Place* places, int unit, int t) {
        const Half* from[LOADS];
        find(from, [&](int row) { return step.hidden(t, 0) + (places[row].row < 0 ? 0 : step.between(places[row].row)); });
        const long long small = step.hidden(t, TERMS - 1) - step.hidden(t, 0);
        for (int chunk = 0; chunk < step.chunks_of_h(t); ++chunk) {
            const int begin = chunk / PASSES_OF_H * DEPTH;
            open(step.chunks_of_x() + chunk, unit);
            if (FLOAT32 && chunk % PASSES_OF_H == 2) {
                const Half* of_small[LOADS];
#pragma unroll
                for (int n = 0; n < LOADS; ++n) of_small[n] = from[n] + small;
                load(of_small, begin, step.hidden() - begin);
            } else load(from, begin, step.hidden() - begin);
        }
    }

    // Waits for the places of the next turn.
    __device__ __forceinline__ Place* await_places() const {
        await(shared_address(&shared.taken[turns % 2]), (turns / 2 & 1) ^ 1);
        return shared.places[turns % 2];
    }
    __device__ __forceinline__ void announce(const Turn& turn) {
        if (threadIdx.x == 0) {
            shared.turns[turns % 2] = turn;
            arrive(shared_address(&shared.announced[turns % 2]));
        }
        ++turns;
    }
    __device__ __forceinline__ void load_step(int t, bool all) {
        const int clusters = gridDim.x / PAIR, units = step.tiles_of_units();
        for (int tile = blockIdx.x / PAIR; tile < step.tiles(); tile += clusters) {
            const int unit = tile % units * UNITS;
            Place* const places = await_places();
            if (!find_places(step, places, tile / units * PAIR + rank(), t, all)) continue;
            announce(Turn{TILE, t, unit, t > 0 && all && step.tiles() <= clusters});
            load_x(places, unit);
            meet_blocks();
            if (DIRECT && t == 0) load_states(places, unit);
            else load_hidden(places, unit, t);
        }
        // Every block attends every meeting after the one before it, whether it had a turn or not.
        meet_blocks();
        meet(1, GROUP); // all threads have read the places
    }
    __device__ __forceinline__ void meet_blocks() {
        if (met < meetings) await_blocks(step, met = meetings);
    }
    // Finds the fewest and the most steps of all rows.
    __device__ __forceinline__ void find_lengths(int& shortest, int& longest) const {
        const Call& call = step.call();
        int least = 0x7fffffff, most = 0;
        for (long long row = call.first + threadIdx.x; row < call.until; row += GROUP) {
            const int steps = (int)(call.offset(row + 1) - call.offset(row));
            least = min(least, steps), most = max(most, steps);
        }
        least = __reduce_min_sync(~0u, least), most = __reduce_max_sync(~0u, most);
        if (threadIdx.x % 32 == 0) shared.counts[0][threadIdx.x / 32] = least, shared.counts[1][threadIdx.x / 32] = most;
        meet(1, GROUP);
        shortest = shared.counts[0][0], longest = shared.counts[1][0];
        for (int warp = 1; warp < GROUP / 32; ++warp) shortest = min(shortest, shared.counts[0][warp]), longest = max(longest, shared.counts[1][warp]);
        meet(1, GROUP);
    }
    __device__ __forceinline__ void run() {
        load_step(0, true);
        int shortest, longest;
        find_lengths(shortest, longest);
        for (int t = 1; t < longest; ++t) {
            await_places();
            announce(Turn{STEP_ENDS});
            ++meetings;
            load_step(t, t < shortest);
        }
        await_places();
        announce(Turn{END});
        if (meetings == 0 || threadIdx.x > 0) return;
        // The last block to leave resets the words for the next launch.
        unsigned left;
        asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(left) : "l"(step.meeting + 1) : "memory");
        if (left + 1 == gridDim.x) step.meeting[0] = step.meeting[1] = 0;
    }
};

// Four neighbouring units.
struct Four {
    float values[4];

    __device__ __forceinline__ float4 vector() const { return float4{values[0], values[1], values[2], values[3]}; }
};
__device__ __forceinline__ Four four_of(const float* at) {
    const float4 four = *(const float4*)at;
    return Four{four.x, four.y, four.z, four.w};
}
__device__ __forceinline__ Four four_of(const Half* at) {
    const uint2 four = *(const uint2*)at;
    return Four{low_of(four.x), high_of(four.x), low_of(four.y), high_of(four.y)};
}

// The sums of a lane: four units of each part, in two rows that are eight apart. A GRU's product of x for the new gate is apart, because
// the reset gate does not multiply it.
struct Sums {
    float all[COLUMNS / 2], new_of_x[GRU ? UNITS / 2 : 1];

    // Returns where a unit of a part has its sum for a gate.
    static __device__ __forceinline__ int at(int part, int gate, int upper, int unit) {
        return (part * BLOCKS + gate) * 8 + unit / 2 * 4 + upper * 2 + unit % 2;
    }
    // Keeps the compiler from moving reads and writes of the sums over products that are under way.
    __device__ __forceinline__ void settle() {
#pragma unroll
        for (int i = 0; i < COLUMNS / 2; ++i) asm volatile("" : "+f"(all[i])::"memory");
    }
    __device__ __forceinline__ void set_apart() {
#if GRU
#pragma unroll
        for (int i = 0; i < UNITS / 2; ++i) {
            float& sum = all[(i / 8 * BLOCKS + 2) * 8 + i % 8];
            new_of_x[i] = sum, sum = 0.0f;
        }
#endif
    }
};

// A warp group that multiplies 64 rows.
struct Multiplier {
    const Step& step;
    const int group, lane = threadIdx.x % 32;
    Memory& shared = memory();
    int chunks = 0;                     // that all turns have multiplied

    // Adds the products of a tile. Calls `before_hidden` when the first hidden values have arrived and before they are multiplied.
    template <typename F> __device__ __forceinline__ void multiply_tile(Sums& sums, int of_x, int of_h, F before_hidden) {
        const unsigned left = piece_at(shared_address(shared.left)) + group * (64 * 128 / 16), right = piece_at(shared_address(shared.right));
        const unsigned full = shared_address(shared.full), empty = shared_address(shared.empty), others = PAIR > 1 ? in_block(empty, rank() ^ 1) : 0;
        auto release = [&](int chunk) {
            const int stage = chunk % STAGES;
            if (lane == 0) arrive(empty + stage * 8);
            if (PAIR > 1 && lane == 1) arrive_at(others + stage * 8);
        };
        sums.settle();
        for (int chunk = 0; chunk < of_x + of_h; ++chunk, ++chunks) {
            const int stage = chunks % STAGES;
            await(full + stage * 8, chunks / STAGES & 1);
            // The chunk was written through the generic proxy, and is read through the asynchronous proxy.
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
            if (chunk == of_x) {
                if (GRU) {
                    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
                    sums.settle();
                    sums.set_apart();
                    sums.settle();
                }
                before_hidden();
            }
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
            for (int k = 0; k < DEPTH / 16; ++k)
                multiply(sums.all, left + stage * (LEFT_BYTES / 16) + k * 2, right + stage * (RIGHT_BYTES / 16) + k * 2, 1);
            asm volatile("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 1;" ::: "memory");
            // The previous chunk has been read by now.
            if (chunk > 0) release(chunks - 1);
        }
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
        sums.settle();
        if (of_x + of_h) release(chunks - 1);
        if (!of_h) sums.set_apart();
    }

    // Returns the gate inputs as the first terms of the sums.
    __device__ __forceinline__ void begin(Sums& sums, const Place (&places)[2], int t, int first) const {
        const Call& call = step.call();
        const float scale = FLOAT32 ? *call.scale : 1.0f;
#pragma unroll
        for (int upper = 0; upper < 2; ++upper) {
            const bool runs = places[upper].steps > t;
            const Gate* const gates = call.gates + (runs ? step.gate_row(places[upper].token) * call.gates_apart : 0) + first;
#pragma unroll
            for (int part = 0; part < PARTS; ++part)
#pragma unroll
                for (int gate = 0; gate < BLOCKS; ++gate) {
                    const bool real = runs && first + 16 * part < step.hidden();
                    const Four inputs = real ? four_of(gates + gate * step.hidden() + 16 * part) : Four{};
#pragma unroll
                    for (int k = 0; k < 4; ++k) sums.all[Sums::at(part, gate, upper, k)] = inputs.values[k] * scale;
                }
        }
    }

    __device__ __forceinline__ void read_cells(Four (&cells)[PARTS][2], const Place (&places)[2], int t, int first) const {
        const Call& call = step.call();
        const float* const states = t ? step.cells() : GRU ? call.hidden_before : call.cell_before;
#pragma unroll
        for (int part = 0; part < PARTS; ++part)
#pragma unroll
            for (int upper = 0; upper < 2; ++upper) {
                const Place& place = places[upper];
                const int unit = first + 16 * part;
                const bool real = states && place.row >= 0 && unit < step.hidden();
                cells[part][upper] = real ? four_of(states + (t ? step.between(place.row) : place.before) + unit) : Four{};
            }
    }

    // Updates the pools of a row, which stay in the outputs between its steps.
    __device__ __forceinline__ void pool(const Place& place, int t, long long at, const Four& hidden) const {
        const Call& call = step.call();
        const bool last = t + 1 == place.steps;
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            if (call.mean) {
                const float sum = (t ? call.mean[at + k] : 0.0f) + hidden.values[k];
                call.mean[at + k] = last ? sum / place.steps : sum;
            }
            if (call.max) call.max[at + k] = t ? larger(call.max[at + k], hidden.values[k]) : hidden.values[k];
        }
    }
    // Writes four units of a row after a step.
    __device__ __forceinline__ void write(const Place& place, int t, int unit, const Four& hidden, const Four& cell) const {
        const Call& call = step.call();
        const long long output = place.row * call.outputs_apart + unit;
        if (call.steps) *(float4*)(call.steps + place.token * call.outputs_apart + unit) = hidden.vector();
        if (call.mean || call.max) pool(place, t, output, hidden);
        if (t + 1 < place.steps) {
            const float(&h)[4] = hidden.values;
            for (int term = 0; term < TERMS; ++term)
                *(uint2*)(step.hidden(t + 1, term) + step.between(place.row) + unit) = uint2{of_hidden(h[0], h[1], term), of_hidden(h[2], h[3], term)};
            *(float4*)(step.cells() + step.between(place.row) + unit) = cell.vector();
        } else end(place, output, unit, hidden, cell);
    }
    __device__ __forceinline__ void end(const Place& place, long long output, int unit, const Four& hidden, const Four& cell) const {
        const Call& call = step.call();
        *(float4*)(call.hidden_after + place.after + unit) = hidden.vector();
        if (!GRU) *(float4*)(call.cell_after + place.after + unit) = cell.vector();
        if (call.last) *(float4*)(call.last + output) = hidden.vector();
    }
    // Ends a row without steps, whose cells have been read.
    __device__ __forceinline__ void end_without_steps(const Place& place, int unit, const Four& cell) const {
        const Call& call = step.call();
        const long long output = place.row * call.outputs_apart + unit;
        end(place, output, unit, call.hidden_before ? four_of(call.hidden_before + place.before + unit) : Four{}, cell);
        if (call.mean) *(float4*)(call.mean + output) = float4{};
        if (call.max) *(float4*)(call.max + output) = float4{};
    }

    __device__ __forceinline__ void advance_cells(const Sums& sums, Four (&cells)[PARTS][2], const Place (&places)[2], int t, int first) const {
        const Call& call = step.call();
        const float by = FLOAT32 ? 1.0f / *call.scale : 1.0f;
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            const int unit = first + 16 * part;
            Own own[4];
#pragma unroll
            for (int k = 0; k < 4; ++k) own[k] = own_of(call, unit + k);
#pragma unroll
            for (int upper = 0; upper < 2; ++upper) {
                const Place& place = places[upper];
                Four& cell = cells[part][upper];
                if (t == 0 && place.row >= 0 && place.steps == 0 && unit < step.hidden()) end_without_steps(place, unit, cell);
                Four hidden;
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    auto sum = [&](int gate) { return sums.all[Sums::at(part, gate, upper, k)]; };
                    const Gates product{sum(0), sum(1), sum(2), GRU ? 0.0f : sum(BLOCKS - 1)};
                    const Gates inputs{0.0f, 0.0f, 0.0f, GRU ? sums.new_of_x[part * 8 + Sums::at(0, 0, upper, k)] * by : 0.0f};
                    const Kept bits = advance(cell.values[k], product, by, inputs, own[k]);
                    hidden.values[k] = GRU ? cell.values[k] : value_of(bits);
                }
                if (place.steps > t && unit < step.hidden()) write(place, t, unit, hidden, cell);
            }
        }
    }

    __device__ __forceinline__ void run() {
        const int row = group * 64 + threadIdx.x % GROUP / 32 * 16 + lane / 4;
        Four cells[PARTS][2];
        if (!DIRECT) gather_hidden(step);
        for (int turns = 0;; ++turns) {
            await(shared_address(&shared.announced[turns % 2]), turns / 2 & 1);
            const Turn turn = shared.turns[turns % 2];
            const Place places[2] = {shared.places[turns % 2][row], shared.places[turns % 2][row + 8]};
            __syncwarp();
            if (lane == 0) arrive(shared_address(&shared.taken[turns % 2]));
            if (turn.kind == END) break;
            if (turn.kind == STEP_ENDS) {
                meet(2, MULTIPLY);
                if (threadIdx.x == GROUP) attend(step);
                continue;
            }
            const int t = turn.step, first = turn.unit + lane % 4 * 4;
            Sums sums;
            begin(sums, places, t, first);
            if (t == 0) read_cells(cells, places, t, first);
            multiply_tile(sums, step.chunks_of_x(), step.chunks_of_h(t), [&] {
                // Other blocks may have advanced these rows last.
                if (t > 0 && !turn.kept) read_cells(cells, places, t, first);
            });
            advance_cells(sums, cells, places, t, first);
        }
    }
};

extern "C" __global__ void CLUSTER_OF(PAIR, 1) __launch_bounds__(THREADS, 1) persistent(const __grid_constant__ Step step) {
    Memory& shared = memory();
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; ++stage) {
            make_barrier(shared_address(&shared.full[stage]), GROUP + 1);                       // the loading threads, and the weights
            make_barrier(shared_address(&shared.empty[stage]), PAIR * MULTIPLY / 32);
        }
        for (int buffer = 0; buffer < 2; ++buffer) {
            make_barrier(shared_address(&shared.announced[buffer]), 1);
            make_barrier(shared_address(&shared.taken[buffer]), MULTIPLY / 32);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    if (PAIR > 1) meet_cluster();
    else __syncthreads();
    // Two warp groups that multiply need more registers than a thread has at the start of a block.
    if (threadIdx.x < GROUP) {
        if (GROUPS > 1) asm volatile("setmaxnreg.dec.sync.aligned.u32 104;");
        Loader{step}.run();
    } else {
        if (GROUPS > 1) asm volatile("setmaxnreg.inc.sync.aligned.u32 200;");
        Multiplier{step, (int)threadIdx.x / GROUP - 1}.run();
    }
    if (PAIR > 1) meet_cluster(); // no block ends while another sends to it
}
