/* The C ABI: raw pointers and plain structs, for other languages and trainers. Every function that can fail returns 0 on success, otherwise
 * nonzero with the reason in nybble_last_error() and its kind in nybble_last_error_kind(), both of the calling thread. Nothing allocates
 * device memory or keeps a pointer after it returns. Enum codes are those of format.h and linear.h. Streaming has a header of its own. */
#ifndef NYBBLE_C_API_H_
#define NYBBLE_C_API_H_

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#  define NYBBLE_EXPORT __declspec(dllexport)
#else
#  define NYBBLE_EXPORT __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define NYBBLE_DEVICE_CPU (-1) /* a device is this or a CUDA ordinal */

NYBBLE_EXPORT const char* nybble_version(void);
NYBBLE_EXPORT const char* nybble_build_info(void); /* a JSON object: version, compiler, flags, cuda, cuda_targets, ... */

/* The last failure of this thread: its text (empty before the first) and nybble::ErrorKind as an int (-1 before the first). */
NYBBLE_EXPORT const char* nybble_last_error(void);
NYBBLE_EXPORT int nybble_last_error_kind(void);

/* The code tables: 0 nf4 and 1 fp4 (16 values), 2 the dynamic map of nested scales (256 values). Returns the number of values written to
 * out. */
NYBBLE_EXPORT int nybble_table(int which, float* out);

/* Threads that CPU kernels use, the caller included. */
NYBBLE_EXPORT void nybble_set_num_threads(int count);
NYBBLE_EXPORT int nybble_num_threads(void);

/* Counters of what really ran, one per (path, direction); directions are 0 forward, 1 grad input. Names end with a null pointer. */
NYBBLE_EXPORT const char* nybble_path_name(int path); /* null when there is no such path */
NYBBLE_EXPORT int64_t nybble_launches(int path, int direction);
NYBBLE_EXPORT void nybble_reset_launches(void);

/* A frozen weight W[n][k] as bitsandbytes stores it. Plain scales: absmax. Nested: absmax_codes, nested_absmax, nested_code and offset. */
typedef struct nybble_weight {
  const void* packed;          /* [(n * k + 1) / 2] bytes */
  const float* absmax;         /* [blocks], null when nested */
  const uint8_t* absmax_codes; /* [blocks], null when plain */
  const float* nested_absmax;  /* [ceil(blocks / 256)] */
  const float* nested_code;    /* [256] */
  const float* offset;         /* [1] */
  int64_t n;
  int64_t k;
  int32_t block_size;
  int32_t quant_type;   /* 0 nf4, 1 fp4 */
  int32_t nested_dtype; /* 0 float32, 1 float16, 2 bfloat16 */
} nybble_weight;

/* One multiply: y[m][n] = x W^T (+ bias), direction 0; or grad_x[m][k] = grad_y W, direction 1. `in` has rows of in_row_stride elements. */
typedef struct nybble_linear_call {
  nybble_weight weight;
  int64_t m;
  int64_t in_row_stride;
  const void* in;
  const void* bias; /* [n] or null, forward only */
  void* out;        /* contiguous */
  void* workspace;  /* nybble_linear_workspace() bytes, 256-byte aligned; null when that is 0 */
  void* stream;     /* cudaStream_t, ignored on the CPU */
  int32_t device;
  int32_t direction;
  int32_t dtype;       /* of in, out and bias */
  int32_t state_dtype; /* quant_state.dtype */
  int32_t mode;        /* 0 auto, 1 fused; 2 (dequantise + dense matmul) needs a dense matmul and is refused here */
  int32_t batch_invariant;
} nybble_linear_call;

/* Runs it. Refused (unsupported) where the plan is to dequantise, as there is no dense matmul behind the C ABI. */
NYBBLE_EXPORT int nybble_linear(const nybble_linear_call* call);
/* Bytes of device workspace that nybble_linear() wants for this call. */
NYBBLE_EXPORT int nybble_linear_workspace(const nybble_linear_call* call, int64_t* bytes);
/* The plan or, where no fused path takes the call, the reason, as text: at most `size` bytes with the final zero. *fused: 1 or 0. */
NYBBLE_EXPORT int nybble_linear_plan(const nybble_linear_call* call, int32_t* fused, char* text, size_t size);
/* The plan as text, also where it is to dequantise: at most `size` bytes with the final zero. */
NYBBLE_EXPORT int nybble_linear_explain(const nybble_linear_call* call, char* text, size_t size);

/* Whether this build works on a device: an error (unsupported) with the reason where it does not, else 0. text: in what it works less well
 * there than elsewhere, one sentence, empty if in nothing; at most `size` bytes with the final zero. */
NYBBLE_EXPORT int nybble_device_note(int32_t device, char* text, size_t size);

/* The table of measured choices that plans on CUDA devices follow, docs/tune.md. Set: JSON text; null or an empty table: none. A text that
 * is wrong is refused, and the table before it stays. Get: the JSON text of the active one ("" when there is none), at most `size` bytes
 * with the final zero; *needed: the bytes that the whole text takes; *hash: what plans print. The first use reads $NYBBLE_TUNE. */
NYBBLE_EXPORT int nybble_set_tune_table(const char* json);
NYBBLE_EXPORT int nybble_tune_table(char* text, size_t size, size_t* needed, uint64_t* hash);

/* x: `count` values of dtype; packed: [(count + 1) / 2]; absmax: [ceil(count / block_size)]. All on `device`. */
NYBBLE_EXPORT int nybble_quantize_4bit(const void* x, int32_t dtype, int64_t count, int32_t block_size, int32_t quant_type, uint8_t* packed,
                                       float* absmax, int32_t device, void* stream);
/* out[0 .. count) = weights [first, first + count) of the flattened weight, in dtype. */
NYBBLE_EXPORT int nybble_dequantize_4bit(const nybble_weight* weight, int32_t dtype, int64_t first, int64_t count, void* out,
                                         int32_t device, void* stream);

#ifdef __cplusplus
}
#endif
#endif /* NYBBLE_C_API_H_ */
