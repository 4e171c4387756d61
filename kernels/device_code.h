// kernels/device_code.h
//
// OFFLOAD_DEVICE_CODE marks the functions that CUDA kernels call as well as the processor's: the
// steps of the rules and what they use. Outside of nvcc it is nothing.
#pragma once

#ifdef __CUDACC__
#define OFFLOAD_DEVICE_CODE __host__ __device__
#else
#define OFFLOAD_DEVICE_CODE
#endif
