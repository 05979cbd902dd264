// A recurrent layer for large layers and many rows: the products of whole warp groups (wgmma), whose right operand is a tile of
// many rows.
//
// A team of blocks owns TILES tiles of ROWS rows. Every member owns 16 hidden units: 64 gate rows, the left operand of its
// products, for all steps. A turn is one step of one tile. Each tile has a warp group that multiplies and then advances its
// cells, while the other warp group multiplies. A lane owns one unit of ROWS / 8 rows, and keeps their cells in registers.
//
// Hidden vectors are exchanged through the L2 cache, in chunks of 64 units as the tensor cores read them. One thread fetches a
// chunk after the other. The two blocks of a cluster fetch half of the rows each, and send them to both. The last chunks'
// weights stay in shared memory. The weights of the first STREAMED chunks, for which it has no room, are fetched again in every
// turn.
//
// A member announces its new hidden values in the counter of their chunk, which counts steps: four members in each. All blocks
// must be resident, so the launch is cooperative. Each tile has two buffers. A member writes step t + 1 over step t - 1 when
// all of step t has arrived, and every member sends step t after reading step t - 1.
//
// One launch may run several levels, each in teams of its own: at any time, each level is at another step. A level above the
// first also multiplies its inputs, the hidden values of the level below. Their chunks come before those of its own hidden
// vector, so they are multiplied while its new hidden values are under way. The levels below the last have more buffers. A
// level overwrites a step when the level above has announced the values that it computed from it.
//
// Order of sums: along the inputs and then the hidden vector, in the order of the tensor cores. It is not the order of the
// other kernels.
//
// Macros besides those of cell.cuh: ROWS of a tile, TILES of a team, CHUNKS of the hidden vector, RESIDENT chunks of weights in
// shared memory, BUFFERS of hidden vectors, STAGES of chunks that arrive, SHARED bytes of a block.
#include "cell.cuh"
#include "../wgmma.cuh"

constexpr int UNITS = 16, DEPTH = 64, GATE_ROWS = 4 * UNITS; // units of a block, units of a chunk, rows of the left operand
constexpr int LEFT_BYTES = GATE_ROWS * DEPTH * 2, RIGHT_BYTES = ROWS * DEPTH * 2;
constexpr int LEVELS = SIDES, MOST = LEVELS > 1 ? 2 * CHUNKS : CHUNKS;  // the most chunks of a level
constexpr int COLUMNS = ROWS / 8;                                       // rows of a tile that a lane owns
constexpr int COUNTERS = 32;                                            // counters of a tile
constexpr int GROUP = 128;                                              // threads of a warp group
static_assert(THREADS == TILES * GROUP + 32 && TILES <= 2 && CHUNKS <= COUNTERS && ROWS % 16 == 0 && STAGES >= 2,
              "launch shape");
static_assert(RESIDENT <= MOST && BUFFERS >= 2, "launch shape");

// A level whose inputs have this many chunks: CHUNKS, or none for the first level, whose gate inputs are given.
template <int INPUTS> struct Level {
    static constexpr int TOTAL = INPUTS + CHUNKS, STREAMED = TOTAL > RESIDENT ? TOTAL - RESIDENT : 0;
    static constexpr int EARLY = STREAMED < STAGES ? STREAMED : STAGES;

    // Every turn begins with the first stage. Returns the parity of a stage when it has a chunk of this turn.
    static __device__ __forceinline__ int phase_of(int turn, int chunk) {
        const int uses = (TOTAL - chunk % STAGES + STAGES - 1) / STAGES;
        return (turn * uses + chunk / STAGES) & 1;
    }
};

struct Memory {
    alignas(1024) unsigned char right[STAGES][RIGHT_BYTES];
    alignas(1024) unsigned char left[RESIDENT + (RESIDENT < MOST ? STAGES : 0)][LEFT_BYTES];
    alignas(16) Gate inputs[TILES][BLOCKS][ROWS][UNITS];
    alignas(16) Half outgoing[TILES][ROWS][UNITS];
    Row rows[TILES * ROWS];
    int lengths[SORTED];
    unsigned long long full[STAGES], empty[STAGES], loaded;
};
static_assert(sizeof(Memory) <= SHARED, "SHARED is less than sizeof(Memory): see wide.py");
extern __shared__ __align__(1024) unsigned char dynamic[];
// Addresses in shared memory are known when the kernel is compiled. The operands of a product are then constants: a product of
// 64 rows takes less time than the computation of its operands.
__device__ __forceinline__ Memory& memory() { return *(Memory*)dynamic; }

// Where a team exchanges the hidden values of a level.
struct Exchange {
    static constexpr long long BYTES = TILES * (COUNTERS * 4 + (long long)BUFFERS * CHUNKS * RIGHT_BYTES);
    unsigned char* at;

    // Returns the counters of a tile.
    __device__ __forceinline__ unsigned* counters(int tile) const { return (unsigned*)at + tile * COUNTERS; }
    // Returns the hidden values that enter step `t` of a tile: (CHUNKS, ROWS, DEPTH) of 16 bits.
    __device__ __forceinline__ unsigned char* values(int tile, int t) const {
        return at + TILES * COUNTERS * 4 + (long long)(tile * BUFFERS + t % BUFFERS) * CHUNKS * RIGHT_BYTES;
    }
};

// Shared by all warps of a block.
struct Team {
    const Call& call;
    Exchange own, below, above;         // of this level, and of the levels below and above it as far as there are any
    int member, longest, shorter;       // steps of the first tile, which has the longest rows, and of the second

    // Returns the weights of this member in a chunk, out of `total`.
    __device__ __forceinline__ const unsigned char* weights(int chunk, int total) const {
        return (const unsigned char*)call.packed + ((long long)member * total + chunk) * LEFT_BYTES;
    }
    // Returns the number of turns before a turn. Tiles take turns while both have steps.
    __device__ __forceinline__ int turns_before(int tile, int t) const { return t + min(t + tile, shorter); }
};

// Waits until all members have announced the hidden values of a step. One warp calls it.
__device__ __forceinline__ void await_step(const unsigned* counters, int t) {
    const unsigned announced = (t + 1) * (DEPTH / UNITS);
    const int lane = threadIdx.x % 32;
    unsigned count;
    do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(count) : "l"(counters + lane) : "memory");
    while (__any_sync(~0u, lane < CHUNKS && count < announced));
    // The values were written through the generic proxy, and are read through the asynchronous proxy.
    asm volatile("fence.proxy.async.global;" ::: "memory");
    __syncwarp();
}

// Returns the bits of a hidden value that other units and the level above read. A GRU's value that is not finite is sent as
// NaN: `kept` would make it finite, and the level above would answer as if nothing had happened.
__device__ __forceinline__ Half sent(Kept hidden, float cell) {
    constexpr Half NOT_A_NUMBER = 0x7fff;
    return GRU && !(fabsf(cell) <= 3.4028235e38f) ? NOT_A_NUMBER : term_of(hidden, 0);
}

// The fetching warp. One of its threads fetches, and every operand that does not depend on the turn is a constant: fetching a
// chunk must not take longer than multiplying it.
template <int INPUTS> __device__ __forceinline__ void fetch_turn(const Team& team, int tile, int t) {
    using L = Level<INPUTS>;
    Memory& shared = memory();
    const int turn = team.turns_before(tile, t), half = cluster_rank() * (RIGHT_BYTES / 2);
    const bool leads = threadIdx.x % 32 == 0;

    // Prepares a stage for a chunk, and fetches its weights.
    auto open = [&](int chunk) {
        const int stage = chunk % STAGES;
        const unsigned full = shared_address(&shared.full[stage]);
        await(shared_address(&shared.empty[stage]), L::phase_of(turn, chunk) ^ 1);
        expect(full, RIGHT_BYTES + (chunk < L::STREAMED ? LEFT_BYTES : 0));
        if (chunk < L::STREAMED)
            copy_in_bulk(shared_address(shared.left[RESIDENT + stage]), team.weights(chunk, L::TOTAL), LEFT_BYTES, full);
    };
    // Fetches the chunks from `first` to `until`, whose values begin at `from`.
    auto fetch = [&](int first, int until, const unsigned char* from) {
        if (leads)
#pragma unroll
            for (int chunk = first; chunk < until; ++chunk) {
                const int stage = chunk % STAGES;
                if (chunk >= L::EARLY) open(chunk);
                const unsigned char* const at = from + (chunk - first) * RIGHT_BYTES + half;
                const unsigned to = shared_address(shared.right[stage]) + half;
                fetch_for_both(to, at, RIGHT_BYTES / 2, shared_address(&shared.full[stage]));
            }
        __syncwarp();
    };
    if (leads)
#pragma unroll
        for (int chunk = 0; chunk < L::EARLY; ++chunk) open(chunk);
    __syncwarp();
    if (INPUTS) {
        await_step(team.below.counters(tile), t + 1);
        fetch(0, INPUTS, team.below.values(tile, t + 1));
    }
    // This step's values overwrite those that the level above reads in step t - BUFFERS.
    if (team.above.at && t >= BUFFERS) await_step(team.above.counters(tile), t - BUFFERS + 1);
    await_step(team.own.counters(tile), t);
    fetch(INPUTS, L::TOTAL, team.own.values(tile, t));
}
template <int INPUTS> __device__ __forceinline__ void fetch_turns(const Team& team) {
    using L = Level<INPUTS>;
    Memory& shared = memory();
    if (threadIdx.x % 32 == 0) {
        expect(shared_address(&shared.loaded), (L::TOTAL - L::STREAMED) * LEFT_BYTES);
        for (int chunk = L::STREAMED; chunk < L::TOTAL; ++chunk)
            copy_in_bulk(shared_address(shared.left[chunk - L::STREAMED]), team.weights(chunk, L::TOTAL), LEFT_BYTES,
                         shared_address(&shared.loaded));
    }
#pragma unroll 1
    for (int t = 0; t < team.longest; ++t)
#pragma unroll 1
        for (int tile = 0; tile <= (t < team.shorter); ++tile) fetch_turn<INPUTS>(team, tile, t);
}

// sums = weights (64 gate rows x inputs and hidden) @ inputs and hidden vectors (inputs and hidden x ROWS).
template <int INPUTS> __device__ __forceinline__ void multiply_turn(float (&sums)[ROWS / 2], int turn) {
    using L = Level<INPUTS>;
    Memory& shared = memory();
    const int lane = threadIdx.x % 32;
    const unsigned left = piece_at(shared_address(shared.left)), right = piece_at(shared_address(shared.right));
    const unsigned full = shared_address(shared.full), empty = shared_address(shared.empty),
                   others = in_block(empty, cluster_rank() ^ 1);
    auto release = [&](int stage) {
        if (lane == 0) arrive(empty + stage * 8);
        if (lane == 1) arrive_at(others + stage * 8);
    };
#pragma unroll
    for (int chunk = 0; chunk < L::TOTAL; ++chunk) {
        const int stage = chunk % STAGES;
        await(full + stage * 8, L::phase_of(turn, chunk));
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
        const unsigned weights = left + (chunk < L::STREAMED ? RESIDENT + stage : chunk - L::STREAMED) * (LEFT_BYTES / 16);
        const unsigned hidden = right + stage * (RIGHT_BYTES / 16);
#pragma unroll
        for (int part = 0; part < DEPTH / 16; ++part) multiply(sums, weights + part * 2, hidden + part * 2, chunk + part);
        asm volatile("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 1;" ::: "memory");
        // The previous chunk has been read by now.
        if (chunk > 0) release((chunk - 1) % STAGES);
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    release((L::TOTAL - 1) % STAGES);
}

// A warp group with its tile.
template <int INPUTS> __device__ __forceinline__ void run_tile(const Team& team, int tile) {
    const Call& call = team.call;
    Memory& shared = memory();
    const int thread = threadIdx.x % GROUP, lane = thread % 32, g = lane / 4, q = lane % 4, odd = g % 2;
    const int own_unit = thread / 32 * 4 + g / 2, unit = team.member * UNITS + own_unit, hidden = (int)call.hidden;
    const Row* const rows = shared.rows + tile * ROWS;
    const Gate* const gates = call.gates + team.member * UNITS;
    const int steps = tile ? team.shorter : team.longest;
    const Own own = own_of(call, unit);
    const float by = unit_of(call);
    const bool all_steps = call.steps || call.mean || call.max;
    constexpr int GATE_PIECES = UNITS * sizeof(Gate) / 16;

    // The gate inputs of a turn.
    auto request = [&](int t) {
#pragma unroll
        for (int index = thread; index < BLOCKS * ROWS * GATE_PIECES; index += GROUP) {
            const int piece = index % GATE_PIECES, block = index / GATE_PIECES % BLOCKS, row = index / GATE_PIECES / BLOCKS;
            const bool wanted = t < rows[row].steps;
            const Gate* const from = gates + call.token(rows[row].begin, t) * call.gates_apart + block * hidden;
            asm volatile("{.reg .pred p; setp.ne.s32 p, %2, 0; @p cp.async.cg.shared.global [%0], [%1], 16;}"
                         ::"r"(shared_address(&shared.inputs[tile][block][row][0]) + piece * 16),
                         "l"((const unsigned char*)from + piece * 16), "r"((int)wanted) : "memory");
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
    auto meet_group = [&] { meet(3 + tile, GROUP); };
    // Sends the hidden values in `outgoing`, which enter step `t`, and announces them.
    auto send = [&](int t) {
        meet_group();
        const int chunk = team.member / 4;
        unsigned char* const to = team.own.values(tile, t) + chunk * RIGHT_BYTES;
#pragma unroll
        for (int index = thread; index < ROWS * 2; index += GROUP) {
            const int row = index / 2, piece = team.member % 4 * 2 + index % 2;
            *(Quad*)(to + row * (DEPTH * 2) + (piece ^ row % 8) * 16) =
                *(const Quad*)&shared.outgoing[tile][row][index % 2 * 8];
        }
        meet_group();
        if (thread == 0)
            announce_to_device(team.own.counters(tile) + chunk);
    };

    float cells[COLUMNS], pooled[COLUMNS][3];
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j) {
        const Row row = rows[8 * j + 2 * q + odd];
        cells[j] = Cell{pooled[j], 1}.begin(call, row, unit);
        const bool known = call.hidden_before && row.row >= 0;
        shared.outgoing[tile][8 * j + 2 * q + odd][own_unit] =
            known ? term_of(kept(call.hidden_before[call.start_before(row.row) + unit]), 0) : 0;
    }
    send(0);
    await(shared_address(&shared.loaded), 0);

#pragma unroll 1
    for (int t = 0; t < steps; ++t) {
        request(t);
        // Warp groups multiply one after the other.
        if (tile || (t > 0 && t <= team.shorter)) meet(1 + tile, 2 * GROUP);
        float sums[ROWS / 2];
        multiply_turn<INPUTS>(sums, team.turns_before(tile, t));
        const bool other_waits = tile ? t + 1 < team.longest : t < team.shorter;
        if (other_waits) asm volatile("bar.arrive %0, %1;" ::"r"(2 - tile), "n"(2 * GROUP) : "memory");

        asm volatile("cp.async.wait_all;" ::: "memory");
        meet_group();
        Kept values[COLUMNS];
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) {
            const int column = 8 * j + 2 * q + odd;
            // The lane of the unit's other two gates sends them for this column, and receives two gates for its own.
            const float a = __shfl_xor_sync(~0u, odd ? sums[4 * j] : sums[4 * j + 1], 4);
            const float b = __shfl_xor_sync(~0u, odd ? sums[4 * j + 2] : sums[4 * j + 3], 4);
            const Gates product =
                odd ? Gates{a, b, sums[4 * j + 1], sums[4 * j + 3]} : Gates{sums[4 * j], sums[4 * j + 2], a, b};
            auto input = [&](int block) { return value_of(shared.inputs[tile][block][column][own_unit]); };
            Gates inputs{input(0), input(1), GRU ? 0.0f : input(2), input(BLOCKS - 1)};
            if (GRU && INPUTS) inputs.o = fmaf(product.o, by, inputs.o);
            values[j] = advance(cells[j], product, by, inputs, own);
            shared.outgoing[tile][column][own_unit] = sent(values[j], cells[j]);
        }
        send(t + 1);
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) {
            const Row row = rows[8 * j + 2 * q + odd];
            if (t < row.steps && (all_steps || t + 1 == row.steps))
                Cell{pooled[j], 1}.record(call, row, unit, t, values[j], cells[j]);
        }
    }
}

template <int INPUTS> __device__ __forceinline__ void run(const Team& team) {
    if (threadIdx.x < TILES * GROUP) run_tile<INPUTS>(team, threadIdx.x / GROUP);
    else fetch_turns<INPUTS>(team);
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(THREADS, 1)
    persistent(const __grid_constant__ Calls calls) {
    Memory& shared = memory();
    const int level = LEVELS > 1 ? blockIdx.x / (int)calls.blocks : 0, block = blockIdx.x - level * (int)calls.blocks;
    const Call& call = calls.sides[level];
    const int members = (int)call.hidden / UNITS, number = block / members;
    if (threadIdx.x == 0) {
        make_barrier(shared_address(&shared.loaded), 1);
        for (int stage = 0; stage < STAGES; ++stage) {
            make_barrier(shared_address(&shared.full[stage]), 1);
            make_barrier(shared_address(&shared.empty[stage]), 2 * GROUP / 32); // the warps of a group in both blocks
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    choose_rows(call, TILES * ROWS / 8, number, shared.lengths, shared.rows);
    meet_cluster();
    auto exchange_of = [&](int other) {
        const bool exists = other >= 0 && other < LEVELS;
        return Exchange{exists ? (unsigned char*)calls.sides[other].exchange + number * Exchange::BYTES : nullptr};
    };
    const Team team{call,
                    exchange_of(level),
                    exchange_of(level - 1),
                    exchange_of(level + 1),
                    block % members,
                    shared.rows[0].steps,
                    TILES > 1 ? shared.rows[(TILES - 1) * ROWS].steps : 0};
    if (level == 0) run<0>(team);
    else if (LEVELS > 1) run<MOST - CHUNKS>(team);
    meet_cluster(); // no block ends while another sends to it
}
