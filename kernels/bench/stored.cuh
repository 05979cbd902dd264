// Arrays of float16 (HALVES) or float32 in memory, and their values as float32.

#if HALVES
typedef unsigned short Stored;

__device__ float wide(Stored bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

__device__ Stored narrow(float value) {
    Stored bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}
#else
typedef float Stored;

__device__ float wide(Stored value) { return value; }
__device__ Stored narrow(float value) { return value; }
#endif
