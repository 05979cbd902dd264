// A layer of linear cells of which only the last hidden vector of each row is needed, computed in tiles of 64 steps. Shared by
// tile_product.cu and tile_gates.cu.
//
// A block has UNITS hidden units and a span of the batch: the parts of rows that begin in it (or whole rows, without maps). It computes
// TILES tiles at once, each by a warp group. The gates of a tile are in shared memory. All threads of the group compute p and q of its steps.
// Then one of its warps computes the chain over the steps, a lane for each unit, and hands the cells on to the next tile.
//
// A block runs this code only once or a few times, so most of the time is the latency of memory and of instructions: loops are not unrolled
// unless they are short.
//
// If the launch has maps, a row's parts are in different blocks. They store their maps, and fold.cu computes the cells and the outputs.

#include "call.cuh"

constexpr int COLUMNS = BLOCKS * UNITS;
constexpr int GROUP = 128, MULTIPLIERS = TILES * GROUP, SPAN = TILES * TILE;
constexpr int LINE = 2 * UNITS;                                 // floats of p and q of a step
constexpr int STRIDE = COLUMNS + 8;                             // gates of a step, without bank conflicts
static_assert(UNITS <= 32, "a lane has one unit");

struct alignas(16) Piece {
    unsigned x, y, z, w;
};

// What the warp groups share.
struct Share {
    alignas(16) float bias[BLOCKS][UNITS];
    float carry[TILES][3][UNITS];                               // after each tile: what the part has added, its factor and its base
    int begins[SPAN];                   // where a row begins, its number + 1; where a later part of a row begins, -1
    int ends[SPAN], part_ends[SPAN];    // where a row ends, its number + 1; where a part ends, its number + 1
    int row, since;                     // of a row that began before the span: its number, and its steps before the span
    unsigned long long handed[TILES];   // barriers: the tile's cells are in `carry`

    __device__ void load_bias(const Call& call, int direction, int slice) {
        for (int index = threadIdx.x; index < BLOCKS * UNITS; index += MULTIPLIERS) {
            const int unit = slice * UNITS + index % UNITS;
            bias[0][index] = unit < call.hidden ? call.bias[direction][index / UNITS * call.hidden + unit] : 0.0f;
        }
    }
};

// Returns the row of a token. Whole warps must call it.
__device__ __forceinline__ int row_of(const Call& call, long long token) {
    int low = 0, high = (int)call.rows;
    while (high - low > 1) {
        const int stride = (high - low + 31) / 32, row = low + (threadIdx.x % 32) * stride;
        const int passed = __popc(__ballot_sync(~0u, row < high && call.offset(row) <= token));
        low += (passed - 1) * stride, high = min(high, low + stride);
    }
    return low;
}

// The steps of a block, in places of all rows together, and the ordinals of its first and its last row.
struct Job {
    Stream all;
    int from, until, first, last;
    bool whole_rows;                    // a row ends in it

    __device__ __forceinline__ Job(const Call& call, int direction, int span) {
        const int tokens = (int)call.offset(call.rows);
        all = Stream{0, tokens, 0, (int)call.rows, direction};
        from = edge(call, span * SPAN), until = edge(call, (span + 1) * SPAN);
        if (from >= until) return;
        first = ordinal_of(call, from), last = ordinal_of(call, until - 1);
        whole_rows = all.start_of(call, first + 1) <= until;
    }
    __device__ int ordinal_of(const Call& call, int place) const {
        const int row = row_of(call, all.token(place));
        return all.direction ? all.until - 1 - row : row;
    }
    // Returns the first place from `place` on at which a row may be divided.
    __device__ int edge(const Call& call, int place) const {
        if (place == 0 || place >= all.places) return min(place, all.places);
        const int ordinal = ordinal_of(call, place), begin = all.start_of(call, ordinal), end = all.start_of(call, ordinal + 1);
        if (place == begin) return place;
        return call.maps[0] ? min(end, begin + (place - begin + PART - 1) / PART * PART) : end;
    }
    __device__ int rounds() const { return from < until ? (until - from + SPAN - 1) / SPAN : 0; }
    __device__ int steps(int round, int tile) const { return min(TILE, until - from - round * SPAN - tile * TILE); }
};

// A warp group with a tile in each round.
struct Group {
    const Call& call;
    Share& share;
    const Job& job;
    Half* gates;                        // of the tile, block by block
    float* pairs;                       // p and q of the tile
    int tile, slice, thread;            // thread of the group

    __device__ int direction() const { return job.all.direction; }
    __device__ int warp() const { return thread / 32; }
    __device__ void meet_group() const { meet(1 + tile, GROUP); }
    __device__ void meet_groups() const { meet(1 + TILES, MULTIPLIERS); }
    __device__ bool single() const { return call.rows == 1; }
    __device__ int place(int round) const { return job.from + round * SPAN + tile * TILE; }
    // Return the number of a row that begins at or ends with a step of the tile, and of a part that ends with it.
    __device__ int row_from(int step) const { return single() ? 0 : share.begins[tile * TILE + step] - 1; }
    __device__ int row_until(int step) const { return single() ? 0 : share.ends[tile * TILE + step] - 1; }
    __device__ int part_until(int round, int step) const { return single() ? (place(round) + step) / PART : share.part_ends[tile * TILE + step] - 1; }
    __device__ bool real(int unit) const { return slice * UNITS + unit < call.hidden; }
    __device__ float first_cell(int row, int unit) const {
        const float* before = call.before[direction()];
        return before && real(unit) ? before[call.slot_before(direction(), row) * call.hidden + slice * UNITS + unit] : 0.0f;
    }
    __device__ Unit unit_of(int unit) const {
        Unit result;
        result.index = slice * UNITS + unit;
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block) result.bias[block] = share.bias[block][unit];
        return result;
    }

    // Finds where rows and parts begin and end in a round. A single row needs no memory for it.
    __device__ __forceinline__ void mark(int round) const {
        if (single()) return;
        const int own = tile * GROUP + thread, place = job.from + round * SPAN;
        if (own < SPAN) share.begins[own] = share.ends[own] = share.part_ends[own] = 0;
        meet_groups();
#pragma unroll 1
        for (int ordinal = job.first + own; ordinal <= job.last; ordinal += MULTIPLIERS) {
            const int begin = job.all.start_of(call, ordinal) - place, end = job.all.start_of(call, ordinal + 1) - place;
            if (begin == end || end <= 0 || begin >= SPAN) continue;
            const int row = job.all.row(ordinal), number = (int)(call.offset(row) / PART) + row + 1;
            for (int k = begin < 0 ? -begin / PART : 0; begin + k * PART < min(end, SPAN); ++k) {
                const int from = begin + k * PART, until = min(from + PART, end);
                if (from >= 0) share.begins[from] = k ? -1 : row + 1;
                if (until <= SPAN) share.part_ends[until - 1] = number + k;
            }
            if (begin < 0) share.row = row, share.since = -begin;
            if (end <= SPAN) share.ends[end - 1] = row + 1;
        }
        meet_groups();
    }

    // Returns the steps of a row before a step of the tile, if they are fewer than `most`, or -1. row: becomes its number.
    __device__ int steps_before(int round, int step, int most, int& row) const {
        if (single()) {
            row = 0;
            return this->place(round) + step < most ? this->place(round) + step : -1;
        }
        const int place = tile * TILE + step;
        for (int before = 0; before < most; ++before) {
            if (place < before) {
                row = share.row;
                return share.since + place < most ? share.since + place : -1;
            }
            row = share.begins[place - before] - 1;
            if (row >= 0) return before;
        }
        return -1;
    }
    // The steps of a tile where a row begins, a later part begins, a row ends and a part ends.
    struct Marks {
        unsigned long long rows, parts, row_ends, part_ends;
    };
    __device__ __forceinline__ Marks marks(int round, int steps) const {
        Marks result{0, 0, 0, 0};
        if (single()) {
            const unsigned long long last = 1ull << (steps - 1);
            const bool is_last = place(round) + steps == job.all.places;
            if (place(round) == 0) result.rows = 1;
            else if (place(round) % PART == 0) result.parts = 1;
            if (is_last) result.row_ends = last;
            if (is_last || (place(round) + steps) % PART == 0) result.part_ends = last;
            return result;
        }
#pragma unroll
        for (int half = 1; half >= 0; --half) {
            const int step = half * 32 + thread % 32, place = tile * TILE + step, begin = share.begins[place];
            const bool is_in = step < steps;
            result.rows = result.rows << 32 | __ballot_sync(~0u, is_in && begin > 0);
            result.parts = result.parts << 32 | __ballot_sync(~0u, is_in && begin < 0);
            result.row_ends = result.row_ends << 32 | __ballot_sync(~0u, is_in && share.ends[place]);
            result.part_ends = result.part_ends << 32 | __ballot_sync(~0u, is_in && share.part_ends[place]);
        }
        return result;
    }

    // Returns the cell before the first row that begins in the tile, for a unit of each lane.
    __device__ float begun(const Marks& marks) const {
        return marks.rows ? first_cell(row_from(__ffsll(marks.rows) - 1), thread % UNITS) : 0.0f;
    }

    // Computes p and q of all steps from the gates, of two units at once. After the last step, they keep the cell.
    __device__ __forceinline__ void prepare_pairs(int steps) const {
        const int column = thread % (UNITS / 2) * 2;
        const Unit units[2] = {unit_of(column), unit_of(column + 1)};
#pragma unroll 2
        for (int step = thread / (UNITS / 2); step < TILE; step += GROUP / (UNITS / 2)) {
            unsigned both[BLOCKS];
#pragma unroll
            for (int block = 0; block < BLOCKS; ++block) both[block] = *(const unsigned*)(gates + step * STRIDE + block * UNITS + column);
            float result[4];
#pragma unroll
            for (int odd = 0; odd < 2; ++odd) {
                float values[4];
#pragma unroll
                for (int block = 0; block < BLOCKS; ++block) values[block] = odd ? high_of(both[block]) : low_of(both[block]);
                prepare(values, units[odd], result[2 * odd], result[2 * odd + 1]);
            }
            const bool real = step < steps;
            *(float4*)(pairs + step * LINE + column * 2) = real ? make_float4(result[0], result[1], result[2], result[3]) : make_float4(1.0f, 0.0f, 1.0f, 0.0f);
        }
    }

    // Computes the cells of a tile for a unit of each lane, and writes the outputs of its rows and parts. begun: the cell before the first row
    // that begins in the tile; last_skip: of the last row that ends in it.
    __device__ __forceinline__ void chain(const Marks& marks, int steps, int round, float begun, Skip last_skip) const {
        const int unit = thread % UNITS, number = slice * UNITS + unit;
        const bool split = call.maps[0] != nullptr;
        if (thread >= UNITS) {
            arrive(shared_address(&share.handed[tile]));
            return;
        }
        float* const at = pairs + unit * 2;
        float added = begun, factor = 0.0f, base = 0.0f;
        if (!(marks.rows & 1)) {
            added = 0.0f, factor = 1.0f;
            if (!split || !(marks.parts & 1)) {
                const int source = (tile + TILES - 1) % TILES;
                if (tile) await(shared_address(&share.handed[source]), round & 1);
                added = share.carry[source][0][unit], factor = share.carry[source][1][unit], base = share.carry[source][2][unit];
                if (marks.parts & 1) base = fmaf(factor, base, added), added = 0.0f, factor = 1.0f;
            }
        }
        const unsigned long long begins = marks.rows | marks.parts, last = 1ull << (steps - 1);
        const unsigned long long events = begins & ~1ull | (split ? marks.part_ends : marks.row_ends) & ~last;
        const int first_row = __ffsll(marks.rows) - 1;
#pragma unroll 1
        for (int n = 0; n < steps; n += 8) {
            if (!(events >> n & 255)) {
                float2 now[8];
#pragma unroll
                for (int i = 0; i < 8; ++i) now[i] = *(const float2*)(at + (n + i) * LINE);
#pragma unroll
                for (int i = 0; i < 8; ++i) added = fmaf(now[i].x, added, now[i].y), factor *= now[i].x;
                continue;
            }
#pragma unroll 1
            for (int step = n; step < min(n + 8, steps); ++step) {
                const float2 now = *(const float2*)(at + step * LINE);
                if (marks.rows >> step & 1 && step > 0) {
                    added = step == first_row ? begun : first_cell(row_from(step), unit);
                    factor = base = 0.0f;
                } else if (marks.parts >> step & 1 && step > 0) base = fmaf(factor, base, added), added = 0.0f, factor = 1.0f;
                added = fmaf(now.x, added, now.y), factor *= now.x;
                if ((split ? marks.part_ends : marks.row_ends) >> step & 1) *(float2*)(at + step * LINE) = make_float2(factor, split ? added : fmaf(factor, base, added));
            }
        }
        share.carry[tile][0][unit] = added, share.carry[tile][1][unit] = factor, share.carry[tile][2][unit] = base;
        arrive(shared_address(&share.handed[tile]));
        if (number >= call.hidden) return;
        *(float2*)(at + (steps - 1) * LINE) = make_float2(factor, split ? added : fmaf(factor, base, added));
#pragma unroll 1
        for (unsigned long long ends = marks.part_ends; split && ends; ends &= ends - 1) {
            const int step = __ffsll(ends) - 1;
            call.maps[direction()][(long long)part_until(round, step) * call.hidden + number] = *(const float2*)(at + step * LINE);
        }
#pragma unroll 1
        for (unsigned long long ends = marks.row_ends; ends; ends &= ends - 1) {
            const int step = __ffsll(ends) - 1;
            write(row_until(step), unit, step, at[step * LINE + 1], ends & (ends - 1) ? skip_of(row_until(step)) : last_skip);
        }
    }
    // Returns the skip of a row's last step for a unit of each lane, in the format of memory: a conversion would wait for the load.
    __device__ Skip skip_of(int row) const {
        if (SKIP != SKIP_COLUMNS || call.maps[0] || !real(thread % UNITS)) return Skip{};
        const long long token = direction() ? call.offset(row) : call.offset(row + 1) - 1;
        return call.skip[token * call.skip_stride + call.skip_from[direction()] + slice * UNITS + thread % UNITS];
    }
    __device__ Skip last_skip(const Marks& marks) const { return marks.row_ends ? skip_of(row_until(63 - __clzll(marks.row_ends))) : Skip{}; }
    __device__ float gate(int block, int step, int unit) const { return widen(gates[step * STRIDE + block * UNITS + unit]); }
    // Writes the outputs of a unit of a row, or what fold.cu needs for them.
    __device__ __forceinline__ void write(int row, int unit, int step, float cell, Skip column) const {
        const int number = slice * UNITS + unit;
        const float output = BLOCKS > OUTPUT ? gate(OUTPUT, step, unit) : 0.0f;
        float skip = SKIP == SKIP_BLOCK ? gate(LAST_BLOCK, step, unit) : 0.0f;
        if (call.maps[0]) {
            call.rests[direction()][(long long)row * call.hidden + number] = make_float2(output, skip);
            return;
        }
        if (SKIP == SKIP_COLUMNS) skip = (float)call.scale[direction()] * value_of(column);
        call.after[direction()][call.slot_after(direction(), row) * call.hidden + number] = cell;
        if (call.last) call.last[row * call.width + direction() * call.hidden + number] = hidden_of(output, skip, cell, 0.0f, unit_of(unit));
    }
};

// Writes the outputs of rows without steps. A warp calls it.
__device__ __forceinline__ void end_empty_rows(const Call& call, int direction, int slice) {
#pragma unroll 1
    for (int base = blockIdx.x * 32; base < call.rows; base += gridDim.x * 32) {
        const int own = base + threadIdx.x % 32;
        unsigned empty = __ballot_sync(~0u, own < call.rows && call.offset(own) == call.offset(own + 1));
        for (; empty; empty &= empty - 1) {
            const int row = base + __ffs(empty) - 1;
            for (int unit = slice * UNITS + threadIdx.x % 32; unit < min((slice + 1) * UNITS, (int)call.hidden); unit += 32) {
                const float* before = call.before[direction];
                call.after[direction][call.slot_after(direction, row) * call.hidden + unit] =
                    before ? before[call.slot_before(direction, row) * call.hidden + unit] : 0.0f;
                if (call.last) call.last[row * call.width + direction * call.hidden + unit] = 0.0f;
            }
        }
    }
}
