// Device operations that several families use: 16-bit values, barriers in shared memory, clusters, and overlapping launches.

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

// Reads a stored value of either type as float32.
__device__ __forceinline__ float value_of(float value) { return value; }
__device__ __forceinline__ float value_of(Half value) { return widen(value); }

// Devices before compute capability 9.0 have no clusters, and each of their kernels begins after the kernels before it have
// ended.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#define BEFORE_HOPPER 1
#define WAIT "test_wait"
#define CLUSTER_OF(x, y)
#else
#define BEFORE_HOPPER 0
#define WAIT "try_wait"                 // suspends the thread for a while
#define CLUSTER_OF(x, y) __cluster_dims__(x, y, 1)
#endif

// Programmatic dependent launch: the next kernel may start now; this kernel waits here for the kernels before it.
__device__ __forceinline__ void let_next_begin() {
#if !BEFORE_HOPPER
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}
__device__ __forceinline__ void wait_for_last() {
#if !BEFORE_HOPPER
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ unsigned shared_address(const void* at) { return (unsigned)__cvta_generic_to_shared(at); }
// Returns a value that all lanes share. The shuffle tells the compiler so, which then keeps it instead of computing it again.
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
// Copies to this block's shared memory in the background. The barrier counts the bytes.
__device__ __forceinline__ void copy_in_bulk(unsigned to, const void* from, int bytes, unsigned barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}
__device__ __forceinline__ bool is_there(unsigned barrier, unsigned parity) {
    unsigned done;
    asm volatile("{.reg .pred p; mbarrier." WAIT ".parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                 : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
    return done;
}
__device__ __forceinline__ void await(unsigned barrier, unsigned parity) {
    while (!is_there(barrier, parity)) {}
}
__device__ __forceinline__ void meet(int barrier, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Returns the address of the same shared memory in another block of the cluster.
__device__ __forceinline__ unsigned in_block(unsigned address, unsigned rank) {
    unsigned remote;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
    return remote;
}
__device__ __forceinline__ unsigned cluster_rank() {
    unsigned rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
__device__ __forceinline__ void meet_cluster() {
    asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Arrives in another block of the cluster. Nothing is released, so no fence is needed: the products have read the stage.
__device__ __forceinline__ void arrive_at(unsigned barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Fetches to the same place in both blocks of a cluster.
__device__ __forceinline__ void fetch_for_both(unsigned to, const void* from, int bytes, unsigned barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], "
                 "%4;" ::"r"(to), "l"(from), "r"(bytes), "r"(barrier), "h"((unsigned short)3) : "memory");
}
// Adds one to a counter that other blocks of the device wait for, after everything that this thread and those that it has met
// wrote.
__device__ __forceinline__ void announce_to_device(unsigned* counter) {
    asm volatile("fence.acq_rel.gpu; red.relaxed.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}

// Returns the larger value, or NaN if either is NaN.
__device__ __forceinline__ float larger(float a, float b) {
    float result;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
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
