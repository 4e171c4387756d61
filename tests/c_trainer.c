/* A trainer in C99, for tests: three steps of a job, and some calls that are refused.
 *
 * Usage: c_trainer POOL [thaw]. Says "step N weight W bias B" and ends with 0; another status names
 * a call that was not refused, 1 one that failed.
 *
 * The loss of a weight is half its square, so a step with the rate 0.5 halves it: every number here
 * is exact in fp32 and bf16. The bias is frozen, until a run says "thaw". */
#include <offload/client.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define COUNT 300000

static offload_job* job; /* open until functions of atexit() have used it */

static void check(int error) {
  if (error == 0) return;
  fprintf(stderr, "%d: %s\n", error, offload_error());
  exit(1);
}

/* Thread-local objects of the main thread are gone here. */
static void at_exit(void) {
  float values[1];
  if (offload_get(job, 9, "weight", 0, 1, values) != 1002 || strncmp(offload_error(), "OFD-1002 tensor 9", 17) != 0)
    puts("offload_error() in a function of atexit()");
  check(offload_close(job));
}

int main(int argc, char** argv) {
  static float values[COUNT], gradient[COUNT];
  const int64_t shape[] = {COUNT}, bias_shape[] = {3};
  const offload_tensor tensors[] = {{"weight", shape, 1, OFFLOAD_FLOAT32, 1}, {"bias", bias_shape, 1, OFFLOAD_BFLOAT16, argc > 2}};
  const offload_options options = {argv[1], "128MiB", "c", NULL, NULL};
  const offload_parameter rates[] = {{"lr", 0.25}, {"momentum", 0}}, rate = {"lr", 0.5}, wrong = {"rate", 0.5};
  const uint16_t ones[] = {0x3F80, 0x3F80, 0x3F80};
  uint16_t bias[3];
  const void* bytes;
  int64_t i;
  int step;
  check(offload_open(&options, tensors, 2, "sgd", rates, 2, &job));
  if (!offload_exists(job)) {
    for (i = 0; i < COUNT; ++i) values[i] = 1024;
    check(offload_put(job, 0, "weight", 0, COUNT, values));
    check(offload_put(job, 1, "weight", 0, 3, ones));
    if (offload_step(job, &rate, 1) == 0) return 2;
    check(offload_publish(job));
  }
  for (step = 0; step < 3; ++step) {
    check(offload_acquire(job, 0, &bytes));
    for (i = 0; i < COUNT; ++i) gradient[i] = ((const float*)bytes)[i];
    offload_release(job, 0);
    check(offload_deliver_gradient(job, 0, gradient));
    if (argc > 2) check(offload_deliver_gradient(job, 1, ones));
    check(offload_step(job, &rate, 1));
    offload_prefetch(job, 0);
  }
  if (offload_acquire(job, 2, &bytes) != 1002) return 7;
  if (argc <= 2 && offload_deliver_gradient(job, 1, ones) != 1002) return 3;
  if (offload_step(job, &wrong, 1) != 1002 || offload_put(job, 0, "weight", 1, 5, values) != 1002) return 4;
  gradient[7] /= 0.0f;
  if (offload_deliver_gradient(job, 0, gradient) != 1701) return 5;
  gradient[7] = 0;
  check(offload_deliver_gradient(job, 0, gradient));
  check(offload_acquire(job, 0, &bytes));
  if (offload_step(job, &rate, 1) != 1002 || offload_put(job, 0, "weight", 0, COUNT, values) != 1002) return 8;
  offload_release(job, 0);
  offload_release(job, 0); /* one too many: nothing */
  if (offload_get(job, 0, "weight", 0, COUNT, NULL) != 1002 || offload_open(NULL, tensors, 2, "sgd", rates, 2, &job) != 1002) return 9;
  check(offload_get(job, 0, "master", 0, COUNT, values));
  check(offload_get(job, 1, "weight", 0, 3, bias));
  for (i = 1; i < COUNT; ++i) {
    if (values[i] != values[0]) return 6;
  }
  check(offload_wait_durable(job));
  printf("step %d weight %g bias %x\n", (int)offload_step_count(job), values[0], (unsigned)bias[0]);
  atexit(at_exit);
  return 0;
}
