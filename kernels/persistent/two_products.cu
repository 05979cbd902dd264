// A recurrent layer with two dependent products in each step: one launch for all steps, and the recurrent weights never move.
//
//   LSTM with a projection      c, m = cell of x + h R              h = m P                                 (Sak et al. 2014)
//   GRU with the reset before   r, z = sigmoid(x + h R),  m = r h   n = tanh(x + m N),  h = n + z (h - n)   (Cho et al. 2014)
//
// A tile of OCTETS octets of rows belongs to MEMBERS blocks: a cluster, or a team of blocks spread over the device. A block
// owns UNITS hidden units and OUTPUTS numbers of h (of a GRU as many), and holds their weights: HELD products of a warp in
// registers, the rest in shared memory. The first product reads h, the second one reads m. Each warp multiplies every PARTS-th
// chunk of the vector by all weight rows of the block, and writes its sums to shared memory. Each thread then adds the parts of
// its own cells, pairwise. The block gathers its new values in shared memory and sends them to all members (exchange.cuh).
//
// A vector needs one buffer. A block sends h of the next step when all of m has arrived, and every block sends its part of m
// after it has read h. The same holds for m. The blocks also exchange the state that the rows start from, so that each value of
// the state is read and written by the same thread.
//
// The order of sums depends on the widths of both vectors alone. All numbers of a row therefore have the same bits in a cluster
// and in a team of any size.
//
// Macros besides those of cell.cuh: CLUSTER, whether a tile's blocks are a cluster, MEMBERS, HIDDEN and VECTOR, the widths of m
// and h, UNITS and OUTPUTS of a block, OCTETS of a tile, HELD products in registers, SHARED bytes of a block.
constexpr int PARTS = THREADS / 32, CELL_GROUPS = THREADS / 64; // cells of a group of units take two warps, as in cluster.cu

// Product 0 reads h, VECTOR numbers, and product 1 reads m, HIDDEN numbers.
template <int N> struct Product {
    static constexpr int GROUPS = ((N ? HIDDEN : VECTOR) + 7) / 8;                  // groups of the vector that it reads
    static constexpr int PIECES = (GROUPS + 3) / 4 * 32;                            // room of an octet of this vector
    static constexpr int CHUNKS = (GROUPS + 4 * PARTS - 1) / (4 * PARTS);           // chunks of a warp
    static constexpr int OWNED = (N ? OUTPUTS : UNITS) / 8;                         // groups that a block computes
    static constexpr int TILES = N ? (OWNED + 1) / 2 : OWNED * (GRU ? 1 : 2);       // of 16 weight rows
    static constexpr int SIZE = 2 * CHUNKS * TILES;                                 // weights of a warp
    static constexpr int TURNS = (OWNED + CELL_GROUPS - 1) / CELL_GROUPS;           // cells of a thread in each octet
};
constexpr int PRODUCTS = Product<0>::SIZE + Product<1>::SIZE, SPILLED = PRODUCTS - HELD;
#include "cell.cuh"
#include "held.cuh"

constexpr int TILES = Product<0>::TILES > Product<1>::TILES ? Product<0>::TILES : Product<1>::TILES;
constexpr int STRIDE = (UNITS > OUTPUTS ? UNITS : OUTPUTS) + 8;  // stride of a row's outgoing values, without bank conflicts
static_assert(THREADS % 64 == 0 && UNITS % 8 == 0 && OUTPUTS % 8 == 0 && HELD <= PRODUCTS && TERMS == 1, "launch shape");

struct Memory {
    Quad spilled[PARTS][SPILLED ? SPILLED : 1][32];
    Pair parts[OCTETS][2][PARTS][TILES][32];
#if CLUSTER
    Quad hidden[OCTETS][Product<0>::PIECES], between[OCTETS][Product<1>::PIECES];
#endif
    alignas(16) Half outgoing[OCTETS][8][STRIDE];
    float cells[OCTETS][3][OUTPUTS * 8];
    Row rows[OCTETS * 8];
    unsigned long long barriers[2][OCTETS];
    int lengths[SORTED];
};
static_assert(sizeof(Memory) == SHARED, "SHARED differs from TwoProductsShape.shared in two_products.py");
#include "exchange.cuh"

// Loads this warp's weights of one product into registers and shared memory.
template <int N>
__device__ __forceinline__ void load_weights(Memory& shared, Quad (&weights)[HELD], const Call& call, int rank) {
    using P = Product<N>;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int index = 0; index < P::SIZE; ++index) {
        const int product = N * Product<0>::SIZE + index, tile = index / (2 * P::CHUNKS),
                  chunk = index / 2 % P::CHUNKS * PARTS + warp;
        const Quad w =
            call.packed[(((long long)(rank * P::TILES + tile) * P::CHUNKS * PARTS + chunk) * 2 + index % 2) * 32 + lane];
        if (is_held(product)) weights[held_before(product)] = w;
        else shared.spilled[warp][product - held_before(product)][lane] = w;
    }
}

// Multiplies this warp's pieces of one octet, and writes its part of the sums.
template <int N>
__device__ __forceinline__ void multiply_part(Memory& shared, const Quad (&weights)[HELD],
                                              const Quad (&pieces)[Product<N>::CHUNKS], int octet) {
    using P = Product<N>;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int tile = 0; tile < P::TILES; ++tile) {
        float sums[2][4] = {}; // two chains finish sooner than one
#pragma unroll
        for (int chunk = 0; chunk < P::CHUNKS; ++chunk)
#pragma unroll
            for (int part = 0; part < 2; ++part) {
                const int product = N * Product<0>::SIZE + (tile * P::CHUNKS + chunk) * 2 + part, held = held_before(product);
                const Quad w = is_held(product) ? weights[held] : shared.spilled[warp][product - held][lane];
                multiply(sums[part], w, part ? pieces[chunk].z : pieces[chunk].x, part ? pieces[chunk].w : pieces[chunk].y);
            }
#pragma unroll
        for (int s = 0; s < 2; ++s)
            shared.parts[octet][s][warp][tile][lane] = Pair{sums[0][s] + sums[1][s], sums[0][2 + s] + sums[1][2 + s]};
    }
}

// Returns this lane's sums of the weight rows g and g + 8 of a tile.
__device__ __forceinline__ Pair sum_of_parts(const Memory& shared, int octet, int odd, int tile) {
    Pair sums[PARTS];
#pragma unroll
    for (int part = 0; part < PARTS; ++part) sums[part] = shared.parts[octet][odd][part][tile][threadIdx.x % 32];
#pragma unroll
    for (int apart = 1; apart < PARTS; apart *= 2)
#pragma unroll
        for (int part = 0; part < PARTS; part += 2 * apart)
            sums[part] = Pair{sums[part].low + sums[part + apart].low, sums[part].high + sums[part + apart].high};
    return sums[0];
}

// A cell of a thread, and the values of the first product that the second product needs.
struct Between {
    float cell;                         // of an LSTM its cell, of a GRU its hidden value
    float update, candidate;            // of a GRU: z, and the gate input of n
};

// Computes this thread's values of m from its sums.
__device__ __forceinline__ Kept first_values(Between& between, const Memory& shared, int octet, int odd, int group,
                                             const Input& x, const Own& own, float by) {
#if GRU
    const Pair sums = sum_of_parts(shared, octet, odd, group);
    between.update = gate_of(sums.high, by, value_of(x.f));
    between.candidate = value_of(x.o);
    return kept(gate_of(sums.low, by, value_of(x.i)) * between.cell);
#else
    const Pair first = sum_of_parts(shared, octet, odd, group * 2), second = sum_of_parts(shared, octet, odd, group * 2 + 1);
    return advance(between.cell, Gates{first.low, first.high, second.low, second.high}, by, x.values(), own);
#endif
}

// Computes this thread's values of h from its sums.
__device__ __forceinline__ Kept second_values(Between& between, const Memory& shared, int octet, int odd, int group, float by) {
    const Pair sums = sum_of_parts(shared, octet, odd, group / 2);
    const float sum = group % 2 ? sums.high : sums.low;
#if GRU
    between.cell = updated(between.cell, between.update, tanh_of(fmaf(sum, by, between.candidate)));
    return kept(between.cell);
#else
    return kept(sum);
#endif
}

#if CLUSTER
#define TOGETHER __cluster_dims__(MEMBERS, 1, 1)
#else
#define TOGETHER
#endif
extern "C" __global__ void TOGETHER __launch_bounds__(THREADS, 1) persistent(const __grid_constant__ Calls calls) {
    extern __shared__ __align__(128) unsigned char dynamic[];
    Memory& shared = *(Memory*)dynamic;
    const int side = SIDES > 2 && blockIdx.x >= calls.blocks, block = blockIdx.x - side * (int)calls.blocks;
    // Of m with its cells, and of h with its outputs.
    const Call &first = calls.sides[2 * side], &second = calls.sides[2 * side + 1];
    const int rank = block % MEMBERS, lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, q = lane % 4;
    const int odd = warp % 2, column = 2 * q + odd;

    Quad weights[HELD];
    load_weights<0>(shared, weights, first, rank);
    load_weights<1>(shared, weights, second, rank);
    choose_rows(first, OCTETS, block / MEMBERS, shared.lengths, shared.rows);

    // This thread's cells: unit g of every CELL_GROUPS-th group, in this column of each octet. The first row of an octet is its
    // longest.
    constexpr int UNIT_TURNS = Product<0>::TURNS, OUTPUT_TURNS = Product<1>::TURNS;
    auto group_of = [&](int turn) { return turn * CELL_GROUPS + warp / 2; };
    auto unit_of_turn = [&](int turn) { return rank * UNITS + group_of(turn) * 8 + g; };
    auto output_of_turn = [&](int turn) { return rank * OUTPUTS + group_of(turn) * 8 + g; };
    auto pools_of = [&](int octet, int turn) {
        return Cell{&shared.cells[octet][0][turn * THREADS + threadIdx.x], OUTPUTS * 8};
    };
    const float by = unit_of(first);
    const long long apart = first.forward ? first.gates_apart : -first.gates_apart;
    int steps[OCTETS], longest[OCTETS];
    const Gate* next[OCTETS];
    Between cells[OCTETS][UNIT_TURNS];
    Input x[OCTETS][UNIT_TURNS];
    Own own[UNIT_TURNS];
#pragma unroll
    for (int turn = 0; turn < UNIT_TURNS; ++turn) own[turn] = GRU ? Own{} : own_of(first, unit_of_turn(turn));
#pragma unroll
    for (int octet = 0; octet < OCTETS; ++octet) {
        const Row row = shared.rows[octet * 8 + column];
        steps[octet] = row.steps;
        longest[octet] = shared.rows[octet * 8].steps;
        next[octet] = first.gates + row.begin * first.gates_apart;
#pragma unroll
        for (int turn = 0; turn < UNIT_TURNS; ++turn) {
            const int unit = unit_of_turn(turn);
            const bool real = group_of(turn) < Product<0>::OWNED && unit < HIDDEN;
            x[octet][turn] = input_at(next[octet] + unit, HIDDEN, real && 0 < steps[octet]);
            cells[octet][turn] = Between{};
            if (!GRU && real && row.row >= 0) {
                if (first.cell_before) cells[octet][turn].cell = first.cell_before[first.start_before(row.row) + unit];
                if (!row.steps) first.cell_after[first.start_after(row.row) + unit] = cells[octet][turn].cell;
            }
        }
#pragma unroll
        for (int turn = 0; turn < OUTPUT_TURNS; ++turn)
            if (group_of(turn) < Product<1>::OWNED) {
                const float hidden = pools_of(octet, turn).begin(second, row, output_of_turn(turn));
                if (GRU) cells[octet][turn].cell = hidden;
                shared.outgoing[octet][column][group_of(turn) * 8 + g] = kept(hidden);
            }
    }
    Exchange exchange(shared, second, block / MEMBERS, rank);
    if (longest[0]) exchange.send<0>(0, 1);
    const bool all_steps = second.steps || second.mean || second.max;

    for (int t = 0; t < longest[0]; ++t) {
        Arriving<0> of_hidden;
        exchange.request<0>(of_hidden, 0);
#pragma unroll
        for (int octet = 0; octet < OCTETS; ++octet) {
            if (OCTETS > 1 && t >= longest[octet]) break;
            Quad pieces[Product<0>::CHUNKS];
            exchange.receive<0>(pieces, of_hidden, octet, t + 1);
            if (octet + 1 < OCTETS) exchange.request<0>(of_hidden, octet + 1);
            multiply_part<0>(shared, weights, pieces, octet);
        }
        __syncthreads();
#pragma unroll
        for (int octet = 0; octet < OCTETS; ++octet) {
            if (OCTETS > 1 && t >= longest[octet]) break;
#pragma unroll
            for (int turn = 0; turn < UNIT_TURNS; ++turn)
                if (group_of(turn) < Product<0>::OWNED)
                    shared.outgoing[octet][column][group_of(turn) * 8 + g] =
                        first_values(cells[octet][turn], shared, octet, odd, group_of(turn), x[octet][turn], own[turn], by);
        }
        __syncthreads();
        exchange.send<1>(t, t + 1);
        // While the pieces are in flight: load the next step's inputs, and write the cells.
#pragma unroll
        for (int octet = 0; octet < OCTETS; ++octet) {
            next[octet] += apart;
#pragma unroll
            for (int turn = 0; turn < UNIT_TURNS; ++turn) {
                const int unit = unit_of_turn(turn);
                const bool real = group_of(turn) < Product<0>::OWNED && unit < HIDDEN;
                x[octet][turn] = input_at(next[octet] + unit, HIDDEN, real && t + 1 < steps[octet]);
                if (!GRU && real && t + 1 == steps[octet])
                    first.cell_after[first.start_after(shared.rows[octet * 8 + column].row) + unit] = cells[octet][turn].cell;
            }
        }

        Arriving<1> of_between;
        exchange.request<1>(of_between, 0);
#pragma unroll
        for (int octet = 0; octet < OCTETS; ++octet) {
            if (OCTETS > 1 && t >= longest[octet]) break;
            Quad pieces[Product<1>::CHUNKS];
            exchange.receive<1>(pieces, of_between, octet, t + 1);
            if (octet + 1 < OCTETS) exchange.request<1>(of_between, octet + 1);
            multiply_part<1>(shared, weights, pieces, octet);
        }
        __syncthreads();
        Kept bits[OCTETS][OUTPUT_TURNS];
#pragma unroll
        for (int octet = 0; octet < OCTETS; ++octet) {
            if (OCTETS > 1 && t >= longest[octet]) break;
#pragma unroll
            for (int turn = 0; turn < OUTPUT_TURNS; ++turn)
                if (group_of(turn) < Product<1>::OWNED)
                    shared.outgoing[octet][column][group_of(turn) * 8 + g] = bits[octet][turn] =
                        second_values(cells[octet][GRU ? turn : 0], shared, octet, odd, group_of(turn), by);
        }
        __syncthreads();
        if (t + 1 < longest[0]) exchange.send<0>(t + 1, t + 2);
#pragma unroll
        for (int octet = 0; octet < OCTETS; ++octet)
#pragma unroll
            for (int turn = 0; turn < OUTPUT_TURNS; ++turn)
                if (group_of(turn) < Product<1>::OWNED && output_of_turn(turn) < VECTOR && t < steps[octet] &&
                    (all_steps || t + 1 == steps[octet]))
                    pools_of(octet, turn).record(second, shared.rows[octet * 8 + column], output_of_turn(turn), t,
                                                 bits[octet][turn], cells[octet][GRU ? turn : 0].cell);
    }
}
