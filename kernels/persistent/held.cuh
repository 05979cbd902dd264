// A warp holds the weights of HELD products in registers. They are spread evenly among the products that load their weights
// from shared memory, so that the loads overlap with products.
__device__ constexpr int held_before(int product) { return product * HELD / PRODUCTS; }
__device__ constexpr bool is_held(int product) { return held_before(product + 1) > held_before(product); }
