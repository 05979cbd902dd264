// What kernels of several families say to the device: 16-bit values, barriers in shared memory, clusters, and launches that overlap.

typedef unsigned short Half;            // the bits of a float16 or bfloat16

#if BFLOAT16
#define NARROW "cvt.rn.bf16x2.f32 %0, %1, %2;"
__device__ __forceinline__ float widen(Half bits) { return __uint_as_float((unsigned)bits << 16); }
#else
#define NARROW "cvt.rn.f16x2.f32 %0, %1, %2;"
__device__ __forceinline__ float widen(Half bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}
#endif
__device__ __forceinline__ float low_of(unsigned two) { return widen((Half)(two & 0xffff)); }
__device__ __forceinline__ float high_of(unsigned two) { return widen((Half)(two >> 16)); }
__device__ __forceinline__ unsigned narrow(float low, float high) {
    unsigned bits;
    asm(NARROW : "=r"(bits) : "f"(high), "f"(low));
    return bits;
}

// What is stored as either.
__device__ __forceinline__ float value_of(float value) { return value; }
__device__ __forceinline__ float value_of(Half value) { return widen(value); }

// Launches overlap: what does not depend on the kernels before this one is done while they still run.
__device__ __forceinline__ void let_next_begin() { asm volatile("griddepcontrol.launch_dependents;"); }
__device__ __forceinline__ void wait_for_last() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

__device__ __forceinline__ unsigned shared_address(const void* at) { return (unsigned)__cvta_generic_to_shared(at); }
// A value that is the same in all lanes, told so that the compiler knows it and does not compute it anew where it is used.
__device__ __forceinline__ unsigned settled(unsigned value) { return __shfl_sync(~0u, value, 0); }
__device__ __forceinline__ void make_barrier(unsigned barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void arrive(unsigned barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void expect(unsigned barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ bool is_there(unsigned barrier, unsigned parity) {
    unsigned done;
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                 : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
    return done;
}
__device__ __forceinline__ void await(unsigned barrier, unsigned parity) {
    while (!is_there(barrier, parity)) {}
}
__device__ __forceinline__ void meet(int barrier, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// An address of shared memory as it is in another block of the cluster.
__device__ __forceinline__ unsigned in_block(unsigned address, unsigned rank) {
    unsigned theirs;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(theirs) : "r"(address), "r"(rank));
    return theirs;
}
__device__ __forceinline__ unsigned cluster_rank() {
    unsigned rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
__device__ __forceinline__ void meet_cluster() {
    asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Not a number when either is not.
__device__ __forceinline__ float larger(float one, float other) {
    float result;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(one), "f"(other));
    return result;
}

#if EXACT
__device__ __forceinline__ float tanh_of(float value) { return tanhf(value); }
__device__ __forceinline__ float sigmoid_of(float value) { return 1.0f / (1.0f + __expf(-value)); }
#else
__device__ __forceinline__ float tanh_of(float value) {
    float result;
    asm("tanh.approx.f32 %0, %1;" : "=f"(result) : "f"(value));
    return result;
}
__device__ __forceinline__ float sigmoid_of(float value) { return fmaf(0.5f, tanh_of(0.5f * value), 0.5f); }
#endif
