// A recurrent layer over many thread blocks, for many rows and for layers that are too large for a cluster. Blocks exchange
// hidden values through the L2 cache.
//
// A team of blocks owns a tile of octets of rows. Every member owns UNITS hidden units and holds their recurrent weights: HELD
// products of a warp in registers, the rest in shared memory. A turn is one step of one octet. PARTS warps of a block multiply.
// Each warp fetches and multiplies only its part of the hidden vector, and writes its sums to shared memory. The other warps
// own the cells, two warps for each group of units as in cluster.cu. They add the parts, advance the cells and send the new
// hidden values. All warps of a block meet once a turn, so that the cells of one turn advance while the products of the next
// turn are computed. Pieces are fetched one turn before they are multiplied.
//
// The data carry their own ready flag. An exchanged value is below two, so the top bit of its exponent is free. The two free
// bits of a word are a tag, which says whether a piece belongs to this step, to an earlier step in the same buffer, or to no
// step yet. A reader polls a piece until it has this step's tag, and waits for nothing else. (A NaN loses that bit on the way
// and becomes finite for the other units; in its own unit it stays a NaN.) Each octet has two buffers, which are zero before
// the launch. A member writes step t + 1 over step t - 1 when all of step t has arrived, and every member sends step t after
// reading step t - 1. All blocks must be resident, so the launch is cooperative.
//
// Order of sums: a part sums along its chunks in PARTS / 4 chains, which take the products of a chunk in turn; then the parts
// are added pairwise.
//
// Macros besides those of cell.cuh: UNITS of a block, PARTS of the hidden vector, CHUNKS of a part, WHOLE, whether the chunks
// have no padding, HELD products in registers, ALONE, whether a tile has one octet, REGISTERS that a multiplying thread has
// after others lent theirs, or 0, OWNERS_REGISTERS, SHARED bytes of a block without those of its octets.
constexpr int GROUPS = UNITS / 8, CELLS = UNITS * 8;
constexpr int PRODUCTS = GROUPS * CHUNKS * 4, SPILLED = PRODUCTS - HELD; // of a warp for one octet; its part has CHUNKS chunks
constexpr int CHAINS = PARTS / 4;
#include "cell.cuh"
#include "held.cuh"

constexpr unsigned TAG = 0x40004000u;                                    // the free bits of a word
static_assert(THREADS >= 32 * PARTS + CELLS && UNITS % 8 == 0 && HELD <= PRODUCTS, "launch shape");

struct Memory {
    Quad spilled[PARTS][SPILLED ? SPILLED : 1][32];
    Quad arrived[ALONE ? 1 : 2][CHUNKS][PARTS * 32];
    Pair parts[2][2][PARTS][2 * GROUPS][32];
    int lengths[SORTED];
};
static_assert(sizeof(Memory) == SHARED, "SHARED differs from GridShape.shared in grid.py");

// The tag of step t. It differs from the zeros before all steps, and from the tags of the two steps before it in the same
// buffer.
__device__ __forceinline__ unsigned tag_of(int t) {
    const int turn = t / 2 % 3;
    return turn == 0 ? 0x00004000u : turn == 1 ? 0x40000000u : TAG;
}
// Returns the bits in which a piece differs from this tag. Only the bits of TAG matter.
__device__ __forceinline__ unsigned differing(const Quad& piece, unsigned tag) {
    return (piece.x ^ tag) | (piece.y ^ tag) | (piece.z ^ tag) | (piece.w ^ tag);
}
__device__ __forceinline__ Quad masked(const Quad& piece, unsigned mask) {
    return Quad{piece.x & mask, piece.y & mask, piece.z & mask, piece.w & mask};
}
// Loads a piece and bypasses caches that are not coherent.
__device__ __forceinline__ Quad fetch(const Quad* at) {
    Quad piece;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(piece.x), "=r"(piece.y), "=r"(piece.z), "=r"(piece.w) : "l"(at) : "memory");
    return piece;
}
__device__ __forceinline__ void store(unsigned* at, unsigned word, bool wanted) {
    asm volatile("{.reg .pred p; setp.ne.s32 p, %2, 0; @p st.relaxed.gpu.global.b32 [%0], %1;}"
                 ::"l"(at), "r"(word), "r"((int)wanted) : "memory");
}
// Copies a piece to shared memory asynchronously and bypasses all caches except L2.
__device__ __forceinline__ void copy(Quad* to, const Quad* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}
// Copies the word that contains this gate input asynchronously.
__device__ __forceinline__ void copy(unsigned* to, const Gate* from, bool wanted) {
    asm volatile("{.reg .pred p; setp.ne.s32 p, %2, 0; @p cp.async.ca.shared.global [%0], [%1], 4;}"
                 ::"r"(shared_address(to)), "l"((unsigned long long)from & ~3ull), "r"((int)wanted) : "memory");
}
// Extracts the gate input from its word. shift: how many bits precede it.
__device__ __forceinline__ float extract(unsigned word, int shift) {
#if GATES_FLOAT32
    return __uint_as_float(word);
#else
    return widen((Half)(word >> shift));
#endif
}

// Returns this lane's word of a piece. For even g, lane 4 g + q receives the values of the lanes with g' = 2q and 2q + 1 and q'
// = g / 2.
__device__ __forceinline__ unsigned transposed(Half bits) {
    unsigned word;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(word) : "r"((unsigned)bits));
    return word;
}

struct Turn {
    int t, octet;
};

__device__ __forceinline__ void meet() { asm volatile("bar.sync 0;" ::: "memory"); }

// Shared by all warps of a block.
struct Tile {
    const Call& call;
    Memory& shared;
    Row* rows;                          // rows of the octets, and a sentinel without steps
    float* cells;                       // cells of the octets
    unsigned* inputs;                   // gate inputs of the octets' next steps
    Quad* buffers;
    int hidden, octets, groups, room, member;

    // Returns the next turn: this step of the next octet or, if no later octet has this step, the next step of the first octet.
    __device__ __forceinline__ Turn after(const Turn& turn) const {
        const bool wraps = turn.t >= rows[turn.octet * 8 + 8].steps;
        return Turn{turn.t + wraps, wraps ? 0 : turn.octet + 1};
    }
    __device__ __forceinline__ int buffer_of(int octet, int t) const { return (octet * 2 + t % 2) * room; }
};

// The multiplying warps: the first PARTS of a block.
__device__ __forceinline__ void multiply_parts(const Tile& tile) {
#if REGISTERS // the other warps lend their registers
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
#endif
    Memory& shared = tile.shared;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, q = lane % 4;
    Quad weights[HELD];
#pragma unroll
    for (int product = 0; product < PRODUCTS; ++product) {
        const long long group = tile.member * GROUPS + product / (4 * CHUNKS);
        const Quad w = tile.call.packed[((group * PARTS + warp) * 4 * CHUNKS + product % (4 * CHUNKS)) * 32 + lane];
        if (is_held(product)) weights[held_before(product)] = w;
        else shared.spilled[warp][product - held_before(product)][lane] = w;
    }

    // This lane reads the pieces of row g in every fourth group, beginning with `first`. Beyond the last group it reads any
    // other piece: the weights there are zero, so every finite value will do.
    const int first = warp * CHUNKS * 4 + q, furthest = max((tile.groups - 1 - first) / 4, 0) * 32;
    const Quad* const pieces_of = tile.buffers + piece_index(min(first, tile.groups - 1), g);
    auto from = [&](const Turn& turn) { return pieces_of + tile.buffer_of(turn.octet, turn.t); };
    auto chunk_of = [&](int chunk) { return WHOLE ? chunk * 32 : min(chunk * 32, furthest); };
    auto request = [&](const Turn& turn, int slot) {
        const Quad* const at = from(turn);
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; ++chunk) copy(&shared.arrived[slot][chunk][threadIdx.x], at + chunk_of(chunk));
    };
    // Waits for pieces of a turn that had not arrived when they were requested.
    auto await = [&](Quad (&pieces)[CHUNKS], const Turn& turn, int slot) {
        if (turn.t == 0) {
#pragma unroll 1
            for (int chunk = 0; chunk < CHUNKS; ++chunk)
                shared.arrived[slot][chunk][threadIdx.x] =
                    piece_before(tile.call, tile.rows[turn.octet * 8 + g], first + chunk * 4);
#pragma unroll
            for (int chunk = 0; chunk < CHUNKS; ++chunk) pieces[chunk] = shared.arrived[slot][chunk][threadIdx.x];
            return;
        }
        const unsigned tag = tag_of(turn.t);
        const bool live = turn.t < tile.rows[turn.octet * 8 + g].steps;
        const Quad* const at = from(turn);
        // Poll only the first piece: polling all of them would slow down their senders.
        do pieces[0] = fetch(at);
        while (__any_sync(~0u, live && differing(pieces[0], tag) & TAG));
#pragma unroll
        for (int chunk = 1; chunk < CHUNKS; ++chunk) pieces[chunk] = fetch(at + chunk_of(chunk));
        unsigned differs = 0;
#pragma unroll
        for (int chunk = 1; chunk < CHUNKS; ++chunk) differs |= differing(pieces[chunk], tag);
        if (live && differs & TAG) {
#pragma unroll
            for (int chunk = 1; chunk < CHUNKS; ++chunk)
                while (differing(pieces[chunk], tag) & TAG) pieces[chunk] = fetch(at + chunk_of(chunk));
        }
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; ++chunk) pieces[chunk] = masked(pieces[chunk], ~TAG);
    };

    const int longest = tile.rows[0].steps;
    Turn turn{0, 0}, next = tile.after(turn);
    Quad pieces[CHUNKS];
    if (longest) await(pieces, turn, 0);
    if (!ALONE) request(next, 1);
    for (int parity = 0; turn.t < longest; parity ^= 1) {
        const Turn later = tile.after(next);
        const bool live = next.t < tile.rows[next.octet * 8 + g].steps;
        const unsigned tag = tag_of(next.t);
        Quad following[CHUNKS];
        unsigned differs[2] = {0, 0}; // alternating, because two chains finish sooner than one
        __syncwarp();
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
            if (!ALONE && group == GROUPS / 2) {
                // Take the next turn's pieces, which have usually arrived, while this turn's are multiplied.
                asm volatile("cp.async.wait_all;" ::: "memory");
#pragma unroll
                for (int chunk = 0; chunk < CHUNKS; ++chunk) following[chunk] = shared.arrived[parity ^ 1][chunk][threadIdx.x];
                request(later, parity);
            }
            float sums[CHAINS][2][4] = {};
#pragma unroll
            for (int chunk = 0; chunk < CHUNKS; ++chunk) {
                const Quad h = pieces[chunk];
#pragma unroll
                for (int part = 0; part < 4; ++part) {
                    const int product = (group * CHUNKS + chunk) * 4 + part, held = held_before(product);
                    const Quad w = is_held(product) ? weights[held] : shared.spilled[warp][product - held][lane];
                    multiply(sums[part / 2 % CHAINS][part % 2], w, part / 2 ? h.z : h.x, part / 2 ? h.w : h.y);
                }
            }
#pragma unroll
            for (int m = 0; m < 2; ++m) {
                if (CHAINS == 2)
                    for (int value = 0; value < 4; ++value) sums[0][m][value] += sums[CHAINS - 1][m][value];
#pragma unroll
                for (int s = 0; s < 2; ++s)
                    shared.parts[parity][s][warp][group * 2 + m][lane] = Pair{sums[0][m][s], sums[0][m][2 + s]};
            }
        }
        if (!ALONE) {
#pragma unroll
            for (int chunk = 0; chunk < CHUNKS; ++chunk) {
                differs[chunk % 2] |= differing(following[chunk], tag);
                pieces[chunk] = masked(following[chunk], ~TAG);
            }
        }
        const bool absent = ALONE || next.t == 0 || live && (differs[0] | differs[1]) & TAG;
        meet();
        if (next.t < longest && __any_sync(~0u, absent)) await(pieces, next, ALONE ? 0 : parity ^ 1);
        turn = next, next = later;
    }
}

// The warps that own the cells: for each group of units, one warp for even rows and one warp for odd rows. A lane owns one cell
// of each octet.
__device__ __forceinline__ void advance_cells(const Tile& tile) {
#if REGISTERS
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(OWNERS_REGISTERS));
#endif
    const Call& call = tile.call;
    const int index = threadIdx.x - PARTS * 32, lane = index % 32, g = lane / 4, q = lane % 4;
    const int odd = index / 32 % 2, pair = index / 64, column = 2 * q + odd;
    const int group = tile.member * GROUPS + pair, unit = group * 8 + g, hidden = tile.hidden;
    const Gate* const gates = call.gates + unit;
    const Own own = own_of(call, unit);
    const float by = unit_of(call);
    const bool all_steps = call.steps || call.mean || call.max, real = unit < hidden;

    auto cell_of = [&](int octet) { return Cell{tile.cells + octet * 3 * CELLS + index, CELLS}; };
    auto request = [&](int octet, const Row& row, int t) {
        const Gate* const from = gates + call.token(row.begin, t) * call.gates_apart;
#pragma unroll
        for (int gate = 0; gate < BLOCKS; ++gate)
            copy(tile.inputs + (octet * 4 + gate) * CELLS + index, from + gate * hidden, real && t < row.steps);
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
    for (int octet = 0; index < CELLS && octet < tile.octets; ++octet) {
        const Row row = tile.rows[octet * 8 + column];
        cell_of(octet).state[0] = cell_of(octet).begin(call, row, unit);
        request(octet, row, 0);
    }

    const int longest = tile.rows[0].steps;
    Turn turn{0, 0};
    if (index >= CELLS) { // warps that only complete the last group of four
        for (; turn.t < longest; turn = tile.after(turn)) meet();
        return;
    }

    // This lane writes the word that `transposed` returns here.
    unsigned* const to = (unsigned*)(tile.buffers + piece_index(group, g + odd)) + q;
    const bool sends = g % 2 == 0 && group < tile.groups;
    int before = 0;
    for (int parity = 0; turn.t < longest; parity ^= 1) {
        const int t = turn.t;
        const Turn next = tile.after(turn);
        const Row row = tile.rows[turn.octet * 8 + column];
        const Cell owned = cell_of(turn.octet);
        float cell = owned.state[0];
        const unsigned tag = tag_of(t + 1);
        const unsigned* const x = tile.inputs + turn.octet * 4 * CELLS + index;
        // The inputs that the previous turn requested are needed now only if that turn had the same octet.
        if (before == turn.octet) asm volatile("cp.async.wait_group 0;" ::: "memory");
        else asm volatile("cp.async.wait_group 1;" ::: "memory");
        // The half of its word that a gate input takes. With four blocks, every token has the same halves.
        const unsigned long long first =
            (unsigned long long)(gates + (BLOCKS % 2 ? call.token(row.begin, t) * call.gates_apart : 0));
        const int shifts[2] = {(int)(first & 2) * 8, (int)(first + hidden * sizeof(Gate) & 2) * 8};
        const Gates input{extract(x[0], shifts[0]), extract(x[CELLS], shifts[1]), GRU ? 0.0f : extract(x[2 * CELLS], shifts[0]),
                          extract(x[(BLOCKS - 1) * CELLS], shifts[(BLOCKS - 1) % 2])};
        meet();

        Gates sums[PARTS];
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            const Pair first = tile.shared.parts[parity][odd][part][pair * 2][lane],
                       second = tile.shared.parts[parity][odd][part][pair * 2 + 1][lane];
            sums[part] = Gates{first.low, first.high, second.low, second.high};
        }
#pragma unroll
        for (int apart = 1; apart < PARTS; apart *= 2)
#pragma unroll
            for (int part = 0; part < PARTS; part += 2 * apart) sums[part] = sums[part] + sums[part + apart];
        const Half bits = advance(cell, sums[0], by, input, own);
        store(to + tile.buffer_of(turn.octet, t + 1) * 4, transposed(bits) & ~TAG | tag, sends);
        request(turn.octet, row, t + 1);
        owned.state[0] = cell;
        if (real && t < row.steps && (all_steps || t + 1 == row.steps)) owned.record(call, row, unit, t, bits, cell);
        before = turn.octet, turn = next;
    }
}

// The shared memory behind `Memory` holds the rows and, for each octet, the cells and the gate inputs of their next step.
extern "C" __global__ void __launch_bounds__(THREADS, 8 / PARTS) persistent(const __grid_constant__ Calls calls) {
    extern __shared__ __align__(128) unsigned char dynamic[];
    Memory& shared = *(Memory*)dynamic;
    const int side = SIDES > 1 && blockIdx.x >= calls.blocks, block = blockIdx.x - side * (int)calls.blocks;
    const Call& call = calls.sides[side];
    const int hidden = (int)call.hidden, octets = (int)call.octets, groups = (hidden + 7) / 8, room = (groups + 3) / 4 * 32;
    const int members = (groups + GROUPS - 1) / GROUPS, team = block / members;
    Row* const rows = (Row*)(dynamic + sizeof(Memory));
    float* const cells = (float*)(rows + octets * 8 + 1);
    const Tile tile{call, shared, rows, cells, (unsigned*)(cells + octets * 3 * CELLS),
                    (Quad*)call.exchange + (long long)team * octets * 2 * room, hidden, octets, groups, room, block % members};
    if (threadIdx.x == 0) rows[octets * 8].steps = 0;
    choose_rows(call, octets, team, shared.lengths, rows);
    if (threadIdx.x < PARTS * 32) multiply_parts(tile);
    else advance_cells(tile);
}
