// The LSTM of a layer that no cluster holds: the same idea over many blocks, hidden values exchanged through the L2 cache.
//
// A team of blocks takes a tile of octets of rows; every member owns UNITS hidden units and holds their recurrent weights, HELD
// products of a warp in registers, the rest in shared memory. Each of the eight warps multiplies its eighth of the hidden vector, so
// that it fetches only that; the eighths are added in shared memory, in order. Two warps for each group of units then own its cells,
// as in cluster.cu. The pieces of the next octet are under way meanwhile.
//
// Data are their own signal: no hidden value is larger than one, so that the top bit of its exponent is free, and tells whether a
// piece is this step's or the one of two steps before. Whoever needs a piece reads it until it is this step's; nothing else is
// waited for. (A NaN loses that bit on the way and is no NaN to the other units; in its own unit it stays one.) There are two
// buffers for each octet, all zeros at first. A member writes step t + 1 over step t - 1 when it has all of step t, which everybody
// sent after reading step t - 1. All blocks must be resident, so that the launch is a cooperative one.
constexpr int WARPS = 8, GROUPS = UNITS / 8, CELLS = UNITS * 8;
constexpr int PRODUCTS = GROUPS * CHUNKS * 4, SPILLED = PRODUCTS - HELD; // of a warp, for one octet; CHUNKS of 32 units in its eighth
#include "cell.cuh"

constexpr unsigned TAG = 0x40004000u;                                    // of the two values in a word
static_assert(THREADS == 32 * WARPS && UNITS % 8 == 0 && CELLS <= THREADS && HELD <= PRODUCTS, "launch shape");

struct alignas(8) Pair {
    float low, high;
};
struct Memory {
    Quad spilled[WARPS][SPILLED ? SPILLED : 1][32];
    Quad first[WARPS][CHUNKS][32];
    Pair parts[2][2][WARPS][2 * GROUPS][32];
    alignas(16) Half outgoing[WARPS][4][8];
    int lengths[SORTED];
};
static_assert(sizeof(Memory) == SHARED, "as in launch.py");

// Step t's tag; that of steps 1 and 2 is set.
__device__ __forceinline__ unsigned tag_of(int t) { return (t - 1) / 2 % 2 ? 0 : TAG; }
__device__ __forceinline__ bool missing(const Quad& piece, unsigned tag) {
    return ((piece.x ^ tag) | (piece.y ^ tag) | (piece.z ^ tag) | (piece.w ^ tag)) & TAG;
}
__device__ __forceinline__ Quad tagged(const Quad& piece, unsigned tag) {
    return Quad{piece.x & ~TAG | tag, piece.y & ~TAG | tag, piece.z & ~TAG | tag, piece.w & ~TAG | tag};
}
// A piece as it is at this moment, or, where none is wanted, one that is never missing.
__device__ __forceinline__ Quad fetch(const Quad* at, bool wanted, unsigned tag) {
    Quad piece{tag, tag, tag, tag};
    if (wanted)
        asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(piece.x), "=r"(piece.y), "=r"(piece.z), "=r"(piece.w) : "l"(at) : "memory");
    return piece;
}
__device__ __forceinline__ void store(Quad* at, const Quad& piece) {
    asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %2, %3, %4};"
                 ::"l"(at), "r"(piece.x), "r"(piece.y), "r"(piece.z), "r"(piece.w) : "memory");
}

// The shared memory after `Memory`, for each octet: eight rows, and each cell.
extern "C" __global__ void __launch_bounds__(THREADS, 1) lstm(const __grid_constant__ Call call) {
    extern __shared__ __align__(128) unsigned char dynamic[];
    Memory& own = *(Memory*)dynamic;
    const int octets = (int)call.octets, groups = ((int)call.hidden + 7) / 8, room = (groups + 3) / 4 * 32;
    const int members = (groups + GROUPS - 1) / GROUPS, team = blockIdx.x / members, member = blockIdx.x % members;
    Row* const rows = (Row*)(dynamic + sizeof(Memory));
    float* const cells = (float*)(rows + octets * 8);

    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, q = lane % 4;
    Quad weights[HELD];
#pragma unroll
    for (int product = 0; product < PRODUCTS; ++product) {
        const long long group = member * GROUPS + product / (4 * CHUNKS);
        const Quad w = call.packed[((group * WARPS + warp) * 4 * CHUNKS + product % (4 * CHUNKS)) * 32 + lane];
        if (is_held(product)) weights[held_before(product)] = w;
        else own.spilled[warp][product - held_before(product)][lane] = w;
    }

    // As the owner of a cell: warps 0 and 1 have the even and odd rows of the first group, and so on.
    const bool owner = threadIdx.x < CELLS;
    const int odd = warp % 2, column = 2 * q + odd, group = member * GROUPS + warp / 2, unit = group * 8 + g;
    choose_rows(call, octets, team, own.lengths, rows);
    auto cell_of = [&](int octet) { return Cell{cells + octet * 3 * CELLS + threadIdx.x, CELLS}; };
    for (int octet = 0; owner && octet < octets; ++octet)
        cell_of(octet).state[0] = cell_of(octet).begin(call, rows[octet * 8 + column], unit);

    // This lane's pieces are those of row g and of every fourth group from `first` on, as many as there are.
    Quad* const buffers = (Quad*)call.exchange + (long long)team * octets * 2 * room;
    auto buffer = [&](int octet, int t) { return buffers + (long long)(octet * 2 + t % 2) * room; };
    const int first = warp * CHUNKS * 4 + q, there = (groups - first + 3) / 4;
    const int place = place_of(first, g);

    auto input_of = [&](const Row& row, int t) {
        const bool live = owner && t < row.steps && unit < call.hidden;
        return input_at(call.gates + (row.begin + t) * 4 * call.hidden + unit, (int)call.hidden, live);
    };

    const int longest = rows[0].steps;
    Row row = rows[column];
    Input x = input_of(row, 0);
    Quad hidden[CHUNKS];
    for (int t = 0, octet = 0, turn = 0; t < longest; turn ^= 1) {
        // The next turn is the next octet that has this step, or the first one's next step. Its input is under way a turn before.
        const bool wraps = octet + 1 == octets || t >= rows[octet * 8 + 8].steps;
        const int next_t = wraps ? t + 1 : t, next_octet = wraps ? 0 : octet + 1;
        const Row next_row = rows[next_octet * 8 + column];
        const Input next_x = input_of(next_row, next_t);
        const int wanted = t < rows[octet * 8 + g].steps ? there : 0, next_wanted = next_t < rows[next_octet * 8 + g].steps ? there : 0;

        if (t == 0) {
#pragma unroll 1
            for (int chunk = 0; chunk < CHUNKS; ++chunk)
                own.first[warp][chunk][lane] = piece_before(call, rows[octet * 8 + g], first + chunk * 4);
#pragma unroll
            for (int chunk = 0; chunk < CHUNKS; ++chunk) hidden[chunk] = own.first[warp][chunk][lane];
        } else {
            const Quad* const from = buffer(octet, t) + place;
            const unsigned tag = tag_of(t);
            if (octets == 1) {
                // Until the first piece is there nobody asks for the others: spinning on all of them would slow down their senders.
                do hidden[0] = fetch(from, 0 < wanted, tag);
                while (__any_sync(~0u, missing(hidden[0], tag)));
#pragma unroll
                for (int chunk = 1; chunk < CHUNKS; ++chunk) hidden[chunk] = fetch(from + chunk * 32, chunk < wanted, tag);
            }
#pragma unroll
            for (int chunk = 0; chunk < CHUNKS; ++chunk) {
                while (missing(hidden[chunk], tag)) hidden[chunk] = fetch(from + chunk * 32, true, tag);
                hidden[chunk] = tagged(hidden[chunk], 0);
            }
        }
        __syncwarp();

#pragma unroll
        for (int of = 0; of < GROUPS; ++of) {
            float sums[2][2][4] = {};
#pragma unroll
            for (int chunk = 0; chunk < CHUNKS; ++chunk) {
                const Quad h = hidden[chunk];
#pragma unroll
                for (int part = 0; part < 4; ++part) {
                    const int product = (of * CHUNKS + chunk) * 4 + part, held = held_before(product);
                    const Quad w = is_held(product) ? weights[held] : own.spilled[warp][product - held][lane];
                    multiply(sums[part / 2][part % 2], w, part / 2 ? h.z : h.x, part / 2 ? h.w : h.y);
                }
            }
#pragma unroll
            for (int m = 0; m < 2; ++m)
#pragma unroll
                for (int s = 0; s < 2; ++s)
                    own.parts[turn][s][warp][of * 2 + m][lane] =
                        Pair{sums[0][m][s] + sums[1][m][s], sums[0][m][2 + s] + sums[1][m][2 + s]};
        }
        if (octets > 1 && next_t > 0) {
            const Quad* const from = buffer(next_octet, next_t) + place;
#pragma unroll
            for (int chunk = 0; chunk < CHUNKS; ++chunk) hidden[chunk] = fetch(from + chunk * 32, chunk < next_wanted, tag_of(next_t));
        }
        __syncthreads();

        if (owner) {
            Gates gates{0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
            for (int part = 0; part < WARPS; ++part) {
                const Pair one = own.parts[turn][odd][part][warp / 2 * 2][lane], two = own.parts[turn][odd][part][warp / 2 * 2 + 1][lane];
                gates = gates + Gates{one.low, one.high, two.low, two.high};
            }
            const Cell owned = cell_of(octet);
            float cell = owned.state[0];
            const Half bits = advance(cell, gates + x);
            owned.state[0] = cell;
            own.outgoing[warp][q][g] = bits;
            __syncwarp();
            if (g == 0 && t + 1 < row.steps && group < groups)
                store(buffer(octet, t + 1) + place_of(group, column), tagged(*(const Quad*)own.outgoing[warp][q], tag_of(t + 1)));
            if (t < row.steps && unit < call.hidden) owned.record(call, row, unit, t, bits, cell);
            __syncwarp();
        }
        row = next_row, x = next_x, t = next_t, octet = next_octet;
    }
}
