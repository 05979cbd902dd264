// Several layers and a product of outputs, for one step of one row at a time, in a kernel that stays: a cluster of CTAS blocks
// waits for requests in mapped host memory, and the weights stay in registers and shared memory between requests.
//
// A request is vectors of 16 bytes: 12 bytes of content, and the number of the request. A vector is written and read as a
// whole, so its number means that its content has arrived. The first vector has the slots of the state and a command, and the
// others six 16-bit inputs each. The answer is vectors of three float32 outputs and the number. One warp polls; more vectors
// than lanes are read after the first.
//
// Block `rank` owns UNITS units of each layer. GROUPS groups of eight units have PARTS warps each, which multiply every
// PARTS-th chunk of [x | h]. The operands of a product have eight columns, and all eight are the one row. The first warp adds
// the parts, advances the cells and sends the new hidden values to all blocks. The first block multiplies the outputs.
//
// Hidden values of the last step stay in shared memory for the next step of the same stream, and states of all streams in their
// slots. The blocks meet before a step of another stream reads its state, so that all of it is in memory.
//
// The kernel ends after `most` requests, at a command, or when no request arrives for `idle_ns`, and then writes to `ended`.
//
// Macros besides those of cell.cuh: CTAS blocks, LAYERS, UNITS of a block, CHUNKS of 32 entries of a layer's vectors, HELD
// products in registers, INPUTS, OUTPUTS, SHARED bytes of a block.
constexpr int WARPS = THREADS / 32, GROUPS = UNITS / 8, PARTS = WARPS / GROUPS;
constexpr int OF_WARP = (CHUNKS + PARTS - 1) / PARTS, OF_ANSWER = (CHUNKS / 2 + WARPS - 1) / WARPS;    // chunks of a warp
constexpr int PRODUCTS = 4 * (LAYERS * OF_WARP + OF_ANSWER), SPILLED = PRODUCTS - HELD;
#include "cell.cuh"
#include "held.cuh"

constexpr int HIDDEN = CHUNKS / 2 * 32, PIECES = HIDDEN / 8;            // of a vector, with padding
constexpr int IN_VECTOR = 6, VECTORS = 1 + (INPUTS + IN_VECTOR - 1) / IN_VECTOR, ANSWERS = (OUTPUTS + 2) / 3;
constexpr int INPUT_PIECES = (INPUTS + 7) / 8;
static_assert(GROUPS * 8 == UNITS && WARPS % GROUPS == 0 && GROUPS * CTAS <= 32 && UNITS <= 32, "launch shape");
static_assert(INPUT_PIECES <= 32 && INPUTS <= HIDDEN && OUTPUTS <= 32, "launch shape");
static_assert(CTAS <= 32 && TERMS == 1 && HELD <= PRODUCTS, "launch shape");

enum Command { STEP, STOP, LATE };
struct Request {
    int before, after, command, number; // slots
};
struct Memory {
    Quad spilled[WARPS][SPILLED ? SPILLED : 1][32];
    Quad vectors[LAYERS + 1][2][PIECES];// of x and of each layer's h, by the parity of the request
    Gates parts[WARPS][8], biases[LAYERS][UNITS];
    float output_bias[32];
    alignas(16) Half outgoing[HIDDEN + IN_VECTOR];
    float answer[32];
    alignas(16) Request request;
    unsigned long long arrived[LAYERS + 1];
};
static_assert(sizeof(Memory) == SHARED, "SHARED differs from ResidentShape.shared in resident.py");

// The arguments. Every member has eight bytes.
struct Layer {
    const Quad* packed;
    const float *bias, *own;            // (BLOCKS, hidden)
    float *hidden, *cell;               // (slots, hidden)
};
struct Resident {
    Layer layers[LAYERS];
    const Quad* packed;                 // of the outputs: four gates of eight units are 32 outputs
    const float* bias;
    const Quad* requests;               // in mapped memory
    Quad* answers;
    unsigned* ended;
    unsigned* number;                   // of the last request, on the device
    long long hidden, most, idle_ns;
};

__device__ __forceinline__ Quad read_mapped(const Quad* at) {
    Quad vector;
    asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(vector.x), "=r"(vector.y), "=r"(vector.z), "=r"(vector.w) : "l"(at) : "memory");
    return vector;
}
__device__ __forceinline__ void write_mapped(Quad* at, const Quad& vector) {
    asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};"
                 ::"l"(at), "r"(vector.x), "r"(vector.y), "r"(vector.z), "r"(vector.w) : "memory");
}
__device__ __forceinline__ long long now_ns() {
    long long now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

// The weights of a warp: products by layer and chunk, and then the products of the outputs.
struct Weights {
    Memory& shared;
    Quad held[HELD];

    __device__ __forceinline__ void load(int product, const Quad& quad) {
        if (is_held(product)) held[held_before(product)] = quad;
        else shared.spilled[threadIdx.x / 32][product - held_before(product)][threadIdx.x % 32] = quad;
    }
    __device__ __forceinline__ Quad at(int product) const {
        const int before = held_before(product);
        return is_held(product) ? held[before] : shared.spilled[threadIdx.x / 32][product - before][threadIdx.x % 32];
    }
};

struct Stay {
    const Resident& resident;
    Memory& shared;
    const int rank = cluster_rank(), lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int group = warp % GROUPS, part = warp / GROUPS;
    Weights weights{shared};
    unsigned number = 0;                // of the request
    int turns = 0;                      // requests of this launch before it
    float cells[LAYERS];                // of the first UNITS threads

    __device__ __forceinline__ int unit() const { return rank * UNITS + threadIdx.x; }
    __device__ __forceinline__ bool owns() const { return threadIdx.x < UNITS && unit() < resident.hidden; }
    __device__ __forceinline__ Quad* vector(int of, int apart) const { return shared.vectors[of][(turns - apart) & 1]; }

    __device__ __forceinline__ void load_weights() {
#pragma unroll
        for (int layer = 0; layer < LAYERS; ++layer)
#pragma unroll
            for (int n = 0; n < 4 * OF_WARP; ++n) {
                const int chunk = n / 4 * PARTS + part;
                const int place = (((rank * GROUPS + group) * CHUNKS + chunk) * 4 + n % 4) * 32 + lane;
                weights.load(layer * 4 * OF_WARP + n, chunk < CHUNKS ? resident.layers[layer].packed[place] : Quad{});
            }
#pragma unroll
        for (int n = 0; n < 4 * OF_ANSWER; ++n) {
            const int chunk = n / 4 * WARPS + warp;
            const int place = (chunk * 4 + n % 4) * 32 + lane;
            weights.load(LAYERS * 4 * OF_WARP + n, chunk < CHUNKS / 2 ? resident.packed[place] : Quad{});
        }
    }
    __device__ __forceinline__ void expect_vectors() const {
        expect(shared_address(&shared.arrived[0]), (INPUT_PIECES + 1) * 16);
#pragma unroll
        for (int layer = 0; layer < LAYERS; ++layer) expect(shared_address(&shared.arrived[1 + layer]), CTAS * UNITS * 2);
    }
    __device__ __forceinline__ void await_vector(int of) const { await(shared_address(&shared.arrived[of]), turns & 1); }
    __device__ __forceinline__ void send_piece(const Quad* to, int of, int peer, const Quad& piece) const {
        send(in_block(shared_address(to), peer), in_block(shared_address(&shared.arrived[of]), peer), piece);
    }

    // The first warp of the first block waits for a request and sends it to all blocks.
    __device__ __forceinline__ void receive() {
        constexpr int EACH = (VECTORS + 31) / 32;
        const long long began = now_ns();
        Quad read[EACH] = {};
        bool late = false;
        for (int polls = 0;; ++polls) {
            bool there = true;
#pragma unroll
            for (int n = 0; n < EACH; ++n)
                if (lane + 32 * n < VECTORS) read[n] = read_mapped(resident.requests + lane + 32 * n);
#pragma unroll
            for (int n = 0; n < EACH; ++n) there &= lane + 32 * n >= VECTORS || read[n].w == number;
            if (__all_sync(~0u, there)) break;
            if (polls % 256 == 255 && __any_sync(~0u, now_ns() - began > resident.idle_ns)) {
                late = true;
                break;
            }
        }
        const Quad first = read[0];
#pragma unroll
        for (int n = 0; n < EACH; ++n) {
            const int vector = lane + 32 * n;
            const unsigned words[3] = {read[n].x, read[n].y, read[n].z};
            if (vector > 0 && vector < VECTORS)
                for (int m = 0; m < 3; ++m) *(unsigned*)&shared.outgoing[(vector - 1) * IN_VECTOR + 2 * m] = words[m];
        }
        constexpr int PADDING = INPUT_PIECES * 8 - (VECTORS - 1) * IN_VECTOR;
        if (lane < PADDING) shared.outgoing[(VECTORS - 1) * IN_VECTOR + lane] = 0;
        if (lane == 0) shared.request = Request{(int)first.x, (int)first.y, late ? LATE : (int)first.z, (int)number};
        __syncwarp();
        const Quad piece = lane < INPUT_PIECES ? *(const Quad*)&shared.outgoing[lane * 8] : Quad{};
        if (lane < CTAS) send_piece((const Quad*)&shared.request, 0, lane, *(const Quad*)&shared.request);
        if (lane < INPUT_PIECES)
#pragma unroll
            for (int peer = 0; peer < CTAS; ++peer) send_piece(vector(0, 0) + lane, 0, peer, piece);
    }

    // Reads the state of another stream than the last request's.
    __device__ __forceinline__ void read_state(int slot) {
        const int hidden = (int)resident.hidden;
#pragma unroll
        for (int layer = 0; layer < LAYERS; ++layer) {
            const Layer& of = resident.layers[layer];
            Half* const to = (Half*)vector(1 + layer, 1);
            const long long begin = (long long)slot * hidden;
            for (int n = threadIdx.x; n < hidden; n += THREADS) to[n] = term_of(kept(__ldcg(of.hidden + begin + n)), 0);
            if (owns()) cells[layer] = __ldcg((GRU ? of.hidden : of.cell) + begin + unit());
        }
        __syncthreads();
    }

    // Multiplies every `apart`-th chunk, from chunk `first` on, of [x | h] or of x alone.
    template <int COUNT>
    __device__ __forceinline__ void multiply_chunks(int product, int first, int apart, const Quad* x, const Quad* h) {
        float sums[2][4] = {};
#pragma unroll
        for (int n = 0; n < COUNT; ++n) {
            const int chunk = first + n * apart;
            const Quad* const of = chunk < CHUNKS / 2 ? x : h - PIECES;
            const Quad pieces = chunk < (h ? CHUNKS : CHUNKS / 2) ? of[chunk * 4 + lane % 4] : Quad{};
#pragma unroll
            for (int step = 0; step < 4; ++step)
                multiply(sums[step % 2], weights.at(product + 4 * n + step), step / 2 ? pieces.z : pieces.x,
                         step / 2 ? pieces.w : pieces.y);
        }
        if (lane % 4 == 0) shared.parts[warp][lane / 4] = Gates{sums[0][0], sums[0][2], sums[1][0], sums[1][2]};
        __syncthreads();
    }

    template <int LAYER> __device__ __forceinline__ void run_layer(const Request& request) {
        const Layer& layer = resident.layers[LAYER];
        await_vector(LAYER);
        multiply_chunks<OF_WARP>(LAYER * 4 * OF_WARP, part, PARTS, vector(LAYER, 0), vector(1 + LAYER, 1));
        if (warp > 0) return;
        Kept bits{};
        const int hidden = (int)resident.hidden;
        if (threadIdx.x < UNITS) {
            Gates product{}, x{};
#pragma unroll
            for (int n = 0; n < (PARTS < CHUNKS ? PARTS : CHUNKS); ++n)
                product = product + shared.parts[n * GROUPS + threadIdx.x / 8][threadIdx.x % 8];
            Own own{};
            if (owns()) {
                x = shared.biases[LAYER][threadIdx.x];
                if (GRU) own.bias = layer.own[unit()];
                if (PEEPHOLES) own = Own{0.0f, layer.own[unit()], layer.own[hidden + unit()], layer.own[2 * hidden + unit()]};
            }
            const float by = GRU && LAYER > 0 ? 16.0f : 1.0f;           // the weights of h of the first layer have the factor
            if (GRU) x.o += product.o * by;
            bits = advance(cells[LAYER], product, by, x, own);
            // A state that is not finite shows in the answer: the host sees nothing else.
            if (!(fabsf(cells[LAYER]) < __int_as_float(0x7f800000))) bits = 0x7fff;
            shared.outgoing[threadIdx.x] = owns() ? term_of(bits, 0) : 0;
        }
        __syncwarp();
        const int piece = lane / CTAS, peer = lane % CTAS;
        if (lane < GROUPS * CTAS) {
            const Quad* const to = vector(1 + LAYER, 0) + rank * GROUPS + piece;
            send_piece(to, 1 + LAYER, peer, *(const Quad*)&shared.outgoing[piece * 8]);
        }
        if (owns()) {
            const long long to = (long long)request.after * hidden + unit();
            layer.hidden[to] = GRU ? cells[LAYER] : value_of(bits);
            if (!GRU) layer.cell[to] = cells[LAYER];
        }
    }
    template <int LAYER> __device__ __forceinline__ void run_layers(const Request& request) {
        run_layer<LAYER>(request);
        if constexpr (LAYER + 1 < LAYERS) run_layers<LAYER + 1>(request);
    }

    __device__ __forceinline__ void answer() {
        await_vector(LAYERS);
        if (rank > 0) return;
        multiply_chunks<OF_ANSWER>(LAYERS * 4 * OF_WARP, warp, WARPS, vector(LAYERS, 0), nullptr);
        if (warp > 0) return;
        if (lane < 8) {
            Gates sum{};
#pragma unroll
            for (int n = 0; n < (WARPS < CHUNKS / 2 ? WARPS : CHUNKS / 2); ++n) sum = sum + shared.parts[n][lane];
            const float by = GRU ? 16.0f : 1.0f, values[4] = {sum.i, sum.f, sum.g, sum.o};
            for (int gate = 0; gate < 4; ++gate)
                shared.answer[gate * 8 + lane] = fmaf(values[gate], by, shared.output_bias[gate * 8 + lane]);
        }
        __syncwarp();
        auto bits = [&](int output) { return output < 32 ? __float_as_uint(shared.answer[output]) : 0; };
        if (lane < ANSWERS) {
            const Quad vector{bits(3 * lane), bits(3 * lane + 1), bits(3 * lane + 2), number};
            write_mapped(resident.answers + lane, vector);
        }
    }

    __device__ __forceinline__ void run() {
        load_weights();
        for (int at = threadIdx.x; at < (LAYERS + 1) * 2 * PIECES; at += THREADS) shared.vectors[0][0][at] = Quad{};
        if (threadIdx.x == 0) {
            for (int n = 0; n <= LAYERS; ++n) make_barrier(shared_address(&shared.arrived[n]), 1);
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
            expect_vectors();
        }
        for (int layer = 0; layer < LAYERS && owns(); ++layer) {
            const float* const bias = resident.layers[layer].bias + unit();
            const int hidden = (int)resident.hidden;
            shared.biases[layer][threadIdx.x] =
                Gates{bias[0], bias[hidden], GRU ? 0.0f : bias[2 * hidden], bias[(BLOCKS - 1) * hidden]};
        }
        if (threadIdx.x < 32) shared.output_bias[threadIdx.x] = resident.bias[threadIdx.x];
        number = *resident.number;
        __syncthreads();
        meet_cluster();
        int slot = -1, last = STEP;
        for (; turns < resident.most; ++turns) {
            ++number;
            if (rank == 0 && warp == 0) receive();
            await_vector(0);
            const Request request = shared.request;
            last = request.command;
            if (last != STEP) break;
            if (request.before != slot) {
                meet_cluster(); // all blocks have written their states
                read_state(request.before);
            }
            slot = request.after;
            run_layers<0>(request);
            answer();
            __syncthreads();
            if (threadIdx.x == 0) expect_vectors();
        }
        if (rank > 0 || threadIdx.x > 0) return;
        *resident.number = last == LATE ? number - 1 : number;
        *(volatile unsigned*)resident.ended = 1;
    }
};

extern "C" __global__ void __cluster_dims__(CTAS, 1, 1) __launch_bounds__(THREADS, 1)
    persistent(const __grid_constant__ Resident resident) {
    extern __shared__ __align__(128) unsigned char dynamic[];
    Stay stay{resident, *(Memory*)dynamic};
    stay.run();
    meet_cluster(); // no block ends while another sends to it
}
