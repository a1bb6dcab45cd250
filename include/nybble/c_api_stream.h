/* Streaming through the C ABI: the owner check for a trainer's own pool, host arena and slot ring. Contracts are those of stream.h; status
 * codes and nybble_last_error() those of c_api.h. Handles are made by *_new and ended by *_free; a ring keeps its arena alive. */
#ifndef NYBBLE_C_API_STREAM_H_
#define NYBBLE_C_API_STREAM_H_

#include "nybble/c_api.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Names an owner and its weights; weight j has *uid + j. */
NYBBLE_EXPORT int nybble_register_owner(const char* name, const char* const* weights, int32_t count, int64_t* uid);
NYBBLE_EXPORT void nybble_forget_owner(int64_t uid);

/* A recycled buffer: `count` ranges that are refilled together. Then, for each refill: nybble_begin_fill before its first byte,
 * nybble_set_owner once the readers' stream waits for its last, nybble_release_slot after the last use. */
NYBBLE_EXPORT int nybble_register_slot(const void* const* bases, const int64_t* bytes, int32_t count, int64_t* slot);
NYBBLE_EXPORT void nybble_unregister_slot(int64_t slot);
NYBBLE_EXPORT int nybble_begin_fill(int64_t slot, int32_t* read_after_release);
NYBBLE_EXPORT int nybble_set_owner(int64_t slot, int64_t uid);
NYBBLE_EXPORT int nybble_release_slot(int64_t slot);
NYBBLE_EXPORT int nybble_slot_owner(int64_t slot, int64_t* owner, uint64_t* generation, int32_t* read_after_release);

/* Fails with kind "stale weight" unless every non-null pointer lies in a slot that holds the weight. */
NYBBLE_EXPORT int nybble_verify_owner(int64_t uid, const void* const* pointers, int32_t count);

typedef struct nybble_arena nybble_arena;
NYBBLE_EXPORT int nybble_arena_new(nybble_arena** arena);
/* Memory that other processes of this host can map: *file is its descriptor here. The other takes one of its own (e.g. of
 * /proc/<pid>/fd/<file>), adds the same layers in the same order once they are filled, and fills nothing. */
NYBBLE_EXPORT int nybble_arena_new_shared(nybble_arena** arena, int32_t* file);
NYBBLE_EXPORT int nybble_arena_attach(int32_t file, nybble_arena** arena);
NYBBLE_EXPORT void nybble_arena_free(nybble_arena* arena);
/* *layout: equal for layers whose parts have equal names and sizes. offsets [parts]: where each part begins in the layer's blob. */
NYBBLE_EXPORT int nybble_arena_add_layer(nybble_arena* arena, const char* const* names, const int64_t* bytes, int32_t parts, int32_t* layer,
                                         int32_t* layout, int64_t* offsets);
NYBBLE_EXPORT int nybble_arena_fill(nybble_arena* arena, int32_t layer, int32_t part, int64_t offset, const void* data, int64_t bytes);
/* A Hugging Face checkpoint (a folder or one file), mapped and validated; see store.h. */
typedef struct nybble_checkpoint nybble_checkpoint;
NYBBLE_EXPORT int nybble_checkpoint_open(const char* path, nybble_checkpoint** checkpoint);
NYBBLE_EXPORT void nybble_checkpoint_close(nybble_checkpoint* checkpoint);
/* Copies a whole part from a tensor of as many bytes, and gives the file's pages back. */
NYBBLE_EXPORT int nybble_arena_fill_tensor(nybble_arena* arena, int32_t layer, int32_t part, const nybble_checkpoint* checkpoint,
                                           const char* tensor);
/* The part's bytes, valid as long as the arena. */
NYBBLE_EXPORT int nybble_arena_part(nybble_arena* arena, int32_t layer, int32_t part, void** data, int64_t* bytes);
NYBBLE_EXPORT int nybble_arena_size(nybble_arena* arena, int32_t* layers, int64_t* bytes, int64_t* largest_layer_bytes);

/* Fails with kind "out of memory" when host memory does not suffice for all layers. Before the first fill. */
NYBBLE_EXPORT int nybble_arena_require_memory(nybble_arena* arena);
/* Page-locks the layers for copies to a GPU. *pinned_bytes of nybble_arena_size's bytes; *reason says why not all, valid until this
 * thread's next call, empty when all are. After the last fill, before nybble_arena_part: layers may move. */
NYBBLE_EXPORT int nybble_arena_pin(nybble_arena* arena, int64_t* pinned_bytes, const char** reason);

/* Called before bytes [begin, end) of a layer are copied, on the copying thread (CUDA: the acquiring one, which must not call the ring);
 * nonzero fails the refill there. */
typedef int32_t (*nybble_copy_observer)(void* context, int32_t layer, int32_t slot, int64_t begin, int64_t end);

typedef struct nybble_ring_options {
  int32_t prefetch; /* 1: start the next refills at each acquire */
  int32_t poison;   /* 1: a refill first overwrites its slot with 0xFF */
  int32_t on_cuda;  /* 1: slots are memory of CUDA device `device`, 0: CPU memory */
  int32_t device;
  int32_t land_at_wait; /* for tests: copy only when acquire waits, the latest legal moment */
  int64_t delay_us;     /* for tests: before each refill */
  int64_t chunk_bytes;  /* of one copy, granularity of the observer; 0: the default */
  nybble_copy_observer observer;
  void* context;
} nybble_ring_options;

typedef struct nybble_ring nybble_ring;
/* uids: one owner a layer of the arena, every part of which is filled. slots: `window` buffers of slot_bytes each, which must outlive the
 * ring. compute_stream below: a cudaStream_t of the slots' device, null for its default stream and on the CPU. */
NYBBLE_EXPORT int nybble_ring_new(nybble_arena* arena, const int64_t* uids, void* const* slots, int32_t window, int64_t slot_bytes,
                                  const nybble_ring_options* options, nybble_ring** ring);
NYBBLE_EXPORT void nybble_ring_free(nybble_ring* ring);
/* order: 0 forward, 1 backward, 2 repeat. *landed = 0: not within timeout_ms, call again. *refilled |= bit s for each slot with a refill
 * issued. */
NYBBLE_EXPORT int nybble_ring_acquire(nybble_ring* ring, int32_t layer, int32_t order, void* compute_stream, int64_t timeout_ms,
                                      int32_t* landed, uint64_t* refilled);
NYBBLE_EXPORT int nybble_ring_release(nybble_ring* ring, int32_t layer, void* compute_stream);
NYBBLE_EXPORT int nybble_ring_reset(nybble_ring* ring);
/* The stream that refills go through, null on the CPU. */
NYBBLE_EXPORT int nybble_ring_copy_stream(nybble_ring* ring, void** copy_stream);

typedef struct nybble_slot_status {
  int32_t state; /* 0 empty, 1 loading, 2 held, 3 released */
  int32_t layer; /* -1: none */
  int64_t owner; /* -1: nobody */
  uint64_t generation;
} nybble_slot_status;
NYBBLE_EXPORT int nybble_ring_status(nybble_ring* ring, int32_t slot, nybble_slot_status* status);

typedef struct nybble_ring_stats {
  int64_t visits;
  int64_t hits;
  int64_t refills;
  int64_t refill_bytes;
  int64_t cancelled;
  int64_t failed;
} nybble_ring_stats;
NYBBLE_EXPORT int nybble_ring_get_stats(nybble_ring* ring, nybble_ring_stats* stats);

#ifdef __cplusplus
}
#endif
#endif /* NYBBLE_C_API_STREAM_H_ */
