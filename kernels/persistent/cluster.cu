// A recurrent layer that fits a thread-block cluster: one launch for all steps, and the recurrent weights never move.
//
// A cluster of CTAS blocks owns a tile of OCTETS octets of rows. Block `rank` owns UNITS of the hidden units. Two warps share a
// group of eight units; each multiplies one half of the hidden vector, with its weights in registers (HELD products) and shared
// memory (the rest). Lane 4 g + q then holds half of the sum of all four gates of unit g, for rows 2q and 2q + 1. The two warps
// exchange halves, so that a lane of half s owns one cell of each octet: unit g of row 2q + s.
//
// A block gathers its new hidden values in its shared memory and copies them to every block of the cluster, whole lines at a
// time (st.async). A barrier of each octet counts the bytes that arrive, and the next step waits on it. No other barrier spans
// the cluster. A block writes step t + 1 of an octet only when all of step t has arrived, and every block sends step t after it
// has read step t - 1.
//
// Macros besides those of cell.cuh: CTAS blocks of a cluster, UNITS of a block, OCTETS of a tile, HELD products in registers,
// SHARED bytes of a block.
constexpr int HIDDEN = CTAS * UNITS, GROUPS = UNITS / 8, WARPS = 2 * GROUPS;
constexpr int CHUNKS = HIDDEN / 64;                             // chunks of 32 units in each half
constexpr int PRODUCTS = 4 * CHUNKS * (FLOAT32 ? 2 : 1), SPILLED = PRODUCTS - HELD; // weights of a warp for one octet
#include "cell.cuh"
#include "held.cuh"

constexpr int STRIDE = UNITS + 8;                               // stride of a row's outgoing values, without bank conflicts
constexpr int PIECES = TERMS * HIDDEN;                          // pieces of an octet
constexpr int PARCELS = (PIECES + THREADS - 1) / THREADS;       // pieces that a thread sends at most
static_assert(THREADS == 32 * WARPS && HIDDEN % 64 == 0 && UNITS % 8 == 0 && HELD <= PRODUCTS, "launch shape");

struct Memory {
    Quad spilled[WARPS][SPILLED ? SPILLED : 1][32];
    Quad buffers[OCTETS][2][PIECES];
    Gates halves[OCTETS][WARPS][32];
    alignas(16) Half outgoing[OCTETS][TERMS][8][STRIDE];
    float cells[OCTETS][3][THREADS];
    Row rows[OCTETS * 8];
    unsigned long long barriers[OCTETS][2];
    int lengths[SORTED];
};
static_assert(sizeof(Memory) == SHARED, "SHARED differs from ClusterShape.shared in cluster.py");

// Selects values. Indexing an array with the condition would put the array into memory.
__device__ __forceinline__ Gates pick(bool first, const Gates& a, const Gates& b) {
    return Gates{first ? a.i : b.i, first ? a.f : b.f, first ? a.g : b.g, first ? a.o : b.o};
}

extern "C" __global__ void __cluster_dims__(CTAS, 1, 1) __launch_bounds__(THREADS, 1)
    persistent(const __grid_constant__ Calls calls) {
    extern __shared__ __align__(128) unsigned char dynamic[];
    Memory& shared = *(Memory*)dynamic;
    const int side = SIDES > 1 && blockIdx.x >= calls.blocks, block = blockIdx.x - side * (int)calls.blocks;
    const Call& call = calls.sides[side];
    const int width = (int)call.width, hidden = (int)call.hidden;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, q = lane % 4;
    const int half = warp / GROUPS, pair = warp % GROUPS, column = 2 * q + half;
    const unsigned rank = cluster_rank();
    const int unit = ((int)rank * GROUPS + pair) * 8 + g;

    const Quad* packed = call.packed + (((long long)rank * GROUPS + pair) * 2 + half) * PRODUCTS * 32 + lane;
    Quad weights[HELD];
#pragma unroll
    for (int product = 0; product < PRODUCTS; ++product) {
        if (is_held(product)) weights[held_before(product)] = packed[product * 32];
        else shared.spilled[warp][product - held_before(product)][lane] = packed[product * 32];
    }

    choose_rows(call, OCTETS, block / CTAS, shared.lengths, shared.rows);
    for (int piece = threadIdx.x; piece < OCTETS * PIECES; piece += THREADS) {
        const int octet = piece / PIECES, term = piece % PIECES / HIDDEN, group = piece % HIDDEN / 8, row = piece % 8;
        shared.buffers[octet][0][term * HIDDEN + piece_index(group, row)] =
            piece_before(call, shared.rows[octet * 8 + row], group, term);
    }
    const unsigned barrier = shared_address(&shared.barriers[0][0]);
    if (threadIdx.x == 0) {
        for (int n = 0; n < 2 * OCTETS; ++n) make_barrier(barrier + n * 8, 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        for (int n = 0; n < 2 * OCTETS; ++n) expect(barrier + n * 8, width * PIECES * 2);
    }

    // This lane's cell in each octet. The first row of an octet is its longest.
    const Own own = own_of(call, unit);
    const float by = unit_of(call);
    const long long apart = call.forward ? call.gates_apart : -call.gates_apart;
    int steps[OCTETS], longest[OCTETS];
    const Gate* next[OCTETS];
    float cell[OCTETS];
    Input x[OCTETS];
#pragma unroll
    for (int octet = 0; octet < OCTETS; ++octet) {
        const Row row = shared.rows[octet * 8 + column];
        steps[octet] = unit < hidden ? row.steps : 0;
        longest[octet] = shared.rows[octet * 8].steps;
        next[octet] = call.gates + row.begin * call.gates_apart + unit;
        x[octet] = input_at(next[octet], hidden, 0 < steps[octet]);
        cell[octet] = Cell{&shared.cells[octet][0][threadIdx.x], THREADS}.begin(call, row, unit);
    }
    __syncthreads();
    meet_cluster();

    // The pieces that this thread sends, by block, then by term, then by row, then by group. The addresses are of the first
    // octet's second buffer and barrier, which even steps use.
    unsigned to[PARCELS], arrived[PARCELS];
    const Quad* from[PARCELS];
    const int pieces = TERMS * width * GROUPS;
#pragma unroll
    for (int parcel = 0; parcel < PARCELS; ++parcel) {
        const int index = parcel * THREADS + threadIdx.x, peer = index / pieces, group = index % GROUPS;
        const int row = index % pieces / GROUPS % width, term = index % pieces / GROUPS / width;
        const int at = term * HIDDEN + piece_index((int)rank * GROUPS + group, row);
        from[parcel] = peer < CTAS ? (const Quad*)&shared.outgoing[0][term][row][group * 8] : nullptr;
        to[parcel] = in_block(shared_address(&shared.buffers[0][1][at]), min(peer, CTAS - 1));
        arrived[parcel] = in_block(shared_address(&shared.barriers[0][1]), min(peer, CTAS - 1));
    }
    // A column without a row reads the values of the first row.
    const Quad* const read_at = &shared.buffers[0][0][half * CHUNKS * 32 + (g < width ? g : 0) * 4 + q];
    const bool all_steps = call.steps || call.mean || call.max;

    int odd = 0, parity = 1;                // parity of the step; phase parity of its barrier, which serves every second step
    for (int t = 0; t < longest[0]; ++t, odd ^= 1, parity ^= odd) {
        Gates own_half[OCTETS];
#pragma unroll
        for (int octet = 0; octet < OCTETS; ++octet) {
            if (OCTETS > 1 && t >= longest[octet]) break;
            if (t > 0) await(barrier + octet * 16 + odd * 8, parity);
            // The two quarters of this half alternate and have separate sums, which are the parts of the grid kernel.
            float sums[2][2][4] = {};
#pragma unroll
            for (int turn = 0; turn < CHUNKS; ++turn) {
                const int quarter = turn % 2, chunk = quarter * ((CHUNKS + 1) / 2) + turn / 2;
                const Quad h = read_at[(octet * 2 + odd) * PIECES + chunk * 32];
                const Quad small = TERMS > 1 ? read_at[(octet * 2 + odd) * PIECES + HIDDEN + chunk * 32] : Quad{};
                auto weight_of = [&](int part, int term) {
                    const int product = (4 * chunk + part) * TERMS + term, held = held_before(product);
                    return is_held(product) ? weights[held] : shared.spilled[warp][product - held][lane];
                };
                // Tensor cores round sums towards zero. With two terms, their sums are of one chunk, and the small products
                // come first.
                float of_chunk[2][4] = {};
#pragma unroll
                for (int part = 0; TERMS > 1 && part < 4; ++part) {
                    multiply(of_chunk[part % 2], weight_of(part, 1), part / 2 ? h.z : h.x, part / 2 ? h.w : h.y);
                    multiply(of_chunk[part % 2], weight_of(part, 0), part / 2 ? small.z : small.x,
                             part / 2 ? small.w : small.y);
                }
                auto& total = TERMS > 1 ? of_chunk : sums[quarter];
#pragma unroll
                for (int part = 0; part < 4; ++part)
                    multiply(total[part % 2], weight_of(part, 0), part / 2 ? h.z : h.x, part / 2 ? h.w : h.y);
#pragma unroll
                for (int value = 0; TERMS > 1 && value < 8; ++value)
                    sums[quarter][value / 4][value % 4] += of_chunk[value / 4][value % 4];
            }
            Gates totals[2];
#pragma unroll
            for (int s = 0; s < 2; ++s)
                totals[s] = Gates{sums[0][0][s] + sums[1][0][s], sums[0][0][2 + s] + sums[1][0][2 + s],
                                sums[0][1][s] + sums[1][1][s], sums[0][1][2 + s] + sums[1][1][2 + s]};
            shared.halves[octet][half ? pair : pair + GROUPS][lane] = pick(half, totals[0], totals[1]);
            own_half[octet] = pick(half, totals[1], totals[0]);
        }
        __syncthreads();
        Kept bits[OCTETS];
#pragma unroll
        for (int octet = 0; octet < OCTETS; ++octet) {
            if (OCTETS > 1 && t >= longest[octet]) break;
            bits[octet] = advance(cell[octet], own_half[octet] + shared.halves[octet][warp][lane], by, x[octet].values(), own);
#pragma unroll
            for (int term = 0; term < TERMS; ++term)
                shared.outgoing[octet][term][column][pair * 8 + g] = term_of(bits[octet], term);
        }
        __syncthreads();
#pragma unroll
        for (int octet = 0; octet < OCTETS; ++octet) {
            if (t + 1 >= longest[octet]) break;
#pragma unroll
            for (int parcel = 0; parcel < PARCELS; ++parcel)
                if (from[parcel])
                    send(to[parcel] + (octet * 2 - odd) * PIECES * 16, arrived[parcel] + octet * 16 - odd * 8,
                         from[parcel][octet * TERMS * STRIDE]);
        }
        // While the pieces are in flight: rearm the barriers, load the next step's inputs, and write the outputs.
#pragma unroll
        for (int octet = 0; octet < OCTETS; ++octet) {
            if (t > 0 && t < longest[octet] && threadIdx.x == 0) expect(barrier + octet * 16 + odd * 8, width * PIECES * 2);
            next[octet] += apart;
            x[octet] = input_at(next[octet], hidden, t + 1 < steps[octet]);
            if (t < steps[octet] && (all_steps || t + 1 == steps[octet]))
                Cell{&shared.cells[octet][0][threadIdx.x], THREADS}.record(call, shared.rows[octet * 8 + column], unit, t,
                                                                           bits[octet], cell[octet]);
        }
    }
}
