/* offload/client.h: weights and optimizer state on NVMe for trainers in any language that calls C.
 * It is what <offload/torch.h> is for libtorch, without torch: the caller names tensors, computes,
 * and hands over gradients; the daemon keeps weights, masters and moments within a budget of bytes
 * and takes the steps. C99; part of liboffload.so.
 *
 *   offload_tensor weight = {"weight", shape, 2, OFFLOAD_FLOAT32, 1};
 *   offload_options options = {"/nvme0", "8GiB", "example", NULL, NULL};
 *   offload_job* job;
 *   if (offload_open(&options, &weight, 1, "adamw", NULL, 0, &job) != 0) die(offload_error());
 *   if (!offload_exists(job)) {
 *     offload_put(job, 0, "weight", 0, count, values);
 *     offload_publish(job);
 *   }
 *   for (...) {
 *     const void* bytes;
 *     offload_acquire(job, 0, &bytes);  // read-only, good until the release
 *     ... forward and backward ...
 *     offload_release(job, 0);
 *     offload_deliver_gradient(job, 0, gradient);
 *     offload_step(job, &learning_rate, 1);
 *   }
 *   offload_close(job);
 *
 * Every step is a checkpoint: a job of that name that exists goes on at its last committed step,
 * with its own weights. One process has a job; a job made here may be attached by any language.
 *
 * Functions that return int return 0, or the number of an error (1203 for OFD-1203; 1 for one
 * without a number), whose text offload_error() then has. Nothing has changed then, but for what
 * the text says; after OFD-1801 or a lost drive a job is only good for offload_close().
 *
 * Thread safety: one thread per job at a time; offload_acquire, offload_release and
 * offload_prefetch from any thread, at any time but during offload_close. */
#ifndef OFFLOAD_CLIENT_H_
#define OFFLOAD_CLIENT_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct offload_job offload_job;

typedef enum { OFFLOAD_FLOAT32 = 0, OFFLOAD_BFLOAT16 = 1 } offload_dtype;

/* Texts that are NULL are the defaults. Nothing of it is kept after offload_open(). */
typedef struct {
  const char* nvme_path;  /* a folder on a drive with direct I/O, or several: "/nvme0,/nvme1" */
  const char* ram;        /* what daemon and library hold never exceeds it: "8GiB" */
  const char* job;        /* names the run; the same name resumes; "default" */
  const char* io;         /* auto | uring | libaio | threads; "auto" */
  const char* durability; /* step | checkpoint:N | checkpoint:Nmin; "step" */
} offload_options;

/* Its number in all calls is its place in the list, the same in every run. Elements lie row by
 * row. */
typedef struct {
  const char* name;
  const int64_t* shape;
  size_t dimension_count;
  offload_dtype dtype;
  int trainable; /* 0: frozen, kept as weights only; 1 in a later run gives it state (zeros) */
} offload_tensor;

/* A parameter of an optimizer under torch's name: {"lr", 1e-3}. */
typedef struct {
  const char* name;
  double value;
} offload_parameter;

/* The elements of one extent: where pieces for offload_put() and offload_get() may begin. */
#define OFFLOAD_EXTENT_ELEMENTS 262144

/* The text of the last error of this thread: begins with OFD-nnnn, ends with the way out. Good
 * until its next error. */
const char* offload_error(void);

/* Connects to the node's daemon, else starts a private one that ends with the job, and opens the
 * job or formats a new one. `optimizer`: adamw, adam, sgd, adagrad, rmsprop, lion or lamb;
 * `parameters` are its values until a step says others, and decide, with the defaults of the rest,
 * what is kept (momentum, amsgrad, centered). OFD-1002, 1201 to 1207, 1301 with the smallest ram,
 * 1501, 1602 when the job has other tensors. */
int offload_open(const offload_options* options, const offload_tensor* tensors, size_t tensor_count,
                 const char* optimizer, const offload_parameter* parameters, size_t parameter_count,
                 offload_job** job);

/* 1 when the job was there before. */
int offload_exists(const offload_job* job);
/* Steps that the job has taken, over all its runs. */
int64_t offload_step_count(const offload_job* job);

/* Writes elements [begin, begin + count) of a plane of a tensor, in its order. Planes are "weight"
 * (in the tensor's type; a bf16 tensor's master becomes its value), and in fp32 "master" and what
 * the optimizer keeps ("exp_avg", ...). `begin` is a multiple of OFFLOAD_EXTENT_ELEMENTS; `count`
 * is one, too, unless the piece goes to the end. Of a job that exists: durable with the next step.
 * Not between offload_acquire() and offload_release() of the tensor. */
int offload_put(offload_job* job, size_t tensor, const char* plane, uint64_t begin, uint64_t count,
                const void* values);
/* Reads as offload_put() writes, as of the last step; zeros before it. */
int offload_get(offload_job* job, size_t tensor, const char* plane, uint64_t begin, uint64_t count,
                void* values);
/* Once, after a new job's weights are there (others are zeros): commits step 0 and gives the job
 * its name. Does nothing for a job that existed. */
int offload_publish(offload_job* job);

/* Pins a tensor's weights in shared memory, read-only, row by row, up to date with the last step;
 * waits until they are there. Good until as many releases. At most what fits beside each other into
 * the window of the plan; OFD-1303. */
int offload_acquire(offload_job* job, size_t tensor, const void** weights);
void offload_release(offload_job* job, size_t tensor);
/* Asks for a tensor that will be acquired soon. Never waits. */
void offload_prefetch(offload_job* job, size_t tensor);

/* Copies a gradient, whole and in the tensor's type, for the next step; what was delivered for that
 * before is replaced. Waits for the tensor's last update. OFD-1701 when it is not finite, 1002 for
 * a frozen tensor. */
int offload_deliver_gradient(offload_job* job, size_t tensor, const void* gradient);
/* One step over the tensors whose gradient was delivered since the last one. This thread has
 * acquired none of them (OFD-1002). Other values of `parameters` count from now on. Returns when
 * the step is recorded: after the commit of the one before. */
int offload_step(offload_job* job, const offload_parameter* parameters, size_t parameter_count);
/* Blocks until every step that was taken is durable. */
int offload_wait_durable(offload_job* job);

/* Commits what was stepped, drops what was put since, and frees the handle, also after an error.
 * NULL is allowed. */
int offload_close(offload_job* job);

#ifdef __cplusplus
}
#endif

#endif /* OFFLOAD_CLIENT_H_ */
