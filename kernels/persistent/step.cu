// A recurrent layer for a few steps, or for many rows: one product of [x | h] with [W; R] for each step, whose epilogue is the
// cell.
//
// A turn is one step of a tile: ROWS rows by UNITS hidden units. Blocks are persistent and take turns in a fixed order. The
// first warp group of a block loads: it gathers rows of x by token and rows of h by state slot, converts them to 16 bits where
// they are float32, and writes them as the tensor cores read them. Weights arrive as they are packed. Each other warp group
// multiplies 64 rows, and then advances their cells while the chunks of the next turn arrive. The PAIR blocks of a cluster have
// neighbouring rows and the same units: each fetches a part of the weights for both.
//
// The hidden values of other units come from all blocks of a step. DIRECT blocks read the first ones from the states, so no row
// may start from a slot that any row ends in. Otherwise the blocks first write them in 16 bits, and meet: units of large
// layers are read by many blocks. Between steps the blocks meet too, and the tiles of a step hold only the rows that have it.
// All blocks must be resident, so the launch is cooperative. Meetings count in `meeting`: two words that are zero before the
// launch and after it.
//
// Order of sums: the gate inputs, then along x, then along h, in the order of the tensor cores, whatever the tile. FLOAT32
// hidden values and weights have two terms: each chunk of h is multiplied three times, the small terms first, and the chunks
// are added in float32.
//
// A GRU with the reset gate before the product has two phases in each step, each with its own gates: the reset and update
// gates, and then the new gate, whose product takes what the reset gate lets pass. Blocks meet between them too.
//
// Macros besides those of cell.cuh: ROWS and UNITS of a tile, PAIR blocks of a cluster, STAGES of chunks that arrive, SHARED
// bytes of a block, DIRECT, X_FLOAT32, the dtype of x, RESET_BEFORE, a GRU with the reset gate before the product.
#include "cell.cuh"
#include "../wgmma.cuh"
#include "step.cuh"
#include "step_loader.cuh"

// Writes this block's part of the hidden values before the first step in 16 bits. The warp groups that multiply call it.
__device__ __forceinline__ void gather_hidden(const Step& step) {
    constexpr int AT_ONCE = 8, PIECE = 256;                             // loads under way; units that a warp converts at once
    const Call& call = step.call();
    const int each = (step.rows() + gridDim.x - 1) / gridDim.x, begin = blockIdx.x * each,
              pieces = (step.hidden() + PIECE - 1) / PIECE;
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
                *(Quad*)(step.hidden(0, term) + to[n]) =
                    piece_of(values[n], [&](float a, float b) { return of_hidden(a, b, term); });
    }
    meet(2, MULTIPLY);
    if (threadIdx.x == GROUP) attend(step);
}

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

// The sums of a lane: four units of each part, in two rows that are eight apart. A GRU's product of x for the new gate is
// apart where the reset gate multiplies that of h.
constexpr bool APART = GRU && !RESET_BEFORE;
struct Sums {
    float all[COLUMNS / 2], new_of_x[APART ? UNITS / 2 : 1], chains[FLOAT32 ? COLUMNS / 2 : 1];

    // Returns the index of the sum of a unit of a part for a gate of the phase.
    template <int GATES> static __device__ __forceinline__ int at(int part, int gate, int upper, int unit) {
        return (part * GATES + gate) * 8 + unit / 2 * 4 + upper * 2 + unit % 2;
    }
    // Keeps the compiler from moving reads and writes of the sums over products that are under way.
    __device__ __forceinline__ void settle() {
#pragma unroll
        for (int i = 0; i < COLUMNS / 2; ++i) asm volatile("" : "+f"(all[i])::"memory");
    }
    // The sum of the gate inputs and all chunks. Until a chain of FLOAT32 products ends, its own sum is apart.
    __device__ __forceinline__ float& total(int at) { return (FLOAT32 ? chains : all)[at]; }
    __device__ __forceinline__ float total(int at) const { return (FLOAT32 ? chains : all)[at]; }
    // Adds the sums of a chunk to the sums of the chunks before. Tensor cores round a chain of products towards zero.
    __device__ __forceinline__ void end_chain() {
#pragma unroll
        for (int i = 0; FLOAT32 && i < COLUMNS / 2; ++i) chains[i] += all[i], all[i] = 0.0f;
    }
    __device__ __forceinline__ void set_apart() {
#pragma unroll
        for (int i = 0; APART && i < UNITS / 2; ++i) {
            float& sum = total((i / 8 * BLOCKS + 2) * 8 + i % 8);
            new_of_x[i] = sum, sum = 0.0f;
        }
    }
};

// A warp group that multiplies 64 rows.
struct Multiplier {
    const Step& step;
    const int group, lane = threadIdx.x % 32;
    Memory& shared = memory();
    int chunks = 0;                     // that all turns have multiplied

    // Adds the products of a tile. Calls `before_hidden` when the first hidden values have arrived and before they are
    // multiplied.
    template <int GATES, typename F>
    __device__ __forceinline__ void multiply_tile(Sums& sums, int of_x, int of_h, F before_hidden) {
        const unsigned left = piece_at(shared_address(shared.left)) + group * (64 * 128 / 16),
                       right = piece_at(shared_address(shared.right));
        const unsigned full = shared_address(shared.full), empty = shared_address(shared.empty),
                       others = PAIR > 1 ? in_block(empty, rank() ^ 1) : 0;
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
                if (APART) {
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
                multiply(*(float(*)[GATES * UNITS / 2])sums.all, left + stage * (LEFT_BYTES / 16) + k * 2,
                         right + stage * (RIGHT_BYTES / 16) + k * 2, 1);
            asm volatile("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 1;" ::: "memory");
            // The previous chunk has been read by now.
            if (chunk > 0) release(chunks - 1);
            if (FLOAT32 && chunk % PASSES_OF_H == PASSES_OF_H - 1) {
                asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
                sums.settle();
                sums.end_chain();
                sums.settle();
            }
        }
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
        sums.settle();
        if (of_x + of_h) release(chunks - 1);
        if (!of_h) sums.set_apart();
    }

    // Begins the sums with the gate inputs, from the gate BEGIN on.
    template <int BEGIN, int GATES>
    __device__ __forceinline__ void begin(Sums& sums, const Place (&places)[2], int t, int first) const {
        const Call& call = step.call();
        const float scale = FLOAT32 ? *call.scale : 1.0f;
        for (int i = 0; FLOAT32 && i < COLUMNS / 2; ++i) sums.all[i] = 0.0f;
#pragma unroll
        for (int upper = 0; upper < 2; ++upper) {
            const bool runs = places[upper].steps > t;
            const Gate* const gates = call.gates + (runs ? step.gate_row(places[upper].token) * call.gates_apart : 0) + first;
#pragma unroll
            for (int part = 0; part < PARTS; ++part)
#pragma unroll
                for (int gate = 0; gate < GATES; ++gate) {
                    const bool real = runs && first + 16 * part < step.hidden();
                    const Four inputs = real ? four_of(gates + (BEGIN + gate) * step.hidden() + 16 * part) : Four{};
#pragma unroll
                    for (int k = 0; k < 4; ++k) sums.total(Sums::at<GATES>(part, gate, upper, k)) = inputs.values[k] * scale;
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
    __device__ __forceinline__ void write_halves(Half* to, const float (&h)[4]) const {
        for (int term = 0; term < TERMS; ++term)
            *(uint2*)(to + term * step.size()) = uint2{of_hidden(h[0], h[1], term), of_hidden(h[2], h[3], term)};
    }
    // Writes four units of a row after a step.
    __device__ __forceinline__ void write(const Place& place, int t, int unit, const Four& hidden, const Four& cell) const {
        const Call& call = step.call();
        const long long output = place.row * call.outputs_apart + unit;
        if (call.steps) *(float4*)(call.steps + place.token * call.outputs_apart + unit) = hidden.vector();
        if (call.mean || call.max) pool(place, t, output, hidden);
        if (t + 1 < place.steps) {
            write_halves(step.hidden(t + 1, 0) + step.between(place.row) + unit, hidden.values);
            *(float4*)(step.cells() + step.between(place.row) + unit) = cell.vector();
        } else end(place, output, unit, hidden, cell);
    }
    __device__ __forceinline__ void end(const Place& place, long long output, int unit, const Four& hidden,
                                        const Four& cell) const {
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

    // Advances the cells by a phase. The first of two phases leads to the update gates and the values that the reset gates let
    // pass.
    template <int PHASE, int GATES>
    __device__ __forceinline__ void advance_cells(const Sums& sums, Four (&cells)[PARTS][2], const Place (&places)[2], int t,
                                                  int first) const {
        const Call& call = step.call();
        const float by = FLOAT32 ? 1.0f / *call.scale : 1.0f;
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            const int unit = first + 16 * part;
            Own own[4];
#pragma unroll
            for (int k = 0; k < 4; ++k) own[k] = RESET_BEFORE ? Own{} : own_of(call, unit + k);
#pragma unroll
            for (int upper = 0; upper < 2; ++upper) {
                const Place& place = places[upper];
                Four& cell = cells[part][upper];
                if (PHASE == 0 && t == 0 && place.row >= 0 && place.steps == 0 && unit < step.hidden())
                    end_without_steps(place, unit, cell);
                const bool runs = place.steps > t && unit < step.hidden();
                float* const updates = step.updates() + step.between(place.row) + unit;
                Four hidden, update = PHASE && runs ? four_of(updates) : Four{};
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    auto sum = [&](int gate) { return sums.total(Sums::at<GATES>(part, gate, upper, k)); };
                    if constexpr (!RESET_BEFORE) {
                        const Gates product{sum(0), sum(1), sum(2), GRU ? 0.0f : sum(BLOCKS - 1)};
                        const float new_of_x = GRU ? sums.new_of_x[part * 8 + Sums::at<1>(0, 0, upper, k)] * by : 0.0f;
                        const Kept bits = advance(cell.values[k], product, by, Gates{0.0f, 0.0f, 0.0f, new_of_x}, own[k]);
                        hidden.values[k] = GRU ? cell.values[k] : value_of(bits);
                    } else if constexpr (PHASE == 0) {
                        hidden.values[k] = gate_of(sum(0), by, 0.0f) * cell.values[k];
                        update.values[k] = gate_of(sum(1), by, 0.0f);
                    } else {
                        cell.values[k] = updated(cell.values[k], update.values[k], tanh_of(sum(0) * by));
                        hidden.values[k] = cell.values[k];
                    }
                }
                if (!runs) continue;
                if (PHASE + 1 == PHASES) {
                    write(place, t, unit, hidden, cell);
                } else {
                    *(float4*)updates = update.vector();
                    write_halves(step.passed(0) + step.between(place.row) + unit, hidden.values);
                }
            }
        }
    }

    template <int PHASE, int GATES>
    __device__ __forceinline__ void run_turn(Sums& sums, const Turn& turn, const Place (&places)[2], Four (&cells)[PARTS][2]) {
        const int t = turn.phase / PHASES, first = turn.unit + lane % 4 * 4;
        begin<PHASE * 2, GATES>(sums, places, t, first);
        if (t == 0 && !(PHASES > 1 && turn.kept)) read_cells(cells, places, t, first);
        multiply_tile<GATES>(sums, step.chunks_of_x(), step.chunks_of_h(t), [&] {
            // Other blocks may have advanced these rows last.
            if (t > 0 && !turn.kept) read_cells(cells, places, t, first);
        });
        advance_cells<PHASE, GATES>(sums, cells, places, t, first);
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
            if (turn.kind == PHASE_ENDS) {
                meet(2, MULTIPLY);
                if (threadIdx.x == GROUP) attend(step);
                continue;
            }
            Sums sums;
            if (turn.phase % PHASES == 0) run_turn<0, MOST_GATES>(sums, turn, places, cells);
            else run_turn<1, 1>(sums, turn, places, cells);
        }
    }
};

extern "C" __global__ void CLUSTER_OF(PAIR, 1) __launch_bounds__(THREADS, 1) persistent(const __grid_constant__ Step step) {
    Memory& shared = memory();
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; ++stage) {
            make_barrier(shared_address(&shared.full[stage]), GROUP + 1); // the loading threads, and the weights
            make_barrier(shared_address(&shared.empty[stage]), PAIR * MULTIPLY / 32);
        }
        for (int buffer = 0; buffer < 2; ++buffer) {
            make_barrier(shared_address(&shared.announced[buffer]), 1);
            make_barrier(shared_address(&shared.taken[buffer]), MULTIPLY / 32);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    wait_for_last();
    let_next_begin();
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
