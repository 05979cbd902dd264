// The cells and the outputs of rows whose parts were computed apart: applies the maps of a row's parts one after the other. A thread has one
// hidden unit of one row.
#define GATES_FLOAT32 0
#include "call.cuh"

constexpr int AHEAD = 8;                // maps that are loaded at once

extern "C" __global__ void __launch_bounds__(THREADS) scan(const __grid_constant__ Call call) {
    const int direction = blockIdx.z, row = blockIdx.y, number = blockIdx.x * THREADS + threadIdx.x;
    let_next_begin();
    Unit unit;
    unit.index = min(number, (int)call.hidden - 1);
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) unit.bias[block] = call.bias[direction][block * call.hidden + unit.index];
    const float2* const all_maps = call.maps[direction] + unit.index;
    wait_for_last();
    if (number >= call.hidden) return;
    // The maps of the first row begin at a known place: their loads do not wait for the offsets. What is not a map is not used.
    const long long begin = row == 0 ? 0 : call.offset(row), most = call.parts - row;
    const float2* map = all_maps + (begin / PART + row) * call.hidden;
    float2 next[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) next[i] = map[min((long long)i, most - 1 - begin / PART) * call.hidden];
    const float2 rest = call.rests[direction][row * call.hidden + number];
    const long long end = call.offset(row + 1);
    const int parts = (int)((end - begin + PART - 1) / PART);
    Skip column{};
    if (SKIP == SKIP_COLUMNS && parts)
        column = call.skip[(direction ? begin : end - 1) * call.skip_stride + call.skip_from[direction] + number];
    float cell = 0.0f, hidden = 0.0f;
#pragma unroll 1
    for (int done = 0; done < parts; done += AHEAD) {
        float2 maps[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            maps[i] = next[i];
            if (done + AHEAD + i < parts) next[i] = map[(done + AHEAD + i) * call.hidden];
        }
#pragma unroll
        for (int i = 0; i < AHEAD; ++i)
            if (done + i < parts) cell = fmaf(maps[i].x, cell, maps[i].y);
    }
    if (parts) hidden = hidden_of(rest.x, SKIP == SKIP_COLUMNS ? (float)call.scale[direction] * value_of(column) : rest.y, cell, 0.0f, unit);
    else if (call.before[direction]) cell = call.before[direction][call.slot_before(direction, row) * call.hidden + number];
    call.after[direction][call.slot_after(direction, row) * call.hidden + number] = cell;
    if (call.last) call.last[row * call.width + direction * call.hidden + number] = hidden;
}
