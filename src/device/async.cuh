// What sm_90a adds for moving data: mbarriers, TMA, bulk copies between the CTAs of a cluster, register budgets, dependent launches.
// Barriers are named by their shared-memory address; `parity` is that of the phase waited for.
#pragma once

#include <cuda.h>

#include "device/fault.h"
#include "device/ptx.cuh"

namespace nybble::device {

__device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}
// Makes initialised barriers visible to the cluster and to the async proxy.
__device__ __forceinline__ void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// One arrival, and `bytes` more to be copied before the phase ends.
__device__ __forceinline__ void barrier_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// On a barrier of any CTA of the cluster (peer_address). The variant with .release.cluster costs a full memory barrier; what wgmma has
// read needs none.
__device__ __forceinline__ void barrier_arrive_remote(uint32_t cluster_address) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(cluster_address) : "memory");
}
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\nWAIT:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@done bra DONE;\nbra WAIT;\nDONE:\n}\n" ::"r"(
          barrier),
      "r"(parity)
      : "memory");
}

// Whether the phase of `parity` is over, without waiting for it.
__device__ __forceinline__ bool barrier_test(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}\n"
               : "=r"(done)
               : "r"(barrier), "r"(parity)
               : "memory");
  return done != 0;
}

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
// The barrier of all threads of a cluster, in two halves: whole warps arrive once and wait once, and what they do between need not be
// behind the others' arrival. Behind it are this CTA's stores to its shared memory, for its own threads, and barriers that were initialised
// (barrier_init_fence), for all. Not more: .release takes a thousand clocks, a fence of all memory.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("fence.acq_rel.cta;\nbarrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}
// The address, in the cluster's window, of what lies at `address` in CTA `rank`.
__device__ __forceinline__ uint32_t peer_address(uint32_t address, uint32_t rank) {
  uint32_t result;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(result) : "r"(address), "r"(rank));
  return result;
}

// Orders this thread's shared-memory accesses before later ones of TMA, bulk copies and wgmma.
__device__ __forceinline__ void async_proxy_fence() {
  if (!NYBBLE_FAULT(kNoProxyFence)) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void prefetch_tensor_map(const CUtensorMap* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map)); }
// Box of `map` at (x, y), x innermost, elements; outside the tensor it reads zeros.
__device__ __forceinline__ void tma_load(uint32_t destination, const CUtensorMap* map, uint32_t barrier, int x, int y) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(destination),
               "l"(map), "r"(barrier), "r"(x), "r"(y)
               : "memory");
}
__device__ __forceinline__ void tma_load(uint32_t destination, const CUtensorMap* map, uint32_t barrier, int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(destination),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z)
      : "memory");
}
// The same box to the same place in every CTA of the cluster that `ranks` has a bit for; each one's own barrier counts the bytes.
__device__ __forceinline__ void tma_load_multicast(uint32_t destination, const CUtensorMap* map, uint32_t barrier, int x, int y,
                                                   uint16_t ranks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;" ::
          "r"(destination),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "h"(ranks)
      : "memory");
}
// Contiguous bytes; source, destination and size are multiples of 16.
__device__ __forceinline__ void bulk_load(uint32_t destination, const void* source, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(destination), "l"(source),
               "r"(bytes), "r"(barrier)
               : "memory");
}
// Parts outside the tensor are not written. Belongs to the thread's current bulk group.
__device__ __forceinline__ void tma_store(const CUtensorMap* map, uint32_t source, int x, int y) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map), "r"(source), "r"(x), "r"(y)
               : "memory");
}
__device__ __forceinline__ void tma_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// At most PENDING groups of this thread still read shared memory.
template <int PENDING>
__device__ __forceinline__ void tma_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}
// Shared memory to shared memory of another CTA; `barrier` lies there and counts the bytes.
__device__ __forceinline__ void bulk_copy_to_peer(uint32_t destination, uint32_t source, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(destination),
               "r"(source), "r"(bytes), "r"(barrier)
               : "memory");
}

// Registers per thread of this warpgroup; all of its warps execute it. The sum over a CTA must fit what its launch got.
template <int REGISTERS>
__device__ __forceinline__ void raise_register_limit() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS>
__device__ __forceinline__ void lower_register_limit() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// Programmatic dependent launch. wait: until the grids before this one are complete and visible (at once after an ordinary launch).
__device__ __forceinline__ void wait_for_previous_grids() {
  if (!NYBBLE_FAULT(kNoGridWait)) asm volatile("griddepcontrol.wait;" ::: "memory");
}
__device__ __forceinline__ void allow_next_grid() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// 8x8 matrices of 16-bit values to shared memory; lane i gives the address of row i of 32.
__device__ __forceinline__ void store_matrix(uint32_t address, const uint4& v) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}
// 8x8 matrices of 16-bit values, transposed on the way to shared memory; lane i gives the address of row i of 32.
__device__ __forceinline__ void store_matrix_transposed(uint32_t address, const uint32_t* v) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v[0]), "r"(v[1]), "r"(v[2]),
               "r"(v[3])
               : "memory");
}

}  // namespace nybble::device
