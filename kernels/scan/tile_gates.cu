// A layer of linear cells from gate inputs in memory, a line for each step, or from rows of a table that ids select (GATHER), of which only
// the last hidden vector of each row is needed: see tiles.cuh. The steps that end a row need all blocks, the others those of the cell.
#define GATES_FLOAT32 0
#define EXACT 0
#include "tiles.cuh"

constexpr int PIECES = UNITS / 8;                               // of 16 bytes in a block of a line
constexpr int FIRST = GATHER ? FIRST_LINE : 0;                  // the first id's line, after the line of zeros
static_assert(THREADS == MULTIPLIERS && STRIDE % 8 == 0, "launch shape");

struct Memory {
    alignas(16) Half gates[TILES][TILE * STRIDE];
    alignas(16) float pairs[TILES][TILE * LINE];
    Share share;
};
static_assert(sizeof(Memory) <= SHARED, "SHARED is less than sizeof(Memory): see tile_gates.py");

struct Reader : Group {
    // Copies the gates of a tile. Two threads share a step. id: of the step.
    __device__ __forceinline__ void copy(const Marks& marks, int steps, int id) const {
        const int step = thread / 2;
        if (step < steps) {
            const Half* line = (const Half*)call.source[direction()] + ((long long)id + FIRST) * BLOCKS * call.hidden + slice * UNITS;
            const bool ends = marks.row_ends >> step & 1;
#pragma unroll
            for (int block = 0; block < BLOCKS; ++block) {
                if (block != CANDIDATE && block != FORGET && (IS_SRU || block != LAST_BLOCK) && !ends) continue;
#pragma unroll
                for (int piece = thread % 2; piece < PIECES; piece += 2)
                    if (real(piece * 8))
                        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                                     ::"r"(shared_address(gates + step * STRIDE + block * UNITS + piece * 8)), "l"(line + block * call.hidden + piece * 8) : "memory");
            }
        }
        asm volatile("cp.async.wait_all;" ::: "memory");
    }
    __device__ __forceinline__ void run() const {
        const int rounds = job.rounds();
#pragma unroll 1
        for (int round = 0; round < rounds; ++round) {
            const int steps = job.steps(round, tile), place = job.from + round * SPAN + tile * TILE + thread / 2;
            int id = 0;
            if (place < job.until) id = GATHER ? call.id(job.all.token(place)) : (int)job.all.token(place);
            mark(round);
            if (steps > 0) {
                const Marks own = marks(round, steps);
                const float begun_at = warp() == 0 ? begun(own) : 0.0f;
                const Skip skip = warp() == 0 ? last_skip(own) : Skip{};
                copy(own, steps, id);
                meet_group();
                prepare_pairs(steps);
                meet_group();
                if (warp() == 0) chain(own, steps, round, begun_at, skip);
                __syncwarp();
            }
            if (round + 1 < rounds) meet_groups();
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 3) scan(const __grid_constant__ Call call) {
    extern __shared__ __align__(128) unsigned char dynamic[];
    Memory& shared = *(Memory*)dynamic;
    const int direction = blockIdx.z, slice = blockIdx.y, tile = settled(threadIdx.x / GROUP);
    let_next_begin();
    if (threadIdx.x < TILES) make_barrier(shared_address(&shared.share.handed[threadIdx.x]), 32);
    shared.share.load_bias(call, direction, slice);
    __syncthreads();
    wait_for_last();
    const Job job(call, direction, blockIdx.x);
    Reader{{call, shared.share, job, shared.gates[tile], shared.pairs[tile], tile, slice, (int)threadIdx.x % GROUP}}.run();
    if (!call.maps[0] && threadIdx.x < 32) end_empty_rows(call, direction, slice);
}
