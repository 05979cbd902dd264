// Shared by the kernels of the LSTM and the GRU: types, the matrix product of one octet of rows, the cell, and the outputs.
//
//   LSTM   i, f, o = sigmoid(x + h R)    g = tanh(x + h R)   c = f c + i g   h = o tanh(c)   (Hochreiter and Schmidhuber 1997)
//          PEEPHOLES add p c to the inputs of i and f, and p c of the new c to that of o         (Gers and Schmidhuber 2000)
//   GRU    r, z = sigmoid(x + h R)    n = tanh(x + r (h R + b))    h = n + z (h - n)             (Cho et al. 2014, as in cuDNN)
//
// The four sums of an LSTM's unit are i, f, g, o. The four sums of a GRU's unit are r, z, the product of n, and the input of n:
// the weights of the fourth sum are zero. The cell of a GRU is its hidden value in float32.
//
// A batch is processed eight rows at a time. An octet of rows is the eight columns of the tensor cores' m16n8k16 product. Its
// left operand is the recurrent weights, its right operand the hidden vectors. A row's values do not depend on its octet, tile
// or launch: the order in which its products are summed depends on the hidden size alone.
//
// Blocks exchange pieces. A piece is 16 bytes: the eight units of one group of one row. Buffers of hidden vectors keep the
// pieces of a group next to each other. The weights are packed so that a lane's piece is its operand of two products (see
// `pack` in packing.py).

// FLOAT32 weights and hidden values are sums of two float16 numbers, of about 22 bits. The product of both small terms is
// left out. The weights are scaled to numbers below 2^14, so that their small terms are normal numbers.

// Macros of all kernels of this folder, which `Variant.load` of packing.py defines: THREADS of a block; SIDES, the directions
// or levels of a launch; SORTED, rows that are sorted together; BFLOAT16, FLOAT32, the dtype of the weights, float16 without
// both; GATES_FLOAT32, gate inputs in float32; GRU, PEEPHOLES, PROJECTED, the cell. `.clangd` has an example of each macro for
// editors.
#define EXACT FLOAT32
#include "../device.cuh"

constexpr int TERMS = FLOAT32 ? 2 : 1;  // 16-bit numbers of a weight and of a hidden value

struct alignas(16) Quad {
    unsigned x, y, z, w;
};
struct alignas(16) Gates {
    float i, f, g, o;
};
struct alignas(8) Pair {
    float low, high;
};
// Parameters of a unit besides matrices: the bias of a GRU's new gate, or the peepholes of an LSTM.
struct Own {
    float bias, i, f, o;
};
struct alignas(16) Row {
    int row, steps;                     // row of the batch, or -1 for none; its number of steps
    long long begin;                    // the token of its first step
};

#if BFLOAT16
#define PRODUCT "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
#define NARROW_ONE "cvt.rn.bf16.f32 %0, %1;"
#else
#define PRODUCT "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
#define NARROW_ONE "cvt.rn.f16.f32 %0, %1;"
#endif
__device__ __forceinline__ Half narrow(float value) {
    Half bits;
    asm(NARROW_ONE : "=h"(bits) : "f"(value));
    return bits;
}

#if GATES_FLOAT32
typedef float Gate;
#else
typedef Half Gate;
#endif
constexpr int BLOCKS = GRU ? 3 : 4;     // gate inputs of a unit

// A new hidden value as a kernel keeps it, and the bits of a term that other units read. A GRU in 16 bits keeps a sixteenth of
// the value, below 2: the grid kernel needs the top bit of the exponent. A GRU's hidden value may be as large as its initial
// value. Products take at most 32 of it.
#if FLOAT32
typedef float Kept;
__device__ __forceinline__ Kept kept(float hidden) { return hidden; }
__device__ __forceinline__ Half term_of(Kept hidden, int term) {
    const Half first = narrow(hidden);
    return term ? narrow(hidden - widen(first)) : first;
}
#elif GRU
typedef Half Kept;
constexpr float SIXTEENTH = 1.0f / 16, LARGEST = BFLOAT16 ? 1.9921875f : 1.9990234375f;
__device__ __forceinline__ Kept kept(float hidden) { return narrow(fminf(fmaxf(hidden * SIXTEENTH, -LARGEST), LARGEST)); }
__device__ __forceinline__ Half term_of(Kept hidden, int) { return hidden; }
#else
typedef Half Kept;
__device__ __forceinline__ Kept kept(float hidden) { return narrow(hidden); }
__device__ __forceinline__ Half term_of(Kept hidden, int) { return hidden; }
#endif

// sums += weights (16 gate rows x 16) @ hidden (16 x 8 rows). Lane 4 g + q holds the sums of rows g and g + 8, columns 2q and
// 2q + 1.
__device__ __forceinline__ void multiply(float (&sums)[4], const Quad& weights, unsigned low, unsigned high) {
    asm(PRODUCT "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(weights.x), "r"(weights.y), "r"(weights.z), "r"(weights.w), "r"(low), "r"(high));
}

// The gate inputs of one unit at one step, or zeros if the row has no such step. They stay in the format of memory: a
// conversion would wait for the load.
struct Input {
    Gate i, f, g, o;

    __device__ __forceinline__ Gates values() const { return Gates{value_of(i), value_of(f), value_of(g), value_of(o)}; }
};
__device__ __forceinline__ Input input_at(const Gate* at, int hidden, bool live) {
    return Input{live ? at[0] : Gate(0), live ? at[hidden] : Gate(0), live && !GRU ? at[2 * hidden] : Gate(0),
                 live ? at[(BLOCKS - 1) * hidden] : Gate(0)};
}

// Copies a piece into the shared memory of another block, whose barrier counts the bytes.
__device__ __forceinline__ void send(unsigned address, unsigned barrier, const Quad& piece) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];"
                 ::"r"(address), "r"(piece.x), "r"(piece.y), "r"(piece.z), "r"(piece.w), "r"(barrier) : "memory");
}

// The arguments of one direction. Outputs that are not requested are null. Every member has eight bytes: the launcher passes
// integers.
struct Call {
    const Gate* gates;                  // (tokens, BLOCKS hidden), `gates_apart` from token to token
    const Quad* packed;                 // the recurrent weights, by group, chunk, product, term, lane
    const float* scale;                 // by which FLOAT32 weights are multiplied, a power of two
    const float* own;                   // (hidden,) the bias of a GRU's new gate, or (3 hidden,) peepholes of i, f, o; or null
    const void* offsets;                // (rows + 1,) int32, or int64 when `wide`
    const int* slots_before;            // (rows,) the slot that a row starts from; null: its row number
    const int* slots_after;             // (rows,) the slot of its new state; null: its row number
    const float* hidden_before;         // (slots, hidden), or null for zeros
    const float* cell_before;           // of an LSTM, as cell_after
    float* hidden_after;                // (slots, hidden)
    float* cell_after;
    float* steps;                       // (tokens, hidden), `outputs_apart` from token to token
    float* last;                        // (rows, hidden), `outputs_apart` from row to row
    float* mean;
    float* max;
    unsigned* exchange;                 // of a kernel whose blocks exchange values through the L2 cache
    long long wide, first, until;       // the rows of this launch
    long long hidden, octets, width;    // octets of a tile, rows of an octet
    long long forward;                  // 1, or 0 for a direction that begins with the last token of a row
    long long gates_apart, outputs_apart;

    __device__ long long offset(long long row) const {
        return wide ? ((const long long*)offsets)[row] : (long long)((const int*)offsets)[row];
    }
    __device__ long long start_before(int row) const { return (slots_before ? (long long)slots_before[row] : row) * hidden; }
    __device__ long long start_after(int row) const { return (slots_after ? (long long)slots_after[row] : row) * hidden; }
    __device__ long long first_token(long long row) const { return forward ? offset(row) : offset(row + 1) - 1; }
    __device__ long long token(long long begin, int t) const { return forward ? begin + t : begin - t; }
};
// The arguments of a launch: of one direction, or of both, each with half of the blocks. Each direction of two_products.cu has
// two.
struct Calls {
    Call sides[SIDES];
    long long blocks;                   // of a direction
};

// Writes the rows of this tile, longest first. Rows are sorted within blocks of up to SORTED rows; one thread counts a row's
// rank. lengths: room for SORTED; rows: room for 8 octets. Ends with a barrier of the thread block.
__device__ void choose_rows(const Call& call, int octets, long long tile, int* lengths, Row* rows) {
    const int width = (int)call.width, tile_rows = width * octets, tiles = SORTED / tile_rows;
    const long long block = call.first + tile / tiles * tiles * tile_rows;
    const int first = (int)(tile % tiles) * tile_rows;
    const int count = (int)min((long long)(tiles * tile_rows), call.until - block);
    for (int row = threadIdx.x; row < count; row += THREADS)
        lengths[row] = (int)(call.offset(block + row + 1) - call.offset(block + row));
    for (int row = threadIdx.x; row < 8 * octets; row += THREADS) rows[row] = Row{-1, 0, 0};
    __syncthreads();
    for (int row = threadIdx.x; row < count; row += THREADS) {
        const int length = lengths[row];
        int rank = -first;
        for (int other = 0; other < count; ++other)
            rank += lengths[other] > length || (lengths[other] == length && other < row);
        if (rank >= 0 && rank < tile_rows)
            rows[rank / width * 8 + rank % width] = Row{(int)block + row, length, call.first_token(block + row)};
    }
    __syncthreads();
}

__device__ __forceinline__ Gates operator+(const Gates& a, const Gates& b) {
    return Gates{a.i + b.i, a.f + b.f, a.g + b.g, a.o + b.o};
}

__device__ __forceinline__ Own own_of(const Call& call, int unit) {
    const int hidden = (int)call.hidden;
    if (unit >= hidden) return Own{};
#if GRU
    return Own{call.own[unit]};
#elif PEEPHOLES
    return Own{0.0f, call.own[unit], call.own[hidden + unit], call.own[2 * hidden + unit]};
#else
    return Own{};
#endif
}

// Returns the factor for a product with the exchanged values.
__device__ __forceinline__ float unit_of(const Call& call) { return FLOAT32 ? 1.0f / *call.scale : GRU ? 16.0f : 1.0f; }

// A sigmoid gate, and the new hidden value of a GRU.
__device__ __forceinline__ float gate_of(float product, float by, float x) { return sigmoid_of(fmaf(product, by, x)); }
__device__ __forceinline__ float updated(float hidden, float update, float candidate) {
    return candidate + update * (hidden - candidate);
}

// Advances a cell by one step, from the product with the exchanged values and the gate inputs. Returns the new hidden value.
__device__ __forceinline__ Kept advance(float& cell, const Gates& product, float by, const Gates& x, const Own& own) {
#if GRU
    const float r = gate_of(product.i, by, x.i), z = gate_of(product.f, by, x.f);
    cell = updated(cell, z, tanh_of(x.o + r * fmaf(product.g, by, own.bias)));
    return kept(cell);
#else
    Gates gates{fmaf(product.i, by, x.i), fmaf(product.f, by, x.f), fmaf(product.g, by, x.g), fmaf(product.o, by, x.o)};
    if (PEEPHOLES) gates.i += own.i * cell, gates.f += own.f * cell;
    cell = sigmoid_of(gates.f) * cell + sigmoid_of(gates.i) * tanh_of(gates.g);
    if (PEEPHOLES) gates.o += own.o * cell;
    return kept(sigmoid_of(gates.o) * tanh_of(cell));
#endif
}

// The state and outputs of one unit of one row. The cell of a GRU, and of a PROJECTED number of an LSTM, is its hidden value.
struct Cell {
    float* state;                       // [cell, sum, maximum] of its thread in shared memory, `stride` apart
    int stride;

    // Returns the cell that the row starts from, and ends a row without steps.
    __device__ __forceinline__ float begin(const Call& call, const Row& row, int unit) const {
        const bool real = row.row >= 0 && unit < call.hidden;
        const long long at = real ? call.start_before(row.row) + unit : 0;
        const float* const before = GRU || PROJECTED ? call.hidden_before : call.cell_before;
        const float cell = real && before ? before[at] : 0.0f;
        if (call.mean) state[stride] = 0.0f;
        if (call.max) state[2 * stride] = __int_as_float(0xff800000);
        if (real && row.steps == 0)
            end(call, row, unit, call.hidden_before ? call.hidden_before[at] : 0.0f, cell);
        return cell;
    }

    // Writes the outputs of step `t`, which the row has, and updates the pools.
    __device__ __forceinline__ void record(const Call& call, const Row& row, int unit, int t, Kept bits, float cell) const {
        const float hidden = GRU ? cell : value_of(bits);
        if (call.steps) call.steps[call.token(row.begin, t) * call.outputs_apart + unit] = hidden;
        if (call.mean) state[stride] += hidden;
        if (call.max) state[2 * stride] = larger(state[2 * stride], hidden);
        if (t + 1 == row.steps) end(call, row, unit, hidden, cell);
    }

    __device__ __forceinline__ void end(const Call& call, const Row& row, int unit, float hidden, float cell) const {
        const long long to = call.start_after(row.row) + unit, output = row.row * call.outputs_apart + unit;
        call.hidden_after[to] = hidden;
        if (!GRU && !PROJECTED) call.cell_after[to] = cell;
        if (call.last) call.last[output] = hidden;
        if (call.mean) call.mean[output] = row.steps ? state[stride] / row.steps : 0.0f;
        if (call.max) call.max[output] = row.steps ? state[2 * stride] : 0.0f;
    }
};

// The index of a piece in a buffer: by chunk of 32 units, then by row, so that the rows of a partly filled octet are
// contiguous.
__device__ __forceinline__ int piece_index(int group, int column) { return group / 4 * 32 + column * 4 + group % 4; }

// Returns the piece of one group in the state that a row starts from, or of its small terms.
__device__ __forceinline__ Quad piece_before(const Call& call, const Row& row, int group, int term = 0) {
    Half bits[8];
    for (int unit = 0; unit < 8; ++unit) {
        const bool real = call.hidden_before && row.row >= 0 && group * 8 + unit < call.hidden;
        bits[unit] = real ? term_of(kept(call.hidden_before[call.start_before(row.row) + group * 8 + unit]), term) : 0;
    }
    return Quad{bits[0] | (unsigned)bits[1] << 16, bits[2] | (unsigned)bits[3] << 16, bits[4] | (unsigned)bits[5] << 16,
                bits[6] | (unsigned)bits[7] << 16};
}
